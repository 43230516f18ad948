"""Opening storage by name: built-in connectors, entry points, and errors for everything else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fdcache.errors import ConnectorNotFoundError, StorageError
from fdcache.settings.cache import StorageTierSettings
from fdcache.storage.connector import ConnectorContext, PlacedStorage, StorageConnector
from fdcache.storage.factory import open_lookup, open_storage
from tests.storage_help import MIB, storage_layout


def context(connector: str, folder: Path = Path("/nowhere"), rank: int | None = 0) -> ConnectorContext:
    settings = StorageTierSettings(connector=connector, directory=folder, size=MIB)
    return ConnectorContext(storage_layout(), rank, settings)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install a third-party package with connectors, as pip would leave it."""
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


def test_no_storage_is_none() -> None:
    assert open_storage(context("none")) is None
    assert open_lookup(context("none")) is None


def test_local_storage_is_placed_and_has_no_lookup(tmp_path: Path) -> None:
    storage = open_storage(context("local", tmp_path))
    assert isinstance(storage, PlacedStorage)
    assert open_lookup(context("local", tmp_path)) is None
    storage.close()


def test_an_entry_point_opens_a_connector(installed: Path, tmp_path: Path) -> None:
    storage = open_storage(context("theirs", tmp_path / "blocks"))
    assert isinstance(storage, StorageConnector)
    storage.close()


def test_a_broken_entry_point_is_refused_by_name(installed: Path) -> None:
    with pytest.raises(ConnectorNotFoundError, match="is not a StorageConnector"):
        open_storage(context("wrong"))
    with pytest.raises(ConnectorNotFoundError, match="cannot be loaded"):
        open_storage(context("broken"))
    with pytest.raises(StorageError, match="their_store:fails failed: RuntimeError: no route to the store"):
        open_storage(context("fails"))


def test_an_unknown_name_lists_the_known_ones(installed: Path) -> None:
    with pytest.raises(
        ConnectorNotFoundError,
        match=r"broken, fails, local, mooncake, nodes, none, object, shared, theirs, wrong",
    ):
        open_storage(context("nothing-like-it"))


def test_attnstore_names_the_package_to_install() -> None:
    with pytest.raises(ConnectorNotFoundError, match="install the vendor's connector"):
        open_storage(context("attnstore"))
