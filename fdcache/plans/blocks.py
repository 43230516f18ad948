"""Lists of blocks: parallel arrays that describe blocks of one tier, and queues of block hashes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Self, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache._core import BlockList
from fdcache.metadata import ComparesArrays, HashArray, Int32Array, UInt32Array

ROOT = bytes(32)
"""Parent hash of the first block of a path."""

UNKNOWN = b"\xff" * 32
"""Parent hash of the first block of a run of which nobody has told what precedes it."""

_MOST_SHOWN = 8
_ONES = np.uint64(2**64 - 1)
_ROOT_ROW = np.zeros((1, 32), np.uint8)


def have_parents(parents: HashArray) -> NDArray[np.bool_]:
    """Return a mask of the blocks below another one, whose parent is neither the root nor unknown."""
    words = parents.view(np.uint64)
    return (words != 0).any(axis=1) & (words != _ONES).any(axis=1)


def parents_of(path: HashArray, start: int, stop: int) -> HashArray:
    """Return the parent hashes of blocks ``start`` to ``stop`` of a path, shape (stop - start, 32)."""
    if start > 0:
        return path[start - 1 : stop - 1]
    return np.concatenate((_ROOT_ROW, path[: stop - 1])) if stop > 0 else path[:0]


class Block(NamedTuple):
    """One block of a list."""

    slot: int
    generation: int
    hash: bytes
    parent: bytes


class Blocks(ComparesArrays, msgspec.Struct, eq=False, frozen=True):
    """Blocks of one tier. Element i of each array is one block: slot, slot generation, hash, parent's hash.

    ::

        blocks = Blocks.of(tier.find(hashes))
        plan.add(SwapPurpose.BACKUP, blocks.select(slice(8)), slots, generations)

    ``unverified`` is 1 for records that were recovered and not read since, None when there are none.
    """

    slots: Int32Array
    generations: UInt32Array
    hashes: HashArray
    parents: HashArray
    unverified: HashArray | None = None

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[Block]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice | NDArray[Any]) -> Blocks: ...
    def __getitem__(self, index: int | slice | NDArray[Any]) -> Block | Blocks:
        if isinstance(index, slice | np.ndarray):
            return self.select(index)
        return Block(
            int(self.slots[index]),
            int(self.generations[index]),
            self.hashes[index].tobytes(),
            self.parents[index].tobytes(),
        )

    def __repr__(self) -> str:
        shown = [str(slot) for slot in self.slots[:_MOST_SHOWN].tolist()]
        shown += ["..."] * (len(self) > _MOST_SHOWN)
        return f"Blocks({len(self)} blocks in slots [{', '.join(shown)}])"

    @classmethod
    def of(cls, found: BlockList) -> Self:
        """View the arrays of a native list."""
        return cls(found.slots, found.generations, found.hashes, found.parents)

    @classmethod
    def of_path(
        cls,
        path: HashArray,
        start: int,
        slots: Int32Array,
        generations: UInt32Array,
        unverified: HashArray | None = None,
    ) -> Self:
        """Return the run of a path that begins at block ``start`` and lies in these slots."""
        stop = start + len(slots)
        return cls(slots, generations, path[start:stop], parents_of(path, start, stop), unverified)

    def select(self, index: slice | np.ndarray) -> Blocks:
        """Return the blocks that a slice, a mask or an index array selects."""
        if isinstance(index, np.ndarray) and index.dtype == np.bool_ and index.all():
            return self
        return Blocks(
            self.slots[index],
            self.generations[index],
            self.hashes[index],
            self.parents[index],
            None if self.unverified is None else self.unverified[index],
        )


NO_BLOCKS = Blocks(
    np.empty(0, np.int32), np.empty(0, np.uint32), np.empty((0, 32), np.uint8), np.empty((0, 32), np.uint8)
)


def path_starts(blocks: Blocks) -> NDArray[np.bool_]:
    """Return a mask of the blocks that do not continue the block before them."""
    starts = np.ones(len(blocks), np.bool_)
    starts[1:] = (blocks.parents[1:] != blocks.hashes[:-1]).any(axis=1)
    return starts


_LEAST_QUEUED = 16384


class BlockQueue(_core.BlockQueue):
    """A first-in, first-out queue of block hashes of a tier of ``slots``. A full queue drops its oldest entries."""

    def __init__(self, slots: int) -> None:
        super().__init__(max(slots, _LEAST_QUEUED))
