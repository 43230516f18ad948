"""Transfers between host records and storage, on threads of their own: one for reads, one for writes.

Neither the engine nor the copy threads ever wait for a disk or a network. A storage call moves a whole batch and
has its own requests in flight, so one thread for each direction keeps order without costing speed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from fdcache._core import CancelFlag, RecordTable
from fdcache.devices.cpu import CpuEvent
from fdcache.errors import PlanError, TransferTimeoutError
from fdcache.machine.process_guard import ProcessGuard, close_at_exit, forget_at_exit
from fdcache.metadata import (
    CacheLevel,
    CacheSwapMetadata,
    Int32Array,
    StorageTask,
    SwapPurpose,
    TransferPlan,
    TransferResult,
)
from fdcache.storage.connector import BatchResult, BlockStorage, Outcome, PlacedStorage, RecordBatch

logger = logging.getLogger(__name__)

_MOST_QUEUED = 4096
_CLEAR_SECONDS = 60.0
_WRONG_BYTES = (Outcome.CORRUPT, Outcome.SOURCE_CHANGED)
"""The record that was to be read, in storage or on the host, is not the block."""

_LEVELS = {
    SwapPurpose.STORE: (CacheLevel.HOST, CacheLevel.STORAGE),
    SwapPurpose.PREFETCH: (CacheLevel.STORAGE, CacheLevel.HOST),
}


class StorageTransfer:
    """One task on its way; to a plan's execution it looks like a copy."""

    def __init__(self, task: StorageTask, batch: RecordBatch) -> None:
        self.task = task
        self.batch = batch
        self.done = CpuEvent()
        self._cancel = CancelFlag()
        self._lock = threading.Lock()
        self._started = False
        self._result: BatchResult | None = None
        self._seconds = 0.0
        self._deadline = time.monotonic() + task.timeout

    def pending_event(self) -> CpuEvent | None:
        """Its end, until that is reached."""
        return None if self.done.query() else self.done

    @property
    def started(self) -> bool:
        """Whether it has begun."""
        return self._started

    def cancel(self) -> bool:
        """Take back what has not begun; true when that is all of it."""
        self._cancel.set()
        with self._lock:
            if self._started or self._result is not None:
                return False
            self._result = BatchResult.of(len(self.batch), Outcome.CANCELLED, "cancelled")
        self.done.set()
        return True

    def run(self, storage: BlockStorage) -> None:
        """Carry it out. A connector that raises fails the batch, not the thread."""
        with self._lock:
            if self._result is not None:
                return
            self._started = True
        begin = time.monotonic()
        move = storage.put if self.task.swap.purpose is SwapPurpose.STORE else storage.get
        try:
            result = move(self.batch, max(self._deadline - begin, 0.0), self._cancel)
        except Exception as error:  # noqa: BLE001 - connectors are anybody's code; the batch carries the error
            result = BatchResult.of(len(self.batch), Outcome.ERROR, f"{type(error).__name__}: {error}")
        self._seconds = time.monotonic() - begin
        self._result = result
        if result.unfinished is None:
            self.done.set()
        else:
            # Reported only then: until the report nobody else gets these host slots.
            result.unfinished.add_done_callback(lambda _: self.done.set())

    def refuse(self, reason: str) -> None:
        """It will never run."""
        with self._lock:
            if self._result is None:
                self._result = BatchResult.of(len(self.batch), Outcome.CANCELLED, reason)
        self.done.set()

    def result(self) -> TransferResult:
        """Return the result, once ``done`` is reached."""
        result = self._result
        assert result is not None, "asked before the end"
        failed = np.flatnonzero(~result.ok).astype(np.int32)
        message = f"{len(failed)} of {len(self.batch)} blocks failed: {result.error or 'see the statistics'}"
        return TransferResult(
            purpose=self.task.swap.purpose,
            failed=failed,
            checksums=result.checksums,
            copied_bytes=result.moved_bytes,
            seconds=self._seconds,
            error_message=message if len(failed) else None,
            lost=np.flatnonzero(result.outcomes == Outcome.MISS).astype(np.int32),
            corrupt=np.flatnonzero(np.isin(result.outcomes, _WRONG_BYTES)).astype(np.int32),
            bad_slots=np.flatnonzero(result.outcomes == Outcome.BAD_SLOT).astype(np.int32),
            no_room=np.flatnonzero(result.outcomes == Outcome.NO_ROOM).astype(np.int32),
        )


class HostRecords(Protocol):
    """Where host records are; later tables may have more of them."""

    @property
    def num_blocks(self) -> int:
        """Slots in the table."""

    @property
    def table(self) -> RecordTable:
        """Where records and headers are."""


class StorageQueue:
    """The storage of one rank and the threads that use it. It owns ``storage`` and closes it.

    ``on_end`` is called by these threads whenever something has ended. ``stats`` is as of then.
    """

    def __init__(
        self, storage: BlockStorage, arena: HostRecords, on_end: Callable[[], None] = lambda: None
    ) -> None:
        self.storage = storage
        self.stats = storage.stats()
        self._arena = arena
        self._on_end = on_end
        self._transfers: dict[int, StorageTransfer] = {}
        self._queues = {purpose: queue.Queue[Callable[[], None] | None](_MOST_QUEUED) for purpose in _LEVELS}
        self._threads = [
            threading.Thread(target=self._serve, args=(jobs,), name=f"fdcache-{purpose.value}", daemon=True)
            for purpose, jobs in self._queues.items()
        ]
        self.clear_error: str | None = None
        self._erasures_asked = self._erasures_done = 0
        for thread in self._threads:
            thread.start()
        close_at_exit(self, ProcessGuard("StorageQueue"))

    def prepare(self, task: StorageTask) -> StorageTransfer:
        """Check a task. Raises ``PlanError`` naming what is wrong."""
        swap = task.swap
        if _LEVELS.get(swap.purpose) != (swap.src_type, swap.dst_type):
            raise PlanError(
                f"storage task {task.plan_id}: no {swap.purpose.value} goes from {swap.src_type.value} "
                f"to {swap.dst_type.value}"
            )
        return StorageTransfer(task, self._batch(swap))

    def submit(self, plan: TransferPlan, prepared: Sequence[StorageTransfer]) -> None:
        """What a plan wants of the storage, in the order that it promises; ``prepared`` are its tasks."""
        for plan_id in plan.cancelled:
            self._cancel(plan_id)
        if plan.clear_storage:
            # After the writes queued so far and before those to come.
            self._erase(self.clear)
        for transfer in prepared:
            self._submit(transfer)

    def clear(self) -> int:
        """Remove every block, now; returns how many. Raises ``StorageError`` when that cannot be known to be done."""
        return self.storage.clear(timeout=_CLEAR_SECONDS)

    def _submit(self, transfer: StorageTransfer) -> None:
        """Queue a prepared task; one that finds the queue full fails at once."""
        self._transfers[transfer.task.plan_id] = transfer
        try:
            self._queues[transfer.task.swap.purpose].put_nowait(lambda: transfer.run(self.storage))
        except queue.Full:
            transfer.refuse("the storage queue is full")

    def _cancel(self, plan_id: int) -> None:
        transfer = self._transfers.get(plan_id)
        if transfer is not None:
            transfer.cancel()

    def forget(self, plan_id: int) -> None:
        """The task was reported."""
        self._transfers.pop(plan_id, None)

    def erase(self, slots: Int32Array) -> None:
        """Empty slots of a storage that has slots, after the writes queued so far and before those to come."""
        storage = self.storage
        assert isinstance(storage, PlacedStorage), "what has no slots is emptied by hash"
        self._erase(lambda: storage.erase(slots))

    def _erase(self, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
                self.clear_error = None
            except Exception as error:  # noqa: BLE001 - as above
                self.clear_error = str(error) or type(error).__name__
            self._erasures_done += 1

        self._erasures_asked += 1
        self._queues[SwapPurpose.STORE].put(run)

    @property
    def erasures_queued(self) -> int:
        """How often it was to be emptied and is not yet."""
        return self._erasures_asked - self._erasures_done

    def register(self, records: RecordTable) -> None:
        """Make records known to the storage before any transfer that is submitted later."""
        done = threading.Event()

        def run() -> None:
            try:
                self.storage.register(records)
            except Exception as error:  # noqa: BLE001 - as above
                logger.warning("host records are of no use to the storage: %s", error)
            done.set()

        self._queues[SwapPurpose.PREFETCH].put(run)
        self._queues[SwapPurpose.STORE].put(lambda: _wait(done))

    def unregister(self, records: RecordTable) -> None:
        """Undo ``register``; no transfer uses these records any more."""

        def run() -> None:
            try:
                self.storage.unregister(records)
            except Exception as error:  # noqa: BLE001 - as above
                logger.warning("the storage cannot let go of host records: %s", error)

        self._queues[SwapPurpose.PREFETCH].put(run)

    def _batch(self, swap: CacheSwapMetadata) -> RecordBatch:
        storing = swap.purpose is SwapPurpose.STORE
        host_slots = swap.host_slots
        if len(host_slots) and not 0 <= host_slots.min() <= host_slots.max() < self._arena.num_blocks:
            raise PlanError(f"{swap.purpose.value}: host slots must be below {self._arena.num_blocks}")
        slots = swap.dst_block_ids if storing else swap.src_block_ids
        return RecordBatch(
            records=self._arena.table,
            host_slots=host_slots,
            host_generations=swap.host_generations,
            hashes=swap.hash_values,
            parents=swap.parent_hashes,
            slots=slots,
            generations=swap.dst_generations if storing else swap.src_generations,
        )

    def _serve(self, jobs: queue.Queue[Callable[[], None] | None]) -> None:
        while (job := jobs.get()) is not None:
            job()
            try:
                self.stats = self.storage.stats()
            except Exception:
                logger.exception("%s: no statistics", self.storage.name)  # anybody's code; the thread goes on
            self._on_end()

    def close(self) -> None:
        """Wait for what has begun, take back the rest, close the storage."""
        self.shutdown()

    def shutdown(self, timeout: float | None = None) -> None:
        """As ``close``. Raises ``TransferTimeoutError`` when that takes longer; the storage is open still then."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for transfer in self._transfers.values():
            transfer.cancel()
        for jobs in self._queues.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            if thread.is_alive():
                raise TransferTimeoutError(f"{self.storage.name}: still at work after {timeout} s")
        self.storage.close()
        forget_at_exit(self)


def _wait(event: threading.Event) -> None:
    event.wait()
