"""Reads from storage: what a fetch waits for, and that a step costs nothing for fetches that wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdcache.metadata import CacheLevel, HashArray, StorageTask, SwapPurpose, TransferReport, TransferResult
from fdcache.plans.ledger import PlanLedger
from fdcache.settings.cache import CacheSettings, PrefetchPolicy, StorageTierSettings
from fdcache.storage.connector import RunResult
from fdcache.tiers.host import LocalHostTier
from fdcache.tiers.remote_index import RemoteIndex
from fdcache.tiers.statistics import Counters
from fdcache.tiers.storage import StorageTier
from fdcache.tiers.storage_index import LocalIndex
from fdcache.tiers.storage_reads import MOST_GROUP_BYTES, GroupSize, leading_ready
from fdcache.tiers.waiting_fetches import Fetch
from tests.service_help import until
from tests.storage_help import storage_layout
from tests.tier_help import chain, copy_in, hashes, report, store

BLOCKS = 4


def path(number: int, length: int = BLOCKS) -> HashArray:
    return hashes(chain(number, *range(100, 99 + length)))


class Stage:
    """Reads into a host tier, of which half may be in flight, from a storage that has ``stored`` paths."""

    def __init__(
        self, stored: Sequence[HashArray], host: int = 2 * BLOCKS, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.clock = clock
        self.host = LocalHostTier(CacheLevel.HOST, host)
        self.index: LocalIndex = LocalIndex.make(256 * BLOCKS)
        self.index.restore([])
        for each in stored:
            store(self.index.pool, [row.tobytes() for row in each])
        self.counters = Counters()
        self.ledger = PlanLedger(1, 5.0)
        self.connect(self.index)

    def connect(self, index: LocalIndex | RemoteIndex) -> None:
        """Make the storage tier between the host and an index."""
        self.tier = StorageTier(
            CacheSettings(),
            StorageTierSettings(timeout=1.0),
            storage_layout(),
            self.host,
            index,
            self.counters,
            self.clock,
        )
        self.reads = self.tier.reads

    def begin(self, hashes: HashArray) -> Fetch:
        return self.reads.begin(hashes, lambda _: 0, budget=9.0, bandwidth=1.0)

    def waits(self, fetch: Fetch) -> bool:
        return self.reads.wait(fetch, PrefetchPolicy.WAIT_COMPLETE) is not None

    @property
    def ordered(self) -> list[int]:
        """Blocks of each read that was ordered and not sent."""
        return [len(order.swap) for order in self.tier.orders.orders]

    def send(self) -> Sequence[StorageTask]:
        return self.ledger.send_storage(self.tier.orders.take(), 0.0)

    def end(self, tasks: Sequence[StorageTask], failed: Sequence[int] = ()) -> None:
        """Report reads that have brought their blocks but for those at the positions ``failed``."""
        for task in tasks:
            result = TransferResult(
                purpose=SwapPurpose.PREFETCH,
                failed=np.array(failed, np.int32),
                checksums=np.zeros(len(task.swap), np.uint64),
                copied_bytes=0,
                seconds=0.0,
            )
            (flight,) = self.ledger.record(TransferReport(plan_id=task.plan_id, rank=0, results=(result,)))
            self.tier.complete(flight)

    @property
    def looks(self) -> int:
        """Number of blocks looked up in any tier."""
        return self.host.stats().lookups + self.index.pool.stats().lookups


@pytest.mark.parametrize("waiting", [1, 128])
def test_a_step_looks_nothing_up_for_fetches_that_wait_for_room(waiting: int) -> None:
    paths = [path(number) for number in range(waiting + 1)]
    stage = Stage(paths)
    fetches = [stage.begin(each) for each in paths]
    before = stage.looks
    for _ in range(3):
        stage.reads.advance()
        assert all(stage.waits(fetch) for fetch in fetches)
    assert stage.looks == before
    assert len(stage.ordered) == 1


def test_room_goes_to_the_fetch_that_has_waited_longest() -> None:
    paths = [path(number) for number in range(4)]
    stage = Stage(paths)
    fetches = [stage.begin(each) for each in paths]
    for number, fetch in enumerate(fetches):
        (task,) = tasks = stage.send()
        assert (task.swap.hash_values == paths[number]).all()
        stage.end(tasks)
        assert not stage.waits(fetch)
        stage.reads.unpin(fetch)
        stage.reads.advance()
    assert all(fetch.done for fetch in fetches)
    assert stage.reads.is_idle


def test_a_fetch_ends_when_other_requests_pin_all_the_room() -> None:
    paths = [path(number) for number in range(2)]
    stage = Stage(paths)
    first, second = (stage.begin(each) for each in paths)
    stage.end(stage.send())
    assert stage.waits(first) is False
    stage.reads.advance()
    assert second.done and not stage.waits(second)


def test_blocks_that_are_wanted_by_themselves_are_read_together() -> None:
    paths = [path(number, 1) for number in range(3)]
    stage = Stage(paths)
    fetches = [stage.begin(each) for each in paths]
    assert stage.ordered == [3]
    stage.end(stage.send(), failed=[1])
    assert not any(stage.waits(fetch) for fetch in fetches)
    assert [fetch.pinned for fetch in fetches] == [1, 0, 1]
    for fetch in fetches:
        stage.reads.unpin(fetch)
    assert stage.reads.is_idle


def test_a_longer_path_shares_no_read_with_others_and_joins_theirs() -> None:
    long = path(7)
    stage = Stage([path(0, 1), long], host=64)
    alone, first = stage.begin(path(0, 1)), stage.begin(long[:1])
    whole = stage.begin(long)  # waits for its first block, which another request reads
    assert stage.ordered == [2]
    stage.end(stage.send())
    assert not stage.waits(alone) and not stage.waits(first) and stage.waits(whole)
    assert stage.ordered == [BLOCKS - 1]
    stage.end(stage.send())
    assert not stage.waits(whole) and whole.pinned == BLOCKS


def test_a_shared_read_is_taken_back_once_nobody_needs_any_of_it() -> None:
    paths = [path(number, 1) for number in range(2)]
    stage = Stage(paths)
    fetches = [stage.begin(each) for each in paths]
    (task,) = stage.send()
    stage.reads.cancel(fetches[0])
    assert stage.reads.take_unneeded() == ()
    stage.reads.cancel(fetches[1])
    assert stage.reads.take_unneeded() == (task.plan_id,)
    assert stage.reads.take_unneeded() == ()
    stage.end([task])
    assert stage.reads.is_idle


@pytest.mark.parametrize("copied", [True, False])
def test_a_copy_from_the_device_wakes_the_fetch_that_waits_for_it(copied: bool) -> None:
    stage = Stage([path(0)], host=64)
    planned = copy_in(stage.host, [row.tobytes() for row in path(0)[:2]])
    fetch = stage.begin(path(0))
    before = stage.looks
    stage.reads.copies_ended(path(7))
    stage.reads.advance()
    assert stage.waits(fetch)
    assert (stage.looks, stage.ordered) == (before, [])
    report(stage.host, planned, copied)
    stage.reads.copies_ended(path(0)[:2])
    stage.reads.advance()
    assert stage.ordered == [2 if copied else 4]


def test_a_reset_of_the_host_wakes_fetches_that_wait_for_copies_to_it() -> None:
    stage = Stage([path(0)], host=64)
    copy_in(stage.host, [row.tobytes() for row in path(0)[:2]])
    stage.begin(path(0))
    stage.host.reset()
    stage.reads.all_copies_ended()
    stage.reads.advance()
    assert stage.ordered == [BLOCKS]


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


def test_the_answer_of_a_store_wakes_the_fetches_that_wait_for_it() -> None:
    stage, slow = Stage([], host=64), SlowStore()
    index = RemoteIndex(slow, timeout=30.0)  # type: ignore[arg-type]
    stage.connect(index)
    fetches = [stage.begin(path(0)), stage.begin(path(0))]
    before = stage.looks
    stage.reads.advance()
    assert all(stage.waits(fetch) for fetch in fetches)
    assert stage.looks == before
    slow.may_answer.set()

    def ordered() -> bool:
        stage.reads.advance()
        return bool(stage.ordered)

    until(ordered, "the store has answered")
    assert stage.ordered == [BLOCKS]
    assert (slow.asked, stage.counters.prefetches_shared) == (1, 1)
    index.close()


def test_a_fetch_that_was_cancelled_while_it_waited_is_not_continued() -> None:
    paths = [path(number) for number in range(3)]
    stage = Stage(paths)
    first, second, third = (stage.begin(each) for each in paths)
    stage.reads.cancel(second)
    stage.end(stage.send())
    stage.reads.advance()
    stage.reads.unpin(first)
    stage.reads.advance()
    assert third.done or third.reads
    assert not second.reads
    for fetch in (first, third):
        stage.reads.cancel(fetch)
    assert stage.reads.num_waiting == 0


@pytest.mark.parametrize("is_left", [True, False])
def test_a_read_that_was_left_to_its_end_outlives_those_that_share_it(is_left: bool) -> None:
    stage = Stage([path(0)], host=64)
    first, second = stage.begin(path(0)), stage.begin(path(0))
    (task,) = stage.send()
    (stage.reads.leave if is_left else stage.reads.cancel)(first)
    stage.reads.cancel(second)
    assert stage.reads.take_unneeded() == (() if is_left else (task.plan_id,))
    stage.end([task])
    assert stage.reads.is_idle
    assert leading_ready(stage.host, path(0)) == BLOCKS


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_reads_take_about_the_same_time_at_every_speed_of_the_disk() -> None:
    clock = Clock()
    size = GroupSize(clock)
    sizes = []
    for speed in (3e9, 3e8):
        for _ in range(20):
            group = size.of(4 << 30)
            size.begin()
            clock.now += group / speed
            size.end(group)
        sizes.append(size.of(0))
        assert size.speed == pytest.approx(speed, rel=0.05)
    assert sizes[0] == pytest.approx(10 * sizes[1], rel=0.05)
    clock.now += 60.0
    size.end(0)
    assert size.of(0) == sizes[1], "a read that failed tells no speed"


@given(st.floats(0, 1e12), st.integers(0, 1 << 40))
def test_a_fetch_has_a_bounded_number_of_bounded_reads(speed: float, nbytes: int) -> None:
    size = GroupSize(lambda: 0.0)
    size.speed = speed
    group = size.of(nbytes)
    assert group <= MOST_GROUP_BYTES
    assert group == MOST_GROUP_BYTES or nbytes <= 64 * group
