"""Memory for packed blocks: planes of several blocks, one record after the other, to be read as one run."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from fdcache import _core
from fdcache._core import PlaneTable

CHUNK_BYTES = 64 << 10
"""Regions begin at a multiple of this many bytes."""

_ALIGNMENT = 64


class Region(NamedTuple):
    """Adjoining chunks."""

    first: int
    count: int


class PackedMemory:
    """A fixed piece of memory, and which of its chunks are taken."""

    def __init__(self, nbytes: int) -> None:
        self.num_chunks = nbytes // CHUNK_BYTES
        self._map = mmap.mmap(-1, self.num_chunks * CHUNK_BYTES)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address = self.bytes.ctypes.data
        self._taken: list[Region] = []
        """Regions in use, in order."""

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return self.num_chunks * CHUNK_BYTES

    @property
    def bytes_taken(self) -> int:
        """Bytes of the regions in use."""
        return sum(each.count for each in self._taken) * CHUNK_BYTES

    def take(self, nbytes: int) -> Region | None:
        """Return the first region of so many bytes that is free, None if there is none."""
        count = -(-nbytes // CHUNK_BYTES)
        end = 0
        for index, each in enumerate([*self._taken, Region(self.num_chunks, 0)]):
            if each.first - end >= count:
                region = Region(end, count)
                self._taken.insert(index, region)
                return region
            end = each.first + each.count
        return None

    def free(self, region: Region) -> None:
        """Give a region back."""
        self._taken.remove(region)


class Packing:
    """How planes [first, last) of blocks lie in a region: packed records, one after the other."""

    def __init__(self, sizes: Sequence[int], first: int, last: int) -> None:
        self.first, self.last = first, last
        self._sizes = list(sizes)
        ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes[first:last]))
        self.record_bytes = ends[-1]
        self._offsets = [*[0] * first, 0, *ends[:-1], *[0] * (len(self._sizes) - last)]

    def table(self, memory: PackedMemory, start: int) -> PlaneTable:
        """Return the planes of packed blocks that begin at this byte of the memory."""
        count = len(self._sizes)
        return PlaneTable(
            [memory.address + start + offset for offset in self._offsets],
            [self.record_bytes] * count,
            self._sizes,
            [0] * count,
            memory.bytes,
        )

    def pack(
        self, planes: PlaneTable, num_blocks: int, slots: np.ndarray, to: PackedMemory, start: int
    ) -> None:
        """Copy blocks out of planes, one after the other. Raises ``IndexError`` for a slot that does not exist."""
        count = len(slots)
        ranks = np.arange(count, dtype=np.int32)
        _core.copy_planes(
            planes, num_blocks, slots, self.table(to, start), count, ranks, self.first, self.last
        )

    def unpack(
        self, memory: PackedMemory, start: int, planes: PlaneTable, num_blocks: int, slots: np.ndarray
    ) -> None:
        """Copy packed blocks into slots of planes. Raises ``IndexError`` for a slot that does not exist."""
        count = len(slots)
        ranks = np.arange(count, dtype=np.int32)
        _core.copy_planes(
            self.table(memory, start), count, ranks, planes, num_blocks, slots, self.first, self.last
        )
