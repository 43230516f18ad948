"""MooncakeLink: one client of the store, the memory it knows, and whether anybody answers.

The client takes no deadline: with a master or a node that is stopped a call lasts up to a minute. So each is made on a
lane of its own and given up at its deadline, which opens the circuit breaker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from fdcache.errors import StorageError, StorageGoneError
from fdcache.storage.breaker import CircuitBreaker
from fdcache.storage.call_lane import CallLane, CallOverdueError, LaneBlockedError
from fdcache.storage.mooncake_client import ClientOptions, connect

_REACH_SECONDS = 1.0

T = TypeVar("T")


class MooncakeLink:
    """The client that ``options`` describe. Without a master it is out of use, and tries again now and then.

    ``timeout``: seconds that setting a client up may take. Raises ``ConnectorNotFoundError`` without its package.
    """

    def __init__(self, options: ClientOptions, breaker: CircuitBreaker, timeout: float) -> None:
        self.breaker = breaker
        self._options = options
        self._timeout = timeout
        self._lock = threading.Lock()
        self._regions: list[tuple[int, int]] = []
        self._client: Any = None
        self._closed = False
        self._setup = CallLane("fdcache-mooncake-setup")
        self._questions = CallLane("fdcache-mooncake")

    @property
    def is_up(self) -> bool:
        """Whether there is a client, and nothing was wrong with it last time."""
        return self._client is not None and self.breaker.reason is None

    @property
    def client(self) -> Any:
        """The client; to be asked for after ``reach``."""
        return self._client

    def reach(self) -> str | None:
        """Make sure there is a client; returns why there is none."""
        with self._lock:
            if self._closed:
                return "mooncake: closed"
            if (reason := self.breaker.refuses()) is not None:
                return reason
            if self._client is None:
                try:
                    self._client = self._connect()
                except StorageGoneError as error:
                    self.breaker.failed(str(error))
                    return str(error)
                for region in self._regions:
                    self._register(*region)
            return None

    def _connect(self) -> Any:
        try:
            return self._setup.ask(partial(connect, self._options, _REACH_SECONDS), self._timeout)
        except CallOverdueError as error:
            error.call.add_done_callback(_dismiss)
            raise StorageGoneError(self._unanswered(self._timeout)) from None
        except LaneBlockedError as error:
            raise StorageGoneError(f"mooncake: {error}") from None

    def register(self, address: int, nbytes: int) -> None:
        """Make memory known to the client, now and whenever there is a new one. Raises ``StorageError``."""
        with self._lock:
            self._regions.append((address, nbytes))
            if self._client is not None:
                self._register(address, nbytes)

    def unregister(self, address: int, nbytes: int) -> None:
        """Let the client forget memory that it was told of."""
        with self._lock:
            self._regions.remove((address, nbytes))
            if self._client is not None:
                self._client.unregister_buffer(address)

    def _register(self, address: int, nbytes: int) -> None:
        code = self._client.register_buffer(address, nbytes)
        if code:
            raise StorageError(f"mooncake: {nbytes} bytes of host records cannot be registered (code {code})")

    def ask(self, question: Callable[[Any], T], timeout: float) -> T:
        """A call of the client that touches no memory of ours. Raises ``StorageGoneError`` when no answer comes."""
        try:
            return self._questions.ask(partial(question, self._client), timeout)
        except (CallOverdueError, LaneBlockedError):
            reason = self._unanswered(timeout)
            self.breaker.failed(reason)
            raise StorageGoneError(reason) from None

    @staticmethod
    def _unanswered(timeout: float) -> str:
        return f"mooncake: no answer within {timeout:.3g} s"

    def close(self) -> None:
        """Leave the store; what this client's memory held of it goes with it. Calls that use memory have ended."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            client, self._client = self._client, None
        self._setup.close()
        self._questions.close()
        if client is not None:
            for address, _ in self._regions:
                client.unregister_buffer(address)
            client.close()


def _dismiss(setup: Future[Any]) -> None:
    """A client that came too late: nobody waits for it any more."""
    with suppress(StorageGoneError):
        setup.result().close()
