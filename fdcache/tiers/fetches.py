"""What requests get from storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fdcache.metadata import HashArray
from fdcache.plans.ledger import StorageOrder


@dataclass(slots=True, eq=False)
class Read:
    """Blocks on their way from storage to the host, the first of them into ``slot``, and who wants them."""

    hashes: list[bytes]
    order: StorageOrder
    slot: int
    waiters: dict[Fetch, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Fetch:
    """What one request gets from storage: blocks ``first`` up to ``stop`` of its path ``hashes``.

    ``on_device`` tells how many of the first blocks its device has: what ends there is not worth a read. The time
    that it may be waited for ends at ``deadline``, later by a second for every ``bandwidth`` bytes that are read.
    What has come is pinned under ``lease`` until the request's match, ``kept`` blocks of it.
    """

    hashes: HashArray
    on_device: Callable[[HashArray], int]
    first: int
    stop: int
    deadline: float
    bandwidth: float
    reads: list[Read] = field(default_factory=list)
    ended: bool = False
    lease: int = 0
    kept: int = 0

    def part(self, start: int, count: int) -> range:
        """Which of ``count`` blocks from ``start`` on were read for this, counted from ``start``."""
        first = min(max(self.first - start, 0), count)
        return range(first, max(min(self.stop - start, count), first))
