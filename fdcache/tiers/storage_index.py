"""StoragePool: the slots of slab files as a tier, which may lose some of them to the medium or to a full disk."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fdcache.metadata import (
    CacheLevel,
    CacheSwapMetadata,
    HashArray,
    Int32Array,
    StorageScan,
    UInt32Array,
    UInt64Array,
)
from fdcache.plans.blocks import Blocks
from fdcache.storage.connector import RunResult, StorageConnector
from fdcache.tiers.pool import ABSENT, NO_PARENT, BlockPool, restore

Mask = NDArray[np.bool_]


class StoragePool(BlockPool):
    """A tier of ``num_blocks`` slots. Where a slot is bad, it is never used again.

    Slab files are sparse. When the disk has no room for a record, the slots that never held one are withheld, and
    new blocks take the places of the coldest in the others. One withheld slot is tried again every ``retry_after``
    seconds; each one that can be written brings back twice as many as the one before.
    """

    def __init__(
        self, num_blocks: int, *, retry_after: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(CacheLevel.STORAGE, num_blocks)
        self._pause = retry_after
        self._clock = clock
        self._written = np.zeros(num_blocks, np.bool_)
        self._withheld = np.zeros(num_blocks, np.bool_)
        self._on_trial = np.zeros(num_blocks, np.bool_)
        self._step = 1
        self._try_at = 0.0
        self._wrote_since = True  # the last trial that failed; its block has had another slot

    @property
    def is_trying(self) -> bool:
        """Whether a slot is being tried that the disk had no room for."""
        return bool(self._on_trial.any())

    def found(self, slots: Int32Array) -> None:
        """These slots hold records in the files, so they have their room."""
        self._written[slots] = True

    def start_over(self) -> None:
        """Forget every block and what is known of the disk; bad slots stay out of use."""
        self.reset()
        self._give_back(len(self._withheld))
        self._on_trial[:] = self._written[:] = False

    def grow_if_due(self) -> None:
        """Before slots are taken: try one that the disk had no room for, now and then."""
        now = self._clock()
        may_try = self._wrote_since or not self.available
        if may_try and self._withheld.any() and now >= self._try_at and not self.is_trying:
            self._try_at = now + self._pause
            self._step = 1
            self._give_back(self._step)

    def end_reads(self, slots: Int32Array, lost: Mask, unusable: Mask) -> None:
        """Let the slots of a read go. What was lost is forgotten; what is unusable is not used again, either."""
        # While the slots are held still: nobody can have given them to other blocks.
        if unusable.any():
            self.discard(slots[unusable], True)
        if lost.any():
            self.discard(slots[lost])
        self.unhold(slots)

    def end_writes(
        self, slots: Int32Array, copied: Mask, checksums: UInt64Array, bad: Mask, no_room: Mask
    ) -> Mask:
        """The end of writes into reserved slots, parents first; says what is an entry now."""
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
        """Withhold every free slot that has no room on the disk yet."""
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


NO_ROOM = NO_PARENT + 1
"""Of ``begin_writes``, beside what a tier answers: there is no slot left."""


Question = tuple[bytes, int]
"""A path, by the hash of its last block, and from which of its blocks on it was asked for."""


def question(hashes: HashArray, start: int) -> Question:
    """What ``StorageIndex.run`` asks of a store."""
    return hashes[-1].tobytes(), start


class StorageIndex(Protocol):
    """Which blocks are stored, and where. What it hands out is held until the matching ``end_`` call."""

    @property
    def is_open(self) -> bool:
        """Whether it knows what the storage held at the start; before that nothing is read or written."""

    def run(self, hashes: HashArray, start: int) -> int | None:
        """How many blocks of this path are stored from ``start`` on; None while that is being asked."""

    def take_answered(self) -> Iterable[Question]:
        """What was asked and has an answer since the last call, or will have none."""

    def begin_reads(self, hashes: HashArray, parents: HashArray) -> Blocks:
        """Hold those of ``hashes``, one path in order, that are stored without a gap from the first on."""

    def end_reads(self, swap: CacheSwapMetadata, lost: Mask, unusable: Mask) -> None:
        """The reads have ended; what was lost is forgotten, and with what is ``unusable`` its place."""

    def is_absent(self, hashes: HashArray) -> Mask:
        """Which blocks are neither stored nor on their way."""

    def begin_writes(self, blocks: Blocks) -> tuple[NDArray[np.uint8], Int32Array, UInt32Array]:
        """Take places for blocks, parents first: a status per block, and the slots of those reserved."""

    def end_writes(
        self, swap: CacheSwapMetadata, copied: Mask, checksums: UInt64Array, bad: Mask, no_room: Mask
    ) -> Mask:
        """The writes have ended; says what is stored now. The places of ``bad`` ones are not used again."""

    @property
    def is_trying(self) -> bool:
        """Whether it is being tried if there is more room than there was."""

    @property
    def has_room(self) -> bool:
        """Whether a block can be stored, if need be in place of another."""

    def reset(self) -> int:
        """Forget everything; returns how many blocks that were."""


class LocalIndex:
    """The third tier: slots of every rank's slab file, the same block in the same slot of each."""

    def __init__(self, pool: StoragePool) -> None:
        self.pool = pool
        self._open = False

    @property
    def is_open(self) -> bool:
        """Whether ``restore`` was called."""
        return self._open

    @property
    def is_trying(self) -> bool:
        """Whether a slot is being tried that the disk had no room for."""
        return self.pool.is_trying

    @property
    def has_room(self) -> bool:
        """Whether there is a slot to be had."""
        return self.pool.available > 0

    def restore(self, scans: Sequence[StorageScan]) -> int:
        """Take up what all ranks' files hold; returns the number of blocks."""
        restored = restore(self.pool, scans)
        for scan in scans:
            self.pool.found(scan.slots)
        self._open = True
        return restored

    def close(self) -> None:
        """Forget the files: a rank opens its own again."""
        self._open = False
        self.pool.start_over()

    def run(self, hashes: HashArray, start: int) -> int | None:
        """How many blocks are stored from ``start`` on; they count as used now."""
        lease = self.pool.open_lease()
        found = len(self.pool.match(lease, hashes, start))
        self.pool.release(lease)
        return found

    def take_answered(self) -> Iterable[Question]:
        """Every question is answered at once."""
        return ()

    def begin_reads(self, hashes: HashArray, parents: HashArray) -> Blocks:
        """Hold the blocks' slots."""
        found = Blocks.of(self.pool.find(hashes))
        held = np.flatnonzero((found.hashes != hashes[: len(found)]).any(axis=1))
        found = found.select(slice(0, int(held[0]) if len(held) else len(found)))
        self.pool.hold(found.slots)
        return found

    def end_reads(self, swap: CacheSwapMetadata, lost: Mask, unusable: Mask) -> None:
        """Let the slots go. Those of unusable records are not used again."""
        self.pool.end_reads(swap.src_block_ids, lost, unusable)

    def is_absent(self, hashes: HashArray) -> Mask:
        """Which blocks are neither stored nor pending."""
        return np.asarray(self.pool.contains(hashes) == ABSENT)

    def begin_writes(self, blocks: Blocks) -> tuple[NDArray[np.uint8], Int32Array, UInt32Array]:
        """Reserve slots, evicting what is coldest; for want of room the last blocks get none."""
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
        """What was written becomes findable."""
        return self.pool.end_writes(swap.dst_block_ids, copied, checksums, bad, no_room)

    def reset(self) -> int:
        """Forget every block."""
        forgotten = self.pool.stats().ready
        self.pool.reset()
        return forgotten

    @staticmethod
    def make(slots: int, retry_after: float = 0.0, clock: Callable[[], float] = time.monotonic) -> LocalIndex:
        """An index of so many slots; ``retry_after``: seconds until a full disk is tried again."""
        return LocalIndex(StoragePool(slots, retry_after=retry_after, clock=clock))


class RemoteIndex:
    """A store that others use too: it is asked what it holds, by a thread of its own, never by the caller.

    What this engine has stored is remembered, so as not to store it twice; ``timeout`` bounds a question and
    ``fresh_seconds`` how long its answer holds.
    """

    is_open = True
    is_trying = False
    has_room = True

    def __init__(
        self,
        connector: StorageConnector,
        *,
        timeout: float,
        fresh_seconds: float = 2.0,
        most_known: int = 1 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connector = connector
        self._timeout = timeout
        self._fresh_seconds = fresh_seconds
        self._most_known = most_known
        self._clock = clock
        self._asker = ThreadPoolExecutor(2, thread_name_prefix="fdcache-lookup")
        self._answers: OrderedDict[Question, tuple[Future[RunResult], float]] = OrderedDict()
        self._answered: deque[Question] = deque()  # by the asking threads
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def run(self, hashes: HashArray, start: int) -> int | None:
        """The answer of the store, once it is there. No answer within the deadline counts as nothing stored."""
        if start >= len(hashes):
            return 0
        key = question(hashes, start)
        now = self._clock()
        asked = self._answers.get(key)
        if asked is None or (asked[0].done() and now > asked[1]):
            rest = hashes[start:].copy()
            future = self._asker.submit(self._connector.exists, rest, self._timeout)
            self._answers[key] = (future, now + self._fresh_seconds)
            future.add_done_callback(lambda _: self._answered.append(key))
            while len(self._answers) > 4096:
                self._answers.popitem(last=False)[1][0].cancel()
            return None
        future = asked[0]
        if not future.done():
            return None
        if future.cancelled() or future.exception() is not None:
            return 0
        return future.result().length

    def take_answered(self) -> Iterable[Question]:
        """What a thread has asked since the last call."""
        while self._answered:
            yield self._answered.popleft()

    def begin_reads(self, hashes: HashArray, parents: HashArray) -> Blocks:
        """Nothing to hold: the blocks go by hash."""
        count = len(hashes)
        return Blocks(np.full(count, -1, np.int32), np.zeros(count, np.uint32), hashes, parents)

    def end_reads(self, swap: CacheSwapMetadata, lost: Mask, unusable: Mask) -> None:
        """Blocks that are gone may be stored again; earlier answers may be wrong."""
        if lost.any() or unusable.any():
            self._answers.clear()
            for row in swap.hash_values[lost | unusable]:
                self._known.pop(row.tobytes(), None)

    def is_absent(self, hashes: HashArray) -> Mask:
        """Which blocks this engine has not stored or begun to store."""
        return np.array([row.tobytes() not in self._known for row in hashes], np.bool_)

    def begin_writes(self, blocks: Blocks) -> tuple[NDArray[np.uint8], Int32Array, UInt32Array]:
        """Every block gets a place; the store makes the room."""
        count = len(blocks)
        self._know(blocks.hashes)
        return np.zeros(count, np.uint8), np.full(count, -1, np.int32), np.zeros(count, np.uint32)

    def end_writes(
        self, swap: CacheSwapMetadata, copied: Mask, checksums: UInt64Array, bad: Mask, no_room: Mask
    ) -> Mask:
        """What failed may be stored again."""
        for row in swap.hash_values[~copied]:
            self._known.pop(row.tobytes(), None)
        self._answers.clear()
        return copied

    def reset(self) -> int:
        """Forget what this engine has stored."""
        self._known.clear()
        self._answers.clear()
        return 0

    def close(self) -> None:
        """End the thread and the connector."""
        self._asker.shutdown(wait=False, cancel_futures=True)
        self._connector.close()

    def _know(self, hashes: HashArray) -> None:
        for row in hashes:
            self._known[row.tobytes()] = None
        while len(self._known) > self._most_known:
            self._known.popitem(last=False)
