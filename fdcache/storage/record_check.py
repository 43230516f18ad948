"""Records and their headers as connectors written in Python check and stamp them."""

from __future__ import annotations

from fdcache import _core
from fdcache.layout import KVLayout
from fdcache.storage.connector import RecordBatch

_WRITING, _READY = 1, 2


class RecordCheck:
    """The records of one layout. ``verify``: compare bytes with checksums, not headers alone."""

    def __init__(self, layout: KVLayout, *, verify: bool) -> None:
        self._layout = layout
        self._verify = verify
        self._offsets = [plane.offset for plane in layout.planes]
        self._sizes = [plane.nbytes for plane in layout.planes]

    def is_source(self, batch: RecordBatch, i: int, header: _core.SlotHeader) -> bool:
        """Whether a host record's header says that it is block ``i`` of the batch, and ready."""
        right = header.state == _READY and header.generation == batch.host_generations[i]
        return bool(right) and self._belongs(header, batch.hashes[i].tobytes())

    def is_intact(self, batch: RecordBatch, i: int, header: _core.SlotHeader) -> bool:
        """Whether the bytes in the host record of block ``i`` are those that this header came with."""
        if not self._belongs(header, batch.hashes[i].tobytes()):
            return False
        if not self._verify:
            return True
        record = batch.records.record(int(batch.host_slots[i]))
        end = 0
        for offset, size in zip(self._offsets, self._sizes, strict=True):
            if record[end:offset].any():
                return False
            end = offset + size
        checksum = _core.record_checksum(record, self._offsets, self._sizes)
        return not record[end:].any() and checksum == header.payload_checksum

    def stamp_writing(self, batch: RecordBatch, i: int) -> None:
        """The host record of block ``i`` is about to be overwritten."""
        self._stamp(batch, i, _WRITING, 0)

    def stamp_ready(self, batch: RecordBatch, i: int, checksum: int) -> None:
        """The host record of block ``i`` has all its bytes."""
        self._stamp(batch, i, _READY, checksum)

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

    def _belongs(self, header: _core.SlotHeader, block_hash: bytes) -> bool:
        layout = self._layout
        return (
            header.is_valid
            and header.hash == block_hash
            and header.fingerprint == layout.fingerprint[:16]
            and header.payload_bytes == layout.payload_bytes
        )
