"""HTTP: probes, metrics, views and commands. It asks the service over RPC, as any tool does."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field

from fdcache import __version__
from fdcache.errors import RefusedError, ServiceUnavailableError
from fdcache.hashing import tenant_key
from fdcache.service.client.connection import Client
from fdcache.service.server.http_control import VIEWS, add_control
from fdcache.service.server.http_page import add_page_views, page_files
from fdcache.service.server.http_schema import SCHEMAS, returns
from fdcache.service.server.metrics import render
from fdcache.service.wire.address import http_key_path
from fdcache.service.wire.client_views import ClientView
from fdcache.service.wire.page_views import ShownService
from fdcache.service.wire.views import BlockView, ConfigView, NamespaceView, ResetView, ServiceView
from fdcache.tiers.pool import TreeNode

_TIMEOUT = 5.0


class Failure(BaseModel):
    """Cause of a failed request."""

    detail: str


class State(BaseModel):
    """State of the service."""

    state: str


class ResetOrder(BaseModel):
    """Blocks to forget."""

    model_config = ConfigDict(extra="forbid", strict=True)

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
    403: {"model": Failure, "description": "A page of another site sent the request."},
    404: {"model": Failure, "description": "There is no such namespace, or no storage."},
    413: {"model": Failure, "description": "The body is too long."},
    421: {"model": Failure, "description": "Host is no name of this service."},
    503: {
        "model": Failure,
        "description": "The service does not answer, or too many requests are in progress.",
    },
}
_UNAUTHORIZED: dict[int | str, dict[str, Any]] = {
    401: {"model": Failure, "description": "The key is missing or wrong."}
}
_CONFLICT: dict[int | str, dict[str, Any]] = {
    409: {
        "model": Failure,
        "description": "Blocks are in flight, or the arguments are not those of one prefix: the detail names them.",
    }
}


_STATUS = {"unknown": 404, "malformed": 409}
"""By the code of a refusal; any other is 503."""


class _Api(FastAPI):
    """The application, whose OpenAPI schema has the records of ``service/wire/*views.py`` too."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI schema."""
        if not self.openapi_schema:
            views = [
                ServiceView,
                ShownService,
                NamespaceView,
                ClientView,
                TreeNode,
                BlockView,
                ConfigView,
                ResetView,
                *VIEWS,
            ]
            _, components = msgspec.json.schema_components(views, ref_template=SCHEMAS)
            super().openapi()["components"]["schemas"].update(components)
        assert self.openapi_schema is not None
        return self.openapi_schema


def _router(keys: tuple[str, ...], remedy: str) -> APIRouter:
    """Return a group of paths that need one of ``keys``; ``remedy`` tells how to send it."""

    def check_key(given: Credentials) -> None:
        text = given.credentials if given is not None else ""
        matches = [secrets.compare_digest(text.encode(), key.encode()) for key in keys]
        if not any(matches):
            raise HTTPException(401, remedy, headers={"WWW-Authenticate": "Bearer"})

    return APIRouter(dependencies=[Depends(check_key)], responses=_FAILURES | _UNAUTHORIZED)


def make_app(
    address: str, api_keys: tuple[str, ...], *, own_key: str | None = None, timeout: float = _TIMEOUT
) -> FastAPI:
    """Return the application for the service at ``address``.

    Commands need one of ``api_keys``, or ``own_key``, which only the service's user knows. Views and metrics need one
    if there are ``api_keys``.
    """
    client = Client(address, timeout=timeout)
    own = f"the key in {http_key_path(address)}"
    remedy = f"send {f'a key of FD_API_KEY, or {own},' if api_keys else own} as a Bearer token"
    commands = _router(api_keys if own_key is None else (*api_keys, own_key), remedy)
    views = APIRouter(
        dependencies=commands.dependencies if api_keys else (),
        responses=commands.responses if api_keys else _FAILURES,
    )

    def ask(what: str, **arguments: Any) -> Any:
        try:
            return client.ask(what, **arguments)
        except ServiceUnavailableError as error:
            raise HTTPException(503, str(error)) from error
        except RefusedError as error:
            raise HTTPException(_STATUS.get(error.code, 503), str(error)) from error

    app = _Api(
        title="fdcache",
        version=__version__,
        description="The KV cache service of a node.",
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
    )

    @app.exception_handler(UnicodeError)
    def not_text(request: Request, error: Exception) -> Response:
        return Response('{"detail":"not valid text"}', 422, media_type="application/json")

    @app.exception_handler(RequestValidationError)
    def not_valid(request: Request, error: RequestValidationError) -> Response:
        # What was sent is left out: JSON cannot repeat NaN, and it may be a secret.
        problems = [{name: each[name] for name in ("type", "loc", "msg")} for each in error.errors()]
        return JSONResponse({"detail": problems}, 422)

    @app.get("/healthz")
    async def healthz() -> State:
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

    @views.get("/metrics", response_class=Response)
    def metrics() -> Response:
        """Return the metrics in the Prometheus text format."""
        stats = msgspec.convert(ask("stats"), ServiceView)
        return Response(render(stats), media_type="text/plain; version=0.0.4; charset=utf-8")

    @views.get("/v1/stats", responses=returns(ServiceView, "The service."))
    def stats() -> dict[str, Any]:
        """Return the whole service."""
        return dict(ask("stats"))

    @views.get("/v1/namespaces", responses=returns(list[NamespaceView], "Namespaces."))
    def namespaces() -> list[dict[str, Any]]:
        """Return every namespace: the blocks of one model and rank count."""
        return list(ask("namespaces"))

    @views.get("/v1/clients", responses=returns(list[ClientView], "Clients."))
    def clients() -> list[dict[str, Any]]:
        """Return every registered client."""
        return list(ask("clients"))

    @views.get("/v1/config", responses=returns(ConfigView, "Settings."))
    def config() -> dict[str, Any]:
        """Return the settings in force; secrets are masked."""
        return dict(ask("config"))

    @commands.post("/v1/reset", responses=_CONFLICT | returns(ResetView, "Blocks reset."))
    def reset(order: ResetOrder) -> dict[str, Any]:
        """Forget blocks; 409 if clients are loading from them."""
        return _require_reset(order, dict(ask("reset", **_reset_arguments(order))))

    @commands.post("/v1/pause")
    def pause() -> State:
        """Find nothing in look-ups and grant no slots until resumed."""
        return State.model_validate(ask("pause"))

    @commands.post("/v1/resume")
    def resume() -> State:
        """End a pause."""
        return State.model_validate(ask("resume"))

    add_control(views, commands, ask, lambda view, description: _CONFLICT | returns(view, description))
    add_page_views(views, address, timeout)
    app.include_router(page_files())
    app.include_router(views)
    app.include_router(commands)
    return app
