"""From FDCACHE_STORAGE to a connector, by entry point too; and what is said when there is none."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fdcache.errors import ConnectorNotFoundError, StorageError
from fdcache.settings.cache import MooncakeSettings, StorageTierSettings
from fdcache.storage.breaker import CircuitBreaker
from fdcache.storage.connector import PlacedStorage, StorageConnector
from fdcache.storage.context import ConnectorContext
from fdcache.storage.factory import open_lookup, open_storage
from fdcache.storage.mooncake_client import ClientOptions
from tests.storage_help import MIB, storage_layout


def context(connector: str, folder: Path = Path("/nowhere"), rank: int | None = 0) -> ConnectorContext:
    settings = StorageTierSettings(connector=connector, directory=folder, size=MIB)
    return ConnectorContext(storage_layout(), rank, settings, MooncakeSettings())


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of somebody else with connectors, as an installer would leave it."""
    (tmp_path / "their_store.py").write_text(
        "from pathlib import Path\n"
        "from tests.local_connector import LocalConnector\n"
        "from fdcache.storage.slab import SlabStore\n"
        "def connect(context):\n"
        "    folder = context.settings.directory\n"
        "    return LocalConnector(SlabStore(folder, context.layout, rank=context.rank or 0, size=1 << 20))\n"
        "def wrong(context):\n"
        "    return object()\n"
        "def fails(context):\n"
        "    raise RuntimeError('no route to the store')\n"
    )
    information = tmp_path / "their_store-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: their-store\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[fdcache.storage_connectors]\n"
        "theirs = their_store:connect\nwrong = their_store:wrong\nbroken = no_such_module:connect\n"
        "fails = their_store:fails\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("their_store", None)


def test_none_is_none() -> None:
    assert open_storage(context("none")) is None
    assert open_lookup(context("none")) is None


def test_local_is_a_storage_whose_slots_the_scheduler_hands_out(tmp_path: Path) -> None:
    storage = open_storage(context("local", tmp_path))
    assert isinstance(storage, PlacedStorage)
    assert open_lookup(context("local", tmp_path)) is None
    storage.close()


def test_an_installed_package_brings_a_connector(installed: Path, tmp_path: Path) -> None:
    storage = open_storage(context("theirs", tmp_path / "blocks"))
    assert isinstance(storage, StorageConnector)
    storage.close()


def test_a_package_that_brings_something_else_is_refused(installed: Path) -> None:
    with pytest.raises(ConnectorNotFoundError, match="no StorageConnector"):
        open_storage(context("wrong"))
    with pytest.raises(ConnectorNotFoundError, match="cannot be loaded"):
        open_storage(context("broken"))
    with pytest.raises(StorageError, match="their_store:fails failed: RuntimeError: no route to the store"):
        open_storage(context("fails"))


def test_an_unknown_name_is_told_with_those_that_are_known(installed: Path) -> None:
    with pytest.raises(ConnectorNotFoundError, match=r"broken, fails, local, mooncake, none, theirs, wrong"):
        open_storage(context("nothing-like-it"))


def test_attnstore_says_what_to_install() -> None:
    with pytest.raises(ConnectorNotFoundError, match="install the vendor's connector"):
        open_storage(context("attnstore"))


def test_the_mooncake_file_comes_before_the_variables(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.json"
    file.write_text(
        json.dumps(
            {
                "master_server_address": "127.0.0.1:50051",
                "protocol": "tcp",
                "global_segment_size": "2GiB",
                "device_name": "mlx5_0,mlx5_1",
            }
        )
    )
    settings = MooncakeSettings(config_path=file, master="elsewhere:1", protocol="rdma", local_buffer_size=99)
    options = ClientOptions.resolve(settings, rank=3)
    assert (options.master, options.protocol) == ("127.0.0.1:50051", "tcp")
    assert (options.segment_bytes, options.buffer_bytes) == (2 << 30, 99)
    assert options.device == "mlx5_1"
    assert options.local_hostname == "127.0.0.1"
    assert ClientOptions.resolve(settings, rank=None).segment_bytes == 0, "a scheduler gives no memory"


def test_mooncake_settings_that_cannot_work_are_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="needs MOONCAKE_MASTER_SERVER_ADDR"):
        ClientOptions.resolve(MooncakeSettings(), 0)
    with pytest.raises(StorageError, match="this machine for every node"):
        ClientOptions.resolve(MooncakeSettings(master="10.1.2.3:50051", local_hostname="localhost"), 0)
    with pytest.raises(StorageError, match="write host and port"):
        ClientOptions.resolve(MooncakeSettings(master="nowhere"), 0)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(StorageError, match=r"broken\.json cannot be read"):
        ClientOptions.resolve(MooncakeSettings(config_path=broken), 0)


def test_a_breaker_refuses_after_a_failure_and_lets_one_call_try_again() -> None:
    now = [0.0]
    breaker = CircuitBreaker(5.0, clock=lambda: now[0])
    assert breaker.refuses() is None
    breaker.failed("no answer")
    assert breaker.refuses() == "no answer"
    now[0] = 5.0
    assert breaker.refuses() is None, "one call may try"
    assert breaker.refuses() == "no answer", "the others wait for what comes of it"
    breaker.succeeded()
    assert breaker.refuses() is None
