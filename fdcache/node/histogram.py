"""How long things take: counts in fixed buckets, for requests and for copies."""

from __future__ import annotations

from bisect import bisect_left
from typing import Annotated

import msgspec

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
