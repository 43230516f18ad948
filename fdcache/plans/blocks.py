"""Parallel arrays that describe blocks of one tier, and the hash arrays they are cut from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fdcache._core import BlockList, Tier
from fdcache.metadata import HashArray, Int32Array, UInt32Array

ROOT = bytes(32)
"""As a parent hash: the block is the first of its path."""

_ROOT_ROW = np.zeros((1, 32), np.uint8)


def parents_of(hashes: HashArray, start: int, stop: int) -> HashArray:
    """The parent hashes of blocks ``start`` to ``stop`` of one path."""
    if start > 0:
        return hashes[start - 1 : stop - 1]
    return np.concatenate((_ROOT_ROW, hashes[: stop - 1])) if stop > 0 else hashes[:0]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Element i of each array is one block: its slot, the slot's generation, its hash, its parent's hash."""

    slots: Int32Array
    generations: UInt32Array
    hashes: HashArray
    parents: HashArray

    def __len__(self) -> int:
        return len(self.slots)

    @classmethod
    def of(cls, found: BlockList) -> Self:
        """The arrays of what a tier returned."""
        return cls(found.slots, found.generations, found.hashes, found.parents)

    @classmethod
    def concat(cls, parts: Iterable[Self]) -> Self:
        """One after the other."""
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([part.slots for part in parts]),
            np.concatenate([part.generations for part in parts]),
            np.concatenate([part.hashes for part in parts]),
            np.concatenate([part.parents for part in parts]),
        )

    def select(self, index: slice | np.ndarray) -> Blocks:
        """Those that a slice, a mask or an index array names."""
        if isinstance(index, np.ndarray) and index.dtype == np.bool_ and index.all():
            return self
        return Blocks(self.slots[index], self.generations[index], self.hashes[index], self.parents[index])


def with_absent_above(
    tier: Tier, slots: Int32Array, is_absent: Callable[[HashArray], NDArray[np.bool_]]
) -> Blocks:
    """Blocks of a tier and those above them, parents first, as far as the tier below lacks them.

    What is below is closed under prefixes, so the walk up a path ends at the first block that is there; its cost is
    that of the blocks found, however deep they stand.
    """
    levels, listed = 0, -1
    while True:
        blocks = Blocks.of(tier.ancestry(slots, levels))
        grown, listed = len(blocks) > listed, len(blocks)
        blocks = blocks.select(is_absent(blocks.hashes))
        above = blocks.parents[parted(blocks)]
        above = above[above.any(axis=1)]
        if not grown or not len(above) or not is_absent(above).any():
            return blocks
        own = {row.tobytes() for row in blocks.hashes}
        if all(parent.tobytes() in own for parent in above[is_absent(above)]):
            return blocks
        levels = max(64, 4 * levels)


def parted(blocks: Blocks) -> NDArray[np.bool_]:
    """Which blocks do not continue the one before them in the arrays."""
    fresh = np.ones(len(blocks), np.bool_)
    fresh[1:] = (blocks.parents[1:] != blocks.hashes[:-1]).any(axis=1)
    return fresh


_MOST_BLOCKS = 16384
_NONE: HashArray = np.empty((0, 32), np.uint8)


class BlockQueue:
    """Hashes in the order in which they came; when it is full the oldest make room."""

    def __init__(self) -> None:
        self._parts: deque[HashArray] = deque()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, hashes: HashArray) -> int:
        """Append; returns how many of the oldest went for it."""
        self._parts.append(hashes)
        self._size += len(hashes)
        gone = 0
        while self._size - gone > _MOST_BLOCKS:
            gone += len(self._parts.popleft())
        self._size -= gone
        return gone

    def put_back(self, hashes: HashArray) -> None:
        """What was taken and cannot be copied yet is first again."""
        if len(hashes):
            self._parts.appendleft(hashes)
            self._size += len(hashes)

    def take(self, count: int) -> HashArray:
        """The first ``count`` or as many as there are, shape (blocks, 32)."""
        parts: list[HashArray] = []
        while self._parts and count > 0:
            hashes = self._parts.popleft()
            if len(hashes) > count:
                self._parts.appendleft(hashes[count:])
                hashes = hashes[:count]
            self._size -= len(hashes)
            count -= len(hashes)
            parts.append(hashes)
        return np.concatenate(parts) if parts else _NONE

    def clear(self) -> None:
        """The blocks are gone."""
        self._parts.clear()
        self._size = 0
