"""Nodes that share a bucket or a folder: what one stores, the others find, and nothing is ever wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache.metadata import HashArray
from fdcache.storage.connector import Outcome, StorageState
from fdcache.storage.objects.backend import LAYOUT as LAYOUT_NAME
from fdcache.storage.objects.connector import ObjectConnector
from fdcache.testing.storage import KnownRecords, conformance_layout, path_of
from tests.object_help import Bucket, open_bucket, open_folder
from tests.service_help import until

PATIENCE = 60.0
LAYOUT = conformance_layout("nodes")
IN_ONE = 4
"""Records in one object."""

TIER = {"object_bytes": IN_ONE * LAYOUT.record_bytes}

OpenNode = Callable[..., ObjectConnector]


@pytest.fixture(params=["folder", "local bucket", "s3"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> OpenNode:
    """Open a connector to one store, each as a node of its own."""
    given: dict[str, Any] = dict(TIER)
    if request.param == "folder":
        return lambda layout=LAYOUT, rank=0, **tier: open_folder(tmp_path, layout, rank, **{**given, **tier})
    bucket = (
        Bucket(f"file://{tmp_path}") if request.param == "local bucket" else request.getfixturevalue("s3")
    )
    return lambda layout=LAYOUT, rank=0, **tier: open_bucket(bucket, layout, rank, **{**given, **tier})


@pytest.fixture
def records() -> KnownRecords:
    return KnownRecords(LAYOUT, 64)


def store(connector: ObjectConnector, records: KnownRecords, hashes: HashArray) -> None:
    assert connector.put(records.fill(hashes), PATIENCE).ok.all()


def read(connector: ObjectConnector, records: KnownRecords, hashes: HashArray) -> list[Outcome]:
    """Read blocks; check that each that is OK has its bytes, and that no other looks as if it had."""
    records.wipe()
    result = connector.get(records.batch(hashes), PATIENCE)
    for slot, outcome in enumerate(result.outcomes.tolist()):
        assert records.holds(slot, hashes[slot].tobytes()) == (outcome == Outcome.OK)
    return [Outcome(value) for value in result.outcomes.tolist()]


def branch(trunk: HashArray, count: int, name: str) -> HashArray:
    return np.concatenate((trunk, path_of(count, name)))


def test_a_new_node_finds_what_another_stored(node: OpenNode, records: KnownRecords) -> None:
    hashes = path_of(30, "found")
    first, second = node(), node()
    store(first, records, hashes)
    assert second.exists(hashes, PATIENCE).length == 30
    assert read(second, records, hashes) == [Outcome.OK] * 30
    third = node()
    assert read(third, records, hashes[8:21]) == [Outcome.OK] * 13, "from the beginning of an object on"


def test_paths_that_part_in_the_middle_of_an_object_share_what_is_before(
    node: OpenNode, records: KnownRecords
) -> None:
    trunk = path_of(6, "trunk")
    paths = [branch(trunk, 7, "left"), branch(trunk, 9, "right"), branch(trunk[:1], 3, "early")]
    writers = [node() for _ in paths]
    for connector, hashes in zip(writers, paths, strict=True):
        batch = records.fill(hashes)
        assert connector.put(batch, PATIENCE).ok.all()
    reader = node()
    for hashes in paths:
        assert reader.exists(hashes, PATIENCE).length == len(hashes)
        assert read(reader, records, hashes) == [Outcome.OK] * len(hashes)
    written = [each.stats().written_bytes // LAYOUT.record_bytes for each in writers]
    assert written[1] <= 9 + len(written)
    assert written[2] <= 3 + len(written)


def test_what_another_node_stored_is_not_written_again(node: OpenNode, records: KnownRecords) -> None:
    hashes = path_of(12, "once")
    first, second = node(), node()
    store(first, records, hashes[:10])
    store(second, records, hashes)
    assert second.stats().written_bytes < 3 * (LAYOUT.record_bytes + 4096)
    assert second.stats().stored == 12
    assert read(node(), records, hashes) == [Outcome.OK] * 12


def test_a_block_that_another_node_removed_is_a_miss_and_comes_back(
    node: OpenNode, records: KnownRecords
) -> None:
    hashes = path_of(9, "healed")
    first, second = node(), node()
    store(first, records, hashes)
    assert second.exists(hashes, PATIENCE).length == 9
    first.clear(PATIENCE)
    assert read(second, records, hashes) == [Outcome.MISS] * 9
    assert second.exists(hashes, PATIENCE).length == 0
    store(first, records, hashes)
    assert second.exists(hashes, PATIENCE).length == 9
    assert read(second, records, hashes) == [Outcome.OK] * 9


def test_a_scheduler_that_hears_of_a_miss_asks_the_store_again(node: OpenNode, records: KnownRecords) -> None:
    hashes = path_of(9, "doubted")
    worker, scheduler = node(), node(rank=None)
    store(worker, records, hashes)
    assert scheduler.exists(hashes, PATIENCE).length == 9
    worker.delete(hashes[5:], PATIENCE)
    scheduler.doubt(hashes[5:6])
    assert scheduler.exists(hashes, PATIENCE).length == 5


def test_an_object_that_grew_shorter_under_a_reader_is_read_as_it_is(
    node: OpenNode, records: KnownRecords
) -> None:
    hashes = path_of(IN_ONE, "shorter")
    first, second = node(), node()
    store(first, records, hashes)
    assert second.exists(hashes, PATIENCE).length == IN_ONE
    assert first.delete(hashes[2:], PATIENCE).outcomes.tolist() == [Outcome.OK] * 2
    assert read(second, records, hashes) == [Outcome.OK] * 2 + [Outcome.MISS] * 2
    store(first, records, hashes)
    assert read(second, records, hashes) == [Outcome.OK] * IN_ONE


def test_nodes_that_store_the_same_blocks_at_once_leave_one_of_each(
    node: OpenNode, records: KnownRecords
) -> None:
    hashes = path_of(40, "at once")
    nodes = [node() for _ in range(4)]
    sources = [KnownRecords(LAYOUT, 40) for _ in nodes]
    with ThreadPoolExecutor(4) as pool:
        puts = [
            pool.submit(each.put, source.fill(hashes), PATIENCE)
            for each, source in zip(nodes, sources, strict=True)
        ]
        assert all(put.result().ok.all() for put in puts)
    assert read(node(), records, hashes) == [Outcome.OK] * 40
    assert nodes[0].clear(PATIENCE) == 40


def test_nodes_keep_the_store_within_its_size_and_paths_lose_their_ends(
    node: OpenNode, records: KnownRecords, request: pytest.FixtureRequest
) -> None:
    object_bytes = 4096 + IN_ONE * LAYOUT.record_bytes
    size = 40 * object_bytes
    nodes = [node(size=size), node(size=size)]
    paths = [path_of(8 * IN_ONE, f"path {number}") for number in range(12)]
    for number, hashes in enumerate(paths):
        store(nodes[number % 2], records, hashes)
    reader = node()
    for each in nodes:
        each.room.sweep()
        assert each.room.bytes is not None
        assert each.room.bytes <= size
    kept = [reader.exists(hashes, PATIENCE).length for hashes in paths]
    assert sum(kept) <= 40 * IN_ONE
    for hashes, length in zip(paths, kept, strict=True):
        assert read(reader, records, hashes[:length]) == [Outcome.OK] * length
    if "s3" not in request.node.name:  # it tells times in whole seconds, and all of this takes about one
        assert sum(kept) >= 20 * IN_ONE
        for hashes, length in zip(paths, kept, strict=True):
            assert reader.exists(hashes[length:], PATIENCE).length == 0, (
                "nothing is left that no path reaches"
            )


def test_of_nodes_with_different_sizes_the_smallest_holds(node: OpenNode, records: KnownRecords) -> None:
    object_bytes = 4096 + IN_ONE * LAYOUT.record_bytes
    large, small = node(size=80 * object_bytes), node(size=20 * object_bytes)
    paths = [path_of(8 * IN_ONE, f"path {number}") for number in range(6)]
    for hashes in paths:
        store(large, records, hashes)
    large.room.sweep()
    assert large.room.removed == 0
    small.room.sweep()
    assert small.room.bytes is not None and small.room.objects is not None
    assert small.room.bytes <= 20 * object_bytes
    outcomes = [read(large, records, hashes) for hashes in paths]
    held = [sum(each is Outcome.OK for each in path) for path in outcomes]
    assert sum(held) == small.room.objects * IN_ONE, (
        "a node with a larger size reads what is left, and misses the rest"
    )
    store(large, records, paths[0])
    assert read(small, records, paths[0]) == [Outcome.OK] * (8 * IN_ONE)


def files(folder: Path) -> list[Path]:
    """The files of objects, and drafts of such."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != LAYOUT_NAME)


def damage(folder: Path, position: int, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of every object in a folder."""
    for path in files(folder):
        content = path.read_bytes()
        path.write_bytes(content[:position] + change(content[position:]))


@pytest.mark.parametrize(
    ("position", "change"),
    [
        (4096 + LAYOUT.record_bytes + 100, lambda rest: bytes([rest[0] ^ 1]) + rest[1:]),
        (4096 + LAYOUT.record_bytes + 100, lambda rest: b""),
        (4096 + LAYOUT.record_bytes + 100, lambda rest: bytes(len(rest))),
    ],
    ids=["a flipped bit", "cut off", "zeros"],
)
@pytest.mark.parametrize("node", ["folder", "local bucket"], indirect=True)
def test_a_damaged_record_is_refused_and_what_is_before_it_stays(
    node: OpenNode, records: KnownRecords, tmp_path: Path, position: int, change: Callable[[bytes], bytes]
) -> None:
    hashes = path_of(IN_ONE, "damaged")
    store(node(), records, hashes)
    damage(tmp_path, position, change)
    reader = node()
    found = read(reader, records, hashes)
    assert found[:2] == [Outcome.OK, Outcome.CORRUPT]
    assert reader.stats().corrupt >= 1
    assert node().exists(hashes, PATIENCE).length == 1
    store(node(), records, hashes)
    assert read(node(), records, hashes) == [Outcome.OK] * IN_ONE


@pytest.mark.parametrize("position", [0, 10, 20, 130, 200, 300, 4000])
@pytest.mark.parametrize("node", ["folder", "local bucket"], indirect=True)
def test_a_damaged_page_makes_its_blocks_misses_until_they_are_stored_again(
    node: OpenNode, records: KnownRecords, tmp_path: Path, position: int
) -> None:
    hashes = path_of(IN_ONE, "page")
    store(node(), records, hashes)
    damage(tmp_path, position, lambda rest: bytes([rest[0] ^ 0x40]) + rest[1:])
    assert node().exists(hashes, PATIENCE).length == 0
    assert read(node(), records, hashes) == [Outcome.MISS] * IN_ONE
    store(node(), records, hashes)
    assert read(node(), records, hashes) == [Outcome.OK] * IN_ONE


def test_a_host_record_with_wrong_bytes_is_not_stored(node: OpenNode, records: KnownRecords) -> None:
    hashes = path_of(IN_ONE + 2, "wrong source")
    batch = records.fill(hashes)
    records.table.record(2)[50] ^= 1
    result = node().put(batch, PATIENCE)
    assert result.outcomes.tolist() == [
        Outcome.SOURCE_CHANGED if i == 2 else Outcome.OK for i in range(len(hashes))
    ]
    assert node().exists(hashes, PATIENCE).length == 2


def test_a_folder_that_is_not_mounted_is_not_made(tmp_path: Path, records: KnownRecords) -> None:
    folder = tmp_path / "not mounted"
    connector = open_folder(folder, LAYOUT)
    hashes = path_of(3, "later")
    assert not connector.put(records.fill(hashes), PATIENCE).ok.any()
    assert connector.stats().state is StorageState.OFF
    assert "mount" in str(connector.stats().error)
    assert not folder.exists()
    folder.mkdir()
    until(lambda: bool(connector.put(records.fill(hashes), PATIENCE).ok.all()), "the folder is used")
    assert connector.stats().state is StorageState.READY


def test_what_a_dead_writer_left_goes_with_the_next_sweep(tmp_path: Path, records: KnownRecords) -> None:
    connector = open_folder(tmp_path, LAYOUT)
    store(connector, records, path_of(3, "draft"))
    (stored,) = files(tmp_path)
    old, fresh = (stored.with_name(f"{stored.name}.node.{number}.draft") for number in (1, 2))
    for draft in (old, fresh):
        draft.write_bytes(b"half of an object")
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    connector.room.sweep()
    assert files(tmp_path) == [stored, fresh]
    assert connector.room.objects == 1
