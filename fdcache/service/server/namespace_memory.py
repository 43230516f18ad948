"""NamespaceMemory: the extents that hold the records of one namespace, as the service maps them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache._core import MemoryGuard
from fdcache.layout import KVLayout
from fdcache.metadata import HashArray, Int32Array, UInt32Array
from fdcache.service.server.arena import Arena
from fdcache.service.wire.shared_memory import Extent, Geometry, create_shared, record_table

READY_HEADER = 2


class NamespaceMemory:
    """The extents of a namespace: equally many on each rank, with one slot at the same place on every rank.

    ``tables`` gives access to the records and headers, one table per rank.
    """

    def __init__(self, arena: Arena, layout: KVLayout, geometry: Geometry) -> None:
        self._arena = arena
        self._layout = layout
        self._layout_text = layout.to_json().encode()
        self._geometry = geometry
        self._ranks = range(layout.record_ranks)
        self._padding = _padding(layout)
        self._extents: list[list[Extent]] = [[] for _ in self._ranks]
        self._guards: list[list[MemoryGuard]] = [[] for _ in self._ranks]
        self.tables: list[_core.RecordTable] = []

    @property
    def num_extents(self) -> int:
        """Extents of each rank."""
        return len(self._extents[0])

    @property
    def num_slots(self) -> int:
        """Slots in these extents."""
        return self.num_extents * self._geometry.records_per_extent

    @property
    def nbytes(self) -> int:
        """Bytes of the extents of all ranks."""
        return self.num_extents * len(self._ranks) * self._geometry.extent_bytes

    @property
    def layout_path(self) -> Path:
        """File with the layout, which lets the next service recover the blocks."""
        return Path(f"{self._geometry.directory}/{self._geometry.prefix}.layout")

    def extents(self, rank: int) -> list[Extent]:
        """Return the extents of a rank, in order."""
        return self._extents[rank]

    def table_of(self, extent: Extent) -> _core.RecordTable:
        """Return a table of the records and headers of one extent."""
        return record_table(self._geometry, [extent])

    def map(self, count: int) -> None:
        """Map ``count`` more extents of each rank. Their files must exist. Raises ``OSError``, and then maps none."""
        wanted = range(self.num_extents, self.num_extents + count)
        new = [
            [Extent(self._geometry.path(rank, index), self._geometry.extent_bytes) for index in wanted]
            for rank in self._ranks
        ]
        for rank, extents in enumerate(new):
            self._extents[rank] += extents
            self._guards[rank] += [MemoryGuard(extent.data) for extent in extents]
        self._renew_tables()

    def add_extent(self) -> None:
        """Take one free extent of the arena for each rank; the arena must have that many. The layout is there before.

        Raises ``OSError`` if either cannot be, and ``HostMemoryError`` as ``Arena.assign``.
        """
        self._keep_layout()
        paths = self._paths(self.num_extents)
        self._arena.assign(paths)
        try:
            self.map(1)
        except OSError:
            self._arena.take_back(paths)
            raise
        for extents in self._extents:
            extents[-1].headers(self._geometry)[:] = 0  # a former writer may have been late
            records = extents[-1].records(self._geometry)
            for first, last in self._padding:
                records[:, first:last] = 0  # bytes of a former owner must not travel with a record

    def remove_extent(self) -> None:
        """Return the last extent of each rank to the arena. None of its slots may be in use."""
        self.tables = []
        for extents, guards in zip(self._extents, self._guards, strict=True):
            extents.pop().headers(self._geometry)[:] = 0
            guards.pop()
        self._arena.take_back(self._paths(self.num_extents))
        self._renew_tables()

    def _keep_layout(self) -> None:
        """Write the layout unless its file is whole; never in place, for without it no block is recovered."""
        try:
            if self.layout_path.stat().st_size == len(self._layout_text):
                return
        except OSError:
            pass
        fresh = self.layout_path.with_name(self.layout_path.name + ".new")
        fresh.write_bytes(self._layout_text)
        fresh.rename(self.layout_path)

    def make_lost_files(self) -> int:
        """Make the files anew that others removed or truncated, from what is mapped. Return how many extents that were.

        Workers map a file again whose name has become other memory. Raises ``OSError`` if there is no room; the mapped
        memory stays in use then.
        """
        made = 0
        try:
            for rank, (extents, guards) in enumerate(zip(self._extents, self._guards, strict=True)):
                for index, extent in enumerate(extents):
                    path = self._geometry.path(rank, index)
                    if extent.is_whole(path):
                        continue
                    self._copy(extent.data, Path(path))
                    extents[index] = Extent(path, extent.nbytes)
                    guards[index] = MemoryGuard(extents[index].data)
                    made += 1
        finally:
            if made:
                self._renew_tables()
        if self.num_extents:
            self._keep_layout()
        return made

    def _copy(self, source: NDArray[np.uint8], path: Path) -> None:
        """Copy an extent that workers may be writing to: headers first, so that a complete one has all its bytes."""
        fresh = path.with_name(path.name + ".new")
        target = create_shared(fresh, len(source))
        split = self._geometry.headers_offset
        target[split:] = source[split:]
        target[:split] = source[:split]
        fresh.rename(path)

    def move(self, sources: Int32Array, targets: Int32Array, generation: int) -> None:
        """Copy the blocks of some slots to others on every rank, where they get a new ``generation``.

        A reader of a former block finds that generation, and fails.
        """
        for table in self.tables:
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                former = table.header(source)
                table.set_header(target, self._empty(generation))
                table.record(target)[:] = table.record(source)
                moved = _core.SlotHeader(
                    former.state,
                    generation,
                    former.hash,
                    former.parent,
                    former.fingerprint,
                    former.payload_bytes,
                    former.payload_checksum,
                )
                table.set_header(target, moved)

    def close(self) -> None:
        """Unmap all extents; their files stay."""
        self.tables = []
        self._guards = [[] for _ in self._ranks]
        self._extents = [[] for _ in self._ranks]

    def headers(self, rank: int, slots: Int32Array) -> np.ndarray:
        """Return a copy of the headers of ``slots`` on one rank, dtype ``HEADER``."""
        per_extent = self._geometry.records_per_extent
        views = [extent.headers(self._geometry) for extent in self._extents[rank]]
        out = np.empty(len(slots), views[0].dtype)
        for index in np.unique(slots // per_extent).tolist():
            chosen = slots // per_extent == index
            out[chosen] = views[index][slots[chosen] % per_extent]
        return out

    def stamp_empty(self, slots: Int32Array, generations: UInt32Array) -> None:
        """Mark slots as empty on every rank, so that a reader of the former record fails its check."""
        for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
            empty = self._empty(generation)
            for table in self.tables:
                table.set_header(slot, empty)

    def clear(self, slots: Int32Array) -> None:
        """Forget on every rank what free slots held, so that no restart finds it."""
        per_extent = self._geometry.records_per_extent
        for extents in self._extents:
            for index in np.unique(slots // per_extent).tolist():
                places = slots[slots // per_extent == index] % per_extent
                extents[index].headers(self._geometry)["state"][places] = 0

    def _empty(self, generation: int) -> _core.SlotHeader:
        return _core.SlotHeader(0, generation, bytes(32), bytes(32), self._layout.fingerprint, 0, 0)

    def are_complete(
        self, slots: Int32Array, generations: UInt32Array, hashes: HashArray
    ) -> NDArray[np.bool_]:
        """Return for each slot True where the header on every rank names this complete block."""
        complete = np.ones(len(slots), np.bool_)
        for rank in self._ranks:
            headers = self.headers(rank, slots)
            complete &= headers["state"] == READY_HEADER
            complete &= headers["generation"] == generations
            complete &= (headers["hash"] == hashes).all(axis=1)
        return complete

    def is_intact(self, slot: int, key: bytes) -> bool:
        """Return True if every rank has this block in the slot and its bytes match their checksum."""
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
    """Return the byte ranges of a record that belong to no plane."""
    ends = [0, *(plane.offset + plane.nbytes for plane in layout.planes)]
    starts = [*(plane.offset for plane in layout.planes), layout.record_bytes]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
