"""Transfers between host records and storage, on threads of their own: one for reads, one for writes.

Neither the engine nor the copy threads ever wait for a disk or a network. A storage call moves a whole batch and
has its own requests in flight, so one thread for each direction keeps order without costing speed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from fdcache._core import CancelFlag
from fdcache.devices.base import CopyOutcome, HostArena
from fdcache.devices.cpu import CpuEvent
from fdcache.errors import PlanError, StorageError
from fdcache.metadata import CacheLevel, CacheSwapMetadata, StorageTask, SwapPurpose, TransferPlan
from fdcache.storage.connector import BatchResult, BlockStorage, Outcome, RecordBatch

_MOST_QUEUED = 4096
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
        self.done.set()

    def refuse(self, reason: str) -> None:
        """It will never run."""
        with self._lock:
            if self._result is None:
                self._result = BatchResult.of(len(self.batch), Outcome.CANCELLED, reason)
        self.done.set()

    def outcome(self) -> CopyOutcome:
        """What came of it, once ``done`` is reached."""
        result = self._result
        assert result is not None, "asked before the end"
        failed = np.flatnonzero(~result.ok).astype(np.int32)
        message = f"{len(failed)} of {len(self.batch)} blocks failed: {result.error or 'see the statistics'}"
        return CopyOutcome(
            failed=failed,
            checksums=result.checksums,
            copied_bytes=result.moved_bytes,
            seconds=self._seconds,
            error_message=message if len(failed) else None,
            lost=np.flatnonzero(result.outcomes == Outcome.MISS).astype(np.int32),
            corrupt=np.flatnonzero(result.outcomes == Outcome.CORRUPT).astype(np.int32),
        )


class StorageQueue:
    """The storage of one worker and the threads that use it. It owns ``storage`` and closes it."""

    def __init__(self, storage: BlockStorage, arena: HostArena) -> None:
        self.storage = storage
        self._arena = arena
        self._transfers: dict[int, StorageTransfer] = {}
        self._queues = {purpose: queue.Queue[Callable[[], None] | None](_MOST_QUEUED) for purpose in _LEVELS}
        self._threads = [
            threading.Thread(target=_serve, args=(jobs,), name=f"fdcache-{purpose.value}", daemon=True)
            for purpose, jobs in self._queues.items()
        ]
        self.clear_error: str | None = None
        storage.register(arena.table)
        for thread in self._threads:
            thread.start()

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
            self._queues[SwapPurpose.STORE].put(self._clear)
        for transfer in prepared:
            self._submit(transfer)

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

    def _clear(self) -> None:
        try:
            self.storage.clear(timeout=60.0)
            self.clear_error = None
        except StorageError as error:
            self.clear_error = str(error)

    def _batch(self, swap: CacheSwapMetadata) -> RecordBatch:
        storing = swap.purpose is SwapPurpose.STORE
        host_slots = swap.src_block_ids if storing else swap.dst_block_ids
        if len(host_slots) and not 0 <= host_slots.min() <= host_slots.max() < self._arena.num_blocks:
            raise PlanError(f"{swap.purpose.value}: host slots must be below {self._arena.num_blocks}")
        slots = swap.dst_block_ids if storing else swap.src_block_ids
        return RecordBatch(
            records=self._arena.table,
            host_slots=host_slots,
            host_generations=swap.src_generations if storing else swap.dst_generations,
            hashes=swap.hash_values,
            parents=swap.parent_hashes,
            slots=slots,
            generations=swap.dst_generations if storing else swap.src_generations,
        )

    def close(self) -> None:
        """Wait for what has begun, take back the rest, close the storage."""
        for transfer in self._transfers.values():
            transfer.cancel()
        for jobs in self._queues.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        self.storage.close()


def _serve(jobs: queue.Queue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
