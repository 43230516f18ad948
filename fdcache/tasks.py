"""Work in flight: a plan or task until its report, the handle to one, the event that ends one, and its result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum, StrEnum
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from msgspec.structs import replace

from fdcache import _core
from fdcache.errors import TaskCancelledError, TransferTimeoutError
from fdcache.metadata import (
    CacheSwapMetadata,
    HandoverEnd,
    Int32Array,
    PeerTask,
    TransferReport,
    TransferResult,
)

T_co = TypeVar("T_co", covariant=True)


class TransferStatus(StrEnum):
    """State of a transfer."""

    PENDING = "pending"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class AsyncTask(Protocol[T_co]):
    """The task behind a handle. Its methods may be called from any thread."""

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end of the task. Return False after the timeout (seconds, None waits forever)."""

    def cancel(self) -> bool:
        """Cancel what has not started. Return False if everything has."""

    def status(self) -> TransferStatus:
        """Return the state of the task."""

    def result(self) -> T_co:
        """Return the result of a task that has ended."""


class Event(Protocol):
    """Point in a stream; recorded once."""

    def record(self, stream: Any) -> None:
        """Reach the event once the stream has completed everything enqueued so far."""

    def query(self) -> bool:
        """Return True once the event is reached."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait on the host up to ``timeout`` seconds, None for ever; return True when the event is reached."""


class Work(Protocol):
    """One transfer of a plan or task in flight."""

    @property
    def is_waiting(self) -> bool:
        """True while it has its turn still to come."""

    @property
    def done(self) -> Event | None:
        """The event of its end, or while it waits one before that; None if nothing is copied."""

    @property
    def started(self) -> bool:
        """True if copying has begun."""

    def cancel(self) -> bool:
        """Cancel it if nothing has begun; return True if it did. All positions fail then."""

    def result(self) -> TransferResult:
        """Return the result, once it has ended."""


class Execution:
    """A submitted plan, storage task or hand-over until its report is polled. An ``AsyncTask``; any thread may call it.

    The report is made once, at the end. ``handover`` returns how a hand-over has ended.
    """

    def __init__(
        self,
        plan_id: int,
        rank: int,
        parts: Sequence[Work],
        handover: Callable[[], HandoverEnd] | None = None,
    ) -> None:
        self.plan_id = plan_id
        self._rank = rank
        self._parts = tuple(parts)
        self._handover = handover
        self._report: TransferReport | None = None
        self._lock = threading.Lock()

    def pending_event(self) -> Event | None:
        """Return an event that comes before the end, or None if that is reached."""
        for part in self._parts:
            was_waiting = part.is_waiting  # asked first: the event of one that waits says nothing of its end
            event = part.done
            if event is not None and (was_waiting or not event.query()):
                return event
        return None

    def wait(self, timeout: float | None) -> bool:
        """Wait up to ``timeout`` seconds, None without limit; return True if it has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (event := self.pending_event()) is not None:
            if not event.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0)):
                return False
        return True

    def cancel(self) -> bool:
        """Cancel the transfers that have not begun; return True if there was one."""
        taken = [part.cancel() for part in self._parts]
        return any(taken)

    def status(self) -> TransferStatus:
        """Return how far it has come."""
        if self.pending_event() is None:
            success = all(result.success for result in self.result().results)
            return TransferStatus.COMPLETED if success else TransferStatus.FAILED
        started = any(part.started for part in self._parts)
        return TransferStatus.IN_PROGRESS if started else TransferStatus.PENDING

    def result(self) -> TransferReport:
        """Return the report of one that has ended, and release its copies and their memory."""
        with self._lock:
            if self._report is None:
                self._report = TransferReport(
                    plan_id=self.plan_id,
                    rank=self._rank,
                    results=tuple(part.result() for part in self._parts),
                    handover=None if self._handover is None else self._handover(),
                )
                self._parts, self._handover = (), None
            return self._report


class AsyncTaskHandler(Generic[T_co]):
    """Handle to an asynchronous task.

        handler = controller.handler(plan.plan_id)
        if handler.wait(timeout=1.0):
            report = handler.get_result()

    A successful cancel is final: the status stays ``CANCELLED`` and ``get_result`` raises, whatever the task does.
    """

    def __init__(self, task: AsyncTask[T_co]) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._cancelled = False

    @property
    def status(self) -> TransferStatus:
        """State of the task."""
        return TransferStatus.CANCELLED if self._cancelled else self._task.status()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds (None waits forever). Return True if the task has ended or was cancelled."""
        return self._cancelled or self._task.wait(timeout)

    def cancel(self) -> bool:
        """Cancel the part of the task that has not started. Return False if there is none."""
        with self._lock:
            self._cancelled = self._cancelled or self._task.cancel()
            return self._cancelled

    def get_result(self, timeout: float | None = None) -> T_co:
        """Wait up to ``timeout`` seconds (None waits forever) and return the result.

        Raises:
            TaskCancelledError: the task was cancelled.
            TransferTimeoutError: the task did not end in time.
        """
        ended = self.wait(timeout)
        if self._cancelled:
            raise TaskCancelledError("the task was cancelled and has no result")
        if not ended:
            raise TransferTimeoutError(f"the task did not end within {timeout} s")
        return self._task.result()


class CpuEvent:
    """One-shot event of the host: a stream of the CPU reaches it, or ``set``."""

    __slots__ = ("core",)

    def __init__(self, core: _core.Event | None = None) -> None:
        self.core = core or _core.Event()

    def record(self, stream: object) -> None:
        """Reach the event once a stream of the CPU has completed everything enqueued so far."""
        core = getattr(stream, "core", None)
        if not isinstance(core, _core.CopyStream):
            raise TypeError(f"expected a stream of the CPU device, got {type(stream).__name__}")
        core.record(self.core)

    def set(self) -> None:
        """Reach the event now."""
        self.core.set()

    def query(self) -> bool:
        """Return True once the event is reached."""
        return self.core.query()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds, None for ever; return True when the event is reached."""
        return self.core.wait(timeout)


class HandoverTask:
    """A submitted hand-over, the part of its ``execution``. It ends once nothing accesses its slots for it any more."""

    is_waiting = False

    def __init__(self, task: PeerTask, rank: int, cancel: Callable[[], None]) -> None:
        self.execution = Execution(task.plan_id, rank, [self], self._how_it_ended)
        self.done = CpuEvent()
        self._task = task
        self._cancel = cancel
        self._start = time.monotonic()
        self._begun: float | None = None
        self._result: TransferResult | None = None
        self._end: HandoverEnd | None = None
        self._lock = threading.Lock()

    @property
    def age(self) -> float:
        """Seconds since it was submitted."""
        return time.monotonic() - self._start

    @property
    def has_ended(self) -> bool:
        """True once it has a result."""
        return self._result is not None

    @property
    def started(self) -> bool:
        """True once it is read, or decode has asked."""
        return self._begun is not None

    def begin(self) -> None:
        """Record the begin of the first read, or that decode has asked."""
        if self._begun is None:
            self._begun = time.monotonic()

    def finish(
        self, end: HandoverEnd, whole: int, corrupt: Sequence[int], moved: int, error: str | None
    ) -> None:
        """End it: the first ``whole`` blocks of the plan were handed over, and ``moved`` bytes of them copied."""
        size = len(self._task.swap)
        with self._lock:
            if self._result is not None:
                return
            age = self.age
            waited = age if self._begun is None else self._begun - self._start
            self._end = replace(end, waited_seconds=waited)
            self._result = TransferResult(
                purpose=self._task.swap.purpose,
                failed=np.arange(whole, size, dtype=np.int32),
                checksums=np.empty(0, np.uint64),
                copied_bytes=moved,
                seconds=age - waited,
                error_message=error,
                corrupt=np.array(corrupt, np.int32),
            )
        self.done.set()

    def cancel(self) -> bool:
        """End the wait; return False: reads in flight go on, and the report follows."""
        self._cancel()
        return False

    def result(self) -> TransferResult:
        """Return what was handed over, once it has ended."""
        assert self._result is not None
        return self._result

    def _how_it_ended(self) -> HandoverEnd:
        assert self._end is not None
        return self._end


class Fault(IntEnum):
    """Reason why a block was not copied. The values are those of the native module."""

    NONE = 0
    NO_HEADER = 1
    NOT_READY = 2
    OTHER_GENERATION = 3
    OTHER_HASH = 4
    OTHER_LAYOUT = 5
    CHANGED = 6
    CANCELLED = 7
    ABANDONED = 8
    DEVICE = 9
    CORRUPT = 10


_BAD_RECORD = (
    Fault.NO_HEADER,
    Fault.NOT_READY,
    Fault.OTHER_GENERATION,
    Fault.OTHER_HASH,
    Fault.OTHER_LAYOUT,
    Fault.CHANGED,
    Fault.CORRUPT,
)
"""Faults of the host record itself: a later load of it would fail as well."""

_TEXT = {
    Fault.NO_HEADER: "host slot {slot} has no valid header",
    Fault.NOT_READY: "host slot {slot} is not ready",
    Fault.OTHER_GENERATION: "host slot {slot} was given to new content",
    Fault.OTHER_HASH: "host slot {slot} holds another block",
    Fault.OTHER_LAYOUT: "host slot {slot} holds a record of another layout",
    Fault.CHANGED: "host slot {slot} changed during the copy",
    Fault.CANCELLED: "cancelled",
    Fault.ABANDONED: "abandoned because its stream was closed",
    Fault.DEVICE: "the device failed: {detail}",
    Fault.CORRUPT: "the bytes copied from host slot {slot} differ from the record's checksum",
}

NO_POSITIONS: Int32Array = np.empty(0, np.int32)
NO_POSITIONS.flags.writeable = False
_NO_SUMS = np.empty(0, np.uint64)


Outcome = tuple[bytes, bytes, int, float, str]
"""Of a whole batch: a byte for each pair, none if all were copied; eight bytes of checksum for each, none for loads;
the bytes and seconds of the copies; the device's error."""


def make_result(
    swap: CacheSwapMetadata, outcome: Outcome, start: int = 0, stop: int | None = None
) -> TransferResult:
    """Return the result of positions ``start`` to ``stop`` of a batch of equal blocks; positions count from 0."""
    faults, checksums, copied_bytes, seconds, detail = outcome
    count = len(swap)
    stop = count if stop is None else stop
    failed = corrupt = NO_POSITIONS
    message = None
    codes = faults[start:stop]
    num_copied = codes.count(Fault.NONE) if codes else stop - start
    if num_copied < stop - start:
        values = np.frombuffer(codes, np.uint8)
        failed = np.flatnonzero(values).astype(np.int32)
        corrupt = np.flatnonzero(np.isin(values, _BAD_RECORD)).astype(np.int32)
        first = failed[0]
        reason = _TEXT[Fault(values[first])].format(slot=swap.host_slots[start + first], detail=detail)
        message = f"{len(failed)} of {len(codes)} blocks failed; position {first}: {reason}"
    if stop - start < count:
        all_copied = faults.count(Fault.NONE) if faults else count
        copied_bytes = copied_bytes * num_copied // max(all_copied, 1)
        seconds *= (stop - start) / count
    return TransferResult(
        purpose=swap.purpose,
        failed=failed,
        checksums=np.frombuffer(checksums, np.uint64)[start:stop] if checksums else _NO_SUMS,
        copied_bytes=copied_bytes,
        seconds=seconds,
        error_message=message,
        lost=NO_POSITIONS,
        corrupt=corrupt,
        bad_slots=NO_POSITIONS,
        no_room=NO_POSITIONS,
    )
