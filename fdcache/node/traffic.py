"""What was copied, by direction: bytes, and how long each copy took."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from fdcache.metadata import SwapPurpose, TransferReport
from fdcache.node.histogram import Count, Histogram


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
