"""Transfers under construction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fdcache.manager.blocks import Blocks
from fdcache.metadata import (
    CacheLevel,
    CacheSwapMetadata,
    HashArray,
    Int32Array,
    StorageTask,
    SwapPurpose,
    UInt32Array,
)

_DIRECTION = {
    SwapPurpose.EVICT: (CacheLevel.DEVICE, CacheLevel.HOST),
    SwapPurpose.BACKUP: (CacheLevel.DEVICE, CacheLevel.HOST),
    SwapPurpose.LOAD: (CacheLevel.HOST, CacheLevel.DEVICE),
    SwapPurpose.STORE: (CacheLevel.HOST, CacheLevel.STORAGE),
    SwapPurpose.PREFETCH: (CacheLevel.STORAGE, CacheLevel.HOST),
}


class Swap:
    """One transfer under construction."""

    def __init__(self, purpose: SwapPurpose) -> None:
        self.purpose = purpose
        self.sources: list[Blocks] = []
        self.slots: list[Int32Array] = []
        self.generations: list[UInt32Array] = []
        self.unverified: list[HashArray | None] = []
        self.size = 0

    def add(
        self,
        source: Blocks,
        slots: Int32Array,
        generations: UInt32Array,
        unverified: HashArray | None = None,
    ) -> int:
        """Copy ``source`` into ``slots``; returns their offset within the transfer.

        ``unverified`` is 1 for blocks that nobody has read since they were recovered; None: there are none.
        """
        offset = self.size
        self.sources.append(source)
        self.slots.append(slots)
        self.generations.append(generations)
        self.unverified.append(unverified)
        self.size += len(source)
        return offset

    def build(self) -> CacheSwapMetadata | None:
        """The transfer, None when it has no blocks."""
        if not self.size:
            return None
        source = Blocks.concat(self.sources)
        src_type, dst_type = _DIRECTION[self.purpose]
        return CacheSwapMetadata(
            purpose=self.purpose,
            src_type=src_type,
            dst_type=dst_type,
            src_block_ids=source.slots,
            src_generations=source.generations,
            dst_block_ids=np.concatenate(self.slots),
            dst_generations=np.concatenate(self.generations),
            hash_values=source.hashes,
            parent_hashes=source.parents,
            unverified=self._marks(),
        )

    def _marks(self) -> HashArray | None:
        if all(marks is None for marks in self.unverified):
            return None
        parts = zip(self.unverified, self.sources, strict=True)
        return np.concatenate(
            [np.zeros(len(source), np.uint8) if marks is None else marks for marks, source in parts]
        )


@dataclass(slots=True, eq=False)
class StorageOrder:
    """A transfer between host and storage; ``plan_id`` is 0 until it is sent, ``failed`` is told at its end."""

    swap: Swap
    timeout: float
    plan_id: int = 0
    failed: bool = False

    def build(self, plan_id: int) -> StorageTask:
        """The task as it goes to the workers."""
        self.plan_id = plan_id
        swap = self.swap.build()
        assert swap is not None, "a storage order has blocks"
        return StorageTask(plan_id=plan_id, swap=swap, timeout=self.timeout)
