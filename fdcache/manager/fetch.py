"""What requests get from storage."""

from __future__ import annotations

from dataclasses import dataclass, field

from fdcache.manager.orders import StorageOrder


@dataclass(slots=True, eq=False)
class Read:
    """Blocks on their way from storage to the host, and how many requests want them."""

    hashes: list[bytes]
    order: StorageOrder
    waiters: int = 0


@dataclass(slots=True, eq=False)
class Fetch:
    """What one request gets from storage: blocks ``first`` up to ``stop`` of its path."""

    first: int
    stop: int
    deadline: float
    reads: list[Read] = field(default_factory=list)
    ended: bool = False
