"""The handle to an asynchronous task."""

from __future__ import annotations

import threading

import pytest

from fdcache.errors import TaskCancelledError, TransferTimeoutError
from fdcache.tasks import AsyncTaskHandler, TransferStatus


class Download:
    """A task that another thread ends, and that can be cancelled until it starts."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._value = ""
        self.started = False

    def finish(self, value: str) -> None:
        self.started = True
        self._value = value
        self._ended.set()

    def wait(self, timeout: float | None) -> bool:
        return self._ended.wait(timeout)

    def cancel(self) -> bool:
        return not self.started

    def status(self) -> TransferStatus:
        if self._ended.is_set():
            return TransferStatus.COMPLETED
        return TransferStatus.IN_PROGRESS if self.started else TransferStatus.PENDING

    def result(self) -> str:
        return self._value


def status_of(handler: AsyncTaskHandler[str]) -> TransferStatus:
    return handler.status


def test_handler_returns_the_result() -> None:
    task = Download()
    handler = AsyncTaskHandler(task)
    assert status_of(handler) is TransferStatus.PENDING
    threading.Timer(0.01, task.finish, ["bytes"]).start()
    assert handler.get_result(30) == "bytes"
    assert status_of(handler) is TransferStatus.COMPLETED


def test_handler_raises_after_the_timeout() -> None:
    handler = AsyncTaskHandler(Download())
    assert not handler.wait(0)
    with pytest.raises(TransferTimeoutError, match="within 0 s"):
        handler.get_result(0)


def test_cancel_is_final() -> None:
    task = Download()
    handler = AsyncTaskHandler(task)
    assert handler.cancel()
    task.finish("too late")
    assert status_of(handler) is TransferStatus.CANCELLED
    assert handler.wait(0)
    with pytest.raises(TaskCancelledError):
        handler.get_result(0)


def test_started_task_is_not_cancelled() -> None:
    task = Download()
    handler = AsyncTaskHandler(task)
    task.started = True
    assert not handler.cancel()
    assert status_of(handler) is TransferStatus.IN_PROGRESS
    task.finish("bytes")
    assert handler.get_result() == "bytes"
