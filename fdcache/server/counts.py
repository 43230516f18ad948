"""What is counted and remembered of one layout."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """Totals of one layout since the service started."""

    lookups: int = 0
    looked_up_blocks: int = 0
    hit_blocks: int = 0
    granted: int = 0
    stored: int = 0
    duplicates: int = 0
    orphans: int = 0
    dropped: int = 0
    evicted: int = 0
    corrupt: int = 0
    recovered: int = 0
    resets: int = 0


@dataclass(slots=True)
class EvictionLog:
    """When blocks left the tier, the newest ``most`` of them."""

    most: int
    times: dict[bytes, float] = field(default_factory=dict)

    def add(self, key: bytes, now: float) -> None:
        """A block left."""
        self.times.pop(key, None)
        self.times[key] = now
        while len(self.times) > self.most:
            del self.times[next(iter(self.times))]
