"""Host records with known bytes, for the conformance suite and whoever tests a connector."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache.layout import KVLayout
from fdcache.metadata import SLOT_HEADER_BYTES, HashArray
from fdcache.storage.connector import RecordBatch

READY = 2
"""The state of a slot whose record is whole."""


def conformance_layout(model: str = "conformance", tp_size: int = 1) -> KVLayout:
    """A small layout of several planes."""
    return KVLayout.uniform(
        block_size=16,
        kv_heads=2,
        head_dim=16,
        dtype="bfloat16",
        model=model,
        revision="1",
        num_layers=3,
        tp_size=tp_size,
    )


def path_of(count: int, name: str) -> HashArray:
    """Block hashes of one path."""
    rows, parent = [], name.encode()
    for _ in range(count):
        parent = hashlib.sha256(parent).digest()
        rows.append(parent)
    return np.frombuffer(b"".join(rows), np.uint8).reshape(count, 32)


class HostRecords:
    """Host records whose bytes follow from the hash of their block."""

    def __init__(self, layout: KVLayout, count: int) -> None:
        self.layout = layout
        self._memory = _core.HostMemory(count * layout.record_bytes)
        self._headers = _core.HostMemory(count * SLOT_HEADER_BYTES)
        self.table = _core.RecordTable(
            [self._memory.address],
            count,
            layout.record_bytes,
            [self._headers.address],
            count,
            (self._memory, self._headers),
        )

    def content(self, block_hash: bytes) -> NDArray[np.uint8]:
        """The bytes of a block's record."""
        record = np.zeros(self.layout.record_bytes, np.uint8)
        random = np.random.default_rng(int.from_bytes(block_hash[:8], "little"))
        for plane in self.layout.planes:
            end = plane.offset + plane.nbytes
            record[plane.offset : end] = random.integers(0, 256, plane.nbytes, np.uint8)
        return record

    def fill(self, hashes: HashArray) -> RecordBatch:
        """Records 0, 1, ... hold these blocks of one path."""
        batch = self.batch(hashes)
        planes = self.layout.planes
        for slot, (row, parent) in enumerate(zip(batch.hashes, batch.parents, strict=True)):
            record = self.table.record(slot)
            record[:] = self.content(row.tobytes())
            checksum = _core.record_checksum(
                record, [plane.offset for plane in planes], [plane.nbytes for plane in planes]
            )
            header = _core.SlotHeader(
                READY,
                1,
                row.tobytes(),
                parent.tobytes(),
                self.layout.fingerprint,
                self.layout.payload_bytes,
                checksum,
            )
            self.table.set_header(slot, header)
        return batch

    def wipe(self) -> None:
        """All records hold something else, and nothing is ready."""
        for slot in range(self.table.num_slots):
            self.table.record(slot)[:] = 0xA5
            self.table.set_header(slot, _core.SlotHeader.from_bytes(bytes(SLOT_HEADER_BYTES)))

    def batch(self, hashes: HashArray) -> RecordBatch:
        """Records 0, 1, ... for these blocks of one path."""
        count = len(hashes)
        return RecordBatch(
            records=self.table,
            host_slots=np.arange(count, dtype=np.int32),
            host_generations=np.ones(count, np.uint32),
            hashes=hashes,
            parents=np.concatenate((np.zeros((1, 32), np.uint8), hashes[:-1])),
        )

    def holds(self, slot: int, block_hash: bytes) -> bool:
        """Whether a record is stamped as this block and has its bytes."""
        header = self.table.header(slot)
        stamped = header.is_valid and header.state == READY and header.hash == block_hash
        return stamped and bool((self.table.record(slot) == self.content(block_hash)).all())
