"""Tasks that run elsewhere: how far one has come, and a hold on it."""

from __future__ import annotations

import threading
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from fdcache.errors import TaskCancelledError, TransferTimeoutError

T_co = TypeVar("T_co", covariant=True)


class TransferStatus(StrEnum):
    """How far a transfer has come."""

    PENDING = "pending"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class AsyncTask(Protocol[T_co]):
    """What a handler needs of the task that it stands for. Its methods may be called from any thread."""

    def wait(self, timeout: float | None) -> bool:
        """Wait until the task has ended; whether it has."""

    def cancel(self) -> bool:
        """Take back what has not started; whether there was anything."""

    def status(self) -> TransferStatus:
        """How far the task has come."""

    def result(self) -> T_co:
        """The result of a task that has ended."""


class AsyncTaskHandler(Generic[T_co]):
    """A hold on a task that runs elsewhere: wait for it, look at it, take back what has not started.

    A cancel that succeeded is final: whatever the task does later, its status stays ``CANCELLED`` and
    ``get_result`` raises.
    """

    def __init__(self, task: AsyncTask[T_co]) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._cancelled = False

    @property
    def status(self) -> TransferStatus:
        """How far the task has come."""
        return TransferStatus.CANCELLED if self._cancelled else self._task.status()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds, None for ever; whether the task has ended or was cancelled."""
        return self._cancelled or self._task.wait(timeout)

    def cancel(self) -> bool:
        """Take back whatever of the task has not started; False when nothing could be taken back."""
        with self._lock:
            self._cancelled = self._cancelled or self._task.cancel()
            return self._cancelled

    def get_result(self, timeout: float | None = None) -> T_co:
        """The result, waiting up to ``timeout`` seconds for it, None for ever.

        Raises ``TaskCancelledError`` after a cancel, ``TransferTimeoutError`` when it does not end in time.
        """
        ended = self.wait(timeout)
        if self._cancelled:
            raise TaskCancelledError("the task was cancelled and has no result")
        if not ended:
            raise TransferTimeoutError(f"the task did not end within {timeout} s")
        return self._task.result()
