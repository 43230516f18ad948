"""The manager with a host tier of its own and with a service's: the same engine, the same expectations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.manager_world import Worlds
from tests.service_help import LocalService, local_service


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
