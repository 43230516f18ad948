"""HTTP: probes, metrics, views and three commands. It asks the service over RPC, as any tool does."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from typing import Annotated, Any, Literal

import msgspec
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field

from fdcache import __version__
from fdcache.errors import RefusedError, ServiceUnavailableError
from fdcache.hashing import tenant_key
from fdcache.service.client.connection import Client
from fdcache.service.server.metrics import render
from fdcache.service.wire.client_views import ClientView
from fdcache.service.wire.views import ConfigView, NamespaceView, ResetView, ServiceView, TreeNode

_TIMEOUT = 5.0
_START_TIMEOUT = 10.0
_SCHEMAS = "#/components/schemas/{name}"


class Failure(BaseModel):
    """Cause of a failed request."""

    detail: str


class State(BaseModel):
    """State of the service."""

    state: str


class ResetOrder(BaseModel):
    """Blocks to forget."""

    model_config = ConfigDict(extra="forbid")

    tier: Literal["host", "storage", "device", "all"] = "all"
    namespace: str | None = Field(None, pattern="^[0-9a-f]{1,16}$", description="Beginning of its name.")
    tenant: str | None = Field(
        None, max_length=1000, description="Name of a tenant; device tiers are left alone."
    )
    older_than: float | None = Field(
        None,
        ge=0,
        le=1e12,
        description="Only blocks unused for so many seconds; device tiers are left alone.",
    )
    in_flight: Literal["keep", "refuse", "drain"] = Field(
        "refuse",
        description="Loads from a host tier: reset anyway, refuse with 409, or let look-ups find nothing for 2 s and "
        "refuse; repeat the request until the loads have ended.",
    )
    dry_run: bool = Field(False, description="Only count the blocks.")


def _reset_arguments(order: ResetOrder) -> dict[str, Any]:
    if order.tier == "device" and (order.tenant is not None or order.older_than):
        raise HTTPException(409, "a device tier is reset as a whole; leave tenant and older_than out")
    key = None if order.tenant is None else tenant_key(order.tenant).hex()
    return {**order.model_dump(), "tenant": key, "tenant_name": order.tenant}


def _require_reset(order: ResetOrder, answer: dict[str, Any]) -> dict[str, Any]:
    if answer["in_flight"] and not order.dry_run:
        names = ", ".join(each["client"] for each in answer["in_flight"])
        raise HTTPException(
            409,
            f"nothing was reset: {names} are loading blocks; use in_flight drain, or keep to reset anyway",
        )
    return answer


Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
_FAILURES: dict[int | str, dict[str, Any]] = {
    401: {"model": Failure, "description": "The API key is missing or wrong."},
    404: {"model": Failure, "description": "There is no such namespace."},
    503: {"model": Failure, "description": "The service does not answer."},
}
_CONFLICT: dict[int | str, dict[str, Any]] = {
    409: {"model": Failure, "description": "Blocks are in flight, or the arguments contradict each other."}
}


def _returns(view: Any, description: str) -> dict[int | str, dict[str, Any]]:
    """Describe an answer by the schema of its record, which ``_Api`` adds to the components."""
    (schema,), _ = msgspec.json.schema_components([view], ref_template=_SCHEMAS)
    return {200: {"description": description, "content": {"application/json": {"schema": schema}}}}


class _Api(FastAPI):
    """The application, whose OpenAPI schema has the records of ``service/wire/*views.py`` too."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI schema."""
        if not self.openapi_schema:
            views = [ServiceView, NamespaceView, ClientView, TreeNode, ConfigView, ResetView]
            _, components = msgspec.json.schema_components(views, ref_template=_SCHEMAS)
            super().openapi()["components"]["schemas"].update(components)
        assert self.openapi_schema is not None
        return self.openapi_schema


def make_app(address: str, api_keys: tuple[str, ...], *, timeout: float = _TIMEOUT) -> FastAPI:
    """Return the application for the service at ``address``. Without keys, requests need none."""
    client = Client(address, timeout=timeout)

    def check_key(given: Credentials) -> None:
        text = given.credentials if given is not None else ""
        matches = [secrets.compare_digest(text.encode(), key.encode()) for key in api_keys]
        if not any(matches):
            raise HTTPException(
                401,
                "send a key of FD_API_KEY as a Bearer token",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def ask(what: str, **arguments: Any) -> Any:
        try:
            return client.ask(what, **arguments)
        except ServiceUnavailableError as error:
            raise HTTPException(503, str(error)) from error
        except RefusedError as error:
            raise HTTPException(404, str(error)) from error

    app = _Api(title="fdcache", version=__version__, description="The KV cache service of a node.")
    failures = {code: each for code, each in _FAILURES.items() if api_keys or code != 401}
    guarded: dict[str, Any] = {"dependencies": [Depends(check_key)] if api_keys else []}

    @app.exception_handler(UnicodeError)
    def not_text(request: Request, error: Exception) -> Response:
        return Response('{"detail":"not valid text"}', 422, media_type="application/json")

    @app.get("/healthz")
    def healthz() -> State:
        """Return 200 while the process lives."""
        return State(state="alive")

    @app.get("/readyz", responses={503: {"model": Failure, "description": "Not ready."}})
    def readyz() -> State:
        """Return 200 if the service takes new clients and has loaded its storage index."""
        stats = ask("stats")
        state = stats["state"]
        if state == "loading":
            loaded = "{done} of {total} slots".format_map(stats["storage"]["loading"])
            raise HTTPException(503, f"loading the storage index: {loaded}")
        if state == "draining":
            raise HTTPException(503, state)
        return State(state=state)

    @app.get("/metrics", response_class=Response, responses=failures, **guarded)
    def metrics() -> Response:
        """Return the metrics in the Prometheus text format."""
        stats = msgspec.convert(ask("stats"), ServiceView)
        return Response(render(stats), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/stats", responses=failures | _returns(ServiceView, "The service."), **guarded)
    def stats() -> dict[str, Any]:
        """Return the whole service."""
        return dict(ask("stats"))

    @app.get("/v1/namespaces", responses=failures | _returns(list[NamespaceView], "Namespaces."), **guarded)
    def namespaces() -> list[dict[str, Any]]:
        """Return every namespace: the blocks of one model and rank count."""
        return list(ask("namespaces"))

    @app.get("/v1/clients", responses=failures | _returns(list[ClientView], "Clients."), **guarded)
    def clients() -> list[dict[str, Any]]:
        """Return every registered client."""
        return list(ask("clients"))

    @app.get("/v1/tree", responses=failures | _returns(list[TreeNode], "Blocks, parents first."), **guarded)
    def tree(
        limit: Annotated[int, Query(ge=1, le=1000)] = 30,
        namespace: Annotated[str | None, Query(pattern="^[0-9a-f]{1,16}$")] = None,
    ) -> list[dict[str, Any]]:
        """Return the hottest blocks, each with its ancestors."""
        return list(ask("tree", limit=limit, namespace=namespace))

    @app.get("/v1/config", responses=failures | _returns(ConfigView, "Settings."), **guarded)
    def config() -> dict[str, Any]:
        """Return the settings in force; secrets are masked."""
        return dict(ask("config"))

    @app.post("/v1/reset", responses=failures | _CONFLICT | _returns(ResetView, "Blocks reset."), **guarded)
    def reset(order: ResetOrder) -> dict[str, Any]:
        """Forget blocks; 409 if clients are loading from them."""
        return _require_reset(order, dict(ask("reset", **_reset_arguments(order))))

    @app.post("/v1/pause", responses=failures, **guarded)
    def pause() -> State:
        """Let look-ups find nothing, and grant no slots, until resumed."""
        return State.model_validate(ask("pause"))

    @app.post("/v1/resume", responses=failures, **guarded)
    def resume() -> State:
        """End a pause."""
        return State.model_validate(ask("resume"))

    return app


class HttpServer:
    """The application, served by a thread. Raises ``OSError`` if the address is taken."""

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        config = uvicorn.Config(
            app, host=host, port=port, log_level="warning", access_log=False, lifespan="off"
        )
        self._server = uvicorn.Server(config)
        _require_free(host, port)
        self._socket = config.bind_socket()
        self._thread = threading.Thread(target=self._run, name="fdcache-http", daemon=True)

    @property
    def port(self) -> int:
        """Port in use."""
        return int(self._socket.getsockname()[1])

    def start(self) -> None:
        """Start serving."""
        self._thread.start()
        deadline = time.monotonic() + _START_TIMEOUT
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Stop serving and close the socket."""
        self._server.should_exit = True
        self._server.force_exit = True
        if self._thread.is_alive():
            self._thread.join(5.0)
        self._socket.close()


def _require_free(host: str, port: int) -> None:
    """Raise ``OSError`` for an address that is taken: uvicorn would end the process instead."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
