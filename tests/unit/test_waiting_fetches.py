"""Requests that wait for storage: what wakes them, and that those asleep cost a step nothing."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event

import numpy as np
import pytest

from fdcache.metadata import CacheLevel, HashArray, SwapPurpose, TransferReport
from fdcache.plans.ledger import OpenPlan, PlanLedger, StorageOrder
from fdcache.settings.cache import PrefetchPolicy
from fdcache.storage.connector import RunResult
from fdcache.tiers.fetches import Fetch
from fdcache.tiers.host import LocalHostTier
from fdcache.tiers.statistics import Counters
from fdcache.tiers.storage_index import LocalIndex, RemoteIndex
from fdcache.tiers.storage_reads import StorageReads
from tests.service_help import until
from tests.tier_help import chain, copy_in, hashes, report, store

BLOCKS = 4


def path(number: int, length: int = BLOCKS) -> HashArray:
    return hashes(chain(number, *range(100, 99 + length)))


class Stage:
    """Reads into a host tier, of which half may be in flight, from a storage that has ``stored`` paths."""

    def __init__(self, stored: Sequence[HashArray], host: int = 2 * BLOCKS) -> None:
        self.host = LocalHostTier(CacheLevel.HOST, host)
        self.index = LocalIndex.make(256 * BLOCKS)
        self.index.restore([])
        for each in stored:
            store(self.index.pool, [row.tobytes() for row in each])
        self.counters = Counters()
        self.reads = self.reads_of(self.index)
        self.plan = OpenPlan()

    def reads_of(self, index: LocalIndex | RemoteIndex) -> StorageReads:
        return StorageReads(self.host, index, self.counters, lambda: 0.0, block_bytes=1, timeout=1.0)

    def begin(self, hashes: HashArray) -> Fetch:
        return self.reads.begin(hashes, lambda _: 0, self.plan, budget=9.0, bandwidth=1.0)

    def waits(self, fetch: Fetch) -> bool:
        return self.reads.must_wait(fetch, PrefetchPolicy.WAIT_COMPLETE, self.plan)

    def take_orders(self) -> list[StorageOrder]:
        orders, self.plan = self.plan.storage, OpenPlan()
        return orders

    def end(self, orders: Sequence[StorageOrder]) -> None:
        """The reads have brought their blocks."""
        ledger = PlanLedger(1, 9.0)
        for order in orders:
            planned = OpenPlan()
            planned.storage.append(order)
            (task,) = ledger.close(planned, 0.0).storage
            flight = ledger.record(TransferReport(plan_id=task.plan_id, rank=0, results=()))
            flights = flight if isinstance(flight, list) else [flight]
            swap = task.swap
            self.host.complete(swap.dst_block_ids, np.ones(len(swap), np.uint8), np.empty(0, np.uint64))
            self.index.end_reads(swap, np.zeros(len(swap), np.bool_), np.zeros(len(swap), np.bool_))
            for each in flights:
                assert each is not None
                self.reads.settled(each)

    @property
    def looks(self) -> int:
        """How often any tier was looked into for a block."""
        return self.host.stats().lookups + self.index.pool.stats().lookups


@pytest.mark.parametrize("waiting", [1, 128])
def test_a_step_looks_nothing_up_for_requests_that_wait_for_room(waiting: int) -> None:
    paths = [path(number) for number in range(waiting + 1)]
    stage = Stage(paths)
    fetches = [stage.begin(each) for each in paths]
    before = stage.looks
    for _ in range(3):
        stage.reads.go_on(stage.plan)
        assert all(stage.waits(fetch) for fetch in fetches)
    assert stage.looks == before
    assert len(stage.plan.storage) == 1


def test_room_goes_to_who_has_waited_longest() -> None:
    paths = [path(number) for number in range(4)]
    stage = Stage(paths)
    fetches = [stage.begin(each) for each in paths]
    for number, fetch in enumerate(fetches):
        (order,) = orders = stage.take_orders()
        assert order.swap.build() is not None
        assert (order.build(1).swap.hash_values == paths[number]).all()
        stage.end(orders)
        assert not stage.waits(fetch)
        stage.reads.let_go(fetch)
        stage.reads.go_on(stage.plan)
    assert all(fetch.ended for fetch in fetches)
    assert len(stage.reads._waiting) == 0


def test_when_what_is_there_is_kept_for_others_nobody_waits_for_room() -> None:
    paths = [path(number) for number in range(2)]
    stage = Stage(paths)
    first, second = (stage.begin(each) for each in paths)
    stage.end(stage.take_orders())
    assert stage.waits(first) is False
    stage.reads.go_on(stage.plan)
    assert second.ended and not stage.waits(second)


@pytest.mark.parametrize("copied", [True, False])
def test_a_copy_from_the_device_wakes_who_waits_for_it(copied: bool) -> None:
    stage = Stage([path(0)], host=64)
    planned = copy_in(stage.host, [row.tobytes() for row in path(0)[:2]])
    fetch = stage.begin(path(0))
    before = stage.looks
    stage.reads.copies_ended(path(7))
    stage.reads.go_on(stage.plan)
    assert stage.waits(fetch)
    assert (stage.looks, stage.plan.storage) == (before, [])
    report(stage.host, planned, copied)
    stage.reads.copies_ended(path(0)[:2])
    stage.reads.go_on(stage.plan)
    (order,) = stage.plan.storage
    assert order.swap.size == (2 if copied else 4)


def test_a_reset_of_the_host_wakes_who_waits_for_copies_to_it() -> None:
    stage = Stage([path(0)], host=64)
    copy_in(stage.host, [row.tobytes() for row in path(0)[:2]])
    stage.begin(path(0))
    stage.host.reset()
    stage.reads.no_more_copies()
    stage.reads.go_on(stage.plan)
    (order,) = stage.plan.storage
    assert order.swap.size == BLOCKS


class SlowStore:
    """A store of others that answers when it is let."""

    def __init__(self) -> None:
        self.may_answer = Event()
        self.asked = 0

    def exists(self, hashes: HashArray, timeout: float) -> RunResult:
        self.asked += 1
        assert self.may_answer.wait(30)
        return RunResult(len(hashes))

    def close(self) -> None:
        """Nothing is open."""


def test_the_answer_of_a_store_wakes_who_waits_for_it() -> None:
    stage, slow = Stage([], host=64), SlowStore()
    index = RemoteIndex(slow, timeout=30.0)  # type: ignore[arg-type]
    stage.reads = stage.reads_of(index)
    fetches = [stage.begin(path(0)), stage.begin(path(0))]
    before = stage.looks
    stage.reads.go_on(stage.plan)
    assert all(stage.waits(fetch) for fetch in fetches)
    assert stage.looks == before
    slow.may_answer.set()
    until(lambda: bool(index._answered), "the store has answered")
    stage.reads.go_on(stage.plan)
    assert [order.swap.size for order in stage.plan.storage] == [BLOCKS]
    assert (slow.asked, stage.counters.prefetches_shared) == (1, 1)
    index.close()


def test_a_request_that_ended_while_it_waited_is_not_woken() -> None:
    paths = [path(number) for number in range(3)]
    stage = Stage(paths)
    first, second, third = (stage.begin(each) for each in paths)
    stage.reads.give_up(second)
    stage.end(stage.take_orders())
    stage.reads.go_on(stage.plan)
    stage.reads.let_go(first)
    stage.reads.go_on(stage.plan)
    assert third.ended or third.reads
    assert not second.reads
    for fetch in (first, third):
        stage.reads.give_up(fetch)
    assert len(stage.reads._waiting) == 0


def test_blocks_in_flight_and_deadlines_are_those_of_plans_that_have_not_ended() -> None:
    paths = [path(number) for number in range(2)]
    stage = Stage(paths, host=64)
    for each in paths:
        stage.begin(each)
    ledger = PlanLedger(1, 5.0)
    plan = ledger.close(stage.plan, 0.0)
    assert ledger.blocks_in_flight(SwapPurpose.PREFETCH) == 2 * BLOCKS
    first, second = plan.storage
    ledger.record(TransferReport(plan_id=first.plan_id, rank=0, results=()))
    assert ledger.blocks_in_flight(SwapPurpose.PREFETCH) == BLOCKS
    late = [
        [flight.plan.plan_id for flight in ledger.newly_overdue(now)] for now in (1.0, 3.0, 4.0, 9.0, 10.0)
    ]
    assert late == [[], [second.plan_id], [], [plan.plan_id], []]
    ledger.lose_rank(0)
    assert ledger.blocks_in_flight(SwapPurpose.PREFETCH) == len(ledger) == 0
