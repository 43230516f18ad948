"""How long requests take: histograms of fixed buckets."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

BOUNDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)
"""Upper bounds of the buckets, in seconds; the last bucket has none."""


@dataclass(slots=True)
class Histogram:
    """Counts by bucket, not cumulated."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds


@dataclass(slots=True)
class Latencies:
    """A histogram for each kind of request."""

    kinds: dict[str, Histogram] = field(default_factory=dict)

    def observe(self, kind: str, seconds: float) -> None:
        """Count one request."""
        self.kinds.setdefault(kind, Histogram()).observe(seconds)
