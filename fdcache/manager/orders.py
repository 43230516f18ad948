"""Transfers under construction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fdcache.manager.blocks import Blocks
from fdcache.metadata import CacheLevel, CacheSwapMetadata, Int32Array, StorageTask, SwapPurpose, UInt32Array

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
        self.size = 0

    def add(self, source: Blocks, slots: Int32Array, generations: UInt32Array) -> int:
        """Copy ``source`` into ``slots``; returns their offset within the transfer."""
        offset = self.size
        self.sources.append(source)
        self.slots.append(slots)
        self.generations.append(generations)
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
