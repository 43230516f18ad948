"""StorageQueue: the transfers between host records and the storage of one rank, on two threads.

One thread reads and one writes, so neither an engine nor a copy thread waits for a disk or a network. A storage call
moves a whole batch with its own requests in flight: one thread for each direction keeps order without costing speed.

A controller drives it for its rank, and a service for every rank of a layout.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from fdcache._core import CancelFlag, RecordTable, Tier
from fdcache.errors import PlanError, TransferTimeoutError
from fdcache.machine.process_guard import ProcessGuard, close_at_exit, forget_at_exit
from fdcache.metadata import (
    CacheSwapMetadata,
    HashArray,
    Int32Array,
    StorageTask,
    SwapPurpose,
    TransferResult,
)
from fdcache.storage.connector import (
    BatchResult,
    BlockStorage,
    Outcome,
    PlacedStorage,
    RecordBatch,
    ServesHostRecords,
)
from fdcache.tasks import CpuEvent

logger = logging.getLogger(__name__)

_MOST_QUEUED = 4096
_CLEAR_SECONDS = 60.0
_CORRUPT = (Outcome.CORRUPT, Outcome.SOURCE_CHANGED)
"""Outcomes of a source record, in storage or on the host, that is not the block."""

_PURPOSES = (SwapPurpose.STORE, SwapPurpose.PREFETCH)


class StorageTransfer:
    """The blocks of a storage task on their way: the part of its ``Execution``. Any thread may call it."""

    is_waiting = False

    def __init__(self, task: StorageTask, batch: RecordBatch) -> None:
        self.plan_id = task.plan_id
        self.purpose = task.swap.purpose
        self.done = CpuEvent()
        self._batch: RecordBatch | None = batch
        self._size = len(batch)
        self._cancel = CancelFlag()
        self._lock = threading.Lock()
        self.started = False
        self._result: BatchResult | None = None
        self._seconds = 0.0
        self._deadline = time.monotonic() + task.timeout

    def cancel(self) -> bool:
        """Take back what has not begun; return True when that is all of it."""
        self._cancel.set()
        return self.refuse("cancelled")

    def refuse(self, reason: str) -> bool:
        """Fail every block if nothing has begun; return True then."""
        with self._lock:
            if self.started or self._batch is None:
                return False
            self._end(BatchResult.of(self._size, Outcome.CANCELLED, reason))
        return True

    def result(self) -> TransferResult:
        """Return what a task came to that has ended."""
        result = self._result
        assert result is not None, "asked before the end"
        failed = np.flatnonzero(~result.ok).astype(np.int32)
        message = f"{len(failed)} of {self._size} blocks failed: {result.error or 'see the statistics'}"
        return TransferResult(
            purpose=self.purpose,
            failed=failed,
            checksums=result.checksums,
            copied_bytes=result.moved_bytes,
            seconds=self._seconds,
            error_message=message if len(failed) else None,
            lost=np.flatnonzero(result.outcomes == Outcome.MISS).astype(np.int32),
            corrupt=np.flatnonzero(np.isin(result.outcomes, _CORRUPT)).astype(np.int32),
            bad_slots=np.flatnonzero(result.outcomes == Outcome.BAD_SLOT).astype(np.int32),
            no_room=np.flatnonzero(result.outcomes == Outcome.NO_ROOM).astype(np.int32),
        )

    # --- for the queue ------------------------------------------------------------------------------------

    def run(self, storage: BlockStorage) -> None:
        """Move the blocks. A connector that raises fails the batch, not the thread."""
        with self._lock:
            batch = self._batch
            if batch is None:
                return
            self.started = True
        begin = time.monotonic()
        move = storage.put if self.purpose is SwapPurpose.STORE else storage.get
        try:
            result = move(batch, max(self._deadline - begin, 0.0), self._cancel)
        except Exception as error:  # noqa: BLE001 - connectors are third-party code; the batch carries the error
            result = BatchResult.of(self._size, Outcome.ERROR, f"{type(error).__name__}: {error}")
        self._seconds = time.monotonic() - begin
        if result.unfinished is None:
            self._end(result)
        else:
            # The report is what frees the host slots: not before the storage has let go of them.
            result.unfinished.add_done_callback(lambda _: self._end(result))

    def _end(self, result: BatchResult) -> None:
        self._result, self._batch = result, None
        self.done.set()


class HostRecords(Protocol):
    """Host records of one rank. A later table may have more of them."""

    @property
    def num_blocks(self) -> int:
        """Number of slots in the table."""

    @property
    def table(self) -> RecordTable:
        """Addresses of records and headers."""


class StorageQueue:
    """The storage of one rank and its two threads. It owns ``storage`` and closes it.

    ::

        transfer = queue.prepare(task)
        queue.submit([transfer])
        execution = Execution(task.plan_id, rank, [transfer])
        execution.wait(None)
        report = execution.result()

    ``on_end`` is called by these threads whenever something has ended; ``stats`` are as of then.
    """

    def __init__(
        self,
        storage: BlockStorage,
        arena: HostRecords,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.storage = storage
        self.stats = storage.stats()
        self._arena = arena
        self._on_end = on_end
        self._transfers: dict[
            int, StorageTransfer
        ] = {}  # submitted, by plan id; those that ended go with the next
        self._jobs = {purpose: queue.Queue[Callable[[], None] | None](_MOST_QUEUED) for purpose in _PURPOSES}
        self._threads = [
            threading.Thread(target=self._serve, args=(jobs,), name=f"fdcache-{purpose.value}", daemon=True)
            for purpose, jobs in self._jobs.items()
        ]
        self.clear_error: str | None = None
        self._erasures_asked = self._erasures_done = 0
        for thread in self._threads:
            thread.start()
        close_at_exit(self, ProcessGuard("StorageQueue"))

    # --- transfers ----------------------------------------------------------------------------------------

    def prepare(self, task: StorageTask) -> StorageTransfer:
        """Check a task and return its transfer. Raises ``PlanError`` naming the mistake."""
        swap = task.swap
        purpose, levels = swap.purpose, (swap.src_type, swap.dst_type)
        if purpose not in _PURPOSES or levels != (purpose.source, purpose.target):
            raise PlanError(
                f"storage task {task.plan_id}: no {purpose.value} goes from {swap.src_type.value} "
                f"to {swap.dst_type.value}"
            )
        return StorageTransfer(task, self._batch(swap))

    def submit(
        self, transfers: Sequence[StorageTransfer], *, cancelled: Sequence[int] = (), clear: bool = False
    ) -> None:
        """Cancel earlier transfers by plan id, empty the storage if asked to, then queue prepared transfers.

        A transfer that finds the queue full fails at once.
        """
        for plan_id in cancelled:
            if (transfer := self._transfers.get(plan_id)) is not None:
                transfer.cancel()
        if clear:
            self._erase(self.clear)
        if transfers:
            self._transfers = {
                number: each for number, each in self._transfers.items() if not each.done.query()
            }
        for transfer in transfers:
            self._transfers[transfer.plan_id] = transfer
            try:
                self._jobs[transfer.purpose].put_nowait(partial(transfer.run, self.storage))
            except queue.Full:
                transfer.refuse("the storage queue is full")

    def _batch(self, swap: CacheSwapMetadata) -> RecordBatch:
        host_slots = swap.host_slots
        if len(host_slots) and not 0 <= host_slots.min() <= host_slots.max() < self._arena.num_blocks:
            raise PlanError(f"{swap.purpose.value}: host slots must be below {self._arena.num_blocks}")
        return RecordBatch(
            records=self._arena.table,
            host_slots=host_slots,
            host_generations=swap.host_generations,
            hashes=swap.hash_values,
            parents=swap.parent_hashes,
            slots=swap.src_block_ids if swap.to_host else swap.dst_block_ids,
            generations=swap.src_generations if swap.to_host else swap.dst_generations,
        )

    # --- the storage as a whole ---------------------------------------------------------------------------

    def clear(self) -> int:
        """Remove every block now; return how many. Raises ``StorageError`` unless it is certain to be done."""
        return self.storage.clear(timeout=_CLEAR_SECONDS)

    def erase(self, slots: Int32Array) -> None:
        """Empty slots of a storage that has slots, between the writes queued so far and later ones."""
        storage = self.storage
        assert isinstance(storage, PlacedStorage), "a storage without slots is emptied by hash"
        self._erase(lambda: storage.erase(slots))

    def lend_from(self, host: Tier | None) -> None:
        """Hold records in the slots of this host tier while others read them; None: there is none any more."""
        if isinstance(self.storage, ServesHostRecords):
            self.storage.lend_from(host)

    def withdraw(self, hashes: HashArray | None) -> None:
        """Serve these host records to nobody else, None for all, once the writes queued so far are done."""
        storage = self.storage
        if isinstance(storage, ServesHostRecords):
            self._erase(lambda: storage.withdraw(hashes))

    def _erase(self, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
                self.clear_error = None
            except Exception as error:  # noqa: BLE001 - as in StorageTransfer.run
                self.clear_error = str(error) or type(error).__name__
            self._erasures_done += 1

        self._erasures_asked += 1
        self._jobs[SwapPurpose.STORE].put(run)

    @property
    def erasures_queued(self) -> int:
        """Number of erasures that were asked for and are not done."""
        return self._erasures_asked - self._erasures_done

    def register(self, records: RecordTable) -> None:
        """Make records known to the storage before any transfer that is submitted later."""
        done = threading.Event()

        def run() -> None:
            try:
                self.storage.register(records)
            except Exception as error:  # noqa: BLE001 - as in StorageTransfer.run
                logger.warning("%s cannot use host records: %s", self.storage.name, error)
            done.set()

        def wait() -> None:
            done.wait()

        self._jobs[SwapPurpose.PREFETCH].put(run)
        self._jobs[SwapPurpose.STORE].put(wait)

    def unregister(self, records: RecordTable) -> None:
        """Undo ``register``; no transfer uses these records any more."""

        def run() -> None:
            try:
                self.storage.unregister(records)
            except Exception as error:  # noqa: BLE001 - as in StorageTransfer.run
                logger.warning("%s cannot give up host records: %s", self.storage.name, error)

        self._jobs[SwapPurpose.PREFETCH].put(run)

    def _serve(self, jobs: queue.Queue[Callable[[], None] | None]) -> None:
        while (job := jobs.get()) is not None:
            job()
            try:
                self.stats = self.storage.stats()
            except Exception:
                logger.exception(
                    "%s: no statistics", self.storage.name
                )  # third-party code; the thread goes on
            self._on_end()

    def close(self) -> None:
        """Wait for transfers that have begun, cancel the others, close the storage."""
        self.shutdown()

    def shutdown(self, timeout: float | None = None) -> None:
        """Close within ``timeout`` seconds. Raises ``TransferTimeoutError`` otherwise, with the storage still open."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for transfer in self._transfers.values():
            transfer.cancel()
        for jobs in self._jobs.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            if thread.is_alive():
                raise TransferTimeoutError(f"{self.storage.name}: still at work after {timeout} s")
        self.storage.close()
        forget_at_exit(self)
