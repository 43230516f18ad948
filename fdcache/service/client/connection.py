"""Connection to a service, and the clients of tools that ask it questions over one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from itertools import count
from types import TracebackType
from typing import Any

import msgspec
import zmq

from fdcache import tracing
from fdcache.errors import ProtocolError, RefusedError, ServiceUnavailableError
from fdcache.service.wire.address import SCHEME, socket_path
from fdcache.service.wire.protocol import (
    MAX_FRAME,
    Answer,
    Ask,
    Refused,
    Request,
    ToolAnswer,
    decode_answer,
    encode_request,
)

_HIGH_WATER_MARK = 1024
_RECONNECT_MS, _MAX_RECONNECT_MS = 20, 1000

Argument = str | int | float | bool | list[str] | None


class Connection:
    """A DEALER socket for one thread; it connects and reconnects by itself.

    ```python
    connection = Connection("ipc:///run/fdcache/fdcache.sock")
    answer, late = connection.call(Ask("stats"), timeout=2.0)
    ```

    ``session`` goes into the envelope of every request; 0 stands for none.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.session = 0
        self._numbers = count(1)
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        self.socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        self.socket.connect(f"{SCHEME}{socket_path(address)}")

    def send(self, body: Request) -> int:
        """Send a request without waiting and return its number.

        Raises ``ServiceUnavailableError`` when the queue of messages is full, or after ``close``.
        """
        if self.socket.closed:
            raise ServiceUnavailableError(f"{self.address}: the connection is closed; make a new client")
        number = next(self._numbers)
        try:
            self.socket.send(encode_request(self.session, number, body), zmq.NOBLOCK)
        except zmq.Again as error:
            raise ServiceUnavailableError(
                f"{self.address}: the service is unreachable, or its queue is full"
            ) from error
        return number

    def receive(self, timeout: float) -> tuple[int, Answer] | None:
        """Return the next answer or notice, or None when none arrived within ``timeout`` seconds."""
        if not self.socket.poll(max(0, int(timeout * 1000))):
            return None
        return decode_answer(self.socket.recv())

    def call(self, body: Request, timeout: float) -> tuple[Answer, list[Answer]]:
        """Send a request and wait for its answer; also return late answers to earlier requests.

        ``timeout`` is the time for each part of an answer that comes in parts. Raises ``ServiceUnavailableError`` when
        none arrived in time, ``RefusedError`` when it was a refusal.
        """
        if tracing.spans is None:
            return self._call(body, timeout)
        began = time.time_ns()
        try:
            return self._call(body, timeout)
        finally:
            tracing.spans.called(type(body).__name__.lower(), began)

    def _call(self, body: Request, timeout: float) -> tuple[Answer, list[Answer]]:
        deadline = time.monotonic() + timeout
        number = self.send(body)
        late: list[Answer] = []
        parts: list[bytes] = []
        while (left := deadline - time.monotonic()) > 0 and (got := self.receive(left + 0.001)) is not None:
            if got[0] != number:
                late.append(got[1])
                continue
            if isinstance(got[1], Refused):
                raise RefusedError(got[1].code, got[1].message)
            if not isinstance(got[1], ToolAnswer):
                return got[1], late
            parts.append(got[1].value)
            if not got[1].more:
                return ToolAnswer(b"".join(parts)), late
            deadline = time.monotonic() + timeout
        raise ServiceUnavailableError(
            f"{self.address}: no answer within {timeout:g} s; is `fdcache serve` running?"
        )

    def close(self) -> None:
        """Close the socket. Calling it again is harmless."""
        self.socket.close()


class Client:
    """Client of a tool.

    ```python
    with Client("ipc:///run/fdcache/fdcache.sock") as client:
        print(client.ask("stats"))
    ```

    Threads may share it; their questions are asked one at a time.
    """

    def __init__(self, address: str, *, timeout: float = 5.0) -> None:
        self.address = address
        self._timeout = timeout
        self._connection = Connection(address)
        self._lock = threading.Lock()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, what: str, **arguments: Argument) -> Any:
        """Ask a question, or give a command, and return the JSON value of the answer.

        Raises ``ServiceUnavailableError`` when no answer arrives in time, ``RefusedError`` for a question that the
        service does not know.
        """
        return msgspec.json.decode(self.ask_json(what, arguments))

    def ask_json(self, what: str, arguments: Mapping[str, Argument]) -> bytes:
        """Do as ``ask``, and return the answer as it came, JSON."""
        if not self._lock.acquire(timeout=self._timeout):
            raise ServiceUnavailableError(
                f"{self.address}: other questions of this client have waited for {self._timeout:g} s"
            )
        try:
            answer, _ = self._connection.call(Ask(what, dict(arguments)), self._timeout)
        finally:
            self._lock.release()
        if not isinstance(answer, ToolAnswer):
            raise ProtocolError(f"expected the answer to {what!r}, got {type(answer).__name__}")
        return answer.value

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class AsyncClient:
    """``Client`` for asyncio: each question is asked in a thread, so that the event loop is not blocked."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def ask(self, what: str, **arguments: Argument) -> Any:
        """See ``Client.ask``."""
        return await asyncio.to_thread(self._client.ask, what, **arguments)

    async def close(self) -> None:
        """See ``Client.close``."""
        await asyncio.to_thread(self._client.close)
