"""StorageConnector: what any storage must offer, and the records that its calls take and give.

A call moves a batch of blocks between host records and the storage, straight, without a copy in between. What
goes wrong with a block is a value in the result, never an exception: ``Outcome`` tells a miss from an error, a
timeout and a peer that is gone.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from fdcache._core import CancelFlag, RecordTable
from fdcache.metadata import HashArray, Int32Array, StorageScan, UInt32Array, UInt64Array


class Outcome(IntEnum):
    """What became of one block of a batch; the first eight are those of the core."""

    OK = 0
    MISS = 1
    """It is not stored."""
    CORRUPT = 2
    """It was stored, but its bytes are not what was written; it counts as a miss and is gone now."""
    SOURCE_CHANGED = 3
    """The host record is not the block that was to be stored."""
    ERROR = 4
    TIMEOUT = 5
    """Not done before the deadline."""
    CANCELLED = 6
    NO_ROOM = 7
    """The disk has no room for it in this slot; others that hold a record already can be written."""
    PEER_GONE = 8
    """The other side cannot be reached, or was found dead a moment ago."""
    BAD_SLOT = 9
    """Its slot cannot be read, or not be written: the block is not stored, and the slot is not to be used again."""


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Blocks on their way; element i of each array is one block.

    ``host_slots`` and ``host_generations`` name records of ``records``: a put requires each to be READY with its
    hash and takes the payload checksum from its header, a get stamps them. ``slots`` and ``generations`` name
    places in a storage whose places the scheduler hands out, and are None for one that goes by hash.
    """

    records: RecordTable
    host_slots: Int32Array
    host_generations: UInt32Array
    hashes: HashArray
    parents: HashArray
    slots: Int32Array | None = None
    generations: UInt32Array | None = None

    def __len__(self) -> int:
        return len(self.host_slots)

    def select(self, index: slice | NDArray[np.bool_] | NDArray[np.intp]) -> RecordBatch:
        """The blocks that a slice, a mask or an index array names."""
        return replace(
            self,
            host_slots=self.host_slots[index],
            host_generations=self.host_generations[index],
            hashes=self.hashes[index],
            parents=self.parents[index],
            slots=None if self.slots is None else self.slots[index],
            generations=None if self.generations is None else self.generations[index],
        )


@dataclass(frozen=True, slots=True)
class BatchResult:
    """``outcomes`` has an ``Outcome`` per block, ``checksums`` the record checksum of those that are OK.

    ``moved_bytes`` were read or written; ``error`` is the first failure in words. ``unfinished`` is a call that was
    given up and goes on by itself: the batch's host records are in use until it is done.
    """

    outcomes: NDArray[np.uint8]
    checksums: UInt64Array
    moved_bytes: int = 0
    error: str | None = None
    unfinished: Future[Any] | None = None

    @classmethod
    def of(cls, count: int, outcome: Outcome, error: str | None = None) -> BatchResult:
        """The same outcome for every block."""
        return cls(np.full(count, outcome, np.uint8), np.zeros(count, np.uint64), 0, error)

    @property
    def ok(self) -> NDArray[np.bool_]:
        """Which blocks were moved."""
        return np.asarray(self.outcomes == Outcome.OK)


@dataclass(frozen=True, slots=True)
class RunResult:
    """The leading run of blocks that are stored; ``outcome`` is OK when the answer is sure."""

    length: int
    outcome: Outcome = Outcome.OK
    error: str | None = None


class StorageState(StrEnum):
    """Whether a storage is of use at present."""

    READY = "ready"
    FULL = "full"
    """The disk has less room than was promised; the blocks that it has room for are read and written."""
    READ_ONLY = "read_only"
    OFF = "off"


class StorageStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one rank's storage. Counts are since it was opened."""

    name: str
    state: StorageState
    error: str | None = None
    blocks: int | None = None
    capacity_blocks: int | None = None
    blocks_found_on_start: int = 0
    corrupt_found_on_start: int = 0
    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    stored: int = 0
    errors: int = 0
    timeouts: int = 0
    peer_gone: int = 0
    no_room: int = 0
    bad_slots: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class BlockStorage(Protocol):
    """What a worker needs of its rank's storage. Calls may come from several threads.

    ``timeout`` is in seconds; a call returns within it, but for requests that the system has begun and cannot
    take back, whose memory is in use till they end: it waits for them, or says in ``BatchResult.unfinished`` what
    to wait for. ``cancel`` takes back what has not begun.
    """

    @property
    def name(self) -> str:
        """The storage in one word."""

    def register(self, records: RecordTable) -> None:
        """Make known the host records that later batches use. Raises ``StorageError`` when that fails."""

    def unregister(self, records: RecordTable) -> None:
        """Records that were made known by themselves are used no more: their memory goes to others."""

    def get(self, batch: RecordBatch, timeout: float, cancel: CancelFlag | None = None) -> BatchResult:
        """Read blocks into their host records, check them, and stamp the records' headers."""

    def put(self, batch: RecordBatch, timeout: float, cancel: CancelFlag | None = None) -> BatchResult:
        """Store blocks from their host records."""

    def clear(self, timeout: float) -> int:
        """Remove every block of this layout and rank, and nothing else; returns how many.

        Raises ``StorageError`` when that cannot be known to be done.
        """

    def stats(self) -> StorageStats:
        """Counts and state; never waits."""

    def close(self) -> None:
        """Let go of everything. Calling it again is harmless."""


@runtime_checkable
class PlacedStorage(BlockStorage, Protocol):
    """A storage whose places the scheduler hands out: every batch names its slots."""

    def scan(self) -> StorageScan:
        """What it holds, for the scheduler's index."""

    def erase(self, slots: Int32Array) -> None:
        """Empty slots. Raises ``StorageError`` when that fails."""


@runtime_checkable
class StorageConnector(BlockStorage, Protocol):
    """A storage that goes by hash, as one rank of one layout sees it. A put of what is stored already is OK."""

    def exists(self, hashes: HashArray, timeout: float) -> RunResult:
        """How many of the first blocks are stored, by every rank of the layout."""

    def delete(self, hashes: HashArray, timeout: float) -> BatchResult:
        """Remove blocks of this rank; MISS for those that were not there."""
