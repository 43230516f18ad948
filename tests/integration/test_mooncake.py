"""Connector to Mooncake Store, with a real master on loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fdcache.integrations.mooncake.client import load_client
from fdcache.integrations.mooncake.store import MooncakeConnector
from fdcache.storage.connector import Outcome, StorageState
from fdcache.testing.storage import KnownRecords, conformance_layout, path_of
from tests.mooncake_master import Master, SharedClient, find_master
from tests.service_help import until

PATIENCE = 120


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    master = Master(find_master(), tmp_path_factory.mktemp("mooncake"))
    yield master
    master.kill()


@pytest.fixture(scope="module")
def client(master: Master) -> Iterator[SharedClient]:
    client = SharedClient()
    yield client
    client.leave()


@pytest.fixture
def connect(
    master: Master, client: SharedClient, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., MooncakeConnector]:
    """Open connectors that share one client."""
    monkeypatch.setattr(load_client(), "MooncakeDistributedStore", lambda: client)
    return master.connect


def test_a_block_exists_only_when_every_rank_stored_it(connect: Callable[..., MooncakeConnector]) -> None:
    layout = conformance_layout("both ranks", tp_size=2)
    hashes = path_of(4, "both")
    records = [KnownRecords(layout, 4), KnownRecords(layout, 4)]
    ranks = [connect(layout, 0), connect(layout, 1)]
    asker = connect(layout, None)
    for rank, connector in enumerate(ranks):
        connector.register(records[rank].table)
    ranks[0].put(records[0].fill(hashes), PATIENCE)
    assert asker.exists(hashes, PATIENCE).length == 0
    ranks[1].put(records[1].fill(hashes[:3]), PATIENCE)
    assert asker.exists(hashes, PATIENCE).length == 3
    for connector in (*ranks, asker):
        connector.close()


def test_one_client_reads_what_another_stored(master: Master) -> None:
    layout = conformance_layout("two engines")
    hashes = path_of(6, "shared")
    writer, reader = master.connect(layout), master.connect(layout)
    source, target = KnownRecords(layout, 6), KnownRecords(layout, 6)
    writer.register(source.table)
    reader.register(target.table)
    assert writer.put(source.fill(hashes), PATIENCE).ok.all()
    assert reader.get(target.batch(hashes), PATIENCE).ok.all()
    assert all(target.holds(slot, row.tobytes()) for slot, row in enumerate(hashes))
    writer.close()
    reader.close()


def test_a_record_that_differs_from_its_checksum_is_refused_and_removed(
    connect: Callable[..., MooncakeConnector],
) -> None:
    layout = conformance_layout("corrupt")
    hashes = path_of(3, "corrupt")
    connector = connect(layout)
    records = KnownRecords(layout, 3)
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


def test_a_dead_master_fails_fast_as_peer_gone_and_recovers(tmp_path: Path) -> None:
    master = Master(find_master(), tmp_path)
    layout = conformance_layout("dead")
    hashes = path_of(4, "dead")
    connector = master.connect(layout, retry_after=0.05)
    records = KnownRecords(layout, 4)
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

    until(stores, "the connector stores again", PATIENCE)
    assert connector.exists(hashes, PATIENCE).length == 4
    assert connector.stats().state is StorageState.READY
    connector.close()
    master.kill()


def test_a_connector_without_a_master_starts_off_and_fails_fast(tmp_path: Path) -> None:
    master = Master(find_master(), tmp_path)
    master.kill()
    layout = conformance_layout("none")
    connector = master.connect(layout)
    records = KnownRecords(layout, 2)
    connector.register(records.table)
    assert connector.stats().state is StorageState.OFF
    assert (connector.put(records.fill(path_of(2, "n")), 10).outcomes == Outcome.PEER_GONE).all()
    connector.close()
