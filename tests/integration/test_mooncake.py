"""Mooncake Store with a real master on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fdcache.layout import KVLayout
from fdcache.storage.conformance import (
    ConnectorConformance,
    HostRecords,
    OpenConnector,
    conformance_layout,
    path_of,
)
from fdcache.storage.connector import Outcome, StorageState
from tests.mooncake_master import Master, find_master
from tests.service_help import until

PATIENCE = 120


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    master = Master(find_master(), tmp_path_factory.mktemp("mooncake"))
    yield master
    master.kill()


class TestMooncakeConnector(ConnectorConformance):
    @pytest.fixture
    def open_connector(self, master: Master) -> OpenConnector:
        def make(layout: KVLayout, rank: int) -> object:
            return master.connect(layout, rank)

        return make  # type: ignore[return-value]


def test_a_block_counts_only_when_every_rank_has_it(master: Master) -> None:
    layout = conformance_layout("both ranks", tp_size=2)
    hashes = path_of(4, "both")
    records = [HostRecords(layout, 4), HostRecords(layout, 4)]
    ranks = [master.connect(layout, 0), master.connect(layout, 1)]
    asker = master.connect(layout, None)
    for rank, connector in enumerate(ranks):
        connector.register(records[rank].table)
    ranks[0].put(records[0].fill(hashes), PATIENCE)
    assert asker.exists(hashes, PATIENCE).length == 0
    ranks[1].put(records[1].fill(hashes[:3]), PATIENCE)
    assert asker.exists(hashes, PATIENCE).length == 3
    for connector in (*ranks, asker):
        connector.close()


def test_another_process_memory_serves_the_block(master: Master) -> None:
    layout = conformance_layout("two engines")
    hashes = path_of(6, "shared")
    writer, reader = master.connect(layout), master.connect(layout)
    source, target = HostRecords(layout, 6), HostRecords(layout, 6)
    writer.register(source.table)
    reader.register(target.table)
    assert writer.put(source.fill(hashes), PATIENCE).ok.all()
    assert reader.get(target.batch(hashes), PATIENCE).ok.all()
    assert all(target.holds(slot, row.tobytes()) for slot, row in enumerate(hashes))
    writer.close()
    reader.close()


def test_bytes_that_differ_from_their_checksum_are_refused_and_removed(master: Master) -> None:
    layout = conformance_layout("corrupt")
    hashes = path_of(3, "corrupt")
    connector = master.connect(layout)
    records = HostRecords(layout, 3)
    connector.register(records.table)
    batch = records.fill(hashes)
    records.table.record(1)[100] ^= 0xFF  # changed after its checksum was computed
    assert connector.put(batch, PATIENCE).ok.all()
    records.wipe()
    read = connector.get(records.batch(hashes), PATIENCE)
    assert read.outcomes.tolist() == [Outcome.OK, Outcome.CORRUPT, Outcome.OK]
    assert records.table.header(1).state != 2
    assert connector.exists(hashes, PATIENCE).length == 1
    connector.close()


def test_a_dead_master_is_told_from_a_miss_fails_fast_and_comes_back(tmp_path: Path) -> None:
    master = Master(find_master(), tmp_path)
    layout = conformance_layout("dead")
    hashes = path_of(4, "dead")
    connector = master.connect(layout, retry_after=0.05)
    records = HostRecords(layout, 4)
    connector.register(records.table)
    batch = records.fill(hashes)
    assert connector.put(batch, PATIENCE).ok.all()
    master.kill()
    gone = connector.get(records.batch(hashes), 10)
    assert (gone.outcomes == Outcome.PEER_GONE).all()
    assert gone.error is not None
    assert connector.exists(hashes, 10).outcome is Outcome.PEER_GONE
    assert connector.stats().state is StorageState.OFF
    assert connector.stats().peer_gone == 4
    master.start()
    records.fill(hashes)

    def stores() -> bool:
        return bool(connector.put(batch, PATIENCE).ok.all())

    until(stores, "it stores again", PATIENCE)
    assert connector.exists(hashes, PATIENCE).length == 4
    assert connector.stats().state is StorageState.READY
    connector.close()
    master.kill()


def test_without_a_master_it_starts_off_and_costs_nothing(tmp_path: Path) -> None:
    master = Master(find_master(), tmp_path)
    master.kill()
    layout = conformance_layout("none")
    connector = master.connect(layout)
    records = HostRecords(layout, 2)
    connector.register(records.table)
    assert connector.stats().state is StorageState.OFF
    assert (connector.put(records.fill(path_of(2, "n")), 10).outcomes == Outcome.PEER_GONE).all()
    connector.close()
