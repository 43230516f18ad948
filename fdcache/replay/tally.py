"""Tally: what is counted while a replay runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from fdcache.manager import MatchResult
from fdcache.metadata import SwapPurpose, TransferReport
from fdcache.replay.job import Job
from fdcache.replay.messages import StepResult
from fdcache.storage.connector import StorageStats


@dataclass(slots=True)
class Traffic:
    """Copies in one direction, summed over ranks."""

    bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Tally:
    """Counts of one replay. ``hit_tokens`` are those found at a request's first match, by tier."""

    requests: int = 0
    rejected: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    clipped_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0, "storage": 0})
    verified_blocks: int = 0
    corrupt_blocks: int = 0
    preemptions: int = 0
    deferred_matches: int = 0
    failed_loads: int = 0
    overdue_loads: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    other_rss_bytes: int = 0
    storage_restored: int = 0
    storage: list[StorageStats] = field(default_factory=list)
    h2d: Traffic = field(default_factory=Traffic)
    d2h: Traffic = field(default_factory=Traffic)
    to_storage: Traffic = field(default_factory=Traffic)
    from_storage: Traffic = field(default_factory=Traffic)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that was found in a tier."""
        return sum(self.hit_tokens.values()) / self.prompt_tokens if self.prompt_tokens else 0.0

    def count_first_match(self, job: Job, match: MatchResult) -> None:
        """Count the prompt and where its cached prefix was found."""
        self.prompt_tokens += job.prompt_length
        self.clipped_tokens += job.item.clipped_tokens
        self.hit_tokens["device"] += match.num_device_blocks * job.block_size
        self.hit_tokens["host"] += match.num_host_blocks * job.block_size
        self.hit_tokens["storage"] += match.num_storage_blocks * job.block_size

    def count_results(self, results: list[StepResult]) -> None:
        """Count what every rank compared, copied, and needed of memory (this process counts for itself)."""
        self.verified_blocks += sum(result.verified for result in results)
        if len(results) > 1:
            self.other_rss_bytes = sum(result.peak_rss_bytes for result in results)
        self.storage = [result.storage for result in results if result.storage is not None]
        for result in results:
            for report in result.reports:
                self._count_traffic(report)

    def _count_traffic(self, report: TransferReport) -> None:
        for result in report.results:
            traffic = self._traffic_of(result.purpose)
            traffic.bytes += result.copied_bytes
            traffic.seconds += result.seconds

    def _traffic_of(self, purpose: SwapPurpose) -> Traffic:
        if purpose is SwapPurpose.LOAD:
            return self.h2d
        if purpose is SwapPurpose.STORE:
            return self.to_storage
        return self.from_storage if purpose is SwapPurpose.PREFETCH else self.d2h
