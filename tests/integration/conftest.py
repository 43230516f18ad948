"""Fixtures: managers with a host tier of their own and with a service's, and a bare connection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fdcache.service.client.connection import Connection
from tests.manager_world import Worlds
from tests.native_build import build_once, make_driver
from tests.service_help import LocalService, local_service
from tests.service_line import Line


@pytest.fixture(scope="module")
def service_of_worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    with local_service(tmp_path_factory.mktemp("service"), FDCACHE_EXTENT_SIZE="256KiB") as running:
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


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    with local_service(tmp_path) as service:
        connection = Connection(service.address)
        yield service, connection
        connection.close()
