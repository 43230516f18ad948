"""Storage indexes: which blocks are stored, and where.

``LocalIndex`` is a tier of its own: ``StoragePool``, the slots of every rank's slab file. ``RemoteIndex`` of
``remote_index`` asks a store that other engines use too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fdcache.errors import StorageError
from fdcache.metadata import (
    CacheLevel,
    CacheSwapMetadata,
    HashArray,
    Int32Array,
    StorageScan,
    UInt32Array,
    UInt64Array,
)
from fdcache.plans.ledger import NO_BLOCKS, UNKNOWN, Blocks
from fdcache.storage.connector import last_whole
from fdcache.tiers.pool import ABSENT, NO_PARENT, BlockPool

Mask = NDArray[np.bool_]


class StoragePool(BlockPool):
    """The slots of slab files as a tier. A bad slot is never used again.

    Blocks whose ancestor is lost become orphans: they keep their slots until room is needed, and are found again once
    the ancestor is stored anew.

    Slab files are sparse. When the disk has no room for a record, the slots that never held one are withheld, and
    new blocks replace the coldest blocks in the other slots. One withheld slot is tried again every ``retry_after``
    seconds; each success brings back twice as many slots as the one before.
    """

    def __init__(
        self,
        num_blocks: int,
        eviction: str = "lru",
        *,
        retry_after: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(CacheLevel.STORAGE, num_blocks, eviction)
        self._pause = retry_after
        self._clock = clock
        self._written = np.zeros(num_blocks, np.bool_)
        self._withheld = np.zeros(num_blocks, np.bool_)
        self._on_trial = np.zeros(num_blocks, np.bool_)
        self._step = 1
        self._try_at = 0.0
        self._wrote_since = True  # since the last trial that failed, so its block has had another slot

    @property
    def is_trying(self) -> bool:
        """True while a withheld slot is tried again."""
        return bool(self._on_trial.any())

    def found(self, slots: Int32Array) -> None:
        """Record that these slots hold records, so they have room on the disk."""
        self._written[slots] = True

    def start_over(self) -> None:
        """Forget every block and the state of the disk; bad slots stay out of use."""
        self.reset()
        self._give_back(len(self._withheld))
        self._on_trial[:] = self._written[:] = False

    def grow_if_due(self) -> None:
        """Give back a withheld slot if it is time to try one; called before slots are reserved."""
        now = self._clock()
        may_try = self._wrote_since or not self.available
        if may_try and self._withheld.any() and now >= self._try_at and not self.is_trying:
            self._try_at = now + self._pause
            self._step = 1
            self._give_back(self._step)

    def end_reads(self, slots: Int32Array, lost: Mask, unusable: Mask) -> None:
        """Release the slots of a read. Lost blocks are forgotten; unusable slots are not used again.

        The blocks below them become orphans.
        """
        # While they are still held, the slots cannot have been given to other blocks.
        if unusable.any():
            self.discard(slots[unusable], True, keep_orphans=True)
        if lost.any():
            self.discard(slots[lost], keep_orphans=True)
        self.unhold(slots)

    def end_writes(
        self, slots: Int32Array, copied: Mask, checksums: UInt64Array, bad: Mask, no_room: Mask
    ) -> Mask:
        """End writes into reserved slots, parents first; return a mask of the blocks that are entries now."""
        no_room = no_room & ~bad & ~copied
        self.quarantine(slots[bad])
        self.withhold(slots[no_room])
        arrived = self.complete(slots, copied.view(np.uint8), checksums).view(np.bool_)
        self._withheld[slots[no_room]] = True
        self._written[slots[no_room]] = False
        self._written[slots[copied]] = True
        worked = self._on_trial[slots[copied]].any()
        self._on_trial[slots] = False
        self._wrote_since = self._wrote_since or bool(copied.any())
        if no_room.any():
            self._shrink()
        elif worked:
            self._step *= 2
            self._give_back(self._step)
        return arrived

    def _shrink(self) -> None:
        """Withhold every free slot that never had room on the disk."""
        self._try_at = self._clock() + self._pause
        self._wrote_since = False
        self._on_trial[:] = False
        lease = self.open_lease()
        free = self.reserve(lease, self.stats().free).slots
        unwritten = free[~self._written[free]]
        self.withhold(unwritten)
        self.release(lease)
        self._withheld[unwritten] = True

    def _give_back(self, count: int) -> None:
        slots = np.flatnonzero(self._withheld)[:count].astype(np.int32)
        self._withheld[slots] = False
        self._on_trial[slots] = True
        self.give_back(slots)


def restore(pool: BlockPool, scans: Sequence[StorageScan]) -> int:
    """Enter the blocks that every rank holds in the same slot and generation; return how many.

    A block without its parent becomes an orphan, and is not counted.
    """
    if not scans:
        return 0
    first = scans[0]
    common = np.ones(len(first.slots), np.bool_)
    for other in scans[1:]:
        common &= _same(first, other)
    ready = pool.restore(
        first.slots[common],
        first.generations[common],
        first.hashes[common],
        first.parents[common],
        first.checksums[common],
        first.written_ms[common],
        keep_orphans=True,
    )
    return int(ready.sum())


def _same(first: StorageScan, other: StorageScan) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return a mask of the blocks of ``first`` that are in the same slot of ``other``. Slots ascend in both."""
    if not len(other.slots):
        return np.zeros(len(first.slots), np.bool_)
    at = np.minimum(np.searchsorted(other.slots, first.slots), len(other.slots) - 1)
    same = other.slots[at] == first.slots
    same &= other.generations[at] == first.generations
    same &= (other.hashes[at] == first.hashes).all(axis=1)
    same &= (other.parents[at] == first.parents).all(axis=1)
    return np.asarray(same)


NO_ROOM = NO_PARENT + 1
"""Answer of ``begin_writes`` beside those of ``reserve_copies``: there is no slot left."""


Question = tuple[bytes, int]
"""Question to a store: the hash of a path's last block, and the first block asked for.

Less than 0: how many blocks, of which the last one that is stored is asked for.
"""


def question(hashes: HashArray, start: int) -> Question:
    """Return the question that ``StorageIndex.run`` asks."""
    return hashes[-1].tobytes(), start


class StorageIndex(Protocol):
    """The blocks that are stored, and where. Slots of ``begin_`` calls are held until the matching ``end_`` call."""

    @property
    def is_open(self) -> bool:
        """True once the contents of the storage are known; before that nothing is read or written."""

    def run(self, hashes: HashArray, start: int) -> int | None:
        """Return how many blocks of this path are stored from ``start`` on; None while a store is asked."""

    def last(self, hashes: HashArray, width: int) -> int | None:
        """Return how many groups of ``width`` blocks there are up to the last that is stored; None as ``run``."""

    def take_answered(self) -> Iterable[Question]:
        """Return the questions that were answered, or given up, since the last call."""

    def parent_of(self, block: HashArray) -> bytes:
        """Return the parent of a stored block, shape (1, 32), as far as the storage knows it."""

    def begin_reads(self, hashes: HashArray, parents: HashArray) -> Blocks:
        """Hold the leading blocks of ``hashes``, one path in order, that are stored without a gap."""

    def end_reads(self, swap: CacheSwapMetadata, lost: Mask, unusable: Mask) -> None:
        """End reads: forget lost blocks, and unusable ones together with their slots."""

    def is_absent(self, hashes: HashArray) -> Mask:
        """Return a mask of the blocks that are neither stored nor being written. Orphans count as absent."""

    def awaited(self, most: int) -> HashArray:
        """Return missing blocks that orphans wait for, others in each call, until all have had their turn."""

    def begin_writes(self, blocks: Blocks) -> tuple[NDArray[np.uint8], Int32Array, UInt32Array]:
        """Reserve slots for blocks, parents first: a status per block, and slots of the reserved ones."""

    def end_writes(
        self, swap: CacheSwapMetadata, copied: Mask, checksums: UInt64Array, bad: Mask, no_room: Mask
    ) -> Mask:
        """End writes; return a mask of the blocks that are stored now. ``bad`` slots are not used again."""

    @property
    def is_trying(self) -> bool:
        """True while a full disk is tried again."""

    @property
    def has_room(self) -> bool:
        """True if a block can be stored, if need be in place of another."""

    def reset(self) -> int:
        """Forget every block; return how many."""


class LocalIndex:
    """Slots of every rank's slab file. A block has the same slot in each."""

    def __init__(self, pool: StoragePool) -> None:
        self.pool = pool
        self._open = False

    @property
    def is_open(self) -> bool:
        """True after ``restore``."""
        return self._open

    @property
    def is_trying(self) -> bool:
        """True while a withheld slot is tried again."""
        return self.pool.is_trying

    @property
    def has_room(self) -> bool:
        """True if a slot is free or can be freed."""
        return self.pool.available > 0

    def restore(self, scans: Sequence[StorageScan]) -> int:
        """Enter the blocks that all ranks' files hold; return how many."""
        restored = restore(self.pool, scans)
        for scan in scans:
            self.pool.found(scan.slots)
        self._open = True
        return restored

    def close(self) -> None:
        """Forget the files: a rank opens its own anew."""
        self._open = False
        self.pool.start_over()

    def run(self, hashes: HashArray, start: int) -> int | None:
        """Return how many blocks are stored from ``start`` on; they count as used now.

        Nothing is stored of a path whose keys an engine has given to blocks of another path as well.
        """
        lease = self.pool.open_lease()
        found = len(self.pool.match(lease, hashes, start))
        self.pool.finish(lease)
        return found

    def last(self, hashes: HashArray, width: int) -> int:
        """Return how many groups of blocks there are up to the last that is stored."""
        return last_whole(~self.is_absent(hashes), width)

    def take_answered(self) -> Iterable[Question]:
        """Return nothing: every question is answered at once."""
        return ()

    def parent_of(self, block: HashArray) -> bytes:
        """Return the parent; unknown for a block that has left since."""
        parents = self.pool.find(block).parents
        return parents[0].tobytes() if len(parents) else UNKNOWN

    def begin_reads(self, hashes: HashArray, parents: HashArray) -> Blocks:
        """Hold the leading blocks that are stored."""
        found = Blocks.of(self.pool.find(hashes))
        held = np.flatnonzero((found.hashes != hashes[: len(found)]).any(axis=1))
        found = found.select(slice(0, int(held[0]) if len(held) else len(found)))
        self.pool.hold(found.slots)
        return found

    def end_reads(self, swap: CacheSwapMetadata, lost: Mask, unusable: Mask) -> None:
        """Release the slots. Those of unusable records are not used again."""
        self.pool.end_reads(swap.src_block_ids, lost, unusable)

    def is_absent(self, hashes: HashArray) -> Mask:
        """Return a mask of the blocks that are neither stored nor pending."""
        return np.asarray(self.pool.contains(hashes) == ABSENT)

    def awaited(self, most: int) -> HashArray:
        """Return missing blocks that orphans wait for."""
        return self.pool.awaited(most) if self.pool.num_orphans else NO_BLOCKS.hashes

    def begin_writes(self, blocks: Blocks) -> tuple[NDArray[np.uint8], Int32Array, UInt32Array]:
        """Reserve slots, evicting the coldest blocks; without enough room the last blocks get none.

        Orphans among the blocks have a slot, and count as pending: they are stored once their parent is.
        """
        self.pool.grow_if_due()
        count = len(blocks)
        while count:
            taken = self.pool.reserve_copies(0, blocks.parents[:count], blocks.hashes[:count])
            if not taken.missing:
                status = np.full(len(blocks), NO_ROOM, np.uint8)
                status[:count] = taken.status
                return status, taken.slots, taken.generations
            count -= min(count, taken.missing)
        nothing = np.empty(0, np.int32)
        return np.full(len(blocks), NO_ROOM, np.uint8), nothing, nothing.view(np.uint32)

    def end_writes(
        self, swap: CacheSwapMetadata, copied: Mask, checksums: UInt64Array, bad: Mask, no_room: Mask
    ) -> Mask:
        """Make written blocks findable."""
        return self.pool.end_writes(swap.dst_block_ids, copied, checksums, bad, no_room)

    def name_source(self, hashes: HashArray, address: str) -> None:
        """Raise ``StorageError``: what is stored here is the node's own."""
        raise StorageError("this storage is the node's own; FDCACHE_STORAGE=nodes reads from others")

    def reset(self) -> int:
        """Forget every block; return how many."""
        forgotten = self.pool.stats()
        self.pool.reset()
        return forgotten.ready + forgotten.orphans

    @staticmethod
    def make(
        slots: int,
        retry_after: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        eviction: str = "lru",
    ) -> LocalIndex:
        """Return an index of ``slots`` slots; a full disk is tried again after ``retry_after`` seconds."""
        return LocalIndex(StoragePool(slots, eviction, retry_after=retry_after, clock=clock))
