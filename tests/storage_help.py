"""Host records with known bytes, and slab stores, for tests of the storage tier."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fdcache import _core
from fdcache.controller.arena import HostArena
from fdcache.devices.cpu import CpuDevice
from fdcache.layout import KVLayout
from fdcache.settings.cache import FsyncPolicy
from fdcache.storage.connector import RecordBatch
from fdcache.storage.slab import SlabStore
from tests.swaps import uniform_layout

ROOT = bytes(32)
MIB = 1 << 20


def storage_layout(**changes: Any) -> KVLayout:
    return uniform_layout(**({"block_size": 16, "head_dim": 16} | changes))


def path_hashes(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the hashes of one path of ``count`` blocks."""
    parent, rows = hashlib.sha256(seed.to_bytes(8, "little")).digest(), []
    for _ in range(count):
        parent = hashlib.sha256(parent).digest()
        rows.append(parent)
    return np.frombuffer(b"".join(rows), np.uint8).reshape(count, 32)


def parents_of(hashes: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.concatenate((np.zeros((1, 32), np.uint8), hashes[:-1]))


def content(layout: KVLayout, block_hash: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the record of a block: bytes derived from its hash, zero between the planes."""
    record = np.zeros(layout.record_bytes, np.uint8)
    generator = np.random.default_rng(int.from_bytes(block_hash[:8], "little"))
    for plane in layout.planes:
        record[plane.offset : plane.offset + plane.nbytes] = generator.integers(
            0, 256, plane.nbytes, np.uint8
        )
    return record


class Records:
    """Host arena with records to fill, wipe and compare."""

    def __init__(self, layout: KVLayout, blocks: int = 64) -> None:
        self.layout = layout
        self.arena = HostArena(layout, blocks, CpuDevice())
        self.table = self.arena.table

    def fill(self, slot: int, block_hash: bytes, parent: bytes = ROOT, generation: int = 1) -> None:
        record = self.table.record(slot)
        record[:] = content(self.layout, block_hash)
        planes = self.layout.planes
        checksum = _core.record_checksum(record, [p.offset for p in planes], [p.nbytes for p in planes])
        self.table.set_header(
            slot,
            _core.SlotHeader(
                2,
                generation,
                block_hash,
                parent,
                self.layout.fingerprint,
                self.layout.payload_bytes,
                checksum,
            ),
        )

    def wipe(self, slot: int) -> None:
        self.table.record(slot)[:] = 0xEE
        self.table.set_header(slot, _core.SlotHeader.from_bytes(bytes(128)))

    def holds(self, slot: int, block_hash: bytes, generation: int = 1) -> bool:
        header = self.table.header(slot)
        stamped = header.is_valid and header.state == 2 and header.hash == block_hash
        right = bool((self.table.record(slot) == content(self.layout, block_hash)).all())
        return stamped and header.generation == generation and right

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
