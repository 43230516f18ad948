"""Connections to a service."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import count
from types import TracebackType
from typing import Any

import msgspec
import zmq

from fdcache.errors import ProtocolError, RefusedError, ServiceUnavailableError
from fdcache.service.wire.address import SCHEME, socket_path
from fdcache.service.wire.protocol import (
    MAX_FRAME,
    Answer,
    Ask,
    Refused,
    Request,
    Told,
    decode_answer,
    encode_request,
)

_HIGH_WATER_MARK = 1024


class Connection:
    """A DEALER socket and the numbers of what was asked on it. It connects, and reconnects, by itself."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.session = 0
        self._numbers = count(1)
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self.socket.connect(f"{SCHEME}{socket_path(address)}")

    def send(self, body: Request) -> int:
        """Send without waiting; returns the number of the request. Raises ``ServiceUnavailableError``."""
        number = next(self._numbers)
        try:
            self.socket.send(encode_request(self.session, number, body), zmq.NOBLOCK)
        except zmq.Again as error:
            raise ServiceUnavailableError(f"{self.address}: nobody takes messages there") from error
        return number

    def receive(self, timeout: float) -> tuple[int, Answer] | None:
        """The next answer or notice; None when none came within ``timeout`` seconds."""
        if not self.socket.poll(max(0, int(timeout * 1000))):
            return None
        return decode_answer(self.socket.recv())

    def call(self, body: Request, timeout: float) -> tuple[Answer, list[Answer]]:
        """Ask and wait; also what else came meanwhile: late answers to questions given up before.

        Raises ``ServiceUnavailableError`` when no answer came in time, ``RefusedError`` when it was a refusal.
        """
        deadline = time.monotonic() + timeout
        number = self.send(body)
        others: list[Answer] = []
        while (left := deadline - time.monotonic()) > 0 and (got := self.receive(left + 0.001)) is not None:
            if got[0] != number:
                others.append(got[1])
                continue
            if isinstance(got[1], Refused):
                raise RefusedError(got[1].code, got[1].message)
            return got[1], others
        raise ServiceUnavailableError(
            f"{self.address}: no answer within {timeout:g} s; is `fdcache serve` running there?"
        )

    def close(self) -> None:
        """Hang up."""
        self.socket.close()


Argument = str | int | float | bool | list[str] | None


class Client:
    """Asks the service at ``address``. Calls may come from several threads, one at a time goes out.

    Raises ``ServiceUnavailableError`` when no answer comes within ``timeout`` seconds, ``RefusedError`` for a
    question that the service does not take.
    """

    def __init__(self, address: str, *, timeout: float = 5.0) -> None:
        self.address = address
        self._timeout = timeout
        self._line = Connection(address)
        self._lock = threading.Lock()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, what: str, **arguments: Argument) -> Any:
        """The JSON value that the service answers to a question or command."""
        with self._lock:
            answer, _ = self._line.call(Ask(what, arguments), self._timeout)
        if not isinstance(answer, Told):
            raise ProtocolError(f"{what} was answered by {type(answer).__name__}")
        return msgspec.json.decode(answer.value)

    def close(self) -> None:
        """Hang up."""
        self._line.close()


class AsyncClient:
    """``Client`` for asyncio: each question is asked in a thread, so that the event loop goes on meanwhile."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def ask(self, what: str, **arguments: Argument) -> Any:
        """As ``Client.ask``."""
        return await asyncio.to_thread(self._client.ask, what, **arguments)

    async def close(self) -> None:
        """As ``Client.close``."""
        await asyncio.to_thread(self._client.close)
