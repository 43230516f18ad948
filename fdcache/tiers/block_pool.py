"""BlockPool: one tier of blocks, over the native core."""

from __future__ import annotations

from collections.abc import Iterable

from fdcache import _core
from fdcache.errors import IntegrityError
from fdcache.metadata import BlockNode, CacheLevel, CacheStatus

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
    """A tier of ``num_blocks`` slots at one level. The calls of the data path are those of the native class."""

    def __init__(self, level: CacheLevel, num_blocks: int, eviction: str = "lru") -> None:
        super().__init__(num_blocks, eviction)
        self.level = level

    def nodes(self, slots: Iterable[int]) -> list[BlockNode]:
        """What stands in these slots, for people and tools; slots that nobody can find are left out."""
        nodes = []
        for slot in slots:
            view = self.node(slot)
            if not view.findable:
                continue
            ready = view.state == _core.SLOT_READY
            nodes.append(
                BlockNode(
                    block_id=view.slot,
                    generation=view.generation,
                    hash_value=view.hash,
                    parent=view.parent,
                    depth=view.depth,
                    cache_status=(_READY if ready else _PENDING)[self.level],
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
