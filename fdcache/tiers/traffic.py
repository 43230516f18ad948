"""How long things take: counts in fixed buckets, for requests and for copies."""

from __future__ import annotations

from bisect import bisect_left
from enum import StrEnum
from typing import Annotated

import msgspec

from fdcache.metadata import SwapPurpose, TransferReport

BOUNDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)
"""Upper bounds of the buckets, in seconds; the last bucket has none."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Histogram(msgspec.Struct):
    """Counts by bucket, not cumulated; ``total`` are the seconds of all."""

    counts: Annotated[list[Count], msgspec.Meta(min_length=len(BOUNDS) + 1, max_length=len(BOUNDS) + 1)] = (
        msgspec.field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    )
    total: Annotated[float, msgspec.Meta(ge=0, le=1e15)] = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def add(self, other: Histogram) -> None:
        """Count all of another's too."""
        self.counts = [mine + more for mine, more in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def since(self, earlier: Histogram) -> Histogram:
        """What came after ``earlier``, a state of the same histogram; nothing is below 0."""
        counts = [max(now - then, 0) for now, then in zip(self.counts, earlier.counts, strict=True)]
        return Histogram(counts, max(self.total - earlier.total, 0.0))


class Direction(StrEnum):
    """Between which tiers."""

    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"
    HOST_TO_STORAGE = "host_to_storage"
    STORAGE_TO_HOST = "storage_to_host"


_DIRECTIONS = {
    SwapPurpose.LOAD: Direction.HOST_TO_DEVICE,
    SwapPurpose.EVICT: Direction.DEVICE_TO_HOST,
    SwapPurpose.BACKUP: Direction.DEVICE_TO_HOST,
    SwapPurpose.STORE: Direction.HOST_TO_STORAGE,
    SwapPurpose.PREFETCH: Direction.STORAGE_TO_HOST,
}


class Copied(msgspec.Struct):
    """Bytes that ranks copied in one direction, and the durations of their copies, in seconds."""

    bytes: Count = 0
    durations: Histogram = msgspec.field(default_factory=Histogram)

    def add(self, other: Copied) -> None:
        """Count all of another's too."""
        self.bytes += other.bytes
        self.durations.add(other.durations)

    def since(self, earlier: Copied) -> Copied:
        """What came after ``earlier``, a state of the same."""
        return Copied(max(self.bytes - earlier.bytes, 0), self.durations.since(earlier.durations))


class Traffic(msgspec.Struct):
    """Totals by direction; only directions in which something was copied."""

    copied: dict[Direction, Copied] = {}

    def record(self, report: TransferReport) -> None:
        """Count what a rank says that it copied."""
        for result in report.results:
            if result.copied_bytes:
                total = self.copied.setdefault(_DIRECTIONS[result.purpose], Copied())
                total.bytes += result.copied_bytes
                total.durations.observe(result.seconds)

    def copy(self) -> Traffic:
        """As it is now."""
        return self.since(Traffic())

    def add(self, other: Traffic) -> None:
        """Count all of another's too."""
        for direction, copied in other.copied.items():
            self.copied.setdefault(direction, Copied()).add(copied)

    def since(self, earlier: Traffic) -> Traffic:
        """What came after ``earlier``, a state of the same."""
        nothing = Copied()
        now = list(self.copied.items())  # at once: others may be recording
        return Traffic({way: copied.since(earlier.copied.get(way, nothing)) for way, copied in now})
