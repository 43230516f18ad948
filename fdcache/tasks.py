"""Work in flight: a plan or task until its report, the handle to one, and the event of the host that ends one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from msgspec.structs import replace

from fdcache import _core
from fdcache.errors import TaskCancelledError, TransferTimeoutError
from fdcache.metadata import HandoverEnd, PeerTask, TransferReport, TransferResult

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
