"""Route OpenAI's API to prefill and decode engines of vLLM with FdcacheConnector.

    python -m examples.openai_router --prefill http://node-1:8100 http://node-2:8100 --decode http://node-3:8200

A request goes to the prefill engine with the least to do, which answers with one token and the parameters of the
hand-over, and with these to a decode engine. An engine that fails costs time and no request: another one is asked, and
without any prefill engine decode computes the prompt. An engine that decode has lost in the middle of a stream ends it.
An engine that is stopped, or whose machine is gone without a word, gets no new requests, and keeps those that it has
until its connections end.
With --at-once decode is asked together with a prefill engine that has handed over before, and waits for its blocks.

    GET  /health            200 while a decode engine answers
    GET  /engines           role, state and requests in flight of each engine
    POST /engines/drain     ?url=...: no new requests; /engines/resume takes it back

Needs httpx beside fdcache.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from fdcache.integrations.vllm.handover import ADDRESSES, ASKED_OF_PREFILL, TRANSFER_ID

log = logging.getLogger("openai_router")

_CHECK_SECONDS, _CHECK_TIMEOUT, _CONNECT_TIMEOUT = 2.0, 5.0, 5.0
_OF_DECODE = ("stream", "stream_options", "min_tokens", "max_completion_tokens", "n", "best_of")
"""Fields that would make prefill answer with more than a token."""
_PARAMETERS = "kv_transfer_params"
_OF_ROUTERS = ("do_remote_", "remote_", TRANSFER_ID)
"""How the names of parameters begin that say who reads from whom."""


@dataclass(eq=False)
class Engine:
    """An engine and what the router knows of it."""

    url: str
    role: str
    is_up: bool = True
    is_draining: bool = False
    in_flight: int = 0
    addresses: list[str] | None = None
    """At which a prefill engine answers peers, as it has told with a hand-over."""

    @property
    def is_usable(self) -> bool:
        """True if it takes requests."""
        return self.is_up and not self.is_draining


class RefusedError(Exception):
    """An engine has answered that the request is wrong: it is for no other engine either."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(str(answer.status_code))
        self.answer = answer


class Router:
    """Chooses engines, and tries others when one fails."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], *, at_once: bool = False) -> None:
        self.at_once = at_once
        self._ahead: set[asyncio.Task[object]] = set()
        urls = {"prefill": prefill, "decode": decode}
        self.engines = [Engine(url.rstrip("/"), role) for role, of_role in urls.items() for url in of_role]
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.client = httpx.AsyncClient(timeout=timeout, limits=limits)

    def engines_at(self, url: str) -> list[Engine]:
        """Return the engine at an address, in each of its roles. Raises ``HTTPException``."""
        found = [each for each in self.engines if each.url == url.rstrip("/")]
        if not found:
            raise HTTPException(404, f"no engine at {url}")
        return found

    def choose(self, role: str, tried: Sequence[Engine]) -> Engine | None:
        """Return the engine of a role with the least to do that was not tried yet."""
        usable = [each for each in self.engines if each.role == role and each.is_usable and each not in tried]
        return min(usable, key=lambda each: each.in_flight, default=None)

    async def check(self) -> None:
        """Ask every engine for its health, for ever."""
        while True:
            await asyncio.gather(*(self._check(each) for each in self.engines))
            await asyncio.sleep(_CHECK_SECONDS)

    async def _check(self, engine: Engine) -> None:
        try:
            answer = await self.client.get(f"{engine.url}/health", timeout=_CHECK_TIMEOUT)
            is_up = answer.status_code < 500
        except httpx.HTTPError:
            is_up = False
        if is_up != engine.is_up:
            log.warning("%s engine %s is %s", engine.role, engine.url, "up" if is_up else "down")
        engine.is_up = is_up
        if not is_up:
            engine.addresses = None

    def failed(self, engine: Engine, reason: object) -> None:
        """Ask an engine for nothing until it is healthy again."""
        log.warning("%s engine %s failed: %s", engine.role, engine.url, reason)
        engine.is_up, engine.addresses = False, None

    def begin_prefill(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any] | None:
        """Let a prompt be computed; return the parameters with which decode waits for it, None if it cannot.

        Decode computes the prompt itself if prefill has not handed it over in about twice the time of that.
        """
        engine = self.choose("prefill", ())
        if not self.at_once or engine is None or engine.addresses is None:
            return None
        name = uuid.uuid4().hex
        engine.in_flight += 1  # now, so that the next request sees it
        task = asyncio.create_task(self._prefill_ahead(engine, path, body, headers, {TRANSFER_ID: name}))
        self._ahead.add(task)
        task.add_done_callback(self._ahead.discard)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            TRANSFER_ID: name,
            ADDRESSES: engine.addresses,
        }

    async def _prefill_ahead(self, engine: Engine, *asked: Any) -> None:
        """Let the engine compute a prompt for which decode waits: no other would have it under that name."""
        try:
            with suppress(RefusedError):  # decode refuses it as well
                await self._ask(engine, *asked)
        except (httpx.HTTPError, ValueError) as error:
            self.failed(engine, error)
        finally:
            engine.in_flight -= 1

    async def prefill(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any] | None:
        """Compute a prompt; return the parameters for decode, None if no engine has computed it.

        Raises ``RefusedError``.
        """
        tried: list[Engine] = []
        while (engine := self.choose("prefill", tried)) is not None:
            tried.append(engine)
            engine.in_flight += 1
            try:
                return await self._ask(engine, path, body, headers)
            except (httpx.HTTPError, ValueError) as error:
                self.failed(engine, error)
            finally:
                engine.in_flight -= 1
        return None

    async def _ask(
        self,
        engine: Engine,
        path: str,
        body: dict[str, Any],
        headers: dict[str, str],
        named: dict[str, str] | None = None,
    ) -> dict[str, Any] | None:
        """Let an engine compute a prompt, under a name if decode waits for it; return the parameters for decode.

        Raises ``RefusedError`` for a wrong request, ``HTTPError`` or ``ValueError`` for an engine that fails.
        """
        asked = {name: value for name, value in body.items() if name not in _OF_DECODE}
        given = body.get(_PARAMETERS) or {}
        asked |= {"max_tokens": 1, _PARAMETERS: {**given, **ASKED_OF_PREFILL, **(named or {})}}
        answer = await self.client.post(f"{engine.url}{path}", json=asked, headers=headers)
        if 400 <= answer.status_code < 500:
            raise RefusedError(answer)
        answer.raise_for_status()
        parameters: dict[str, Any] | None = answer.json().get(_PARAMETERS)
        engine.addresses = (parameters or {}).get(ADDRESSES, engine.addresses)
        return parameters

    @asynccontextmanager
    async def decode(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> AsyncIterator[httpx.Response]:
        """Open the answer of a decode engine, of another if one fails before it answers.

        Raises ``HTTPException`` without any.
        """
        tried: list[Engine] = []
        while (engine := self.choose("decode", tried)) is not None:
            tried.append(engine)
            engine.in_flight += 1
            try:
                request = self.client.build_request("POST", f"{engine.url}{path}", json=body, headers=headers)
                try:
                    answer = await self.client.send(request, stream=True)
                except httpx.HTTPError as error:
                    self.failed(engine, error)
                    continue
                if answer.status_code >= 500 and self.choose("decode", tried) is not None:
                    await answer.aclose()
                    self.failed(engine, answer.status_code)
                    continue
                try:
                    yield answer
                finally:
                    await answer.aclose()
                return
            finally:
                engine.in_flight -= 1
        raise HTTPException(503, "no decode engine answers")

    async def models(self, headers: dict[str, str]) -> Response:
        """Return the models of a decode engine, of another if one fails. Raises ``HTTPException`` without any."""
        while (engine := self.choose("decode", ())) is not None:
            try:
                answer = await self.client.get(
                    f"{engine.url}/v1/models", headers=headers, timeout=_CHECK_TIMEOUT
                )
            except httpx.HTTPError as error:
                self.failed(engine, error)
            else:
                return Response(answer.content, answer.status_code, media_type="application/json")
        raise HTTPException(503, "no decode engine answers")

    async def answer(self, path: str, request: Request) -> Response:
        """Answer a request of a client."""
        body = await _body_of(request)
        headers = _headers_of(request)
        parameters = self.begin_prefill(path, dict(body), headers)
        try:
            parameters = parameters or await self.prefill(path, body, headers)
        except RefusedError as refused:
            return Response(refused.answer.content, refused.answer.status_code, media_type="application/json")
        if parameters:
            body[_PARAMETERS] = {**(body.get(_PARAMETERS) or {}), **parameters}
        opened = self.decode(path, body, headers)
        answer = await opened.__aenter__()

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.aiter_raw():
                    yield piece
            finally:  # also when the client goes meanwhile: decode then aborts the request
                await opened.__aexit__(None, None, None)

        kept = {
            name: value
            for name, value in answer.headers.items()
            if name in ("content-type", "content-encoding")
        }
        return StreamingResponse(pieces(), answer.status_code, kept)


def _headers_of(request: Request) -> dict[str, str]:
    """Return what engines are told of a client's headers: its name of the request, and its key."""
    headers = {"X-Request-Id": request.headers.get("X-Request-Id") or uuid.uuid4().hex}
    if (key := request.headers.get("Authorization")) is not None:
        headers["Authorization"] = key
    return headers


async def _body_of(request: Request) -> dict[str, Any]:
    """Return the body of a client's request, without words on hand-overs: those are the router's alone.

    A client that could say them would choose whom decode reads from. Raises ``HTTPException``.
    """
    try:
        body = await request.json()
    except ValueError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from error
    given = body.get(_PARAMETERS) if isinstance(body, dict) else None
    if not isinstance(body, dict) or not (given is None or isinstance(given, dict)):
        raise HTTPException(400, f"the body is not an object, or its {_PARAMETERS} is not")
    if given is not None:
        kept = {name: value for name, value in given.items() if not name.startswith(_OF_ROUTERS)}
        body[_PARAMETERS] = kept
    return body


def make_app(prefill: Sequence[str], decode: Sequence[str], *, at_once: bool = False) -> FastAPI:
    """Return the application of a router."""
    router = Router(prefill, decode, at_once=at_once)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        checks = asyncio.create_task(router.check())
        yield
        checks.cancel()
        await router.client.aclose()

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await router.answer("/v1/completions", request)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await router.answer("/v1/chat/completions", request)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return await router.models(_headers_of(request))

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if router.choose("decode", ()) is not None else 503)

    @app.get("/engines")
    async def engines() -> Response:
        return JSONResponse([{**vars(each), "is_usable": each.is_usable} for each in router.engines])

    @app.post("/engines/{action}")
    async def drain(action: str, url: str) -> Response:
        if action not in ("drain", "resume"):
            raise HTTPException(404, "drain or resume")
        engines = router.engines_at(url)
        for engine in engines:
            engine.is_draining = action == "drain"
        return JSONResponse([{**vars(engine), "is_usable": engine.is_usable} for engine in engines])

    return app


def _url(text: str) -> str:
    """Return the address of an engine. Raises ``ArgumentTypeError``."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no address: {error}; write http://host:port"
        ) from error
    if url.scheme not in ("http", "https") or not url.host:
        raise argparse.ArgumentTypeError(f"{text!r} is no address of an engine; write http://host:port")
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(prog="python -m examples.openai_router")
    parser.add_argument("--prefill", nargs="+", type=_url, required=True, metavar="URL")
    parser.add_argument("--decode", nargs="+", type=_url, required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--at-once", action="store_true", help="ask decode together with prefill")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO)
    app = make_app(options.prefill, options.decode, at_once=options.at_once)
    uvicorn.run(app, host=options.host, port=options.port)


if __name__ == "__main__":
    main()
