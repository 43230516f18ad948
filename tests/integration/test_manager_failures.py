"""Copies that fail, are late or have lost their request, with either host tier."""

from __future__ import annotations

import numpy as np
import pytest

from fdcache.errors import PlanError
from fdcache.manager import LoadStatus, Request
from fdcache.metadata import SwapPurpose, TransferReport, TransferResult
from tests.manager_world import TAIL, A, B, C, Worlds
from tests.property.engine_model import BLOCK


class TestFailures:
    @pytest.mark.parametrize("failing_rank", [0, 1])
    @pytest.mark.parametrize("failing_block", [0, 1])
    def test_one_rank_failing_one_block_makes_the_request_recompute_from_there(
        self, worlds: Worlds, failing_rank: int, failing_block: int
    ) -> None:
        world = worlds.new(device=8, host=8, ranks=2)
        world.serve(*A, *B, *TAIL)
        world.manager.sleep()
        world.manager.wakeup()
        job = world.submit(*A, *B, *C, *TAIL)
        world.engine.schedule([job], 100)
        for rank in world.engine.ranks:
            fails = frozenset({failing_block}) if rank.index == failing_rank else frozenset()
            world.engine.execute(rank, fails)
        outcomes = world.manager.apply(world.engine.reports)
        world.engine.reports.clear()
        assert [outcome.status for outcome in outcomes] == [LoadStatus.FAILED]
        assert outcomes[0].recompute_from == failing_block * BLOCK
        assert "injected" in (outcomes[0].error_message or "")
        world.engine.handle(outcomes)
        world.settle()
        assert world.manager.get_stats().device.ready == failing_block
        world.engine.schedule([job], 100)
        world.settle()
        assert world.manager.get_stats().device.ready == 3
        world.engine.finish(job)
        world.assert_nothing_is_held()

    def test_after_a_failed_load_the_prompt_may_be_computed_in_smaller_steps(self, worlds: Worlds) -> None:
        world = worlds.with_blocks_on_the_host_only()
        request = Request("r", [*A, *B, *C, *TAIL])
        world.manager.match_prefix([request])
        world.manager.allocate_device_blocks([(request, 13)])
        (plan,) = world.manager.take_plans()
        (outcome,) = world.manager.apply([TransferReport.refusal(plan, 0, "refused")])
        assert (outcome.recompute_from, request.num_cached_tokens) == (0, 0)
        (allocation,) = world.manager.allocate_device_blocks([(request, 1)])
        assert (allocation.ok, len(allocation.block_ids)) == (True, 0)
        world.manager.commit([(request, 4)])
        assert world.manager.get_stats().device.ready == 1
        world.manager.finish([request])
        world.assert_nothing_is_held()

    def test_nothing_above_an_unconfirmed_load_is_committed(self, worlds: Worlds) -> None:
        world = worlds.with_blocks_on_the_host_only()
        job = world.submit(*A, *B, *C, *TAIL)
        world.engine.schedule([job], 100)
        plan_of_the_step = world.engine.ranks[0]
        while plan_of_the_step.queue:
            world.engine.execute(plan_of_the_step, frozenset())
        world.engine.accept_oldest()
        assert world.manager.get_stats().device.ready == 0
        world.engine.deliver(0)
        assert world.manager.get_stats().device.ready == 3

    @pytest.mark.parametrize("failing_block", [0, 1])
    def test_a_commit_that_waited_for_a_failed_load_publishes_nothing(
        self, worlds: Worlds, failing_block: int
    ) -> None:
        world = worlds.with_blocks_on_the_host_only()
        job = world.submit(*A, *B, *C, *TAIL)
        world.engine.schedule([job], 100)
        (rank,) = world.engine.ranks
        while rank.queue:
            world.engine.execute(rank, frozenset({failing_block}))
        world.engine.accept_oldest()
        world.engine.deliver(0)
        assert world.manager.get_stats().device.ready == failing_block
        assert job.request.num_cached_tokens == failing_block * BLOCK
        world.engine.schedule([job], 100)
        world.settle()
        assert world.manager.get_stats().device.ready == 3
        world.engine.finish(job)
        world.assert_nothing_is_held()

    def test_an_overdue_load_keeps_its_slots_until_it_is_reported(self, worlds: Worlds) -> None:
        world = worlds.with_blocks_on_the_host_only()
        job = world.submit(*A, *B, *TAIL)
        world.engine.schedule([job], 100)
        world.now = 100.0
        outcomes = world.manager.expire()
        assert [outcome.status for outcome in outcomes] == [LoadStatus.OVERDUE]
        assert world.manager.expire() == []
        world.engine.handle(outcomes)
        stats = world.manager.get_stats()
        assert (stats.device.writing, stats.device.leases, stats.plans_in_flight) == (2, 0, 1)
        world.settle()
        world.assert_nothing_is_held()

    def test_a_request_whose_load_was_overdue_computes_the_next_time(self, worlds: Worlds) -> None:
        world = worlds.with_blocks_on_the_host_only()
        job = world.submit(*A, *B, *TAIL)
        world.engine.schedule([job], 100)
        world.now = 100.0
        world.engine.handle(world.manager.expire())
        world.engine.execute(world.engine.ranks[0], frozenset({0, 1}))
        world.engine.deliver(0)
        match = world.manager.match_prefix([job.request])[0]
        assert (match.num_device_blocks, match.num_host_blocks) == (0, 0)
        world.manager.finish([job.request])
        assert world.match(*A, *B, *TAIL) == (0, 2), "others load it as before"
        world.assert_nothing_is_held()

    def test_an_overdue_load_has_one_outcome_though_it_is_reported_later(self, worlds: Worlds) -> None:
        world = worlds.with_blocks_on_the_host_only()
        job = world.submit(*A, *B, *TAIL)
        world.engine.schedule([job], 100)
        world.now = 100.0
        (overdue,) = world.manager.expire()
        assert overdue.load == world.manager.load_of(job.request) > 0
        (rank,) = world.engine.ranks
        world.engine.execute(rank, frozenset())
        assert world.manager.apply(world.engine.reports) == []
        world.engine.reports.clear()
        assert world.manager.get_stats().device.ready == 2, "others find what has arrived"
        world.engine.handle([overdue])
        world.assert_nothing_is_held()

    def test_the_outcome_of_a_request_that_loads_again_names_its_present_load(self, worlds: Worlds) -> None:
        world = worlds.with_blocks_on_the_host_only()
        request = Request("r", [*A, *B, *TAIL])
        loads = []
        for _ in range(2):
            world.manager.match_prefix([request])
            world.manager.allocate_device_blocks([(request, 9)])
            loads.append(world.manager.load_of(request))
            (plan,) = world.manager.take_plans()
            (outcome,) = world.manager.apply([TransferReport.refusal(plan, 0, "refused")])
            assert (outcome.status, outcome.load) == (LoadStatus.FAILED, loads[-1])
            assert world.manager.load_of(request) == 0
            world.manager.finish([request])
        assert 0 < loads[0] < loads[1]
        world.assert_nothing_is_held()

    def test_nobody_is_told_of_an_overdue_load_whose_request_ended(self, worlds: Worlds) -> None:
        world = worlds.with_blocks_on_the_host_only()
        job = world.submit(*A, *B, *TAIL)
        world.engine.schedule([job], 100)
        world.engine.finish(job)
        world.now = 100.0
        assert world.manager.expire() == []

    def test_a_lost_worker_takes_what_was_its_own_with_it_and_leaves_nothing_held(
        self, worlds: Worlds
    ) -> None:
        world = worlds.with_blocks_on_the_host_only()
        job = world.submit(*A, *B, *TAIL)
        world.engine.schedule([job], 100)
        world.engine.lose(world.engine.ranks[0])
        assert world.match(*A, *B, *TAIL) == (0, 2 if world.service else 0)
        world.assert_nothing_is_held()

    def test_a_plan_that_could_not_be_submitted_is_a_failed_load(self, worlds: Worlds) -> None:
        world = worlds.with_blocks_on_the_host_only()
        request = Request("r", [*A, *B, *TAIL])
        world.manager.match_prefix([request])
        world.manager.allocate_device_blocks([(request, 9)])
        (plan,) = world.manager.take_plans()
        (outcome,) = world.manager.apply([TransferReport.refusal(plan, 0, "no device planes")])
        assert (outcome.status, outcome.recompute_from) == (LoadStatus.FAILED, 0)
        assert "no device planes" in (outcome.error_message or "")
        world.manager.finish([request])
        world.assert_nothing_is_held()

    @pytest.mark.parametrize("end", ["lost", "reset"])
    def test_a_load_that_the_cache_forgot_is_a_failed_load(self, worlds: Worlds, end: str) -> None:
        world = worlds.with_blocks_on_the_host_only()
        world.engine.schedule([world.submit(*A, *B, *TAIL)], 100)
        if end == "lost":
            outcomes = world.manager.worker_lost(0)
        else:
            world.manager.reset_cache()
            world.execute()
            outcomes = world.manager.apply(world.engine.reports)
        message = {"lost": "rank 0: its process is gone", "reset": "the cache was reset"}[end]
        assert [(each.status, each.recompute_from, each.error_message) for each in outcomes] == [
            (LoadStatus.FAILED, 0, message)
        ]

    def test_reports_that_do_not_fit_are_refused_and_repeated_ones_counted(self, worlds: Worlds) -> None:
        world = worlds.new(host=8)
        job = world.submit(*A, *TAIL)
        world.engine.schedule([job], 100)
        world.settle()
        (plan,) = world.manager.take_plans()
        assert plan.backups is not None

        def report(
            rank: int = 0, failed: tuple[int, ...] = (), purpose: SwapPurpose = SwapPurpose.BACKUP
        ) -> TransferReport:
            result = TransferResult(
                purpose=purpose,
                failed=np.array(failed, np.int32),
                checksums=np.empty(0, np.uint64),
                copied_bytes=0,
                seconds=0.0,
            )
            return TransferReport(plan_id=plan.plan_id, rank=rank, results=(result,))

        for wrong in (
            report(rank=1),
            report(failed=(1,)),
            report(failed=(-1,)),
            report(purpose=SwapPurpose.LOAD),
        ):
            with pytest.raises(PlanError):
                world.manager.apply([wrong])
        assert world.manager.get_stats().plans_in_flight == 1
        world.manager.apply([report(), report()])
        assert world.manager.get_stats().counters.unexpected_reports == 1
        assert plan.backups.success
        assert plan.backups.mapping == {
            int(plan.backups.src_block_ids[0]): int(plan.backups.dst_block_ids[0])
        }


class TestAllOrNothing:
    """A call that takes a list changes nothing when one of its elements is refused."""

    def test_reports(self, worlds: Worlds) -> None:
        world = worlds.with_blocks_on_the_host_only()
        world.engine.schedule([world.submit(*A, *B, *TAIL)], 100)
        world.execute()
        (report,) = world.engine.reports
        with pytest.raises(PlanError, match="rank 7"):
            world.manager.apply([report, TransferReport(plan_id=1, rank=7, results=())])
        assert [outcome.status for outcome in world.manager.apply([report])] == [LoadStatus.CONFIRMED]
