"""LayoutMemory: the extents of one layout, as many on each rank, with the records and headers in them."""

from __future__ import annotations

import numpy as np

from fdcache import _core
from fdcache.layout import KVLayout
from fdcache.metadata import HashArray, Int32Array, UInt32Array
from fdcache.service.server.arena import Arena
from fdcache.service.wire.shared_memory import Extent, Geometry, record_table

READY_HEADER = 2


class LayoutMemory:
    """A slot is the same place in the extents of every rank. ``tables`` has the records and headers of each rank."""

    def __init__(self, arena: Arena, layout: KVLayout, geometry: Geometry) -> None:
        self._arena = arena
        self._layout = layout
        self._geometry = geometry
        self._ranks = range(layout.tp_size)
        self._padding = _padding(layout)
        self._extents: list[list[Extent]] = [[] for _ in self._ranks]
        self.tables: list[_core.RecordTable] = []

    @property
    def num_extents(self) -> int:
        """Extents of each rank."""
        return len(self._extents[0])

    @property
    def num_slots(self) -> int:
        """Slots in them."""
        return self.num_extents * self._geometry.records_per_extent

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.num_extents * len(self._ranks) * self._geometry.extent_bytes

    def extents(self, rank: int) -> list[Extent]:
        """The extents of a rank, in order."""
        return self._extents[rank]

    def table_of(self, extent: Extent) -> _core.RecordTable:
        """Records and headers of one extent alone."""
        return record_table(self._geometry, [extent])

    def map(self, count: int) -> None:
        """Map ``count`` more extents of each rank, whose files are there."""
        first = self.num_extents
        for rank, extents in enumerate(self._extents):
            for index in range(first, first + count):
                extents.append(Extent(self._geometry.path(rank, index), self._geometry.extent_bytes))
        self._renew_tables()

    def take(self) -> None:
        """Take one more extent of the arena for each rank; there have to be so many."""
        self._arena.assign(self._paths(self.num_extents))
        self.map(1)
        for extents in self._extents:
            records = extents[-1].records(self._geometry)
            for first, last in self._padding:
                records[:, first:last] = 0  # what another layout left there would go wherever the record goes

    def give_back(self) -> None:
        """Give the last extent of each rank back to the arena; nothing in it is in use."""
        self.tables = []
        for extents in self._extents:
            extents.pop().headers(self._geometry)[:] = 0
        self._arena.take_back(self._paths(self.num_extents))
        self._renew_tables()

    def close(self) -> None:
        """Unmap everything; the files stay."""
        self.tables = []
        self._extents = [[] for _ in self._ranks]

    def headers(self, rank: int, slots: Int32Array) -> np.ndarray:
        """The headers of slots on one rank, a copy, dtype ``HEADER``."""
        per_extent = self._geometry.records_per_extent
        views = [extent.headers(self._geometry) for extent in self._extents[rank]]
        out = np.empty(len(slots), views[0].dtype)
        for index in np.unique(slots // per_extent).tolist():
            chosen = slots // per_extent == index
            out[chosen] = views[index][slots[chosen] % per_extent]
        return out

    def stamp_empty(self, slots: Int32Array, generations: UInt32Array) -> None:
        """Mark slots as empty on every rank: whatever reads what was there before fails its check."""
        for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
            empty = _core.SlotHeader(0, generation, bytes(32), bytes(32), self._layout.fingerprint, 0, 0)
            for table in self.tables:
                table.set_header(slot, empty)

    def arrived(self, slots: Int32Array, generations: UInt32Array, hashes: HashArray) -> np.ndarray:
        """Where every rank's header says that this block is there, whole."""
        there = np.ones(len(slots), np.bool_)
        for rank in self._ranks:
            headers = self.headers(rank, slots)
            there &= headers["state"] == READY_HEADER
            there &= headers["generation"] == generations
            there &= (headers["hash"] == hashes).all(axis=1)
        return there

    def is_whole(self, slot: int, key: bytes) -> bool:
        """Whether every rank has this block in the slot, with the bytes that its checksum is of."""
        offsets = [plane.offset for plane in self._layout.planes]
        sizes = [plane.nbytes for plane in self._layout.planes]
        for table in self.tables:
            header = table.header(slot)
            if not header.is_valid or header.state != READY_HEADER or header.hash != key:
                return False
            if _core.record_checksum(table.record(slot), offsets, sizes) != header.payload_checksum:
                return False
        return True

    def _paths(self, index: int) -> list[str]:
        return [self._geometry.path(rank, index) for rank in self._ranks]

    def _renew_tables(self) -> None:
        self.tables = [record_table(self._geometry, extents) for extents in self._extents if extents]


def _padding(layout: KVLayout) -> list[tuple[int, int]]:
    """The bytes of a record that belong to no plane, as ranges."""
    ends = [0, *(plane.offset + plane.nbytes for plane in layout.planes)]
    starts = [*(plane.offset for plane in layout.planes), layout.record_bytes]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
