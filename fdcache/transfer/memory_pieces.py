"""Pieces of memory as arrays of addresses and bytes: planes of blocks, one plane after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fdcache.transfer.connector import LocalPlanes, Pieces

Numbers = NDArray[np.int64]


class MemoryPieces(NamedTuple):
    """Pieces of a peer's memory, where they go in the own one, and their bytes."""

    theirs: Numbers
    mine: Numbers
    sizes: Numbers

    @property
    def mean_bytes(self) -> float:
        """Bytes of a piece on average."""
        return float(self.sizes.mean())

    def merged(self) -> MemoryPieces:
        """Return the same with pieces joined that adjoin on both sides."""
        theirs, mine, sizes = self
        begins = (theirs[1:] != theirs[:-1] + sizes[:-1]) | (mine[1:] != mine[:-1] + sizes[:-1])
        first = np.concatenate(([0], np.flatnonzero(begins) + 1))
        return MemoryPieces(theirs[first], mine[first], np.add.reduceat(sizes, first))


def addresses_of(
    planes: Sequence[tuple[int, int]], starts: Sequence[int], blocks: NDArray[np.integer]
) -> Numbers:
    """Return the addresses of blocks in planes of these addresses and strides, ``starts`` bytes into each."""
    begins = np.array([address + start for (address, _), start in zip(planes, starts, strict=True)], np.int64)
    strides = np.array([stride for _, stride in planes], np.int64)
    return (begins[:, None] + strides[:, None] * blocks.astype(np.int64)).ravel()


def sizes_of(sizes: Sequence[int], count: int) -> Numbers:
    """Return the bytes of ``count`` blocks in planes of these sizes."""
    return np.repeat(np.array(sizes, np.int64), count)


def mean_run_bytes(
    planes: LocalPlanes, pieces: Pieces, first: int, last: int, slots: NDArray[np.integer]
) -> float:
    """Return the bytes of a run on average: blocks whose pieces adjoin in a plane."""
    sizes = pieces.sizes[first:last]
    runs = 1 + np.count_nonzero(np.diff(slots) != 1)
    count = sum(
        runs if stride == size else len(slots)
        for stride, size in zip(planes.strides[first:last], sizes, strict=True)
    )
    return len(slots) * sum(sizes) / count


def extents(planes: LocalPlanes) -> list[tuple[int, int]]:
    """Return the address and the bytes of each plane."""
    last = planes.num_blocks - 1
    return [
        (address, last * stride + plane.nbytes)
        for address, stride, plane in zip(planes.addresses, planes.strides, planes.layout.planes, strict=True)
    ]


def plane_ranges(sizes: Sequence[int], first: int, last: int, most: int) -> list[tuple[int, int]]:
    """Split planes [first, last) into ranges of at most ``most`` bytes of a block, or one plane."""
    ranges: list[tuple[int, int]] = []
    while first < last:
        until = first + 1
        while until < last and sum(sizes[first : until + 1]) <= most:
            until += 1
        ranges.append((first, until))
        first = until
    return ranges
