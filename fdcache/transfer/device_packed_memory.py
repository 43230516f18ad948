"""Packed memory on a GPU: one kernel packs the scattered pieces of blocks, and one spreads them again."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from fdcache._core import PlaneTable
from fdcache.devices.base import Event
from fdcache.devices.cuda_peers import CudaPeerAccess, CudaRead
from fdcache.devices.cuda_planes import CudaPlanes
from fdcache.metadata import Int32Array
from fdcache.transfer.connector import LocalPlanes, Pieces, whole_planes
from fdcache.transfer.packed_memory import Copying, Packing, Regions

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
        pieces = pieces or whole_planes(self._planes.layout)
        return self._access.part(pieces, self._planes.table_of(pieces))

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
