"""KeyedStorage: storage for an engine that keeps host records itself and names each of them by a key.

    storage = KeyedStorage(layout, settings, rows)      # rows: uint8 [records, record_bytes]
    storage.store(1, keys, rows=np.array([4, 7]))
    for ended in storage.take_ended():
        ...

The blocks have no parents: each is found, evicted and lost by itself. Reads go through records of this process, so
that a read which ends after its deadline never writes into a row that the engine has given to another block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache.errors import ConfigurationError, TransferTimeoutError
from fdcache.layout import KVLayout
from fdcache.metadata import (
    SLOT_HEADER_BYTES,
    CacheLevel,
    CacheSwapMetadata,
    HashArray,
    Int32Array,
    StorageTask,
    SwapPurpose,
    TransferResult,
    UInt32Array,
)
from fdcache.plans.ledger import Blocks
from fdcache.settings.cache import StorageTierSettings
from fdcache.storage.connector import BatchResult, ConnectorContext, PlacedStorage, RecordBatch, StorageStats
from fdcache.storage.factory import open_storage
from fdcache.storage.queue import StorageQueue, StorageTransfer
from fdcache.tiers.pool import IS_PENDING, IS_READY, READY, RESERVED
from fdcache.tiers.statistics import TierUsage
from fdcache.tiers.storage_index import LocalIndex, Mask

logger = logging.getLogger(__name__)

_STAGING_BYTES = 256 << 20
_PIECE_BYTES = 16 << 20
_READY_HEADER = 2
_POLL_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class EndedJob:
    """End of one store or load: which of its blocks were moved, in the order of its keys."""

    number: int
    moved: Mask
    seconds: float
    nbytes: int


@dataclass(slots=True)
class _Job:
    number: int
    purpose: SwapPurpose
    keys: HashArray
    rows: Int32Array
    moved: Mask
    began: float
    left: int
    nbytes: int = 0
    is_over: bool = False


@dataclass(slots=True)
class _Piece:
    """Blocks of one job that are moved together. ``positions``: theirs in the job."""

    job: _Job
    positions: NDArray[np.intp]
    swap: CacheSwapMetadata
    transfer: StorageTransfer | None = None
    delivered: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_abandoned: bool = False


class KeyedStorage:
    """Bounded storage of the engine's ``rows``, uint8 [records, ``layout.record_bytes``], under keys of 32 bytes.

    All methods are called by one thread, and none waits for a disk except ``drain`` and ``close``. A job that has
    not ended ``settings.timeout`` seconds after it began ends without the blocks that are missing, and until its
    transfers end nothing is found or stored. Where a read fails as a whole, nothing is found for
    ``settings.retry_after`` seconds: who is told that a block is there, and does not get it, asks again at once.

    Raises ``ConfigurationError`` for a storage that is off or has no slots of its own, and ``StorageError`` when it
    cannot be opened.
    """

    def __init__(
        self,
        layout: KVLayout,
        settings: StorageTierSettings,
        rows: NDArray[np.uint8],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if settings.connector != "local":
            raise ConfigurationError(
                f"FDCACHE_STORAGE={settings.connector}: blocks under keys are kept by FDCACHE_STORAGE=local alone; "
                "set it, and FDCACHE_STORAGE_DIR"
            )
        storage = open_storage(ConnectorContext(layout, 0, settings))
        assert isinstance(storage, PlacedStorage), "local storage has slots"
        self._timeout = settings.timeout
        self._retry_after = settings.retry_after
        self._finds_after = 0.0
        self._clock = clock
        scan = storage.scan()
        self._index = LocalIndex.make(scan.capacity, settings.retry_after, clock)
        self._index.restore([scan])
        self._records = _Records(storage, layout, rows)
        self._queue = StorageQueue(self._records, self._records)
        self._per_piece = max(_PIECE_BYTES // layout.record_bytes, 1)
        self._most_writing = max(len(rows) // 2, 1)
        self._plan = 0
        self._loads: deque[_Piece] = deque()
        self._moving: list[_Piece] = []
        self._jobs: dict[int, _Job] = {}
        self._ended: list[EndedJob] = []

    # --- look-ups -------------------------------------------------------------------------------------------

    def contains(self, key: bytes) -> bool:
        """Return True if the block under this key is stored; it counts as used now."""
        return not self._is_out_of_order() and self._index.run(_rows_of(key), 0) == 1

    @property
    def usage(self) -> TierUsage:
        """State of the slots."""
        return self._index.pool.usage()

    @property
    def stats(self) -> StorageStats:
        """Counts and state of the storage."""
        return self._queue.stats

    @property
    def is_idle(self) -> bool:
        """True without a job that has not been told as ended."""
        return not self._jobs and not self._ended

    def record_events(self, capacity: int) -> None:
        """Keep up to ``capacity`` events for ``take_events``."""
        self._index.pool.record_events(capacity)

    def take_events(self) -> tuple[NDArray[np.uint8], HashArray, HashArray]:
        """Return kinds, keys and parents of the events since the last call."""
        return self._index.pool.take_events()

    # --- jobs -----------------------------------------------------------------------------------------------

    def store(self, number: int, keys: HashArray, rows: Int32Array) -> None:
        """Begin to store rows under their keys. Those that are stored, or on their way, count as moved."""
        job = self._begin(number, SwapPurpose.STORE, keys, rows)
        writing = sum(len(each.positions) for each in self._moving if each.job.purpose is SwapPurpose.STORE)
        if self._is_stuck() or writing + len(keys) > self._most_writing:
            self._end(job)
            return
        zeros = np.zeros(len(keys), np.uint32)
        blocks = Blocks(rows, zeros, keys, np.zeros_like(keys))
        status, slots, generations = self._index.begin_writes(blocks)
        job.moved |= (status == IS_READY) | (status == IS_PENDING)
        positions = np.flatnonzero(status == RESERVED)
        job.left = len(positions)
        for first in range(0, len(positions), self._per_piece):
            part = slice(first, first + self._per_piece)
            self._move(self._piece(job, positions[part], rows, zeros, slots[part], generations[part]))
        if not job.left:
            self._end(job)

    def load(self, number: int, keys: HashArray, rows: Int32Array) -> None:
        """Begin to read blocks into rows. A row is written only while its job has not ended."""
        job = self._begin(number, SwapPurpose.PREFETCH, keys, rows)
        present = np.flatnonzero(self._index.pool.contains(keys) == READY)
        if self._is_out_of_order() or not len(present):
            self._end(job)
            return
        found = self._index.begin_reads(keys[present], np.zeros_like(keys[present]))
        job.left = len(present)
        for first in range(0, len(present), self._per_piece):
            part = slice(first, first + self._per_piece)
            positions = present[part]
            zeros = np.zeros(len(positions), np.uint32)
            self._loads.append(
                self._piece(job, positions, rows, zeros, found.slots[part], found.generations[part])
            )
        self._start_loads()

    def take_ended(self) -> list[EndedJob]:
        """Return the jobs that have ended since the last call."""
        self._advance()
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Wait until every job has ended; each does so within its deadline."""
        while self._jobs:
            self._advance()
            if self._jobs:
                time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """End every job and close the storage, within the deadline of a job."""
        for job in list(self._jobs.values()):
            self._end(job)
        for piece in self._moving:
            self._abandon(piece)
        try:
            self._queue.shutdown(self._timeout)
        except TransferTimeoutError as error:
            logger.warning("%s: it ends with the process", error)
        self._records.close()

    # --- pieces ---------------------------------------------------------------------------------------------

    def _begin(self, number: int, purpose: SwapPurpose, keys: HashArray, rows: Int32Array) -> _Job:
        job = _Job(number, purpose, keys, rows, np.zeros(len(keys), np.bool_), self._clock(), 0)
        self._jobs[number] = job
        return job

    def _piece(
        self,
        job: _Job,
        positions: NDArray[np.intp],
        rows: Int32Array,
        host_generations: UInt32Array,
        slots: Int32Array,
        generations: UInt32Array,
    ) -> _Piece:
        writes = job.purpose is SwapPurpose.STORE
        host = rows[positions], host_generations[: len(positions)]
        source, target = (host, (slots, generations)) if writes else ((slots, generations), host)
        return _Piece(
            job,
            positions,
            CacheSwapMetadata(
                purpose=job.purpose,
                src_type=CacheLevel.HOST if writes else CacheLevel.STORAGE,
                dst_type=CacheLevel.STORAGE if writes else CacheLevel.HOST,
                src_block_ids=source[0],
                dst_block_ids=target[0],
                src_generations=source[1],
                dst_generations=target[1],
                hash_values=job.keys[positions],
                parent_hashes=np.zeros((len(positions), 32), np.uint8),
            ),
        )

    def _move(self, piece: _Piece) -> None:
        self._plan += 1
        left = max(piece.job.began + self._timeout - self._clock(), 0.0)
        swap = self._records.prepare(piece, piece.swap, self._plan)
        piece.transfer = self._queue.prepare(StorageTask(plan_id=self._plan, swap=swap, timeout=left))
        self._moving.append(piece)
        self._queue.submit([piece.transfer])

    def _start_loads(self) -> None:
        """Start reads for which records are free, in order."""
        while self._loads and self._records.has_room(len(self._loads[0].positions)):
            piece = self._loads.popleft()
            if piece.job.is_over:
                self._release(piece)
            else:
                self._move(piece)

    def _advance(self) -> None:
        for piece in [each for each in self._moving if _has_ended(each)]:
            self._moving.remove(piece)
            self._settle(piece)
        now = self._clock()
        for job in [each for each in self._jobs.values() if now >= each.began + self._timeout]:
            for piece in self._moving:
                if piece.job is job:
                    self._abandon(piece)
            logger.warning(
                "%s of %d blocks has not ended after %g s: nothing is found in storage until it has",
                job.purpose.value,
                len(job.keys),
                self._timeout,
            )
            self._end(job)
        self._start_loads()

    def _settle(self, piece: _Piece) -> None:
        """Record what became of a piece whose transfer has ended."""
        assert piece.transfer is not None
        result = piece.transfer.result()
        copied = _without(len(piece.positions), result.failed)
        if piece.job.purpose is SwapPurpose.STORE:
            bad, no_room = _mask(piece, result.bad_slots), _mask(piece, result.no_room)
            copied &= not piece.job.is_over  # the row may have got other bytes meanwhile
            copied = self._index.end_writes(piece.swap, copied, result.checksums, bad, no_room)
        else:
            lost = _mask(piece, result.lost)
            unusable = _mask(piece, result.corrupt) | _mask(piece, result.bad_slots)
            self._index.end_reads(piece.swap, lost, unusable)
            self._records.free(piece)
            if not np.all(copied | lost | unusable):
                self._finds_after = self._clock() + self._retry_after
        self._count(piece, copied, result)

    def _count(self, piece: _Piece, copied: Mask, result: TransferResult) -> None:
        job = piece.job
        if job.is_over:
            return
        job.moved[piece.positions] = copied
        job.nbytes += result.copied_bytes
        job.left -= len(piece.positions)
        if not job.left:
            self._end(job)

    def _end(self, job: _Job) -> None:
        job.is_over = True
        del self._jobs[job.number]
        self._ended.append(EndedJob(job.number, job.moved, self._clock() - job.began, job.nbytes))

    def _abandon(self, piece: _Piece) -> None:
        """Keep a piece out of the engine's rows from now on, and cancel what has not begun."""
        with piece.lock:
            piece.is_abandoned = True
        if piece.transfer is not None:
            piece.transfer.cancel()

    def _release(self, piece: _Piece) -> None:
        nothing = np.zeros(len(piece.positions), np.bool_)
        self._index.end_reads(piece.swap, nothing, nothing)

    def _is_out_of_order(self) -> bool:
        return self._is_stuck() or self._clock() < self._finds_after

    def _is_stuck(self) -> bool:
        return any(piece.job.is_over for piece in self._moving)


class _Records:
    """The engine's rows and the records for reads as one table, and the storage below it.

    A ``BlockStorage`` for the queue: it stamps rows before they are written, and copies what was read into its rows.
    """

    def __init__(self, storage: PlacedStorage, layout: KVLayout, rows: NDArray[np.uint8]) -> None:
        if rows.shape[1:] != (layout.record_bytes,) or not rows.flags.c_contiguous:
            raise ConfigurationError(f"rows of {rows.shape[1:]} bytes: records have {layout.record_bytes}")
        self._storage = storage
        self._layout = layout
        self._rows: NDArray[np.uint8] | None = rows
        self._first = len(rows)
        count = max(min(_STAGING_BYTES // layout.record_bytes, len(rows)), 1)
        count = max(count, min(_PIECE_BYTES // layout.record_bytes, len(rows)))
        self._memory = _core.HostMemory(count * layout.record_bytes)
        self._free = deque(range(self._first, self._first + count))
        self._reads: dict[int, _Piece] = {}
        self.num_blocks = self._first + count
        headers = _core.HostMemory(self.num_blocks * SLOT_HEADER_BYTES)
        size, base = layout.record_bytes, rows.ctypes.data
        addresses = [base + i * size for i in range(self._first)]
        addresses += [self._memory.address + i * size for i in range(count)]
        self.table = _core.RecordTable(
            addresses,
            1,
            size,
            [headers.address + i * SLOT_HEADER_BYTES for i in range(self.num_blocks)],
            self.num_blocks,
            (self._memory, headers),
        )
        self._copier = ThreadPoolExecutor(1, "fdcache-keyed")

    @property
    def name(self) -> str:
        """Name of the storage below."""
        return self._storage.name

    def has_room(self, count: int) -> bool:
        """Return True if as many records are free for a read."""
        return len(self._free) >= count

    def prepare(self, piece: _Piece, swap: CacheSwapMetadata, generation: int) -> CacheSwapMetadata:
        """Return the transfer with the slots and generations of this table."""
        count = len(piece.positions)
        generations = np.full(count, generation & 0xFFFFFFFF, np.uint32)
        if piece.job.purpose is SwapPurpose.STORE:
            return msgspec.structs.replace(swap, src_generations=generations)
        slots = np.array([self._free.popleft() for _ in range(count)], np.int32)
        self._reads[int(slots[0])] = piece
        piece.swap = msgspec.structs.replace(swap, dst_block_ids=slots, dst_generations=generations)
        return piece.swap

    def free(self, piece: _Piece) -> None:
        """Take back the records of a read that has ended."""
        slots = piece.swap.dst_block_ids.tolist()
        del self._reads[slots[0]]
        self._free.extend(slots)

    # --- the storage, on the queue's threads -----------------------------------------------------------------

    def put(self, batch: RecordBatch, timeout: float, cancel: _core.CancelFlag | None = None) -> BatchResult:
        """Stamp the rows with their keys and checksums, then store them."""
        offsets, sizes = [0], [self._layout.payload_bytes]
        for row, generation, key in zip(
            batch.host_slots.tolist(), batch.host_generations.tolist(), batch.hashes, strict=True
        ):
            checksum = _core.record_checksum(self.table.record(row), offsets, sizes)
            header = _core.SlotHeader(
                _READY_HEADER,
                generation,
                key.tobytes(),
                bytes(32),
                self._layout.fingerprint,
                self._layout.payload_bytes,
                checksum,
            )
            self.table.set_header(row, header)
        return self._storage.put(batch, timeout, cancel)

    def get(self, batch: RecordBatch, timeout: float, cancel: _core.CancelFlag | None = None) -> BatchResult:
        """Read blocks into records of this process; another thread copies them into the rows."""
        piece = self._reads[int(batch.host_slots[0])]
        try:
            result = self._storage.get(batch, timeout, cancel)
        except BaseException:
            piece.delivered.set()
            raise
        self._copier.submit(self._deliver, piece, batch.host_slots, result.ok)
        return result

    def _deliver(self, piece: _Piece, slots: Int32Array, ok: Mask) -> None:
        targets = piece.job.rows[piece.positions]
        for slot, target in zip(slots[ok].tolist(), targets[ok].tolist(), strict=True):
            with piece.lock:
                if piece.is_abandoned or self._rows is None:
                    break
                self._rows[target] = self.table.record(slot)
        piece.delivered.set()

    def register(self, records: _core.RecordTable) -> None:
        """Pass on."""
        self._storage.register(records)

    def unregister(self, records: _core.RecordTable) -> None:
        """Pass on."""
        self._storage.unregister(records)

    def clear(self, timeout: float) -> int:
        """Pass on."""
        return self._storage.clear(timeout)

    def stats(self) -> StorageStats:
        """Pass on."""
        return self._storage.stats()

    def close(self) -> None:
        """Close the storage, and keep the engine's memory no longer."""
        self._copier.shutdown()
        self._rows = None
        self._storage.close()


def _has_ended(piece: _Piece) -> bool:
    transfer = piece.transfer
    if transfer is None or not transfer.done.query():
        return False
    if piece.job.purpose is SwapPurpose.STORE or piece.delivered.is_set():
        return True
    return len(transfer.result().failed) == len(piece.positions)  # there is nothing to copy


def _rows_of(key: bytes) -> HashArray:
    return np.frombuffer(key, np.uint8).reshape(-1, 32)


def _mask(piece: _Piece, positions: Int32Array) -> Mask:
    mask = np.zeros(len(piece.positions), np.bool_)
    mask[positions] = True
    return mask


def _without(count: int, positions: Int32Array) -> Mask:
    mask = np.ones(count, np.bool_)
    mask[positions] = False
    return mask
