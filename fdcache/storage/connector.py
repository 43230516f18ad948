"""The interface of a storage connector, and the records that its calls take and return.

    def connect(context: ConnectorContext) -> StorageConnector:
        return MyConnector(context.layout, context.rank)

A call moves a batch of blocks directly between host records and the storage, without a copy in between. A block
that cannot be moved is a value in the result, never an exception: ``Outcome`` tells a miss from an error, a timeout
and a peer that is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from fdcache._core import CancelFlag, RecordTable, Tier
from fdcache.layout import KVLayout
from fdcache.metadata import HashArray, Int32Array, StorageScan, UInt32Array, UInt64Array
from fdcache.settings.cache import StorageTierSettings
from fdcache.settings.variable import Group


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """Everything a connector is made from.

    ``rank`` is None for the scheduler, which only asks which blocks exist. ``options``: the group of settings that has
    the connector's name. ``verify``: compare every record that is read with its checksum. ``on_progress`` is called
    with the number of slots scanned so far and in all.
    """

    layout: KVLayout
    rank: int | None
    settings: StorageTierSettings
    options: Group | None = None
    verify: bool = True
    on_progress: Callable[[int, int], None] | None = None


class Outcome(IntEnum):
    """Result of moving one block; the first eight values are those of the native module."""

    OK = 0
    MISS = 1
    """The block is not stored."""
    CORRUPT = 2
    """The stored bytes are not those that were written. It counts as a miss, and the record is removed."""
    SOURCE_CHANGED = 3
    """The host record is not the block that was to be stored."""
    ERROR = 4
    TIMEOUT = 5
    """Not finished before the deadline."""
    CANCELLED = 6
    NO_ROOM = 7
    """The disk has no room for this slot. Slots that already hold a record can still be written."""
    PEER_GONE = 8
    """The remote side is not reachable, or was found unreachable a moment ago."""
    BAD_SLOT = 9
    """The slot cannot be read or written: the block is not stored, and the slot must not be used again."""


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Blocks to move; element i of each array is one block.

    ``host_slots`` and ``host_generations`` name records in ``records``. A put requires each record to be READY with
    its hash, and takes the payload checksum from its header; a get stamps the headers. ``slots`` and ``generations``
    name places in a storage whose places the scheduler assigns; they are None for a storage addressed by hash.
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
        """Return the blocks that a slice, a mask or an index array selects."""
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
    """Result of moving a batch: an ``Outcome`` for each block, and the checksum of each record that is OK.

    ``moved_bytes`` were read or written; ``error`` is the message of the first failure. ``unfinished`` is a call that
    was given up and is still running: the host records of the batch stay in use until it is done.
    """

    outcomes: NDArray[np.uint8]
    checksums: UInt64Array
    moved_bytes: int = 0
    error: str | None = None
    unfinished: Future[Any] | None = None

    @classmethod
    def of(cls, count: int, outcome: Outcome, error: str | None = None) -> BatchResult:
        """Return a result with the same outcome for all ``count`` blocks."""
        return cls(np.full(count, outcome, np.uint8), np.zeros(count, np.uint64), 0, error)

    @property
    def ok(self) -> NDArray[np.bool_]:
        """Mask of the blocks that were moved."""
        return np.asarray(self.outcomes == Outcome.OK)


@dataclass(frozen=True, slots=True)
class RunResult:
    """Length of the leading run of stored blocks; ``outcome`` is OK unless the look-up was cut short."""

    length: int
    outcome: Outcome = Outcome.OK
    error: str | None = None


class StorageState(StrEnum):
    """Condition of a storage."""

    READY = "ready"
    FULL = "full"
    """The disk has less room than promised; blocks that it has room for are read and written."""
    READ_ONLY = "read_only"
    OFF = "off"


class NodeStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one connector has read from another node. ``failures`` and ``last_error`` are those of the whole process.

    ``seconds``: between ``answers`` reads and their questions. ``failure``: why the node is not waited for now.
    """

    address: str
    failure: str | None = None
    failures: int = 0
    last_error: str | None = None
    hits: int = 0
    read_bytes: int = 0
    answers: int = 0
    seconds: float = 0.0


class StorageStats(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of one rank's storage. Counts start when it is opened.

    ``store_bytes`` and ``store_objects``: what all nodes store in the same place, as of this node's last look;
    ``removed_objects``: what this node has removed of it, for want of room.
    """

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
    store_bytes: int | None = None
    store_objects: int | None = None
    removed_objects: int = 0
    nodes: tuple[NodeStats, ...] = ()


_COUNTED_AS = {
    Outcome.MISS: "misses",
    Outcome.CORRUPT: "corrupt",
    Outcome.SOURCE_CHANGED: "errors",
    Outcome.ERROR: "errors",
    Outcome.TIMEOUT: "timeouts",
    Outcome.PEER_GONE: "peer_gone",
    Outcome.NO_ROOM: "no_room",
    Outcome.BAD_SLOT: "bad_slots",
}


class StorageCounters:
    """Counts of a storage's batches; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        names = ("hits", "stored", "read_bytes", "written_bytes", *_COUNTED_AS.values())
        self._counts = dict.fromkeys(names, 0)

    def add(self, outcomes: NDArray[np.uint8], moved_bytes: int, *, writing: bool) -> None:
        """Count a batch: an ``Outcome`` for each block, and the bytes read or written."""
        found = np.bincount(outcomes, minlength=len(Outcome)).tolist()
        with self._lock:
            self._counts["stored" if writing else "hits"] += found[Outcome.OK]
            self._counts["written_bytes" if writing else "read_bytes"] += moved_bytes
            for outcome, name in _COUNTED_AS.items():
                self._counts[name] += found[outcome]

    def stats(self, name: str, state: StorageState, error: str | None, **more: Any) -> StorageStats:
        """Return a snapshot; ``more`` are further fields of ``StorageStats``."""
        with self._lock:
            return StorageStats(name=name, state=state, error=error, **{**self._counts, **more})


class BlockStorage(Protocol):
    """Storage of one rank, as a worker uses it. Calls may come from several threads.

    ``timeout`` is in seconds, and a call returns within it, except for requests that the system has begun and cannot
    take back. The memory of those is in use until they end: the call waits for them, or returns them as
    ``BatchResult.unfinished``. ``cancel`` cancels work that has not begun.
    """

    @property
    def name(self) -> str:
        """The storage in one word."""

    def register(self, records: RecordTable) -> None:
        """Register the host records that later batches use. Raises ``StorageError`` when that fails."""

    def unregister(self, records: RecordTable) -> None:
        """Forget registered host records; no later batch uses them."""

    def get(self, batch: RecordBatch, timeout: float, cancel: CancelFlag | None = None) -> BatchResult:
        """Read blocks into their host records, check them, and stamp the records' headers."""

    def put(self, batch: RecordBatch, timeout: float, cancel: CancelFlag | None = None) -> BatchResult:
        """Store blocks from their host records."""

    def clear(self, timeout: float) -> int:
        """Remove every block of this layout and rank, and no other; return how many.

        Raises ``StorageError`` when the blocks cannot be shown to be removed.
        """

    def stats(self) -> StorageStats:
        """Return counts and state; never blocks."""

    def close(self) -> None:
        """Release all resources. Closing twice is harmless."""


@runtime_checkable
class PlacedStorage(BlockStorage, Protocol):
    """Storage whose places the scheduler assigns: every batch names its slots."""

    def scan(self) -> StorageScan:
        """Return the stored blocks, for the scheduler's index."""

    def erase(self, slots: Int32Array) -> None:
        """Empty slots. Raises ``StorageError`` when that fails."""


@runtime_checkable
class RemembersBlocks(Protocol):
    """A connector whose ``exists`` answers from what it has seen before."""

    def doubt(self, hashes: HashArray) -> None:
        """Ask the storage again before these blocks count as stored: a read has not found them. Never blocks."""


@runtime_checkable
class FindsLast(Protocol):
    """A connector that can be asked by position: states of a model come and go without those after them."""

    def last(self, hashes: HashArray, width: int, timeout: float) -> RunResult:
        """Return how many groups of ``width`` blocks there are up to the last of which every rank has all stored."""


def last_whole(there: NDArray[np.bool_], width: int) -> int:
    """Return how many groups of ``width`` blocks there are up to the last that is whole."""
    whole = np.flatnonzero(there.reshape(-1, width).all(axis=1))
    return int(whole[-1]) + 1 if len(whole) else 0


@runtime_checkable
class ServesHostRecords(Protocol):
    """A connector that lets others read host records where they are. Calls never block."""

    def lend_from(self, host: Tier | None) -> None:
        """Hold records in the slots of this tier while others read them; None: there is none any more.

        The host tier evicts first what others have read since, as they have it, too.
        """

    def withdraw(self, hashes: HashArray | None) -> None:
        """Serve these blocks to nobody any more, None for all: the host tier was told to forget them."""


@runtime_checkable
class AsksNodes(Protocol):
    """A connector that reads from other nodes, each of which has blocks of its own. Calls never block."""

    def name_source(self, hashes: HashArray, address: str) -> bool:
        """Ask this node first for these blocks, and the others for those that it lacks; False if that was known.

        Raises ``StorageError`` for an address that no other node has.
        """

    def seen(self, hashes: HashArray) -> list[str | None]:
        """Return the node that had each block when it was last asked for."""

    def stats(self) -> StorageStats:
        """Return counts and state, with those of each node."""


@runtime_checkable
class StorageConnector(BlockStorage, Protocol):
    """Storage addressed by hash, as one rank of one layout sees it. Putting a block that is stored already is OK."""

    def exists(self, hashes: HashArray, timeout: float) -> RunResult:
        """Return the leading run of blocks that every rank of the layout has stored."""

    def delete(self, hashes: HashArray, timeout: float) -> BatchResult:
        """Remove blocks of this rank; MISS for blocks that are not stored."""
