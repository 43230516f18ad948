"""BlockPool: a tier of slots with the blocks in them, and the codes of its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache.errors import ConfigurationError, IntegrityError
from fdcache.metadata import BlockNode, CacheLevel, CacheStatus, HashArray, Int32Array
from fdcache.plans.ledger import Blocks, have_parents, path_starts
from fdcache.tiers.statistics import TierUsage

ABSENT, READY, PENDING = range(3)
"""Answers of ``contains``, per block."""

RESERVED, IS_READY, IS_PENDING, NO_PARENT = range(4)
"""Answers of ``reserve_copies``, per block: a slot was reserved, or why none was."""

EVENT_STORED, EVENT_REMOVED, EVENT_CLEARED, EVENT_LOST = range(4)
"""Kinds of ``take_events``. The last two concern the whole tier."""
EventKinds = np.ndarray[tuple[int], np.dtype[np.uint8]]

MOST_BLOCKS = 2**31 - 1
"""Most blocks of a tier: slots are int32."""

HOST_SPARE = 1 / 64
"""Share of a host tier's slots that reservations may free ahead of need, to get longer runs."""

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


class BlockPool(_core.Tier):
    """A tier of ``num_blocks`` slots at one level.

    ::

        pool = BlockPool(CacheLevel.DEVICE, 1024)
        lease = pool.open_lease()
        run = pool.match(lease, hashes)
        pool.release(lease)

    The calls of the data path are those of the native ``Tier``, which also explains ``extent`` and
    ``spare``. Raises ``ConfigurationError`` for a number of blocks that no tier can have.
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
        if level is not CacheLevel.DEVICE:
            self.set_above()
        self.level = level
        self.loading_from_storage: set[int] = set()
        """Slots that blocks are being read into from storage, kept by the storage tier."""

    def resize(self, slots: int) -> int:
        """Change the number of slots; return how many slots in use prevent it, 0 when done."""
        _check_size(self.level, slots)
        return super().resize(slots)

    def nodes(self, slots: Iterable[int]) -> list[BlockNode]:
        """Return the blocks in these slots, for tools; slots without a findable block are left out."""
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

    def hottest_paths(self, limit: int) -> Iterator[tuple[_core.NodeView, bytes]]:
        """Yield the hottest blocks and their ancestors, parents first, each with the hash of its parent.

        Blocks may leave meanwhile; those that have left are left out.
        """
        blocks = self.ancestry(self.hottest(limit).slots)
        for slot, key, parent in zip(blocks.slots.tolist(), blocks.hashes, blocks.parents, strict=True):
            if slot >= self.stats().slots:  # the tier has shrunk since
                continue
            node = self.node(slot)
            if node.findable and node.hash == key.tobytes():
                yield node, parent.tobytes()

    def usage(self) -> TierUsage:
        """Return the state of the tier."""
        return TierUsage.of(self.stats())

    def verify(self) -> None:
        """Raise ``IntegrityError`` listing every invariant of the tier that does not hold."""
        broken = self.check_integrity()
        if broken:
            raise IntegrityError(f"{self.level.value} tier: " + "; ".join(broken))


def _check_size(level: CacheLevel, num_blocks: int) -> None:
    if not 1 <= num_blocks <= MOST_BLOCKS:
        raise ConfigurationError(f"{num_blocks} {level.value} blocks: a tier has 1 to {MOST_BLOCKS}")


def with_absent_ancestors(
    tier: _core.Tier, slots: Int32Array, is_absent: Callable[[HashArray], NDArray[np.bool_]]
) -> Blocks:
    """Return blocks of a tier and their ancestors, parents first, as far as the tier below lacks them.

    The tier below is closed under prefixes, so the walk up a path ends at the first block that it has. The cost grows
    with the blocks returned, not with their depth.
    """
    levels, listed = 0, -1
    while True:
        blocks = Blocks.of(tier.ancestry(slots, levels))
        grown, listed = len(blocks) > listed, len(blocks)
        blocks = blocks.select(is_absent(blocks.hashes))
        above = blocks.parents[path_starts(blocks)]
        above = above[have_parents(above)]
        if not grown or not len(above) or not is_absent(above).any():
            return blocks
        own = {row.tobytes() for row in blocks.hashes}
        if all(parent.tobytes() in own for parent in above[is_absent(above)]):
            return blocks
        levels = max(64, 4 * levels)


class TreeNode(msgspec.Struct):
    """A hot block, or an ancestor of one. ``parent`` is None below the root."""

    namespace: str
    hash: str
    parent: str | None
    depth: int
    hits: int
    children: int
    pins: int
    idle_seconds: float

    @classmethod
    def of(cls, namespace: str, node: _core.NodeView, parent: bytes) -> TreeNode:
        """Return what is shown of a block; ``parent`` is 0 below the root."""
        return cls(
            namespace=namespace,
            hash=node.hash.hex(),
            parent=parent.hex() if any(parent) else None,
            depth=node.depth,
            hits=node.hits,
            children=node.children,
            pins=node.pins,
            idle_seconds=node.idle_seconds,
        )
