"""The page of the service at ``/``, and what it asks for: its record each second, blocks of a prompt, the tree."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, HTTPException, Query, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from msgspec import Struct, json

from fdcache.errors import RefusedError, ServiceUnavailableError
from fdcache.service.client.connection import Client
from fdcache.service.page import SCRIPTS, STYLES, asset, document
from fdcache.service.server.http_schema import returns
from fdcache.service.wire.page_views import ShownService
from fdcache.service.wire.views import BlockView
from fdcache.tiers.pool import TreeNode

MOST_STREAMS = 4
"""Limit of the pages that are shown at the same time."""
UPDATES = 15
"""Updates of a stream, one a second. It ends before its connection is too old, and the page opens the next one."""
_SECONDS = 1.0
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_KINDS = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}


class _Numbered(Struct):
    row: int


_numbered = json.Decoder(_Numbered)


def page_files() -> APIRouter:
    """Return the paths of the page itself, which tell nothing of the service and need no key."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def page() -> Response:
        return HTMLResponse(document(), headers=_HEADERS)

    @router.get("/page/{name:path}")
    async def file(name: str) -> Response:
        if name not in SCRIPTS + STYLES:
            raise HTTPException(404, "the page has no such file")
        return Response(asset(name), media_type=_KINDS[name.rpartition(".")[2]], headers=_HEADERS)

    return router


class PageData:
    """What the page shows: asked of the service, and passed on as it is."""

    def __init__(self, address: str, timeout: float) -> None:
        self._client = Client(address, timeout=timeout)
        self._streams = 0

    def ask(self, what: str, **arguments: Any) -> Response:
        """Return the service's answer. Raises ``HTTPException``."""
        try:
            answer = self._client.ask_json(what, arguments)
        except ServiceUnavailableError as error:
            raise HTTPException(503, str(error)) from error
        except RefusedError as error:
            raise HTTPException(503 if error.code == "busy" else 404, str(error)) from error
        return Response(answer, media_type="application/json")

    def stream(self, row: int) -> Response:
        """Return a stream of server-sent events. Raises ``HTTPException`` if there are too many."""
        if self._streams >= MOST_STREAMS:
            raise HTTPException(503, f"{MOST_STREAMS} pages are shown already; close one")
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._events(row), media_type="text/event-stream", headers=headers)

    async def _events(self, row: int) -> AsyncIterator[bytes]:
        self._streams += 1
        try:
            for _ in range(UPDATES):
                try:
                    shown = await to_thread.run_sync(self._client.ask_json, "page", {"row": row})
                except (ServiceUnavailableError, RefusedError):
                    return
                row = _numbered.decode(shown).row
                yield b"data: " + shown + b"\n\n"
                await asyncio.sleep(_SECONDS)
        finally:
            self._streams -= 1


def add_page_views(views: APIRouter, address: str, timeout: float) -> None:
    """Add the paths of what the page shows."""
    shown = PageData(address, timeout)

    @views.get("/v1/page", responses=returns(ShownService, "What the page shows."))
    def page(row: Annotated[int, Query(ge=0, lt=1 << 53)] = 0) -> Response:
        """Return what the page shows, with totals over time after the row with this number."""
        return shown.ask("page", row=row)

    @views.get("/v1/page/events", include_in_schema=False)
    async def page_events(row: Annotated[int, Query(ge=0, lt=1 << 53)] = 0) -> Response:
        """Stream the same as server-sent events, at most one a second."""
        return shown.stream(row)

    @views.get("/v1/block", responses=returns(list[BlockView], "Blocks."))
    def block(hash: Annotated[str, Query(pattern="^[0-9a-f]{4,64}$")]) -> Response:  # noqa: A002
        """Return the blocks whose hash begins so, and those that left."""
        return shown.ask("block", hash=hash)

    @views.get("/v1/tree", responses=returns(list[TreeNode], "Blocks, parents first."))
    def tree(
        limit: Annotated[int, Query(ge=1, le=10_000)] = 30,
        namespace: Annotated[str | None, Query(pattern="^[0-9a-f]{1,16}$")] = None,
    ) -> Response:
        """Return the hottest blocks, each with its ancestors."""
        return shown.ask("tree", limit=limit, namespace=namespace)
