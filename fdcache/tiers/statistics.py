"""Statistics: the state of a tier, a manager's totals, and how many bytes copies moved in what time."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from enum import StrEnum
from typing import Annotated, Protocol

import msgspec

from fdcache._core import CopyMeter, TierStats
from fdcache.groups import Reach
from fdcache.hints import HintStatus
from fdcache.metadata import HandoverEnd, SwapPurpose, TransferReport

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class TierUsage(msgspec.Struct, frozen=True):
    """Blocks of one tier at one moment, by state. The only list of a tier's figures.

    ``writing`` includes ``pending``, ``quarantined``, ``withheld`` and ``orphans``; ``evictable`` is part of ``ready``.
    ``quarantined`` slots held a corrupt record or cannot be read or written, and are never used again. ``withheld``
    slots have no room on the disk for now. ``orphans`` are stored blocks that cannot be found until a block above them
    is stored again. ``unjoined`` blocks begin runs of which nobody has told what precedes them. ``contradictions``
    counts look-ups that found nothing because their keys contradict the paths of the tier.
    """

    blocks: int = 0
    free: int = 0
    writing: int = 0
    ready: int = 0
    pending: int = 0
    evictable: int = 0
    pins: int = 0
    holds: int = 0
    leases: int = 0
    epoch: int = 0
    evictions: int = 0
    quarantined: int = 0
    withheld: int = 0
    orphans: int = 0
    unjoined: int = 0
    contradictions: int = 0

    @classmethod
    def of(cls, stats: TierStats) -> TierUsage:
        """Return the figures of a native tier."""
        return cls(stats.slots, *[getattr(stats, name) for name in cls.__struct_fields__[1:]])


class HasUsage(Protocol):
    """A tier that tells its state."""

    def usage(self) -> TierUsage:
        """Return the state of the tier."""


class MemoryUsage(msgspec.Struct, frozen=True):
    """Bytes of one tier on one rank. Bytes of blocks that are not free are used."""

    total_bytes: int
    used_bytes: int
    free_bytes: int

    @classmethod
    def of(cls, tier: HasUsage, block_bytes: int) -> MemoryUsage:
        """Return the bytes of a tier whose blocks have ``block_bytes``."""
        usage = tier.usage()
        free = usage.free * block_bytes
        total = usage.blocks * block_bytes
        return cls(total_bytes=total, used_bytes=total - free, free_bytes=free)

    @property
    def usage(self) -> float:
        """Used share, 0 to 1."""
        return self.used_bytes / self.total_bytes if self.total_bytes else 0.0


class Counters(msgspec.Struct):
    """Totals since the manager was made, or since the service opened a layout's storage."""

    lookups: int = 0
    lookup_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    deferred_lookups: int = 0
    matches_ended_by_all: int = 0
    matches_ended_by_last: int = 0
    matches_ended_by_chunk: int = 0
    matches_ended_by_state: int = 0
    allocation_failures: int = 0
    loads_confirmed: int = 0
    loads_failed: int = 0
    loads_overdue: int = 0
    loads_cut_short: int = 0
    blocks_loaded: int = 0
    blocks_loaded_ahead: int = 0
    blocks_evicted_to_host: int = 0
    blocks_backed_up: int = 0
    copies_failed: int = 0
    backups_dropped: int = 0
    blocks_stored: int = 0
    blocks_prefetched: int = 0
    blocks_sent: int = 0
    blocks_fetched: int = 0
    blocks_corrupt_from_peer: int = 0
    fetches_skipped: int = 0
    blocks_requested_from_storage: int = 0
    blocks_corrupt_in_storage: int = 0
    bad_storage_slots: int = 0
    blocks_corrupt_in_host: int = 0
    stores_dropped: int = 0
    prefetches_shared: int = 0
    prefetches_timed_out: int = 0
    unexpected_reports: int = 0

    def count_end(self, reach: Reach) -> None:
        """Count a match that ended since a group of layers of this reach had no more."""
        name = f"matches_ended_by_{reach.value}"
        setattr(self, name, getattr(self, name) + 1)

    def count_copies(self, purpose: SwapPurpose, copied: int, planned: int) -> None:
        """Count a finished transfer: ``copied`` of ``planned`` blocks."""
        name = _COPIES[purpose]
        setattr(self, name, getattr(self, name) + copied)
        self.copies_failed += planned - copied


_COPIES = {
    SwapPurpose.LOAD: "blocks_loaded",
    SwapPurpose.EVICT: "blocks_evicted_to_host",
    SwapPurpose.BACKUP: "blocks_backed_up",
    SwapPurpose.STORE: "blocks_stored",
    SwapPurpose.PREFETCH: "blocks_prefetched",
    SwapPurpose.SEND: "blocks_sent",
    SwapPurpose.FETCH: "blocks_fetched",
}


# --- traffic --------------------------------------------------------------------------------------------------


BOUNDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)
"""Upper bounds of the buckets of a histogram, in seconds. The last bucket has none."""


class Histogram(msgspec.Struct):
    """Durations by bucket. ``counts`` are not cumulated; ``total`` is the sum of all durations, in seconds."""

    counts: Annotated[list[Count], msgspec.Meta(min_length=len(BOUNDS) + 1, max_length=len(BOUNDS) + 1)] = (
        msgspec.field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    )
    total: Seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def add(self, other: Histogram) -> None:
        """Add another histogram."""
        self.counts = [mine + more for mine, more in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def since(self, earlier: Histogram) -> Histogram:
        """Return the difference from an earlier state of the same histogram; nothing is below 0."""
        counts = [max(now - then, 0) for now, then in zip(self.counts, earlier.counts, strict=True)]
        return Histogram(counts, max(self.total - earlier.total, 0.0))


class Direction(StrEnum):
    """Source and target tier of copies."""

    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"
    HOST_TO_STORAGE = "host_to_storage"
    STORAGE_TO_HOST = "storage_to_host"
    DEVICE_TO_PEER = "device_to_peer"
    PEER_TO_DEVICE = "peer_to_device"

    @classmethod
    def of(cls, purpose: SwapPurpose) -> Direction:
        """Return the direction of copies for a purpose."""
        return cls(f"{purpose.source.value}_to_{purpose.target.value}")


_DIRECTIONS = {purpose: Direction.of(purpose) for purpose in SwapPurpose}


class Copied(msgspec.Struct):
    """Bytes that ranks copied in one direction, and the durations of their copies."""

    bytes: Count = 0
    durations: Histogram = msgspec.field(default_factory=Histogram)

    def add(self, other: Copied) -> None:
        """Add another total."""
        self.bytes += other.bytes
        self.durations.add(other.durations)

    def since(self, earlier: Copied) -> Copied:
        """Return the difference from an earlier state of the same total."""
        return Copied(max(self.bytes - earlier.bytes, 0), self.durations.since(earlier.durations))


class Traffic(msgspec.Struct):
    """Totals by direction. A direction without copies is missing."""

    copied: dict[Direction, Copied] = {}

    def add(self, other: Traffic) -> None:
        """Add another's totals."""
        for direction, copied in other.copied.items():
            self.copied.setdefault(direction, Copied()).add(copied)

    def since(self, earlier: Traffic) -> Traffic:
        """Return the difference from an earlier state of the same totals."""
        nothing = Copied()
        now = list(self.copied.items())  # a snapshot: another thread may be recording
        return Traffic({way: copied.since(earlier.copied.get(way, nothing)) for way, copied in now})


class TrafficMeter(CopyMeter):
    """Counts the traffic of one manager, or of one client of a service."""

    def __init__(self) -> None:
        super().__init__(list(BOUNDS))

    def record(self, report: TransferReport) -> None:
        """Add what a rank reports."""
        for result in report.results:
            self.add(result.purpose, result.copied_bytes, result.seconds)

    def copy(self) -> Traffic:
        """Return a snapshot."""
        traffic = Traffic()
        for purpose, direction in _DIRECTIONS.items():
            copied, counts, seconds = self.total(purpose)
            if copied:
                traffic.add(Traffic({direction: Copied(copied, Histogram(counts, seconds))}))
        return traffic


class ReadTotals(msgspec.Struct, frozen=True):
    """Reads of a service from storage, over all ranks: how many, their bytes and their seconds."""

    reads: Count = 0
    bytes: Count = 0
    seconds: float = 0.0

    def plus(self, nbytes: int, seconds: float) -> ReadTotals:
        """Return the totals with one read more."""
        return ReadTotals(self.reads + 1, self.bytes + nbytes, self.seconds + seconds)

    def since(self, before: ReadTotals) -> ReadTotals:
        """Return the reads after these totals."""
        return ReadTotals(self.reads - before.reads, self.bytes - before.bytes, self.seconds - before.seconds)


class LoadDecision(msgspec.Struct):
    """How much of one request's cached prefix was to be loaded, and how that turned out.

    ``choice``: whole, part or nothing. ``last_block``: hash of the last block found, in hexadecimal. ``reused_blocks``
    of the blocks found in the tiers were wanted. The expected seconds are those from the match to the first token: as
    decided, if all were reused, and if none were loaded. ``hedged``: a read was late, and the request went on without
    it. ``true_seconds`` is 0.0 until the prompt is computed.
    """

    request_id: str
    last_block: str = ""
    num_tokens: int = 0
    device_blocks: int = 0
    host_blocks: int = 0
    storage_blocks: int = 0
    reused_blocks: int = 0
    choice: str = ""
    expected_seconds: float = 0.0
    expected_seconds_whole: float = 0.0
    expected_seconds_nothing: float = 0.0
    hedged: bool = False
    waited_seconds: float = 0.0
    true_seconds: float = 0.0


class SpeedFigures(msgspec.Struct):
    """Speed of one kind of copy, as observed; 0.0 while unknown."""

    latency_seconds: float = 0.0
    bytes_per_second: float = 0.0


class LoadFigures(msgspec.Struct):
    """Decisions of load or recompute: totals, the speeds behind them, and the last decisions.

    ``hedged`` requests went on without a late read. ``probes`` are reads begun for the speed of storage alone.
    ``expected_seconds`` and ``true_seconds`` are sums over the ``judged`` requests, whose prompts are computed.
    """

    whole: int = 0
    part: int = 0
    nothing: int = 0
    hedged: int = 0
    probes: int = 0
    judged: int = 0
    expected_seconds: float = 0.0
    true_seconds: float = 0.0
    host: SpeedFigures = msgspec.field(default_factory=SpeedFigures)
    storage: SpeedFigures = msgspec.field(default_factory=SpeedFigures)
    prefill_step_seconds: float = 0.0
    prefill_token_seconds: float = 0.0
    prefill_context_seconds: float = 0.0
    recent: list[LoadDecision] = msgspec.field(default_factory=list)


class HandoverCount(msgspec.Struct):
    """Hand-overs with one peer that ended in one way; each rank's counts. ``direction`` is send or fetch.

    ``blocks`` and ``bytes`` that arrived whole. ``waited_seconds`` from the plan to the first block that could be
    read, or to the peer's question; ``moved_seconds`` from there to the end.
    """

    direction: str
    peer: str
    result: str
    transfers: Count = 0
    blocks: Count = 0
    bytes: Count = 0
    waited_seconds: Seconds = 0.0
    moved_seconds: Seconds = 0.0

    def add(self, other: HandoverCount) -> None:
        """Add another count."""
        self.transfers += other.transfers
        self.blocks += other.blocks
        self.bytes += other.bytes
        self.waited_seconds += other.waited_seconds
        self.moved_seconds += other.moved_seconds

    @property
    def is_expired_lease(self) -> bool:
        """True for sends that ended because no peer asked, or renewed its lease, in time."""
        return self.direction == SwapPurpose.SEND.value and self.result == "expired"


class HintFigures(msgspec.Struct):
    """Hints that were given, by outcome, a value of ``HintStatus``; one that was taken may have a second one later.

    ``evicted_early`` of them, by the reason.
    """

    given: int = 0
    outcomes: dict[str, int] = msgspec.field(default_factory=dict)
    evicted_early: dict[str, int] = msgspec.field(default_factory=dict)

    def count(self, status: HintStatus, number: int = 1, reason: str = "") -> None:
        """Count by status, and by reason what was evicted before its time."""
        self.outcomes[status.value] = self.outcomes.get(status.value, 0) + number
        if status is HintStatus.EVICTED_EARLY:
            self.evicted_early[reason] = self.evicted_early.get(reason, 0) + number

    def copy(self) -> HintFigures:
        """Return a snapshot."""
        return HintFigures(self.given, dict(self.outcomes), dict(self.evicted_early))


class CacheStats(msgspec.Struct, frozen=True):
    """A snapshot of a manager. A tier that does not exist is None, and so is the storage when others share it.

    ``sending_blocks`` are being handed over to peers and ``fetching_blocks`` fetched from them; ``held_blocks`` of
    these are slots of fetches that no request waits for any more. ``handovers`` that have ended, by peer and result.
    ``queued_stores`` blocks wait to be written to storage, ``storing_blocks`` are being written and ``reading_blocks``
    read. ``CacheController.storage_stats`` and ``transfer_stats`` have the state and the errors of a rank.
    """

    device: TierUsage
    host: TierUsage | None
    counters: Counters
    live_requests: int
    plans_in_flight: int
    queued_backups: int
    queued_stores: int = 0
    storing_blocks: int = 0
    reading_blocks: int = 0
    storage: TierUsage | None = None
    sending_blocks: int = 0
    fetching_blocks: int = 0
    held_blocks: int = 0
    traffic: Traffic = msgspec.field(default_factory=Traffic)
    loads: LoadFigures = msgspec.field(default_factory=LoadFigures)
    handovers: list[HandoverCount] = msgspec.field(default_factory=list)
    hints: HintFigures = msgspec.field(default_factory=HintFigures)


OTHERS = "others"
"""Peer of the counts of those that have not been counted for longest."""
_MOST_PEERS = 32


class HandoverTally:
    """Counts by peer, direction and result. Those of peers beyond the last few are added up under ``OTHERS``."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, dict[tuple[str, str], HandoverCount]] = OrderedDict()

    def record(self, report: TransferReport) -> None:
        """Count a rank's report of a hand-over; ignore others."""
        if (end := report.handover) is not None:
            for result in report.results:
                self.add(result.purpose, end, result.copied_bytes, result.seconds)

    def add(self, purpose: SwapPurpose, end: HandoverEnd, moved_bytes: int, moved_seconds: float) -> None:
        """Count a hand-over that has ended."""
        self._add(
            HandoverCount(
                purpose.value,
                end.peer,
                end.result,
                1,
                end.blocks,
                moved_bytes,
                end.waited_seconds,
                moved_seconds,
            )
        )
        self._peers.move_to_end(end.peer)
        named = len(self._peers) - (OTHERS in self._peers)
        if named > _MOST_PEERS:
            oldest = next(peer for peer in self._peers if peer != OTHERS)
            for count in self._peers.pop(oldest).values():
                count.peer = OTHERS
                self._add(count)

    def _add(self, count: HandoverCount) -> None:
        counts = self._peers.setdefault(count.peer, {})
        key = (count.direction, count.result)
        if key in counts:
            counts[key].add(count)
        else:
            counts[key] = count

    def counts(self) -> list[HandoverCount]:
        """Return a snapshot."""
        return [msgspec.structs.replace(each) for counts in self._peers.values() for each in counts.values()]
