"""Statistics of a running replay: durations of the manager's calls, counts, hit rate and occupancy over time."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field

import numpy as np

from fdcache.manager import MatchResult
from fdcache.metadata import SwapPurpose, TransferReport
from fdcache.replay.engine_cache import Cache
from fdcache.replay.jobs import Job
from fdcache.replay.messages import StepResult
from fdcache.service.server.known_blocks import KnownBlocks, SampledMisses
from fdcache.service.wire.page_views import TrendRow
from fdcache.storage.connector import StorageStats
from fdcache.tiers.statistics import CacheStats, TierUsage


class Stopwatch:
    """Durations of batched calls, divided by the number of requests in each batch."""

    def __init__(self) -> None:
        self._samples: dict[str, list[tuple[int, int]]] = defaultdict(list)

    @staticmethod
    def now() -> int:
        """Return the current time in nanoseconds."""
        return time.perf_counter_ns()

    def add(self, name: str, since: int, requests: int) -> None:
        """Record a call for ``requests`` requests that started at ``since`` and ends now."""
        if requests:
            self._samples[name].append((time.perf_counter_ns() - since, requests))

    def microseconds(self, name: str) -> dict[str, float]:
        """Return p50, p99 and mean per request; a call of n requests counts n times. All 0 without calls."""
        samples = np.array(self._samples.get(name, [(0, 1)]), dtype=np.float64)
        per_request = np.repeat(samples[:, 0] / samples[:, 1], samples[:, 1].astype(np.int64)) / 1000
        p50, p99 = np.percentile(per_request, [50, 99])
        return {
            "p50": round(float(p50), 3),
            "p99": round(float(p99), 3),
            "mean": round(float(per_request.mean()), 3),
        }


@dataclass(slots=True)
class CopyTraffic:
    """Bytes and seconds of copies in one direction, summed over ranks."""

    bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Tally:
    """Counts of one replay. ``hit_tokens`` counts tokens found at a request's first match, by tier.

    ``longest_deferral``: seconds for which a request's matches were deferred, most of all requests.
    """

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
    longest_deferral: float = 0.0
    failed_loads: int = 0
    overdue_loads: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    other_rss_bytes: int = 0
    storage_restored: int = 0
    storage: list[StorageStats] = field(default_factory=list)
    h2d: CopyTraffic = field(default_factory=CopyTraffic)
    d2h: CopyTraffic = field(default_factory=CopyTraffic)
    known: KnownBlocks | None = None
    missed: SampledMisses = field(default_factory=SampledMisses)
    missed_blocks: int = 0
    to_storage: CopyTraffic = field(default_factory=CopyTraffic)
    from_storage: CopyTraffic = field(default_factory=CopyTraffic)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in a tier."""
        return sum(self.hit_tokens.values()) / self.prompt_tokens if self.prompt_tokens else 0.0

    def count_first_match(self, job: Job, match: MatchResult) -> None:
        """Count the prompt, and its cached prefix by tier."""
        self.prompt_tokens += job.prompt_length
        self.clipped_tokens += job.item.clipped_tokens
        self.hit_tokens["device"] += (match.num_device_blocks - match.num_ahead_blocks) * job.block_size
        ahead_from_host = match.num_ahead_blocks - match.num_ahead_from_storage
        self.hit_tokens["host"] += (match.num_host_blocks + ahead_from_host) * job.block_size
        self.hit_tokens["storage"] += (
            match.num_storage_blocks + match.num_ahead_from_storage
        ) * job.block_size
        if self.known is not None:
            self._count_missing(self.known, job, match.total_matched_blocks)

    def _count_missing(self, known: KnownBlocks, job: Job, found: int) -> None:
        missing = job.request.block_hashes[found : (job.prompt_length - 1) // job.block_size]
        self.missed_blocks += len(missing)
        if len(missing):
            self.missed = self.missed.plus(known.add_missing(missing))

    def count_results(self, results: list[StepResult]) -> None:
        """Add the ranks' compared blocks, copies, storage counts, and the memory of rank processes."""
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

    def _traffic_of(self, purpose: SwapPurpose) -> CopyTraffic:
        if purpose is SwapPurpose.LOAD:
            return self.h2d
        if purpose is SwapPurpose.STORE:
            return self.to_storage
        return self.from_storage if purpose is SwapPurpose.PREFETCH else self.d2h


_MOST_SAMPLES = 2000
_RECENT_SAMPLES = 20


@dataclass(frozen=True, slots=True)
class Sample:
    """Hit rates and occupancy (used share) by tier, ``seconds`` after the start.

    ``recent_hit_rate`` covers the last samples; NaN if no prompt was matched in that time.
    """

    seconds: float
    hit_rate: float
    recent_hit_rate: float
    occupancy: dict[str, float]
    row: TrendRow


@dataclass(slots=True)
class Timeline:
    """Samples at equal distances; if there are too many, every second one is dropped and the distance doubles."""

    interval: float = 0.005
    samples: list[Sample] = field(default_factory=list)
    _next: float = 0.0
    _window: deque[tuple[int, int]] = field(default_factory=lambda: deque([(0, 0)], maxlen=_RECENT_SAMPLES))

    def record(self, now: float, tally: Tally, manager: Cache, *, last: bool = False) -> None:
        """Take a sample if one is due, or in any case with ``last``."""
        if now < self._next and not last:
            return
        self._next = now + self.interval
        hits, prompts = sum(tally.hit_tokens.values()), tally.prompt_tokens
        earlier_hits, earlier_prompts = self._window[0]
        self._window.append((hits, prompts))
        recent = (
            (hits - earlier_hits) / (prompts - earlier_prompts) if prompts > earlier_prompts else math.nan
        )
        usage = {level.value: usage.usage for level, usage in manager.get_memory_usage().items()}
        row = _row(now, tally, manager.get_stats())
        self.samples.append(Sample(now, tally.hit_rate, recent, usage, row))
        if len(self.samples) > _MOST_SAMPLES:
            del self.samples[::2]
            self.interval *= 2


def _row(seconds: float, tally: Tally, stats: CacheStats) -> TrendRow:
    """Return the totals so far, as a service records them."""
    host, storage = stats.host or TierUsage(), stats.storage or TierUsage()
    return TrendRow(
        time=seconds,
        prompt_tokens=tally.prompt_tokens,
        device_hit_tokens=tally.hit_tokens["device"],
        host_hit_tokens=tally.hit_tokens["host"],
        storage_hit_tokens=tally.hit_tokens["storage"],
        missed_sample=tally.missed.sample,
        missed_estimated=tally.missed.missed,
        missed_known=tally.missed.known,
        missed_blocks=tally.missed_blocks,
        stored_blocks=stats.counters.blocks_backed_up + stats.counters.blocks_evicted_to_host,
        evicted_blocks=host.evictions,
        storage_evicted_blocks=storage.evictions,
        host_to_device_bytes=tally.h2d.bytes,
        device_to_host_bytes=tally.d2h.bytes,
        storage_to_host_bytes=tally.from_storage.bytes,
        host_to_storage_bytes=tally.to_storage.bytes,
        host_blocks=host.ready,
        storage_blocks=storage.ready,
        storage_reading=stats.reading_blocks,
        storage_writing=stats.storing_blocks,
        storage_queued=stats.queued_stores,
    )
