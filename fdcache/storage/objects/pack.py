"""An object: a page of headers, and the records of some blocks of one path (docs/format-objects.md)."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache.layout import KVLayout
from fdcache.metadata import SLOT_HEADER_BYTES
from fdcache.storage.objects.backend import Buffer, DamagedObjectError

PAGE = 4096
MOST_RECORDS = PAGE // SLOT_HEADER_BYTES - 1
"""Records whose headers fit into the page, beside the object's own."""

_MAGIC = b"FDPK"
_VERSION = 1
_FIELDS = struct.Struct("<4sII4xQ16s")
_CHECKSUM_AT = SLOT_HEADER_BYTES - 8
_READY = 2

Headers = tuple[_core.SlotHeader, ...]
"""Header of each record of an object, in the order of the path."""


class ObjectFormat:
    """Sizes of a layout's objects, and their pages."""

    def __init__(self, layout: KVLayout) -> None:
        self.record_bytes = layout.record_bytes
        self._fingerprint = layout.fingerprint[:16]

    def size(self, count: int) -> int:
        """Return the bytes of an object with this many records."""
        return PAGE + count * self.record_bytes

    def count(self, size: int) -> int:
        """Return the number of records of an object of this size."""
        return max(size - PAGE, 0) // self.record_bytes

    def offset(self, position: int) -> int:
        """Return where the record at this position begins."""
        return PAGE + position * self.record_bytes

    def write_page(self, page: NDArray[np.uint8], headers: Sequence[_core.SlotHeader]) -> None:
        """Write the page of an object with these headers."""
        page[:] = 0
        fields = _FIELDS.pack(_MAGIC, _VERSION, len(headers), self.record_bytes, self._fingerprint)
        page[: len(fields)] = np.frombuffer(fields, np.uint8)
        table = b"".join(header.to_bytes() for header in headers)
        page[SLOT_HEADER_BYTES : SLOT_HEADER_BYTES + len(table)] = np.frombuffer(table, np.uint8)
        checksum = _core.record_checksum(page, [0], [PAGE])
        page[_CHECKSUM_AT:SLOT_HEADER_BYTES].view(np.uint64)[0] = checksum

    def headers(self, data: Buffer) -> Headers:
        """Read a page. Raises ``DamagedObjectError``."""
        if len(data) < PAGE:
            raise DamagedObjectError("the object is cut off in its page")
        page = np.frombuffer(data, np.uint8, PAGE).copy()
        magic, version, count, record_bytes, fingerprint = _FIELDS.unpack_from(page.data)
        if (magic, version) != (_MAGIC, _VERSION):
            raise DamagedObjectError("the object is not one of fdcache in this version")
        stored = page[_CHECKSUM_AT:SLOT_HEADER_BYTES].view(np.uint64)
        checksum = int(stored[0])
        stored[0] = 0
        if checksum != _core.record_checksum(page, [0], [PAGE]):
            raise DamagedObjectError("the object's page differs from its checksum")
        own = (self.record_bytes, self._fingerprint)
        if (record_bytes, fingerprint) != own or not 1 <= count <= MOST_RECORDS:
            raise DamagedObjectError("the object is of another layout")
        ends = range(2 * SLOT_HEADER_BYTES, (count + 2) * SLOT_HEADER_BYTES, SLOT_HEADER_BYTES)
        headers = [_core.SlotHeader.from_bytes(page[end - SLOT_HEADER_BYTES : end].tobytes()) for end in ends]
        if not all(header.is_valid and header.state == _READY for header in headers):
            raise DamagedObjectError("a header in the object's page is damaged")
        return tuple(headers)
