"""A shared file system that hangs, forgets, cuts and fails: nothing is wrong, and deadlines are kept."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fdcache.storage.connector import Outcome, StorageState
from fdcache.storage.objects.connector import FolderConnector
from fdcache.testing.storage import KnownRecords, conformance_layout, path_of
from tests.fuse_folder import FaultyFolder, faulty_folder
from tests.object_help import open_folder
from tests.service_help import until

PATIENCE = 60.0
LAYOUT = conformance_layout("shared faults")
COUNT = 8
TIER = {"object_bytes": 4 * LAYOUT.record_bytes}


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyFolder]:
    with faulty_folder(tmp_path_factory.mktemp("fuse"), until) as folder:
        if folder is None:
            pytest.skip("mounting /dev/fuse is not allowed here")
        yield folder


@pytest.fixture
def folder(mounted: FaultyFolder) -> Iterator[FaultyFolder]:
    yield mounted
    mounted.calm()


@pytest.fixture
def records() -> KnownRecords:
    return KnownRecords(LAYOUT, COUNT)


def node(folder: FaultyFolder) -> FolderConnector:
    return open_folder(folder.folder, LAYOUT, **TIER)


def read(
    connector: FolderConnector, records: KnownRecords, name: str, timeout: float = PATIENCE
) -> list[Outcome]:
    """Read a path's blocks; check that exactly those that are OK have their bytes."""
    hashes = path_of(COUNT, name)
    records.wipe()
    found = connector.get(records.batch(hashes), timeout).outcomes.tolist()
    for slot, outcome in enumerate(found):
        assert records.holds(slot, hashes[slot].tobytes()) == (outcome == Outcome.OK)
    return [Outcome(value) for value in found]


def write(
    connector: FolderConnector, records: KnownRecords, name: str, timeout: float = PATIENCE
) -> list[Outcome]:
    found = connector.put(records.fill(path_of(COUNT, name)), timeout).outcomes.tolist()
    return [Outcome(value) for value in found]


ALL = [Outcome.OK] * COUNT


def test_nodes_share_a_mounted_folder(folder: FaultyFolder, records: KnownRecords) -> None:
    assert write(node(folder), records, "mounted") == ALL
    assert read(node(folder), records, "mounted") == ALL


@pytest.mark.parametrize("operation", ["open", "read"])
def test_a_stale_file_is_opened_once_more(
    folder: FaultyFolder, records: KnownRecords, operation: str
) -> None:
    assert write(node(folder), records, f"stale {operation}") == ALL
    folder.disturb(**{operation: ("ESTALE", 1)})
    assert read(node(folder), records, f"stale {operation}") == ALL


@pytest.mark.parametrize("operation", ["open", "read"])
def test_a_file_that_stays_stale_is_a_miss(
    folder: FaultyFolder, records: KnownRecords, operation: str
) -> None:
    name = f"always stale {operation}"
    assert write(node(folder), records, name) == ALL
    connector = node(folder)
    folder.disturb(**{operation: ("ESTALE", -1)})
    assert read(connector, records, name) == [Outcome.MISS] * COUNT
    folder.calm()
    assert read(connector, records, name) == ALL


def test_short_reads_are_read_on(folder: FaultyFolder, records: KnownRecords) -> None:
    assert write(node(folder), records, "short") == ALL
    connector = node(folder)
    folder.disturb(read=("short", 7))
    assert read(connector, records, "short") == ALL


def test_half_writes_are_written_on(folder: FaultyFolder, records: KnownRecords) -> None:
    folder.disturb(write=("half", 5))
    write(node(folder), records, "half")
    folder.calm()
    found = read(node(folder), records, "half")
    assert set(found) <= {Outcome.OK, Outcome.MISS}
    assert write(node(folder), records, "half") == ALL
    assert read(node(folder), records, "half") == ALL


@pytest.mark.parametrize("operation", ["read", "open"])
def test_a_medium_that_fails_is_left_alone_and_read_again(
    folder: FaultyFolder, records: KnownRecords, operation: str
) -> None:
    name = f"failing {operation}"
    connector = node(folder)
    assert write(connector, records, name) == ALL
    folder.disturb(**{operation: ("EIO", -1)})
    assert read(connector, records, name) == [Outcome.PEER_GONE] * COUNT
    assert connector.stats().state is StorageState.OFF
    folder.calm()
    until(lambda: read(connector, records, name) == ALL, "the folder is read again")
    assert connector.stats().state is StorageState.READY


@pytest.mark.parametrize(
    ("operation", "error", "state"),
    [
        ("create", "EROFS", StorageState.READ_ONLY),
        ("write", "ENOSPC", StorageState.FULL),
        ("fsync", "EDQUOT", StorageState.FULL),
        ("write", "EIO", StorageState.OFF),
        ("fsync", "EIO", StorageState.OFF),
        ("link", "EIO", StorageState.OFF),
    ],
)
def test_a_write_that_fails_leaves_nothing_that_is_read(
    folder: FaultyFolder, records: KnownRecords, operation: str, error: str, state: StorageState
) -> None:
    name, kept = f"unwritten {operation} {error}", f"kept {operation} {error}"
    connector = node(folder)
    assert write(connector, records, kept) == ALL
    folder.disturb(**{operation: (error, -1)})
    assert write(connector, records, name) == [Outcome.PEER_GONE] * COUNT
    assert connector.stats().state is state
    folder.calm()
    assert read(node(folder), records, name) == [Outcome.MISS] * COUNT
    assert not list(folder.source.rglob("*.draft"))
    until(lambda: write(connector, records, name) == ALL, "the folder is written again")
    assert read(node(folder), records, name) == ALL


@pytest.mark.parametrize("error", ["EPERM", "EOPNOTSUPP", "ENOSYS", "EMLINK"])
def test_a_file_system_without_links_is_written_by_renaming(
    folder: FaultyFolder, records: KnownRecords, error: str
) -> None:
    folder.disturb(link=(error, -1))
    assert write(node(folder), records, f"renamed {error}") == ALL
    assert read(node(folder), records, f"renamed {error}") == ALL
    assert write(node(folder), records, f"renamed {error}") == ALL


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_mount_that_hangs_costs_a_batch_its_deadline(
    folder: FaultyFolder, records: KnownRecords, operation: str
) -> None:
    connector, name = node(folder), f"hanging {operation}"
    if operation == "read":
        assert write(connector, records, name) == ALL
    move = read if operation == "read" else write
    folder.disturb(**{operation: (3.0, 4)})
    begin = time.monotonic()
    found = move(connector, records, name, 0.5)
    assert set(found) <= {Outcome.OK, Outcome.TIMEOUT}
    assert Outcome.TIMEOUT in found
    assert time.monotonic() - begin < 30
    assert connector.stats().state is StorageState.OFF
    folder.calm()
    until(lambda: move(connector, records, name) == ALL, "the folder is used again")
    assert read(node(folder), records, name) == ALL


def test_a_file_system_that_is_gone_is_not_written_below(tmp_path: Path, records: KnownRecords) -> None:
    with faulty_folder(tmp_path, until) as mounted:
        if mounted is None:
            pytest.skip("mounting /dev/fuse is not allowed here")
        connector = node(mounted)
        assert write(connector, records, "before") == ALL
    assert not os.path.ismount(tmp_path / "mounted")
    assert write(connector, records, "after") == [Outcome.PEER_GONE] * COUNT
    assert connector.stats().state is StorageState.OFF
    assert list((tmp_path / "mounted").iterdir()) == []
