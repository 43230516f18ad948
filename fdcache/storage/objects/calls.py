"""Calls to a store that may hang: each on a thread, waited for no longer than until a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from fdcache import _core

T = TypeVar("T")


class GivenUpError(Exception):
    """A call did not end before its deadline, or never began."""


class HangingError(GivenUpError):
    """A call began and did not end before its deadline."""


class Gate:
    """Keeps calls that were given up away from host memory.

    ::

        with gate.passage():  # by a call that has its bytes
            copy_to_the_host()
        gate.close()  # by its caller: waits for copies that have begun, and lets no other begin
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextmanager
    def passage(self) -> Iterator[None]:
        """Hold the gate open. Raises ``GivenUpError`` once it is closed."""
        with self._changed:
            if self._closed:
                raise GivenUpError
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Wait for those inside, and let nobody in."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._inside)


class CallPool:
    """Threads that make calls. One that hangs is left behind, and does not keep the process from ending."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0
        self._busy = 0
        self._hanging: set[Future[Any]] = set()
        self._closed = False

    @property
    def is_blocked(self) -> bool:
        """True while calls that were given up occupy every thread."""
        return len(self._hanging) >= self._threads

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Queue a call; after ``close`` it is cancelled."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
                    future.set_exception(error)

        with self._lock:
            if self._closed:
                future.cancel()
                return future
            self._busy += 1
            if self._busy > self._started and self._started < self._threads:
                self._started += 1
                name = f"{self._name}-{self._started}"
                threading.Thread(target=self._serve, name=name, daemon=True).start()
            self._jobs.put(run)
        return future

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job
            with self._lock:
                self._busy -= 1

    def results(
        self,
        functions: Sequence[Callable[[], T]],
        deadline: float,
        cancel: _core.CancelFlag | None = None,
    ) -> list[T | Exception]:
        """Make calls side by side; return what each returned or raised.

        None begins after the deadline or once ``cancel`` is set. A call that has not ended at the deadline, or has not
        begun, is a ``GivenUpError``, of one that was cancelled a ``CancelledError``.
        """

        def guarded(function: Callable[[], T]) -> T:
            if cancel is not None and cancel.is_set:
                raise CancelledError
            if time.monotonic() >= deadline:
                raise GivenUpError
            return function()

        futures = [self.submit(partial(guarded, each)) for each in functions]
        results: list[T | Exception] = []
        for each in futures:
            results.append(self._result(each, deadline))
        return results

    def _result(self, future: Future[Any], deadline: float) -> Any:
        if not future.cancelled():
            wait((future,), max(deadline - time.monotonic(), 0.0))
            if not future.done() and future.cancel():
                return GivenUpError()
        if future.cancelled():
            return CancelledError()
        if not future.done():
            self._hanging.add(future)
            future.add_done_callback(self._hanging.discard)
            return HangingError()
        error = future.exception()
        if error is None:
            return future.result()
        return error if isinstance(error, Exception) else GivenUpError()

    def close(self) -> None:
        """End the threads after the calls that are queued; no further call may be made."""
        with self._lock:
            self._closed = True
            for _ in range(self._started):
                self._jobs.put(None)
