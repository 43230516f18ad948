"""Host records with known bytes, and slab stores, for tests of the storage tier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fdcache.layout import KVLayout
from fdcache.metadata import HashArray
from fdcache.settings.cache import FsyncPolicy
from fdcache.storage.connector import RecordBatch
from fdcache.storage.slab import SlabStore
from fdcache.testing.storage import KnownRecords, path_of
from tests.swaps import uniform_layout

ROOT = bytes(32)
MIB = 1 << 20


def storage_layout(**changes: Any) -> KVLayout:
    return uniform_layout(**({"block_size": 16, "head_dim": 16} | changes))


def path_hashes(count: int, seed: int = 0) -> HashArray:
    """Return the hashes of one path of ``count`` blocks."""
    return path_of(count, str(seed))


def parents_of(hashes: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.concatenate((np.zeros((1, 32), np.uint8), hashes[:-1]))


class Records:
    """Known records to fill, wipe and compare, each by its slot."""

    def __init__(self, layout: KVLayout, blocks: int = 64) -> None:
        self._known = KnownRecords(layout, blocks)
        self.table = self._known.table

    def fill(self, slot: int, block_hash: bytes, parent: bytes = ROOT, generation: int = 1) -> None:
        self._known.put_block(slot, generation, block_hash, parent)

    def wipe(self, slot: int) -> None:
        self._known.wipe_block(slot)

    def holds(self, slot: int, block_hash: bytes, generation: int = 1) -> bool:
        return self._known.holds(slot, block_hash) and self.table.header(slot).generation == generation

    def batch(
        self,
        hashes: np.ndarray[Any, np.dtype[np.uint8]],
        *,
        first: int = 0,
        slots: Sequence[int] | None = None,
        parents: np.ndarray[Any, np.dtype[np.uint8]] | None = None,
        generation: int = 1,
    ) -> RecordBatch:
        count = len(hashes)
        return RecordBatch(
            records=self.table,
            host_slots=np.arange(first, first + count, dtype=np.int32),
            host_generations=np.ones(count, np.uint32),
            hashes=hashes,
            parents=parents_of(hashes) if parents is None else parents,
            slots=None if slots is None else np.array(slots, np.int32),
            generations=None if slots is None else np.full(count, generation, np.uint32),
        )

    def full_batch(
        self,
        hashes: np.ndarray[Any, np.dtype[np.uint8]],
        *,
        slots: Sequence[int] | None = None,
        generation: int = 1,
    ) -> RecordBatch:
        """Fill the records of a batch and return it."""
        parents = parents_of(hashes)
        for slot, (block_hash, parent) in enumerate(zip(hashes, parents, strict=True)):
            self.fill(slot, block_hash.tobytes(), parent.tobytes())
        return self.batch(hashes, slots=slots, generation=generation)


def open_store(folder: Path, layout: KVLayout, **changes: Any) -> SlabStore:
    options: dict[str, Any] = {
        "rank": 0,
        "size": 4 * MIB,
        "fsync": FsyncPolicy.NEVER,
        "threads": 2,
        "retry_after": 0.0,
    }
    return SlabStore(folder, layout, **(options | changes))
