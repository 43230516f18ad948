"""Mooncake Store with a master and nodes that die or freeze while a batch is in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache.controller.arena import HostArena
from fdcache.devices.cpu import CpuDevice
from fdcache.integrations.mooncake.client import load_client
from fdcache.integrations.mooncake.store import MooncakeConnector
from fdcache.metadata import CacheLevel, CacheSwapMetadata, StorageTask, SwapPurpose
from fdcache.storage.connector import BatchResult, Outcome, StorageState
from fdcache.storage.queue import StorageQueue, StorageTransfer
from fdcache.testing.storage import KnownRecords, conformance_layout, path_of
from tests.mooncake_master import Master, find_master
from tests.mooncake_node import Node

BLOCKS = 4
PATIENCE = 120
_MOVES = ("batch_get_into_multi_buffers", "batch_put_from_multi_buffers")


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    master = Master(find_master(), tmp_path)
    yield master
    master.kill()


class Calls:
    """Calls that move records, of every client: their count, and an action before each."""

    def __init__(self) -> None:
        self.moves = 0
        self.before: Callable[[], None] = lambda: None


class WatchedClient:
    """The real client, with its calls that move records reported to ``calls``."""

    def __init__(self, client: Any, calls: Calls) -> None:
        self._client = client
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        if name in _MOVES:
            self._calls.moves += 1
            self._calls.before()
        return getattr(self._client, name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    find_master()
    calls = Calls()
    library = load_client()
    new = library.MooncakeDistributedStore
    monkeypatch.setattr(library, "MooncakeDistributedStore", lambda: WatchedClient(new(), calls))
    return calls


def assert_given_up(result: BatchResult, connector: MooncakeConnector) -> None:
    """Check that the batch failed at its deadline, and that its call is still running."""
    assert result.outcomes.tolist() == [Outcome.TIMEOUT] * len(result.outcomes)
    assert result.unfinished is not None
    assert not result.unfinished.done()
    stats = connector.stats()
    assert stats.state is StorageState.OFF
    assert "no answer" in str(stats.error)
    assert stats.timeouts == len(result.outcomes)


@pytest.mark.parametrize("writing", [False, True])
def test_a_master_that_freezes_inside_a_batch_costs_only_the_deadline(
    master: Master, calls: Calls, writing: bool
) -> None:
    layout = conformance_layout("frozen master")
    hashes = path_of(BLOCKS, "stored")
    connector = master.connect(layout, retry_after=0.0)
    records = KnownRecords(layout, BLOCKS)
    connector.register(records.table)
    assert connector.put(records.fill(hashes), 30).ok.all()
    calls.before = master.freeze
    batch = records.fill(path_of(BLOCKS, "new")) if writing else records.batch(hashes)
    move = connector.put if writing else connector.get
    given_up = move(batch, 1.5)
    assert_given_up(given_up, connector)
    moves = calls.moves
    refused = move(batch, 1.5)
    assert refused.outcomes.tolist() == [Outcome.PEER_GONE] * BLOCKS
    assert refused.unfinished is None
    assert calls.moves == moves, "the client is not called again while its call is in progress"
    master.kill()
    assert given_up.unfinished is not None
    given_up.unfinished.result(PATIENCE)
    assert all(records.table.header(slot).state != 2 for slot in range(BLOCKS)) or writing
    calls.before = lambda: None
    master.start()
    batch = records.fill(hashes)
    while not connector.put(batch, 10).ok.all():
        pass
    assert connector.stats().state is StorageState.READY
    connector.close()


@pytest.mark.parametrize("freezes", [False, True])
def test_a_node_that_dies_inside_a_batch_costs_only_the_deadline(
    master: Master, calls: Calls, freezes: bool
) -> None:
    layout = conformance_layout("node")
    hashes = path_of(BLOCKS, "node")
    node = Node(master.address, "node", BLOCKS)
    connector = master.connect(layout, segment=0, retry_after=3600.0)
    records = KnownRecords(layout, BLOCKS)
    connector.register(records.table)
    assert connector.get(records.batch(hashes), 30).ok.all()
    assert all(records.holds(slot, row.tobytes()) for slot, row in enumerate(hashes))
    records.wipe()
    calls.before = node.freeze if freezes else node.kill
    gone = connector.get(records.batch(hashes), 1.5 if freezes else 30.0)
    if freezes:
        assert_given_up(gone, connector)
        node.kill()
        assert gone.unfinished is not None
        gone.unfinished.result(PATIENCE)
    else:
        assert gone.outcomes.tolist() == [Outcome.PEER_GONE] * BLOCKS
        assert connector.stats().state is StorageState.OFF
    moves = calls.moves
    assert (connector.get(records.batch(hashes), 10).outcomes == Outcome.PEER_GONE).all()
    assert calls.moves == moves, "an open breaker makes no call"
    assert all(records.table.header(slot).state != 2 for slot in range(BLOCKS))
    connector.close()


def test_host_slots_are_reported_free_only_after_the_call_has_ended(master: Master, calls: Calls) -> None:
    layout = conformance_layout("slots")
    hashes = path_of(2, "slots")
    connector = master.connect(layout, retry_after=3600.0)
    arena = HostArena(layout, 4, CpuDevice())
    queue = StorageQueue(connector, arena)
    calls.before = master.freeze
    given_up, later = (
        transfer(queue, plan_id, slot, hashes[slot : slot + 1]) for plan_id, slot in ((1, 0), (2, 1))
    )
    queue.submit([given_up])
    queue.submit([later])
    assert later.done.wait(PATIENCE), "the thread continues with the next task"
    assert later.result().failed.tolist() == [0]
    assert not given_up.done.query(), "its slot is still in use"
    closing = threading.Thread(target=queue.close)
    closing.start()
    master.kill()
    master.start()  # with a dead master a client takes ten seconds to leave
    assert given_up.done.wait(PATIENCE)
    assert given_up.result().failed.tolist() == [0]
    closing.join(PATIENCE)
    assert not closing.is_alive()
    arena.close()


def transfer(queue: StorageQueue, plan_id: int, slot: int, block_hash: Any) -> StorageTransfer:
    swap = CacheSwapMetadata(
        purpose=SwapPurpose.PREFETCH,
        src_type=CacheLevel.STORAGE,
        dst_type=CacheLevel.HOST,
        src_block_ids=np.array([-1], np.int32),
        src_generations=np.zeros(1, np.uint32),
        dst_block_ids=np.array([slot], np.int32),
        dst_generations=np.ones(1, np.uint32),
        hash_values=block_hash,
        parent_hashes=np.zeros((1, 32), np.uint8),
    )
    return queue.prepare(StorageTask(plan_id=plan_id, swap=swap, timeout=2.0))
