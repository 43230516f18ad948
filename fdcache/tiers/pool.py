"""What a tier answers for each block, and what it tells of itself: a byte of an array each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fdcache import _core
from fdcache.errors import ConfigurationError, IntegrityError
from fdcache.metadata import BlockNode, CacheLevel, CacheStatus, StorageScan

ABSENT, READY, PENDING = range(3)
"""Of ``contains``."""

RESERVED, IS_READY, IS_PENDING, NO_PARENT = range(4)
"""Of ``reserve_copies``: a slot was taken, or why none was."""

STORED, DUPLICATE = range(2)
"""Of ``commit``."""

EVENT_STORED, EVENT_REMOVED, EVENT_CLEARED, EVENT_LOST = range(4)
"""Of ``take_events``. From ``EVENT_CLEARED`` on they are of the tier as a whole."""


_READY = {
    CacheLevel.DEVICE: CacheStatus.DEVICE,
    CacheLevel.HOST: CacheStatus.HOST,
    CacheLevel.STORAGE: CacheStatus.STORAGE,
}
_PENDING = {
    CacheLevel.DEVICE: CacheStatus.SWAP_TO_DEVICE,
    CacheLevel.HOST: CacheStatus.SWAP_TO_HOST,
    CacheLevel.STORAGE: CacheStatus.SWAP_TO_STORAGE,
}


MOST_BLOCKS = 2**31 - 1
"""Blocks of a tier at most: slots are int32."""

HOST_SPARE = 1 / 64
"""The share of a host tier's slots up to which reservations evict ahead of need, for longer runs."""


class BlockPool(_core.Tier):
    """A tier of ``num_blocks`` slots at one level. The calls of the data path are those of the native class.

    ``extent`` and ``spare`` shape the runs of its slots, as the native class says.

    Raises ``ConfigurationError`` for a number of slots that no tier can have.
    """

    def __init__(
        self,
        level: CacheLevel,
        num_blocks: int,
        eviction: str = "lru",
        *,
        extent: int = 0,
        spare: float = 0.0,
    ) -> None:
        _check_size(level, num_blocks)
        super().__init__(num_blocks, eviction, extent, spare)
        self.level = level
        self.loading_from_storage: set[int] = set()
        """Slots that blocks are on their way into from storage; whoever reads them says so."""

    def resize(self, slots: int) -> int:
        """Change the number of slots; returns how many in use stand against it, 0 when done."""
        _check_size(self.level, slots)
        return super().resize(slots)

    def nodes(self, slots: Iterable[int]) -> list[BlockNode]:
        """What stands in these slots, for people and tools; slots that nobody can find are left out."""
        nodes = []
        for slot in slots:
            view = self.node(slot)
            if not view.findable:
                continue
            ready = view.state == _core.SLOT_READY
            pending = _PENDING[self.level]
            if slot in self.loading_from_storage:
                pending = CacheStatus.LOADING_FROM_STORAGE
            nodes.append(
                BlockNode(
                    block_id=view.slot,
                    generation=view.generation,
                    hash_value=view.hash,
                    parent=view.parent,
                    depth=view.depth,
                    cache_status=_READY[self.level] if ready else pending,
                    ref_count=view.pins + view.holds,
                    children=view.children,
                    hit_count=view.hits,
                    idle_seconds=view.idle_seconds,
                )
            )
        return nodes

    def verify(self) -> None:
        """Raise ``IntegrityError`` that lists every invariant of the tier that does not hold."""
        broken = self.check_integrity()
        if broken:
            raise IntegrityError(f"{self.level.value} tier: " + "; ".join(broken))


def _check_size(level: CacheLevel, num_blocks: int) -> None:
    if not 1 <= num_blocks <= MOST_BLOCKS:
        raise ConfigurationError(f"{num_blocks} {level.value} blocks: a tier has 1 to {MOST_BLOCKS}")


def restore(pool: BlockPool, scans: Sequence[StorageScan]) -> int:
    """Make entries of the blocks that every rank holds in the same slot and generation; returns how many.

    A block without its parent cannot be found and does not count.
    """
    if not scans:
        return 0
    first = scans[0]
    common = np.ones(len(first.slots), np.bool_)
    for other in scans[1:]:
        common &= _same(first, other)
    ready = pool.restore(
        first.slots[common],
        first.generations[common],
        first.hashes[common],
        first.parents[common],
        first.checksums[common],
        first.written_ms[common],
    )
    return int(ready.sum())


def _same(first: StorageScan, other: StorageScan) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which blocks of ``first`` stand in the same slot of ``other``. Slots ascend in both."""
    if not len(other.slots):
        return np.zeros(len(first.slots), np.bool_)
    at = np.minimum(np.searchsorted(other.slots, first.slots), len(other.slots) - 1)
    same = other.slots[at] == first.slots
    same &= other.generations[at] == first.generations
    same &= (other.hashes[at] == first.hashes).all(axis=1)
    same &= (other.parents[at] == first.parents).all(axis=1)
    return np.asarray(same)
