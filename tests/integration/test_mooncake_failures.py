"""Mooncake Store with a real master and real nodes that die or freeze while a batch is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache.controller.arena import HostArena
from fdcache.devices.cpu import CpuDevice
from fdcache.metadata import CacheLevel, CacheSwapMetadata, StorageTask, SwapPurpose
from fdcache.storage.conformance import HostRecords, conformance_layout, path_of
from fdcache.storage.connector import BatchResult, Outcome, StorageState
from fdcache.storage.mooncake import MooncakeConnector
from fdcache.storage.queue import StorageQueue, StorageTransfer
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


class Watched:
    """The real client; ``happens`` happens when a call that moves records is about to begin."""

    def __init__(self, client: Any, happens: Callable[[], None]) -> None:
        self._client = client
        self.happens = happens
        self.moves = 0

    def __getattr__(self, name: str) -> Any:
        if name in _MOVES:
            self.moves += 1
            self.happens()
        return getattr(self._client, name)


def watch(connector: MooncakeConnector, happens: Callable[[], None]) -> Watched:
    connector._link._client = watched = Watched(connector._link.client, happens)
    return watched


def assert_given_up(result: BatchResult, connector: MooncakeConnector) -> None:
    """The deadline passed, the call goes on, and nobody else is made to wait."""
    assert result.outcomes.tolist() == [Outcome.TIMEOUT] * len(result.outcomes)
    assert result.unfinished is not None
    assert not result.unfinished.done()
    stats = connector.stats()
    assert stats.state is StorageState.OFF
    assert "no answer" in str(stats.error)
    assert stats.timeouts == len(result.outcomes)


@pytest.mark.parametrize("writing", [False, True])
def test_a_master_that_freezes_inside_a_batch_costs_the_deadline_and_no_more(
    master: Master, writing: bool
) -> None:
    layout = conformance_layout("frozen master")
    hashes = path_of(BLOCKS, "stored")
    connector = master.connect(layout, retry_after=0.0)
    records = HostRecords(layout, BLOCKS)
    connector.register(records.table)
    assert connector.put(records.fill(hashes), 30).ok.all()
    watched = watch(connector, master.freeze)
    batch = records.fill(path_of(BLOCKS, "new")) if writing else records.batch(hashes)
    move = connector.put if writing else connector.get
    given_up = move(batch, 1.5)
    assert_given_up(given_up, connector)
    moves = watched.moves
    refused = move(batch, 1.5)
    assert refused.outcomes.tolist() == [Outcome.PEER_GONE] * BLOCKS
    assert refused.unfinished is None
    assert watched.moves == moves, "the client is not called again while its call is under way"
    master.kill()
    assert given_up.unfinished is not None
    given_up.unfinished.result(PATIENCE)
    assert all(records.table.header(slot).state != 2 for slot in range(BLOCKS)) or writing
    watched.happens = lambda: None
    master.start()
    batch = records.fill(hashes)
    while not connector.put(batch, 10).ok.all():
        pass
    assert connector.stats().state is StorageState.READY
    connector.close()


@pytest.mark.parametrize("freezes", [False, True])
def test_a_node_that_dies_inside_a_batch_costs_the_deadline_and_no_more(
    master: Master, freezes: bool
) -> None:
    layout = conformance_layout("node")
    hashes = path_of(BLOCKS, "node")
    node = Node(master.address, "node", BLOCKS)
    connector = master.connect(layout, segment=0, retry_after=3600.0)
    records = HostRecords(layout, BLOCKS)
    connector.register(records.table)
    assert connector.get(records.batch(hashes), 30).ok.all()
    assert all(records.holds(slot, row.tobytes()) for slot, row in enumerate(hashes))
    records.wipe()
    watched = watch(connector, node.freeze if freezes else node.kill)
    gone = connector.get(records.batch(hashes), 1.5 if freezes else 30.0)
    if freezes:
        assert_given_up(gone, connector)
        node.kill()
        assert gone.unfinished is not None
        gone.unfinished.result(PATIENCE)
    else:
        assert gone.outcomes.tolist() == [Outcome.PEER_GONE] * BLOCKS
        assert connector.stats().state is StorageState.OFF
    moves = watched.moves
    assert (connector.get(records.batch(hashes), 10).outcomes == Outcome.PEER_GONE).all()
    assert watched.moves == moves, "behind the breaker nothing is asked"
    assert all(records.table.header(slot).state != 2 for slot in range(BLOCKS))
    connector.close()


def test_host_slots_are_reported_free_only_when_the_call_has_ended(master: Master) -> None:
    layout = conformance_layout("slots")
    hashes = path_of(2, "slots")
    connector = master.connect(layout, retry_after=3600.0)
    arena = HostArena(layout, 4, CpuDevice())
    queue = StorageQueue(connector, arena)
    watch(connector, master.freeze)
    given_up, later = (
        transfer(queue, plan_id, slot, hashes[slot : slot + 1]) for plan_id, slot in ((1, 0), (2, 1))
    )
    queue.submit([given_up])
    queue.submit([later])
    assert later.done.wait(PATIENCE), "the thread goes on to the next task"
    assert later.result().results[0].failed.tolist() == [0]
    assert not given_up.done.query(), "its slot is in use"
    closing = threading.Thread(target=queue.close)
    closing.start()
    master.kill()
    assert given_up.done.wait(PATIENCE)
    assert given_up.result().results[0].failed.tolist() == [0]
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
