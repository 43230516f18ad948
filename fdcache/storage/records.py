"""RecordCheck: whether a host record is the block that a batch names, and the stamps of its header."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache.layout import KVLayout
from fdcache.storage.connector import RecordBatch

_WRITING, _READY = 1, 2


class RecordCheck:
    """Checks and stamps of host records and their headers. ``verify``: compare bytes with checksums, too."""

    def __init__(self, layout: KVLayout, *, verify: bool) -> None:
        self._layout = layout
        self._verify = verify
        self._offsets = [plane.offset for plane in layout.planes]
        self._sizes = [plane.nbytes for plane in layout.planes]

    def is_source(self, batch: RecordBatch, i: int, header: _core.SlotHeader) -> bool:
        """Return True when a host record's header names block ``i`` of the batch and is ready."""
        same = header.generation == batch.host_generations[i]
        return bool(same) and self.is_ready(header, batch.hashes[i].tobytes())

    def is_ready(self, header: _core.SlotHeader, block_hash: bytes) -> bool:
        """Return True for the header of a complete record of this block."""
        return header.state == _READY and self.belongs(header, block_hash)

    def is_intact(self, batch: RecordBatch, i: int, header: _core.SlotHeader) -> bool:
        """Return True when the host record of block ``i`` has the bytes that ``header`` was stored with."""
        if not self.belongs(header, batch.hashes[i].tobytes()):
            return False
        if not self._verify:
            return True
        return self.has_bytes_of(header, batch.records.record(int(batch.host_slots[i])))

    def has_bytes_of(self, header: _core.SlotHeader, record: NDArray[np.uint8]) -> bool:
        """Return True when a record has the checksum of ``header``, and zeros between its planes."""
        checksum = _core.record_checksum(record, self._offsets, self._sizes)
        return bool(checksum == header.payload_checksum) and self._has_zeros(record)

    def deliver(
        self, batch: RecordBatch, i: int, header: _core.SlotHeader, source: NDArray[np.uint8]
    ) -> bool:
        """Copy the record of ``header`` to block ``i`` on the host; return what ``is_intact`` says of the copy."""
        target = batch.records.record(int(batch.host_slots[i]))
        if not self._verify:
            target[:] = source
            return self.belongs(header, batch.hashes[i].tobytes())
        checksum = _core.copy_record_with_checksum(target, source, self._offsets, self._sizes)
        same = checksum == header.payload_checksum and self._has_zeros(target)
        return same and self.belongs(header, batch.hashes[i].tobytes())

    def _has_zeros(self, record: NDArray[np.uint8]) -> bool:
        """Return True when there is nothing between a record's planes."""
        end = 0
        for offset, size in zip(self._offsets, self._sizes, strict=True):
            if offset > end and record[end:offset].any():
                return False
            end = offset + size
        return not record[end:].any()

    def stamp_writing(self, batch: RecordBatch, i: int) -> None:
        """Mark the host record of block ``i`` as being overwritten."""
        self._stamp(batch, i, _WRITING, 0)

    def stamp_ready(self, batch: RecordBatch, i: int, checksum: int) -> None:
        """Mark the host record of block ``i`` as complete."""
        self._stamp(batch, i, _READY, checksum)

    def belongs(self, header: _core.SlotHeader, block_hash: bytes) -> bool:
        """Return True for a valid header of this block and layout."""
        layout = self._layout
        return (
            header.is_valid
            and header.hash == block_hash
            and header.fingerprint == layout.fingerprint[:16]
            and header.payload_bytes == layout.payload_bytes
        )

    def _stamp(self, batch: RecordBatch, i: int, state: int, checksum: int) -> None:
        header = _core.SlotHeader(
            state,
            int(batch.host_generations[i]),
            batch.hashes[i].tobytes(),
            batch.parents[i].tobytes(),
            self._layout.fingerprint,
            self._layout.payload_bytes,
            checksum,
        )
        batch.records.set_header(int(batch.host_slots[i]), header)
