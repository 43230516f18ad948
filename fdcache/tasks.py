"""Handle to an asynchronous task, and the event that says that one has ended."""

from __future__ import annotations

import threading
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from fdcache import _core
from fdcache.errors import TaskCancelledError, TransferTimeoutError

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
