"""Memory for packed blocks: planes of several blocks, one record after the other, to be read as one run."""

from __future__ import annotations

import mmap
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np

from fdcache import _core
from fdcache._core import PlaneTable
from fdcache.devices.cuda_peers import CudaPeerAccess, CudaRead
from fdcache.devices.cuda_planes import CudaPlanes
from fdcache.metadata import Int32Array
from fdcache.tasks import Event
from fdcache.transfer.connector import LocalPlanes, Pieces, whole_planes

CHUNK_BYTES = 64 << 10
"""Regions begin at a multiple of this many bytes."""

_ALIGNMENT = 64


class Region(NamedTuple):
    """Adjoining chunks."""

    first: int
    chunks: int

    @property
    def start(self) -> int:
        """First byte."""
        return self.first * CHUNK_BYTES


class Regions:
    """Which chunks of a fixed piece of memory are taken."""

    def __init__(self, nbytes: int) -> None:
        self.num_chunks = nbytes // CHUNK_BYTES
        self._taken: list[Region] = []
        """Regions in use, in order."""

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return self.num_chunks * CHUNK_BYTES

    @property
    def bytes_taken(self) -> int:
        """Bytes of the regions in use."""
        return sum(each.chunks for each in self._taken) * CHUNK_BYTES

    def take(self, nbytes: int) -> Region | None:
        """Return the first free region of ``nbytes`` bytes, None if there is none."""
        count = -(-nbytes // CHUNK_BYTES)
        end = 0
        for index, each in enumerate([*self._taken, Region(self.num_chunks, 0)]):
            if each.first - end >= count:
                region = Region(end, count)
                self._taken.insert(index, region)
                return region
            end = each.first + each.chunks
        return None

    def free(self, region: Region) -> None:
        """Give a region back."""
        self._taken.remove(region)


class Packing:
    """How planes [first, last) of blocks lie in a region: records, or plane by plane.

    Plane p of block i is at ``offsets[p]`` plus i times ``strides[p]``. ``by_plane``: the number of blocks, which
    then lie one after the other in each plane.
    """

    def __init__(self, sizes: Sequence[int], first: int, last: int, by_plane: int = 0) -> None:
        self.first, self.last, self.planes = first, last, slice(first, last)
        self.sizes = tuple(sizes)
        padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes[first:last]]
        ends = list(accumulate(padded))
        self.record_bytes = ends[-1]
        times = max(by_plane, 1)
        before, after = (0,) * first, (0,) * (len(self.sizes) - last)
        self.offsets = (*before, *(times * each for each in (0, *ends[:-1])), *after)
        self.strides = tuple(padded if by_plane else [self.record_bytes] * (last - first))
        self.strides = (*before, *self.strides, *after)

    def table(self, start: int, owner: object) -> PlaneTable:
        """Return the planes of blocks in a region of memory that begins at an address, which ``owner`` keeps."""
        addresses = [start + offset for offset in self.offsets]
        return PlaneTable(addresses, list(self.strides), list(self.sizes), [0] * len(self.sizes), owner)


packing_of = lru_cache(maxsize=1024)(Packing)
"""Return a packing, one for all reads that are alike."""


class Copying(Protocol):
    """A copy between packed memory and planes."""

    def has_ended(self) -> bool:
        """Return True once it has ended."""

    def wait(self) -> None:
        """Wait until it has ended."""

    def end(self) -> str | None:
        """Release what it has used, once it has ended; return why it failed."""


class PackedMemory(Protocol):
    """Memory of a device in which blocks are packed. ``kind`` and ``device`` are NIXL's names of the memory."""

    kind: str
    device: int
    address: int
    regions: Regions

    def scope(self) -> AbstractContextManager[Any]:
        """Return a context in which NIXL may use the memory."""

    def pack(self, slots: Int32Array, pieces: Pieces | None, packing: Packing, start: int) -> Copying | None:
        """Begin to copy blocks of the planes, or of pieces of them, to ``start``; return None if that has ended.

        Raises ``IndexError`` for a slot that does not exist, ``DeviceError``.
        """

    def unpack(
        self, slots: Int32Array, pieces: Pieces | None, packing: Packing, start: int, after: Event | None
    ) -> Copying | None:
        """Begin to copy packed blocks into slots after an event; return None if that has ended.

        Raises ``IndexError`` for a slot that does not exist, ``DeviceError``.
        """


class HostPackedMemory:
    """Packed memory for planes of the CPU, in huge pages if the system has any: NIXL reads those faster."""

    kind = "DRAM"
    device = 0

    def __init__(self, nbytes: int, planes: LocalPlanes) -> None:
        self.regions = Regions(nbytes)
        self._map = mmap.mmap(-1, self.regions.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.address: int = self._bytes.ctypes.data
        self._planes = planes

    def scope(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()

    def pack(self, slots: Int32Array, pieces: Pieces | None, packing: Packing, start: int) -> Copying | None:
        """Copy blocks of the planes, or of pieces of them, to ``start``."""
        planes, count = self._planes, len(slots)
        _core.copy_planes(
            planes.table_of(pieces),
            planes.num_blocks,
            np.ascontiguousarray(slots),
            packing.table(self.address + start, self._bytes),
            count,
            np.arange(count, dtype=np.int32),
            packing.first,
            packing.last,
        )
        return None

    def unpack(
        self, slots: Int32Array, pieces: Pieces | None, packing: Packing, start: int, after: Event | None
    ) -> Copying | None:
        """Copy packed blocks into slots."""
        planes, count = self._planes, len(slots)
        _core.copy_planes(
            packing.table(self.address + start, self._bytes),
            count,
            np.arange(count, dtype=np.int32),
            planes.table_of(pieces),
            planes.num_blocks,
            np.ascontiguousarray(slots),
            packing.first,
            packing.last,
        )
        return None


_UNIT = 64
"""Kernels count bytes of the memory in these: a record may begin at any of them."""


class _Copying:
    def __init__(self, begun: CudaRead, access: CudaPeerAccess) -> None:
        self._begun, self._access = begun, access

    def has_ended(self) -> bool:
        return self._begun.done.query()

    def wait(self) -> None:
        self._begun.done.wait(None)

    def end(self) -> str | None:
        return self._begun.end() or self._access.lost


class DevicePackedMemory:
    """Packed memory for planes of a GPU. Raises ``DeviceError`` if the GPU has no room for it."""

    kind = "VRAM"

    def __init__(self, nbytes: int, planes: LocalPlanes, access: CudaPeerAccess) -> None:
        self.regions = Regions(nbytes)
        self.device = access.ordinal
        self._memory = access.reserve(self.regions.nbytes)
        self.address: int = self._memory.ptr
        self._planes, self._access = planes, access
        self._owned: dict[Pieces | None, CudaPlanes] = {}
        self._packed: dict[Hashable, CudaPlanes] = {}

    def scope(self) -> AbstractContextManager[Any]:
        """Return a context in which the GPU is current."""
        return self._access.scope()

    def pack(self, slots: Int32Array, pieces: Pieces | None, packing: Packing, start: int) -> Copying | None:
        """Begin to copy blocks of the planes, or of pieces of them, to ``start``."""
        packed, places = self._bound(pieces, packing), self._places(packing, start, len(slots))
        begun = self._access.pack(
            self._own(pieces), np.ascontiguousarray(slots), packed, places, packing.first, packing.last
        )
        return _Copying(begun, self._access)

    def unpack(
        self, slots: Int32Array, pieces: Pieces | None, packing: Packing, start: int, after: Event | None
    ) -> Copying | None:
        """Begin to copy packed blocks into slots after an event."""
        begun = self._access.spread(
            self._bound(pieces, packing),
            self._places(packing, start, len(slots)),
            self._own(pieces),
            np.ascontiguousarray(slots),
            packing.first,
            packing.last,
            () if after is None else (after,),
        )
        return _Copying(begun, self._access)

    def _own(self, pieces: Pieces | None) -> CudaPlanes:
        """Return pieces of the own planes, made once."""
        if pieces not in self._owned:
            found = pieces or whole_planes(self._planes.layout)
            self._owned[pieces] = self._access.part(found, self._planes.table_of(found))
        return self._owned[pieces]

    def _bound(self, pieces: Pieces | None, packing: Packing) -> CudaPlanes:
        """Return the memory as planes whose block b begins at unit b, made once for each packing."""
        key = pieces, packing.first, packing.last
        if key not in self._packed:
            found = pieces or whole_planes(self._planes.layout)
            table = PlaneTable(
                [self.address + offset for offset in packing.offsets],
                [_UNIT] * len(packing.sizes),
                list(packing.sizes),
                list(found.positions),
                self._memory,
            )
            blocks = (self.regions.nbytes - packing.record_bytes) // _UNIT + 1
            self._packed[key] = self._access.bind_packed(table, blocks)
        return self._packed[key]

    @staticmethod
    def _places(packing: Packing, start: int, count: int) -> Int32Array:
        return (start // _UNIT + np.arange(count) * (packing.record_bytes // _UNIT)).astype(np.int32)
