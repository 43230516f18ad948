"""Backups in flight leave requests most of the device tier, and give way to one that asks for more."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache.manager import CacheManager, Request
from fdcache.metadata import SLOT_HEADER_BYTES, SwapPurpose, TransferPlan
from fdcache.settings.cache import CacheSettings, WritePolicy
from tests.manager_world import layout
from tests.property.engine_model import BLOCK, Rank

POLICIES = [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH_SELECTIVE, WritePolicy.WRITE_BACK]


class Pool:
    """A manager whose worker copies when it is told to; requests come, compute and end at once."""

    def __init__(self, blocks: int, policy: WritePolicy = WritePolicy.WRITE_THROUGH) -> None:
        shape = layout()
        self.manager = CacheManager(
            CacheSettings(
                device_blocks=blocks,
                host_memory=2 * blocks * (shape.record_bytes + SLOT_HEADER_BYTES),
                write_policy=policy,
                write_through_threshold=1,
                clean_reserve=blocks,
            ),
            shape,
        )
        self.plans: list[TransferPlan] = []
        self._rank = Rank(0)
        self._names = count()
        self._tokens = count(1000)

    def ask(self, blocks: int, prefix: tuple[int, ...] = ()) -> tuple[int, ...] | None:
        """A request for so many more blocks than ``prefix`` has; its tokens, or None when it did not get them."""
        tokens = (*prefix, *(next(self._tokens) for _ in range(blocks * BLOCK)))
        request = Request(f"r{next(self._names)}", list(tokens))
        self.manager.match_prefix([request])
        (allocation,) = self.manager.allocate_device_blocks([(request, len(tokens))])
        if allocation.ok:
            self.plan()
            self.copy(keep_backups=True)
            self.manager.commit([(request, len(tokens))])
        self.manager.finish([request])
        return tokens if allocation.ok else None

    def plan(self) -> None:
        self.plans += self.manager.take_plans()

    def copy(self, *, keep_backups: bool = False) -> None:
        """The worker reports everything, or everything but backups."""
        kept = []
        for plan in self.plans:
            if keep_backups and plan.backups is not None:
                kept.append(plan)
                continue
            self._rank.queue.append(plan)
            self.manager.apply(self._rank.execute_next(frozenset()))
        self.plans = kept

    @property
    def in_flight(self) -> int:
        return self.manager._plans.blocks_in_flight(SwapPurpose.BACKUP)

    @property
    def withheld(self) -> int:
        device = self.manager._device
        return device.stats().slots - device.available - device.above_copies

    def back_up_everything(self) -> None:
        for _ in range(500):
            self.plan()
            if not self.plans:
                return
            self.copy()
        raise AssertionError("there is always something left to copy")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("paths", [1, 10, 50])
def test_a_request_gets_a_third_of_a_pool_that_nobody_runs_on(policy: WritePolicy, paths: int) -> None:
    pool = Pool(1000, policy)
    for _ in range(paths):
        pool.ask(900 // paths)
    for _ in range(4):
        pool.plan()
    assert pool.in_flight > 0
    assert pool.ask(300) is not None


def test_the_ends_of_long_paths_do_not_hold_the_paths() -> None:
    """Fifty conversations of 18 blocks are copied; each gets one block more, and that is being copied."""
    pool = Pool(1000)
    paths = [pool.ask(18) for _ in range(50)]
    pool.back_up_everything()
    for path in paths:
        assert path is not None
        pool.ask(1, path)
    for _ in range(4):
        pool.plan()
    assert pool.in_flight > 0
    assert pool.withheld == pool.in_flight == 50
    assert pool.ask(300) is not None


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_tiny_pool_is_backed_up_to_the_last_block_and_used_to_the_last(
    blocks: int, policy: WritePolicy
) -> None:
    pool = Pool(blocks, policy)
    path = pool.ask(blocks)
    assert path is not None
    pool.ask(0, path)
    pool.back_up_everything()
    host = pool.manager.get_stats().host
    assert host is not None and host.ready == blocks
    assert pool.ask(blocks) is not None


@given(
    blocks=st.integers(1, 60),
    policy=st.sampled_from(POLICIES),
    requests=st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 3), st.sampled_from(["none", "plan", "copy"])),
        min_size=1,
        max_size=12,
    ),
    wanted=st.integers(1, 60),
)
@settings(max_examples=150, derandomize=True, deadline=None)
def test_whoever_asks_waits_at_most_for_what_is_in_flight(
    blocks: int, policy: WritePolicy, requests: list[tuple[int, int, str]], wanted: int
) -> None:
    """Backups withhold their own blocks, half of the pool; a request that gets none for them gets them next."""
    pool = Pool(blocks, policy)
    paths: list[tuple[int, ...]] = []
    for size, continued, then in requests:
        prefix = paths[-1] if continued == 0 and paths else ()
        room = blocks - len(prefix) // BLOCK
        if room > 0 and (path := pool.ask(min(size, room), prefix)) is not None:
            paths.append(path)
        if then == "plan":
            pool.plan()
        elif then == "copy":
            pool.copy()
        assert pool.withheld == pool.in_flight <= max(1, blocks // 2)
    wanted = min(wanted, blocks)
    if pool.ask(wanted) is None:
        before = pool.in_flight
        assert before > 0
        pool.plan()
        assert pool.in_flight == before, "no more begin while somebody waits"
        pool.copy()
        assert pool.ask(wanted) is not None
    pool.manager.check_integrity()
