"""CallLane: calls into a library that neither takes a deadline nor can be interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class CallOverdueError(Exception):
    """The call was given up at its deadline; ``call`` ends by itself, and uses its memory until then."""

    def __init__(self, call: Future[Any]) -> None:
        super().__init__("no answer before the deadline")
        self.call = call


class LaneBlockedError(Exception):
    """An earlier call, given up long ago, has still not returned."""


class CallLane:
    """One call at a time, on a thread of its own, for which its caller waits no longer than it wants to.

    While a call that was given up is still under way, the lane refuses all others at once: whatever they share,
    its memory first of all, is still in use.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._turn = threading.Lock()
        self._overdue: Future[Any] | None = None

    @contextmanager
    def turn(self, timeout: float) -> Iterator[None]:
        """The right to make calls. Raises ``LaneBlockedError`` when it cannot be had."""
        if not self._turn.acquire(timeout=timeout):
            raise LaneBlockedError("other calls took all the time there was")
        try:
            if self._overdue is not None and not self._overdue.done():
                raise LaneBlockedError("an earlier call has not returned yet")
            yield
        finally:
            self._turn.release()

    def call(self, function: Callable[[], T], timeout: float) -> T:
        """Make a call, in one's turn. Raises ``CallOverdueError`` after ``timeout`` seconds without its end."""
        future = self._thread.submit(function)
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done():
                return future.result()
            self._overdue = future
            raise CallOverdueError(future) from None

    def ask(self, function: Callable[[], T], timeout: float) -> T:
        """A turn with one call in it. Raises what both raise."""
        with self.turn(timeout):
            return self.call(function, timeout)

    def close(self) -> None:
        """Wait for the call under way; there may be no more."""
        self._thread.shutdown()
