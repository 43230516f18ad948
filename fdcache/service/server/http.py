"""HTTP: probes, metrics, read-only views, and three commands. It asks the service as any tool does."""

from __future__ import annotations

import secrets
import threading
import time
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field

from fdcache import __version__
from fdcache.errors import RefusedError, ServiceUnavailableError
from fdcache.hashing import tenant_key
from fdcache.service.client.connection import Client
from fdcache.service.server.metrics import render

_TIMEOUT = 5.0
_START_TIMEOUT = 10.0


class Failure(BaseModel):
    """What went wrong."""

    detail: str


class State(BaseModel):
    """What the service is doing."""

    state: str


class ResetOrder(BaseModel):
    """What to forget."""

    model_config = ConfigDict(extra="forbid")

    tier: Literal["host", "storage", "device", "all"] = "all"
    namespace: str | None = Field(None, pattern="^[0-9a-f]{1,16}$")
    tenant: str | None = Field(None, max_length=1000, description="Its name; device tiers are left alone.")
    older_than: float | None = Field(None, ge=0, le=1e12, description="Seconds; device tiers are left alone.")
    in_flight: Literal["keep", "refuse", "drain"] = Field(
        "refuse",
        description="Of a host tier; drain: look-ups find nothing for 2 s, ask again until it is done.",
    )
    dry_run: bool = False


def _reset_arguments(order: ResetOrder) -> dict[str, Any]:
    if order.tier == "device" and (order.tenant is not None or order.older_than):
        raise HTTPException(
            409, "a device tier forgets everything or nothing; leave tenant and older_than out"
        )
    key = None if order.tenant is None else tenant_key(order.tenant).hex()
    return {**order.model_dump(), "tenant": key, "tenant_name": order.tenant}


def _unless_in_flight(order: ResetOrder, answer: dict[str, Any]) -> dict[str, Any]:
    if answer["in_flight"] and not order.dry_run:
        names = ", ".join(each["client"] for each in answer["in_flight"])
        raise HTTPException(409, f"nothing was forgotten: {names} are loading blocks; drain, or keep")
    return answer


Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
_CONFLICT: dict[str, Any] = {"model": Failure, "description": "It cannot be done now, or not so."}
_FAILURES: dict[int | str, dict[str, Any]] = {
    401: {"model": Failure, "description": "The key is missing or wrong."},
    404: {"model": Failure, "description": "There is no such thing."},
    503: {"model": Failure, "description": "The service does not answer."},
}


def make_app(address: str, api_keys: tuple[str, ...], *, timeout: float = _TIMEOUT) -> FastAPI:
    """The application for the service at ``address``; without keys nobody is asked for one."""
    client = Client(address, timeout=timeout)

    def check_key(given: Credentials) -> None:
        text = given.credentials if given is not None else ""
        matches = [secrets.compare_digest(text.encode(), key.encode()) for key in api_keys]
        if not any(matches):
            raise HTTPException(
                401, "give a key of FD_API_KEY as a Bearer token", headers={"WWW-Authenticate": "Bearer"}
            )

    def ask(what: str, **arguments: Any) -> Any:
        try:
            return client.ask(what, **arguments)
        except ServiceUnavailableError as error:
            raise HTTPException(503, str(error)) from error
        except RefusedError as error:
            raise HTTPException(404, str(error)) from error

    app = FastAPI(title="fdcache", version=__version__, description="The node-wide cache service.")
    guarded: dict[str, Any] = {
        "dependencies": [Depends(check_key)] if api_keys else [],
        "responses": _FAILURES if api_keys else {503: _FAILURES[503], 404: _FAILURES[404]},
    }

    conflicting = {**guarded, "responses": guarded["responses"] | {409: _CONFLICT}}

    @app.exception_handler(UnicodeError)
    def not_text(request: Request, error: Exception) -> Response:
        return Response('{"detail":"not valid text"}', 422, media_type="application/json")

    @app.get("/healthz")
    def healthz() -> State:
        """Whether the process lives."""
        return State(state="alive")

    @app.get("/readyz", responses={503: {"model": Failure, "description": "Not ready."}})
    def readyz() -> State:
        """Whether the service takes new clients and knows what its storage holds."""
        stats = ask("stats")
        state = stats["state"]
        if state == "loading":
            loaded = "{done} of {total} slots".format_map(stats["storage"]["loading"])
            raise HTTPException(503, f"loading the storage index: {loaded}")
        if state == "draining":
            raise HTTPException(503, state)
        return State(state=state)

    @app.get("/metrics", response_class=Response, **guarded)
    def metrics() -> Response:
        """Figures in the Prometheus text format."""
        return Response(render(ask("stats")), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/stats", **guarded)
    def stats() -> dict[str, Any]:
        """The whole service in figures."""
        return dict(ask("stats"))

    @app.get("/v1/namespaces", **guarded)
    def namespaces() -> list[dict[str, Any]]:
        """One entry for each layout."""
        return list(ask("namespaces"))

    @app.get("/v1/clients", **guarded)
    def clients() -> list[dict[str, Any]]:
        """One entry for each client."""
        return list(ask("clients"))

    @app.get("/v1/tree", **guarded)
    def tree(
        limit: Annotated[int, Query(ge=1, le=1000)] = 30,
        namespace: Annotated[str | None, Query(pattern="^[0-9a-f]{1,16}$")] = None,
    ) -> list[dict[str, Any]]:
        """The hottest blocks, each with its ancestors."""
        return list(ask("tree", limit=limit, namespace=namespace))

    @app.get("/v1/config", **guarded)
    def config() -> dict[str, Any]:
        """The settings in force, secrets masked."""
        return dict(ask("config"))

    @app.post("/v1/reset", **conflicting)
    def reset(order: ResetOrder) -> dict[str, Any]:
        """Forget blocks; 409 when something in flight stands against it."""
        return _unless_in_flight(order, dict(ask("reset", **_reset_arguments(order))))

    @app.post("/v1/pause", **guarded)
    def pause() -> State:
        """Find nothing and grant nothing until resumed."""
        return State.model_validate(ask("pause"))

    @app.post("/v1/resume", **guarded)
    def resume() -> State:
        """Go on."""
        return State.model_validate(ask("resume"))

    return app


class HttpServer:
    """The application in a thread of its own. Raises ``OSError`` at ``start`` for an address that is taken."""

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        config = uvicorn.Config(
            app, host=host, port=port, log_level="warning", access_log=False, lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._socket = config.bind_socket() if _is_free(host, port) else None
        self._thread = threading.Thread(target=self._run, name="fdcache-http", daemon=True)

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self._socket.getsockname()[1]) if self._socket is not None else 0

    def start(self) -> None:
        """Serve from now on."""
        self._thread.start()
        deadline = time.monotonic() + _START_TIMEOUT
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _run(self) -> None:
        self._server.run(sockets=[self._socket] if self._socket is not None else None)

    def stop(self) -> None:
        """End it."""
        self._server.should_exit = True
        self._server.force_exit = True
        if self._thread.is_alive():
            self._thread.join(5.0)
        if self._socket is not None:
            self._socket.close()


def _is_free(host: str, port: int) -> bool:
    """Bind and let go: uvicorn would end the process for an address that is taken."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
    return True
