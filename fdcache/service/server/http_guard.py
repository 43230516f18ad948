"""What is refused before the application sees a request: strange hosts, other sites' pages, long bodies, too many."""

from __future__ import annotations

from collections.abc import Sequence, Set
from secrets import compare_digest
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fdcache.service.server.http_address import is_loopback_number

MAX_BODY = 64 << 10
"""Limit of a request's body in bytes; the longest order to reset takes 4 KiB."""
MAX_PROMPT = 10 << 20
"""Limit of a body with a prompt, of a client that has a key."""
MAX_REQUESTS = 16
"""Limit of the requests in progress; probes are served beyond it."""
_PROBES = frozenset({"/healthz", "/readyz"})


class Guard:
    """Passes requests on to an application, except those that it refuses.

    A body has at most ``MAX_BODY`` bytes, or ``MAX_PROMPT`` at the paths ``prompts`` with one of ``keys``.

    ``host`` is the name under which the service listens on loopback, and the only one besides ``localhost`` and the
    addresses of loopback that a request may ask for: a page whose name leads here cannot read. It is None where other
    machines reach the service, by any name, and every view and command needs a key.
    """

    def __init__(
        self, app: ASGIApp, host: str | None, keys: Sequence[str] = (), prompts: Set[str] = frozenset()
    ) -> None:
        self._app = app
        self._host = host
        self._keys = keys
        self._prompts = prompts
        self._in_progress = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            return
        try:
            headers = Headers(scope=scope)
            limit = MAX_PROMPT if scope["path"] in self._prompts and self._has_key(headers) else MAX_BODY
            self._check(headers, limit)
            body = await _read(receive, limit)
            is_counted = scope["path"] not in _PROBES
            if is_counted and self._in_progress >= MAX_REQUESTS:
                raise HTTPException(
                    503, f"{MAX_REQUESTS} requests are in progress; try again", {"Retry-After": "1"}
                )
        except HTTPException as refusal:
            more = {**(refusal.headers or {}), "Connection": "close"}  # what follows is not read
            await JSONResponse({"detail": refusal.detail}, refusal.status_code, more)(scope, receive, send)
            return
        if is_counted:
            await self._serve_counted(scope, _after(body, receive), send)
        else:
            await self._app(scope, _after(body, receive), send)

    async def _serve_counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that is in progress until its answer is made: its client may read that slowly, or never."""
        is_in_progress = True

        def end() -> None:
            nonlocal is_in_progress
            self._in_progress -= is_in_progress
            is_in_progress = False

        async def send_made(message: Message) -> None:
            end()
            await send(message)

        self._in_progress += 1
        try:
            await self._app(scope, receive, send_made)
        finally:
            end()

    def _has_key(self, headers: Headers) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        matches = [compare_digest(given.encode(), key.encode()) for key in self._keys]
        return kind.lower() == "bearer" and any(matches)

    def _check(self, headers: Headers, limit: int) -> None:
        """Raise ``HTTPException`` for a request that no client of the service sends."""
        host, origin = headers.get("host"), headers.get("origin")
        if self._host is not None and host is not None and not self._is_own(host):
            raise HTTPException(421, "Host: name the service by its address, such as 127.0.0.1")
        is_foreign = origin is not None and (host is None or _host_of(origin) != host.lower())
        if is_foreign or _is_embedded(headers):
            raise HTTPException(403, "Origin: pages of other sites may not send requests")
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdecimal()) or int(length) > limit:
            raise _too_long(limit)

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        return name in {"localhost", self._host} or is_loopback_number(name or "")


def _is_embedded(headers: Headers) -> bool:
    """Return True if a browser says that a page of another site asks, and not a user who follows a link."""
    by_others = headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}
    return by_others and headers.get("sec-fetch-mode") != "navigate"


def _host_of(url: str) -> str:
    """Return host and port of a URL, empty if there are none."""
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""


def _too_long(limit: int) -> HTTPException:
    return HTTPException(413, f"the body is longer than {limit} bytes")


async def _read(receive: Receive, limit: int) -> bytes:
    """Return the body. Raises ``HTTPException`` if it is too long, or its client is gone."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HTTPException(400, "the client is gone")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit:
            raise _too_long(limit)
    return body


def _after(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that begins with a body that was read already."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
