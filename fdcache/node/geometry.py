"""Where the memory of one layout is in a service's arena."""

from __future__ import annotations

import msgspec

from fdcache.metadata import SLOT_HEADER_BYTES


class Geometry(msgspec.Struct, frozen=True):
    """Where the extents of one layout are: files of ``extent_bytes`` in ``directory``, named by ``prefix``.

    An extent holds ``records_per_extent`` records, then their slot headers. ``incarnation`` changes whenever
    files of the same names are other memory. ``table_bytes`` is the size of the presence table.
    """

    directory: str
    prefix: str
    incarnation: int
    extent_bytes: int
    record_bytes: int
    table_bytes: int

    @property
    def records_per_extent(self) -> int:
        """Slots of an extent."""
        return self.extent_bytes // (self.record_bytes + SLOT_HEADER_BYTES)

    @property
    def headers_offset(self) -> int:
        """Where an extent's slot headers begin."""
        return self.records_per_extent * self.record_bytes

    def path(self, rank: int, index: int) -> str:
        """The file of a rank's extent."""
        return f"{self.directory}/{self.prefix}-r{rank}-{index:05d}"

    @property
    def table_path(self) -> str:
        """The file of the presence table."""
        return f"{self.directory}/{self.prefix}.table"
