"""HTTP: probes, API keys, views, commands, and answers that conform to the OpenAPI schema."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings

from fdcache.service.server.http import make_app
from tests.service_engine import PROMPT, Engine
from tests.service_help import LocalService, local_service, until

KEY = "k" * 32
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    directory: Path = tmp_path_factory.mktemp("service")
    with local_service(directory) as running:
        yield running


@pytest.fixture
def web(tmp_path: Path) -> Iterator[TestClient]:
    """The application of a service with ten blocks."""
    with local_service(tmp_path) as own:
        engine = Engine(own.address)
        engine.serve(PROMPT)
        until(lambda: own.ask("stats")["tiers"]["host"]["ready"] == 10, "the blocks are stored")
        with TestClient(make_app(own.address, (), own_key=KEY), headers=BEARER) as client:
            yield client
        engine.close()


@pytest.fixture(scope="module")
def schemas(service: LocalService) -> dict[tuple[str, ...], Any]:
    """The OpenAPI schemas of the application without and with a key."""
    import schemathesis

    return {
        keys: schemathesis.openapi.from_asgi("/openapi.json", make_app(service.address, keys, own_key=KEY))
        for keys in ((), (KEY,))
    }


PATHS = [
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
    ("GET", "/v1/stats"),
    ("GET", "/v1/namespaces"),
    ("GET", "/v1/clients"),
    ("GET", "/v1/tree"),
    ("GET", "/v1/block"),
    ("GET", "/v1/page"),
    ("GET", "/v1/config"),
    ("GET", "/v1/pins"),
    ("GET", "/v1/quotas"),
    ("POST", "/v1/explain"),
    ("POST", "/v1/pin"),
    ("POST", "/v1/unpin"),
    ("POST", "/v1/prefetch"),
    ("POST", "/v1/move"),
    ("POST", "/v1/delete"),
    ("POST", "/v1/quotas"),
    ("POST", "/v1/reset"),
    ("POST", "/v1/pause"),
    ("POST", "/v1/resume"),
]


def test_openapi_has_every_path(web: TestClient) -> None:
    paths = web.get("/openapi.json").json()["paths"]
    assert sorted((method.upper(), path) for path, each in paths.items() for method in each) == sorted(PATHS)


@pytest.mark.parametrize(
    ("path", "view"),
    [
        ("/v1/stats", "ServiceView"),
        ("/v1/clients", "ClientView"),
        ("/v1/reset", "ResetView"),
        ("/v1/pin", "PinView"),
    ],
)
def test_openapi_describes_the_answers(web: TestClient, path: str, view: str) -> None:
    schema = web.get("/openapi.json").json()
    (operation,) = schema["paths"][path].values()
    answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert f"#/components/schemas/{view}" in str(answer)
    properties = schema["components"]["schemas"][view]["properties"]
    assert all("description" in properties[name] for name in ("state", "name") if name in properties)


@pytest.mark.parametrize("keys", [(), (KEY,)], ids=["open", "guarded"])
@pytest.mark.parametrize(("method", "path"), PATHS)
def test_answers_conform_to_the_openapi_schema(
    service: LocalService,
    schemas: dict[tuple[str, ...], Any],
    method: str,
    path: str,
    keys: tuple[str, ...],
) -> None:
    is_view = method == "GET" or path == "/v1/explain"
    needs_key = not is_view or (keys and path.startswith(("/v1", "/metrics")))
    headers = BEARER if needs_key else {}
    operation = schemas[keys][path][method]

    @given(case=operation.as_strategy())
    @settings(max_examples=10, suppress_health_check=list(HealthCheck))
    def holds(case: Any) -> None:
        case.call_and_validate(headers=headers)

    holds()
    service.ask("resume")


class TestKeys:
    @pytest.mark.parametrize("path", ["/healthz", "/readyz"])
    def test_probes_need_no_key(self, service: LocalService, path: str) -> None:
        with TestClient(make_app(service.address, (KEY,))) as web:
            assert web.get(path).status_code == 200

    @pytest.mark.parametrize("path", ["/metrics", "/v1/stats", "/v1/config", "/v1/clients", "/v1/namespaces"])
    def test_everything_else_needs_a_key(self, service: LocalService, path: str) -> None:
        with TestClient(make_app(service.address, ("other", KEY))) as web:
            assert web.get(path).status_code == 401
            assert web.get(path, headers={"Authorization": f"Bearer {KEY[:-1]}"}).status_code == 401
            assert web.get(path, headers=BEARER).status_code == 200

    @pytest.mark.parametrize("path", ["/metrics", "/v1/stats", "/v1/config", "/v1/clients", "/v1/namespaces"])
    def test_views_need_no_key_where_none_is_set(self, service: LocalService, path: str) -> None:
        with TestClient(make_app(service.address, (), own_key=KEY)) as web:
            assert web.get(path).status_code == 200

    @pytest.mark.parametrize("path", ["/v1/pause", "/v1/resume", "/v1/reset"])
    @pytest.mark.parametrize("keys", [(), ("other",)], ids=["open", "guarded"])
    def test_commands_always_need_a_key(
        self, service: LocalService, path: str, keys: tuple[str, ...]
    ) -> None:
        with TestClient(make_app(service.address, keys)) as web:
            for headers in ({}, BEARER, {"Authorization": "Bearer "}):
                assert web.post(path, json={}, headers=headers).status_code == 401
        with TestClient(make_app(service.address, keys, own_key=KEY)) as web:
            assert web.post(path, json={}).status_code == 401
            assert web.post(path, json={}, headers=BEARER).status_code == 200
        service.ask("resume")


def test_views_and_commands(web: TestClient) -> None:
    stats = web.get("/v1/stats").json()
    assert stats["tiers"]["host"]["ready"] == 10
    assert len(web.get("/v1/tree", params={"limit": 5}).json()) >= 5
    assert web.post("/v1/reset", json={"tier": "host", "dry_run": True}).json()["host"][0]["blocks"] == 10
    assert web.post("/v1/pause").json() == {"state": "paused"}
    assert web.post("/v1/resume").json() == {"state": "ready"}
    assert web.post("/v1/reset", json={"tier": "nothing"}).status_code == 422


def test_without_a_service_readyz_fails_and_healthz_does_not(tmp_path: Path) -> None:
    from fdcache.service.server import http

    web = TestClient(http.make_app(f"ipc://{tmp_path}/none.sock", (), timeout=0.2))
    assert web.get("/healthz").status_code == 200
    assert web.get("/readyz").status_code == 503
