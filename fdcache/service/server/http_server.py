"""Server of the HTTP application: its socket and thread, limits of its connections, and the key of its user."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn
from anyio.to_thread import current_default_thread_limiter
from uvicorn.protocols.http.h11_impl import H11Protocol

from fdcache.errors import ConfigurationError
from fdcache.service.server.http import make_app
from fdcache.service.server.http_address import is_loopback_number, require_keys
from fdcache.service.server.http_control import PREFIX_PATHS
from fdcache.service.server.http_guard import Guard
from fdcache.service.wire.address import http_key_path

log = logging.getLogger("fdcache.service.server")

MAX_CONNECTIONS = 128
STEP_SECONDS = 20.0
"""Time of a client for a request's head, then for its body and the answer, and between two requests."""
_KEEP_ALIVE_SECONDS = 5
_MAX_HEAD = 16 << 10
_BACKLOG = 128
_ACCEPTED_AT_ONCE = 4
"""asyncio accepts several times as many before it tells of the first; for a moment the limit is exceeded by them."""
_THREADS = 2
"""Threads that make answers. Each may hold the interpreter for 5 ms while engines wait."""
_START_TIMEOUT = 10.0
_LOG_SECONDS = 60.0


def most_connections() -> int:
    """Return the limit of connections, at most a quarter of the process's descriptors: the rest is for engines."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if descriptors < 0 else max(min(MAX_CONNECTIONS, descriptors // 4), 2)


class HttpConnection(H11Protocol):
    """A connection with a deadline, which gives way to a new one while it waits for its client."""

    _deadline: asyncio.TimerHandle | None = None
    _request: object = None

    @property
    def waits(self) -> bool:
        """True unless a whole request is here and its answer is being made: one that is not read waits too."""
        is_idle = self.cycle is None or self.cycle.response_complete or self.cycle.more_body
        return is_idle or self.flow.write_paused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, and end the connection that has waited longest for its client if there are too many."""
        super().connection_made(transport)
        self._begin_step()
        assert self.limit_concurrency is not None
        others = [each for each in self._open_connections() if each is not self]
        if len(others) + 1 >= self.limit_concurrency:
            waiting = [each for each in others if each.waits]
            min(waiting, key=HttpConnection._ends_at, default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client. A request whose head is complete begins a step."""
        super().data_received(data)
        if self.cycle is not self._request:
            self._request = self.cycle
            self._begin_step()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._begin_step()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._end_step()
        super().connection_lost(exc)

    def _open_connections(self) -> list[HttpConnection]:
        every = (each for each in self.connections if isinstance(each, HttpConnection))
        return [each for each in every if not each.transport.is_closing()]

    def _begin_step(self) -> None:
        self._end_step()
        self._deadline = self.loop.call_later(STEP_SECONDS, self.transport.abort)

    def _end_step(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def _ends_at(self) -> float:
        return self._deadline.when() if self._deadline is not None else 0.0


class _Server(uvicorn.Server):
    """A server that logs once a minute that it cannot accept connections; asyncio does so for each that waits."""

    _logged_at = -_LOG_SECONDS

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        asyncio.get_running_loop().set_exception_handler(self._on_error)
        current_default_thread_limiter().total_tokens = _THREADS
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "accept" not in context.get("message", ""):
            loop.default_exception_handler(context)
        elif (now := time.monotonic()) - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            log.warning("HTTP: connections cannot be accepted: %s", context.get("exception"))


class HttpServer:
    """The HTTP application of the service at ``address``, served by a thread.

    While it serves, the folder of the service's socket has the key of the service's user. Raises ``OSError`` for an
    address that is taken, ``ConfigurationError`` for one that other machines reach if there are no ``api_keys``.
    """

    def __init__(self, address: str, api_keys: tuple[str, ...], host: str, port: int) -> None:
        self.key_path = http_key_path(address)
        self._own_key = secrets.token_urlsafe(32)
        app = make_app(address, api_keys, own_key=self._own_key)
        self._socket = _listen(host, port)
        number = str(self._socket.getsockname()[0])
        require_keys(number, api_keys)  # the name may have had another address before
        config = uvicorn.Config(
            Guard(
                app,
                host.lower() if is_loopback_number(number) else None,
                (*api_keys, self._own_key),
                PREFIX_PATHS,
            ),
            http=HttpConnection,
            ws="none",
            workers=1,
            backlog=_ACCEPTED_AT_ONCE,
            limit_concurrency=most_connections(),
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            h11_max_incomplete_event_size=_MAX_HEAD,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            lifespan="off",
        )
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._run, name="fdcache-http", daemon=True)

    @property
    def port(self) -> int:
        """Port in use."""
        return int(self._socket.getsockname()[1])

    def start(self) -> None:
        """Write the key and start serving. Raises ``ConfigurationError`` if the key cannot be written."""
        _write_key(self.key_path, self._own_key)
        self._thread.start()
        deadline = time.monotonic() + _START_TIMEOUT
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Stop serving, close the socket and remove the key."""
        self._server.should_exit = True
        self._server.force_exit = True
        if self._thread.is_alive():
            self._thread.join(5.0)
            self.key_path.unlink(missing_ok=True)
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    """Bind a socket; uvicorn would end the process if the address is taken."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _write_key(path: Path, key: str) -> None:
    """Write the key for this user alone, in place of the one that a killed service left."""
    try:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{key}\n")
    except OSError as error:
        raise ConfigurationError(
            f"{path}: the key of HTTP cannot be written: {error.strerror}; make room there, or give --http off"
        ) from error
