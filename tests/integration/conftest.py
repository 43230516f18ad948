"""Fixtures: managers with a host tier of their own and with a service's, and a bare connection."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fdcache.service.client.connection import Connection
from fdcache.tiers import storage_reads
from tests.manager_world import Worlds
from tests.native_build import build_once, make_driver
from tests.network_help import Network
from tests.nodes_help import RedisServer
from tests.object_help import Bucket, S3Server
from tests.service_help import LocalService, local_service
from tests.service_line import Line
from tests.storage_engine import LAYOUT
from tests.transfer_peer import GATE, Clock, install_gate, renew_often
from tests.transfer_world import World


@pytest.fixture(scope="module")
def service_of_worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    with local_service(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(params=["embedded", "shared"])
def worlds(request: pytest.FixtureRequest) -> Iterator[Worlds]:
    shared = request.param == "shared"
    made = Worlds(request.getfixturevalue("service_of_worlds") if shared else None)
    yield made
    made.close()


@pytest.fixture(scope="session")
def cuda_driver() -> Path:
    """The folder of the driver that stands in for a GPU's."""
    return build_once("driver", make_driver)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A server with the interface of S3."""
    server = S3Server()
    yield server
    server.kill()


@pytest.fixture
def s3(s3_server: S3Server, request: pytest.FixtureRequest) -> Bucket:
    """A bucket of which each test has a folder of its own."""
    return s3_server.bucket(hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16])


@pytest.fixture
def network() -> Iterator[Network]:
    """A network namespace with a cable to it."""
    made = Network()
    try:
        if not made.make():
            pytest.skip("network namespaces are not allowed here")
        yield made
    finally:
        made.remove()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """An empty Redis with a password."""
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    with local_service(tmp_path) as service:
        connection = Connection(service.address)
        yield service, connection
        connection.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The monotonic clock of this process, which a test can put forward."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


@pytest.fixture
def gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the connector ``gated`` known; its gate is open after the test."""
    monkeypatch.syspath_prepend(install_gate(tmp_path))
    yield
    GATE.reset()


@pytest.fixture
def make_world(
    tmp_path: Path, clock: Clock, gated: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., World]]:
    """A function that starts an instance of a role in this process, and its peer in another."""
    renew_often(monkeypatch.setattr)
    worlds: list[World] = []

    def make(role: str, **options: Any) -> World:
        worlds.append(World(tmp_path, clock, role, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def groups_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a read from storage have two blocks."""
    monkeypatch.setattr(storage_reads, "MOST_GROUP_BYTES", 2 * LAYOUT.record_bytes)
