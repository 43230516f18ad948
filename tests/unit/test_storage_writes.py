"""Writes to storage: which blocks are written, and when there is no room for them, or the disk fails."""

from __future__ import annotations

from hashlib import sha256
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from fdcache._core import BlockList
from fdcache.metadata import CacheLevel, Int32Array, SwapPurpose, TransferReport, TransferResult
from fdcache.plans.ledger import PlanLedger
from fdcache.settings.cache import CacheSettings, StorageTierSettings, WritePolicy
from fdcache.tiers.host import LocalHostTier
from fdcache.tiers.statistics import Counters
from fdcache.tiers.storage import StorageTier
from fdcache.tiers.storage_index import LocalIndex
from tests.storage_help import storage_layout
from tests.tier_help import chain, copy_in, eviction_order, hashes, store

PATH = chain(1, 2, 3, 4)


class Stage:
    """A host tier of 8 blocks above a storage of 16."""

    def __init__(self, policy: WritePolicy, **storage: int) -> None:
        self.host = LocalHostTier(CacheLevel.HOST, 8)
        self.index = LocalIndex.make(16)
        self.counters = Counters()
        self.now = 0.0
        self.ledger = PlanLedger(1, 10.0)
        self.policy, self.options = policy, storage
        self.connect()

    def connect(self) -> None:
        """Make the storage tier between ``host`` and ``index``."""
        self.index.restore([])
        self.tier = StorageTier(
            CacheSettings(write_policy=self.policy),
            StorageTierSettings(**self.options),
            storage_layout(),
            self.host,
            self.index,
            self.counters,
            lambda: self.now,
        )
        self.writes = self.tier.writes
        self.host.on_evict = self.writes.on_evict

    def planned(self) -> int:
        self.writes.plan(0)
        return sum(len(order.swap) for order in self.tier.orders.take().orders)

    def write(self, **failed: list[int]) -> int:
        """Plan what may be written and report it, with these positions failed; return how many were planned."""
        self.writes.plan(0)
        tasks = self.ledger.send_storage(self.tier.orders.take(), self.now)
        for task in tasks:
            kinds: dict[str, Any] = {
                kind: np.array(positions, np.int32) for kind, positions in failed.items()
            }
            result = TransferResult(
                purpose=SwapPurpose.STORE,
                failed=np.unique(np.concatenate([*kinds.values(), np.empty(0, np.int32)])).astype(np.int32),
                checksums=np.zeros(len(task.swap), np.uint64),
                copied_bytes=0,
                seconds=0.0,
                **{kind: positions for kind, positions in kinds.items() if kind != "failed"},
            )
            (flight,) = self.ledger.record(TransferReport(plan_id=task.plan_id, rank=0, results=(result,)))
            self.tier.complete(flight)
        return sum(len(task.swap) for task in tasks)


def test_a_storage_that_refuses_every_block_is_retried_later_with_one_block() -> None:
    stage = Stage(WritePolicy.WRITE_BACK, retry_after=5)
    store(stage.index.pool, chain(*range(100, 116)))  # every slot is taken: each write evicts
    store(stage.host, PATH)
    assert stage.write(failed=[0, 1, 2, 3]) == 4
    assert stage.index.pool.stats().ready == 12
    assert [stage.write(), stage.write()] == [0, 0]
    stage.now = 5.0
    assert stage.write(failed=[0]) == 1
    assert stage.write() == 0
    stage.now = 10.0
    assert stage.write() == 1
    assert not stage.writes.is_refused
    assert stage.write() == 3, "at full speed again"
    stage.index.pool.verify()


@pytest.mark.parametrize("kind", ["bad_slots", "no_room"])
def test_blocks_whose_slot_fails_are_written_to_others(kind: str) -> None:
    stage = Stage(WritePolicy.WRITE_THROUGH, retry_after=3600)
    store(stage.index.pool, chain(100, 101))
    store(stage.host, PATH[:2])
    stage.writes.on_arrival(hashes(PATH[:2]))
    assert stage.write(**{kind: [0, 1]}) == 2
    assert not stage.writes.is_refused
    assert stage.writes.queued == 2
    stage.write()
    stats = stage.index.pool.stats()
    assert stats.quarantined == (2 if kind == "bad_slots" else 0)
    assert stage.index.is_absent(hashes(PATH[:2])).tolist() == [False, False]
    assert stage.counters.bad_storage_slots == stats.quarantined
    assert stage.writes.queued == 0
    stage.index.pool.verify()


class CountingHost(LocalHostTier):
    """Counts the blocks that it lists."""

    listed = 0

    def ancestry(self, slots: Int32Array, levels: int = 2**32 - 1) -> BlockList:
        found = super().ancestry(slots, levels)
        self.listed += len(found)
        return found


def visits(depth: int, stored: int) -> tuple[int, int, int]:
    """Blocks planned, listed in the host and looked up in the storage when one below ``depth`` others is stored.

    The storage has the first ``stored`` of them.
    """
    path = list(accumulate(range(depth), lambda key, _: sha256(key).digest(), initial=bytes(31) + b"1"))
    stage = Stage(WritePolicy.WRITE_THROUGH)
    stage.host, stage.index = CountingHost(CacheLevel.HOST, 2 * depth), LocalIndex.make(2 * depth)
    stage.connect()
    store(stage.host, path)
    store(stage.index.pool, path[:stored])
    stage.writes.on_arrival(hashes(path[-1:]))
    before = stage.index.pool.stats().lookups
    planned = stage.planned()
    return planned, stage.host.listed, stage.index.pool.stats().lookups - before


def test_writing_below_a_stored_path_costs_the_same_at_every_depth() -> None:
    shallow, deep = visits(16, 16), visits(4096, 4096)
    assert shallow == deep
    assert deep[0] == deep[1] == 1


@pytest.mark.parametrize("missing", [1, 63, 64, 65, 400])
def test_a_block_is_written_with_its_ancestors_that_are_not_stored(missing: int) -> None:
    planned, listed, looked_up = visits(4096, 4096 - missing)
    assert planned == missing + 1
    assert max(listed, looked_up) <= 8 * missing + 256


def test_queued_blocks_that_left_the_host_are_dropped_and_counted() -> None:
    stage = Stage(WritePolicy.WRITE_THROUGH)
    store(stage.host, PATH)
    stage.writes.on_arrival(hashes(PATH))
    copy_in(stage.host, chain(*range(10, 16)))  # drives two of the four out
    assert [stage.planned(), stage.planned()] == [2, 0]
    assert stage.counters.stores_dropped == 2
    assert stage.writes.queued == 0


def test_a_storage_that_refused_is_retried_with_a_block_that_the_host_still_has() -> None:
    stage = Stage(WritePolicy.WRITE_THROUGH, retry_after=5)
    store(stage.host, PATH)
    stage.writes.on_arrival(hashes(PATH))
    assert stage.write(failed=[0, 1]) == 2, "a quarter of the host tier"
    was_refused = stage.writes.is_refused
    stage.writes.forget()
    stage.writes.on_arrival(hashes(chain(50, 51, 52)))  # they have left the host
    stage.writes.on_arrival(hashes(PATH))
    stage.now = 5.0
    assert stage.write() == 1
    assert (was_refused, stage.writes.is_refused) == (True, False)
    assert stage.counters.stores_dropped == 3


@pytest.mark.parametrize(("stored", "lost"), [(0, 2), (3, 1), (4, 0)])
def test_write_back_counts_blocks_that_leave_the_host_unstored(stored: int, lost: int) -> None:
    stage = Stage(WritePolicy.WRITE_BACK)
    store(stage.host, PATH)
    if stored:
        store(stage.index.pool, PATH[:stored])
    copy_in(stage.host, chain(*range(10, 16)))
    assert stage.counters.stores_dropped == lost


def test_writing_every_host_block_keeps_the_eviction_order_of_the_host() -> None:
    stage = Stage(WritePolicy.WRITE_THROUGH, write_blocks=8)
    stored = [store(stage.host, chain(number))[0] for number in range(8)]
    stage.writes.queue_all()
    while stage.writes.queued:
        stage.write()
    assert stage.index.pool.stats().ready == 8
    assert eviction_order(stage.host) == stored


def test_a_full_queue_drops_its_oldest_blocks() -> None:
    stage = Stage(WritePolicy.WRITE_THROUGH, write_blocks=1)
    store(stage.host, PATH)
    stage.writes.on_arrival(hashes(PATH))
    for _ in range(16384 // 4):
        stage.writes.on_arrival(hashes(PATH))
    assert stage.writes.queued == 16384
    assert stage.counters.stores_dropped == 4
