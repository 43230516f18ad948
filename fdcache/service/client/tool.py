"""Client: the small end of a service's line, for tools."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Any

import msgspec

from fdcache.errors import ProtocolError
from fdcache.service.wire.connection import Connection
from fdcache.service.wire.protocol import Ask, Told

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
