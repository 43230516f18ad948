"""The index of a store that other engines use too: it asks the store, and remembers what this engine has stored."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fdcache.errors import StorageError
from fdcache.metadata import CacheSwapMetadata, HashArray, Int32Array, UInt32Array, UInt64Array
from fdcache.plans.ledger import NO_BLOCKS, UNKNOWN, Blocks
from fdcache.storage.connector import (
    AsksNodes,
    FindsLast,
    Outcome,
    RemembersBlocks,
    RunResult,
    StorageConnector,
    last_whole,
)
from fdcache.tiers.storage_index import Mask, Question, question


@dataclass(slots=True)
class _Answer:
    """An answer, or one to come. ``is_heeded``: blocks that are not stored any more may be stored again."""

    result: Future[RunResult]
    fresh_until: float
    is_heeded: bool = False


def _last(connector: FindsLast, width: int, hashes: HashArray, timeout: float) -> RunResult:
    return connector.last(hashes, width, timeout)


class RemoteIndex:
    """A store that other engines use too. Threads of its own ask it; the caller never waits.

    Blocks that this engine has stored are remembered and not stored twice, until the store says that it has removed
    them. ``timeout``: seconds for a question. ``fresh_seconds``: how long an answer holds.
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
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="fdcache-lookup")
        self._answers: OrderedDict[Question, _Answer] = OrderedDict()
        self._answered: deque[Question] = deque()  # by the asking threads
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._writing: set[bytes] = set()

    def run(self, hashes: HashArray, start: int) -> int | None:
        """Return the store's answer once it has come. No answer in time counts as nothing stored."""
        if start >= len(hashes):
            return 0
        rest = hashes[start:]
        return self._answer(question(hashes, start), rest, 1, self._connector.exists)

    def last(self, hashes: HashArray, width: int) -> int | None:
        """Return the store's answer once it has come; of one that cannot be asked, what this engine has stored."""
        connector = self._connector
        if not isinstance(connector, FindsLast):
            return last_whole(~self.is_absent(hashes), width)
        if not len(hashes):
            return 0
        ask = partial(_last, connector, width)
        return self._answer(question(hashes, -len(hashes)), hashes, width, ask)

    def _answer(
        self, key: Question, hashes: HashArray, width: int, ask: Callable[[HashArray, float], RunResult]
    ) -> int | None:
        """Return how many groups of ``width`` blocks are stored by the answer to a question, once that has come."""
        asked, now = self._answers.get(key), self._clock()
        if asked is None or (asked.result.done() and now > asked.fresh_until):
            future = self._threads.submit(ask, hashes.copy(), self._timeout)
            self._answers[key] = _Answer(future, now + self._fresh_seconds)
            future.add_done_callback(lambda _: self._answered.append(key))
            while len(self._answers) > 4096:
                self._answers.popitem(last=False)[1].result.cancel()
            return None
        future = asked.result
        if not future.done():
            return None
        if future.cancelled() or future.exception() is not None:
            return 0
        answer = future.result()
        if not asked.is_heeded and answer.outcome is Outcome.OK:
            asked.is_heeded = True
            self._forget(hashes[answer.length * width :])
        return answer.length

    def take_answered(self) -> Iterable[Question]:
        """Return the questions that were answered since the last call."""
        while self._answered:
            yield self._answered.popleft()

    @property
    def nodes(self) -> AsksNodes | None:
        """The other nodes, if the store is what those have."""
        return self._connector if isinstance(self._connector, AsksNodes) else None

    def name_source(self, hashes: HashArray, address: str) -> None:
        """Ask one node first for these blocks. Raises ``StorageError`` where no other node has this address."""
        if self.nodes is None:
            raise StorageError("this storage reads from no node; FDCACHE_STORAGE=nodes does")
        if self.nodes.name_source(hashes, address):
            self._answers.clear()

    def parent_of(self, block: HashArray) -> bytes:
        """Return an unknown one: a store has blocks by their hashes alone."""
        return UNKNOWN

    def begin_reads(self, hashes: HashArray, parents: HashArray) -> Blocks:
        """Return every block: a store finds them by hash, and nothing is held."""
        count = len(hashes)
        return Blocks(np.full(count, -1, np.int32), np.zeros(count, np.uint32), hashes, parents)

    def end_reads(self, swap: CacheSwapMetadata, lost: Mask, unusable: Mask) -> None:
        """Allow lost blocks to be stored again, and forget earlier answers."""
        if lost.any() or unusable.any():
            self._answers.clear()
            gone = swap.hash_values[lost | unusable]
            self._forget(gone)
            if isinstance(self._connector, RemembersBlocks):
                self._connector.doubt(gone)

    def is_absent(self, hashes: HashArray) -> Mask:
        """Return a mask of the blocks that this engine has not begun to store."""
        return np.array([not self._has_begun(row.tobytes()) for row in hashes], np.bool_)

    def _has_begun(self, block_hash: bytes) -> bool:
        return block_hash in self._known or block_hash in self._writing

    def awaited(self, most: int) -> HashArray:
        """Return nothing: the store knows no parents."""
        return NO_BLOCKS.hashes

    def begin_writes(self, blocks: Blocks) -> tuple[NDArray[np.uint8], Int32Array, UInt32Array]:
        """Accept every block: the store makes room."""
        count = len(blocks)
        self._writing.update(row.tobytes() for row in blocks.hashes)
        return np.zeros(count, np.uint8), np.full(count, -1, np.int32), np.zeros(count, np.uint32)

    def end_writes(
        self, swap: CacheSwapMetadata, copied: Mask, checksums: UInt64Array, bad: Mask, no_room: Mask
    ) -> Mask:
        """Allow failed blocks to be stored again."""
        self._writing.difference_update(row.tobytes() for row in swap.hash_values)
        self._know(swap.hash_values[copied])
        self._answers.clear()
        return copied

    def reset(self) -> int:
        """Forget which blocks this engine has stored; return 0, as the store keeps them."""
        self._known.clear()
        self._answers.clear()
        return 0

    def close(self) -> None:
        """End the threads and close the connector."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._connector.close()

    def _forget(self, hashes: HashArray) -> None:
        """Allow blocks that are not stored any more to be stored again."""
        for row in hashes:
            self._known.pop(row.tobytes(), None)

    def _know(self, hashes: HashArray) -> None:
        self._known.update(dict.fromkeys(row.tobytes() for row in hashes))
        while len(self._known) > self._most_known:
            self._known.popitem(last=False)
