"""Handle to an asynchronous task."""

from __future__ import annotations

import threading
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

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
