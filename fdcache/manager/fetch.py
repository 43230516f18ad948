"""What requests get from storage."""

from __future__ import annotations

from dataclasses import dataclass, field

from fdcache.manager.orders import StorageOrder
from fdcache.metadata import HashArray


@dataclass(slots=True, eq=False)
class Read:
    """Blocks on their way from storage to the host, and who wants them."""

    hashes: list[bytes]
    order: StorageOrder
    waiters: list[Fetch] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Fetch:
    """What one request gets from storage: blocks ``first`` up to ``stop`` of its path ``hashes``.

    What has come is pinned under ``lease`` until the request's match, ``kept`` blocks of it.
    """

    hashes: HashArray
    first: int
    stop: int
    deadline: float
    reads: list[Read] = field(default_factory=list)
    ended: bool = False
    lease: int = 0
    kept: int = 0
