"""The manager against a model engine: bytes are right, and nothing leaks, whatever happens in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fdcache.layout import KVLayout
from fdcache.manager import CacheManager
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.tiers.host import host_block_bytes
from tests.property.engine_model import BLOCK, Engine, Job, Rank, model_rank
from tests.seeds import budget

PROMPTS = st.builds(
    lambda blocks, tail: tuple(token for block in blocks for token in [block] * BLOCK) + tuple(tail),
    st.lists(st.integers(0, 1), max_size=5),
    st.lists(st.integers(0, 1), min_size=1, max_size=BLOCK),
)
_fails: st.SearchStrategy[frozenset[int]] = st.frozensets(st.integers(0, 7), max_size=1) | st.just(
    frozenset()
)


MOST_DEVICE_BLOCKS = 14


class ManagerMachine(RuleBasedStateMachine):
    """Random interleavings of schedule, execute, report, accept, preempt, finish, reset, resize, pause, loss."""

    num_layers = 1
    make_rank: Callable[[CacheManager, int], Rank] = staticmethod(model_rank)

    @initialize(
        ranks=st.integers(1, 2),
        device_blocks=st.integers(5, 12),
        host_blocks=st.sampled_from([0, 2, 6, 12, 30]),
        policy=st.sampled_from(WritePolicy),
        threshold=st.integers(1, 3),
        clean_reserve=st.integers(0, 3),
        grid=st.sampled_from([1, 1, 2, 3]),
        lookahead=st.sampled_from([0, 0, 1, 2, BLOCK + 1]),
        defer_timeout=st.sampled_from([2.0, 2.0, 0.0]),
    )
    def start(self, **shape: Any) -> None:
        self.begin(**shape)

    def begin(
        self,
        ranks: int,
        device_blocks: int,
        host_blocks: int,
        policy: WritePolicy,
        threshold: int,
        clean_reserve: int,
        grid: int,
        lookahead: int,
        defer_timeout: float,
    ) -> None:
        layout = KVLayout.uniform(
            model="model",
            revision="1",
            block_size=BLOCK,
            num_layers=self.num_layers,
            kv_heads=1,
            head_dim=8,
            dtype="float16",
            tp_size=ranks,
        )
        self.now = 0.0
        self.disturbances = 0
        cache = CacheSettings(
            device_blocks=device_blocks,
            host_memory=host_blocks * host_block_bytes(layout),
            write_policy=policy,
            write_through_threshold=threshold,
            clean_reserve=clean_reserve,
            reuse_grid=grid * BLOCK,
            lookahead_tokens=lookahead,
            defer_timeout=defer_timeout,
            plan_timeout=5.0,
            event_buffer=1000,
        )
        self.engine = Engine(self.make_manager(cache, layout), ranks, self.make_rank)
        self.engine.grid = grid

    def make_manager(self, cache: CacheSettings, layout: KVLayout) -> CacheManager:
        return CacheManager(cache, layout, clock=lambda: self.now)

    def work_elsewhere(self, data: st.DataObject) -> None:
        """Events beside the ranks in a stretch of normal traffic."""

    def job(self, pick: int) -> Job:
        return self.engine.jobs[pick % len(self.engine.jobs)]

    @rule(data=st.data(), rounds=st.integers(1, 4), ahead=st.booleans())
    def serve(self, data: st.DataObject, rounds: int, ahead: bool) -> None:
        """A stretch of normal traffic: mostly reuse happens here, what the other rules break into."""
        engine = self.engine
        for _ in range(rounds):
            while len(engine.jobs) < 3:
                engine.submit(data.draw(PROMPTS))
            engine.schedule(engine.jobs, 16)
            for rank in engine.ranks[: 1 if ahead else 2]:
                fails = data.draw(_fails)
                while rank.queue:
                    engine.execute(rank, fails)
            self.work_elsewhere(data)
            while engine.reports and not ahead:
                engine.deliver(0)
            for _ in range(len(engine.steps)):
                engine.accept_oldest()
            for job in list(engine.jobs):
                if job.scheduled == len(job.tokens) and not ahead:
                    engine.finish(job)

    @precondition(lambda self: len(self.engine.jobs) < 6)
    @rule(tokens=PROMPTS, use_cache=st.sampled_from([True, True, True, False]))
    def submit(self, tokens: tuple[int, ...], use_cache: bool) -> None:
        self.engine.submit(tokens, use_cache)

    @precondition(lambda self: self.engine.jobs)
    @rule(picks=st.sets(st.integers(0, 5), min_size=1, max_size=3), chunk=st.integers(1, 24))
    def schedule(self, picks: set[int], chunk: int) -> None:
        jobs = [job for i, job in enumerate(self.engine.jobs) if i in picks]
        self.engine.schedule(jobs, chunk)

    @precondition(lambda self: self.engine.jobs)
    @rule(pick=st.integers(0, 5), token=st.integers(0, 1))
    def generate(self, pick: int, token: int) -> None:
        job = self.job(pick)
        if job.running and job.scheduled == len(job.tokens):
            self.engine.generate(job, token)

    @rule(rank=st.integers(0, 1), fails=_fails, count=st.integers(1, 4))
    def execute(self, rank: int, fails: frozenset[int], count: int) -> None:
        worker = self.engine.ranks[rank % len(self.engine.ranks)]
        for _ in range(min(count, len(worker.queue))):
            self.engine.execute(worker, fails)

    @rule(rank=st.integers(0, 1), count=st.integers(1, 3))
    def refuse(self, rank: int, count: int) -> None:
        """Plans that no controller gets."""
        worker = self.engine.ranks[rank % len(self.engine.ranks)]
        for _ in range(min(count, len(worker.queue))):
            self.engine.refuse(worker)

    @precondition(lambda self: self.engine.reports)
    @rule(index=st.integers(0, 7))
    def deliver(self, index: int) -> None:
        self.engine.deliver(index)

    @precondition(lambda self: self.engine.steps)
    @rule()
    def accept(self) -> None:
        self.engine.accept_oldest()

    @precondition(lambda self: self.engine.jobs)
    @rule(pick=st.integers(0, 5))
    def preempt(self, pick: int) -> None:
        self.engine.stop(self.job(pick))

    @precondition(lambda self: self.engine.jobs)
    @rule(pick=st.integers(0, 5))
    def finish(self, pick: int) -> None:
        self.engine.finish(self.job(pick))

    @rule(seconds=st.sampled_from([1.0, 3.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.engine.handle(self.engine.manager.expire())

    @precondition(lambda self: self.disturbances < 2)
    @rule()
    def reset(self) -> None:
        self.disturbances += 1
        self.engine.manager.reset_cache()

    @rule(blocks=st.integers(4, MOST_DEVICE_BLOCKS))
    def resize(self, blocks: int) -> None:
        before = self.engine.manager.num_device_blocks
        done = self.engine.manager.resize_device_pool(blocks)
        assert self.engine.manager.num_device_blocks == (blocks if done else before)

    @rule(jobs=st.booleans())
    def pause(self, jobs: bool) -> None:
        self.engine.manager.pause()
        self.engine.schedule(self.engine.jobs if jobs else [], 8)
        self.engine.manager.wakeup()

    @precondition(lambda self: self.disturbances < 2)
    @rule(rank=st.integers(0, 1))
    def lose_worker(self, rank: int) -> None:
        self.disturbances += 1
        self.engine.lose(self.engine.ranks[rank % len(self.engine.ranks)])

    @invariant()
    def tiers_are_sound(self) -> None:
        if hasattr(self, "engine"):
            self.engine.manager.check_integrity()

    def come_to_rest(self) -> None:
        """Nothing is left to copy."""
        self.engine.schedule([], 1)
        self.engine.drain()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        for job in list(engine.jobs):
            engine.finish(job)
        self.come_to_rest()
        stats = engine.manager.get_stats()
        assert stats.live_requests == stats.plans_in_flight == 0
        for tier in (stats.device, stats.host):
            if tier is not None:
                assert (tier.pins, tier.holds, tier.leases, tier.writing) == (0, 0, 0, 0)
                assert tier.free + tier.evictable == tier.blocks
        engine.manager.check_integrity()
        engine.close()


def bounded(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


def test_bytes_are_right_and_nothing_leaks_in_short_histories() -> None:
    run_state_machine_as_test(ManagerMachine, settings=bounded(examples=budget(1000), steps=30))


@pytest.mark.slow
def test_bytes_are_right_and_nothing_leaks_in_long_histories() -> None:
    run_state_machine_as_test(ManagerMachine, settings=bounded(examples=budget(6000), steps=60))
