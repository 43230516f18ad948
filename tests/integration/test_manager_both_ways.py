"""The manager with a host tier of its own and with a service's: the same engine, the same expectations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from fdcache.errors import PlanError, RequestStateError
from fdcache.manager import AllocationFailure, LoadStatus, ManagerState, Request
from fdcache.metadata import (
    SwapPurpose,
    TransferReport,
    TransferResult,
)
from fdcache.settings.cache import WritePolicy
from tests.manager_world import TAIL, A, B, C, Worlds
from tests.property.engine_model import BLOCK, Step
from tests.service_help import LocalService, local_service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    with local_service(tmp_path_factory.mktemp("service"), FDCACHE_EXTENT_SIZE="256KiB") as running:
        yield running


@pytest.fixture(params=["embedded", "shared"])
def worlds(request: pytest.FixtureRequest) -> Iterator[Worlds]:
    made = Worlds(request.getfixturevalue("service") if request.param == "shared" else None)
    yield made
    made.close()


class TestHostTier:
    def test_a_block_evicted_from_the_device_comes_back_from_the_host(self, worlds: Worlds) -> None:
        for policy in WritePolicy:
            world = worlds.new(device=4, host=8, policy=policy, write_through_threshold=1, clean_reserve=2)
            world.serve(*A, *B, *TAIL)
            world.serve(*C, *C, *C, *TAIL)
            assert world.match(*A, *B, *TAIL)[1] > 0, policy
            job = world.submit(*A, *B, *TAIL)
            world.engine.schedule([job], 100)
            world.settle()  # the model checks what the step reads
            assert job.running
            assert world.manager.get_stats().counters.blocks_loaded > 0
            world.engine.finish(job)
            world.assert_nothing_is_held()

    def test_a_block_is_backed_up_though_its_parents_copy_was_under_way(self, worlds: Worlds) -> None:
        world = worlds.new(host=8)
        job = world.submit(*A, *B, *C, *TAIL)
        for _ in range(4):
            world.engine.schedule([job], BLOCK)
            world.execute()
            world.engine.accept_oldest()  # no report so far
        world.settle()
        for _ in range(3):
            world.engine.schedule([], 1)
            world.settle()
        assert (world.host_ready, world.manager.get_stats().queued_backups) == (3, 0)

    def test_a_path_evicted_for_loads_and_new_blocks_alike_is_kept_whole(self, worlds: Worlds) -> None:
        world = worlds.new(device=4, host=8, policy=WritePolicy.WRITE_BACK, clean_reserve=0)
        world.serve(*A, *TAIL)
        world.serve(*B, *C, *C, *B)  # takes the whole device
        assert world.match(*A, *TAIL) == (0, 1)
        world.serve(*A, *A, *TAIL)  # one block loaded, two computed: three blocks of the path go
        assert world.match(*B, *C, *C, *B, *TAIL) == (1, 3)
        assert world.manager.get_stats().counters.backups_dropped == 0

    def test_selective_copies_only_what_is_reused(self, worlds: Worlds) -> None:
        world = worlds.new(host=8, policy=WritePolicy.WRITE_THROUGH_SELECTIVE, write_through_threshold=2)
        world.serve(*A, *B, *TAIL)
        assert world.host_ready == 0
        world.serve(*A, *C, *TAIL)
        assert world.host_ready == 1

    def test_write_back_keeps_the_blocks_next_to_go_clean(self, worlds: Worlds) -> None:
        world = worlds.new(host=8, policy=WritePolicy.WRITE_BACK, clean_reserve=2)
        world.serve(*A, *B, *C, *TAIL)
        cold = world.manager._device.coldest(2)
        assert world.manager._host is not None
        assert world.manager._host.contains(cold.hashes).tolist() == [1, 1]

    def test_loads_are_confirmed_without_waiting_for_backups(self, worlds: Worlds) -> None:
        world = worlds.with_blocks_on_the_host_only()
        world.serve(*C, *TAIL)
        job = world.submit(*A, *B, *TAIL)
        other = world.submit(*C, *C, *TAIL)
        world.engine.schedule([other], 100)
        world.settle()
        world.engine.schedule([job], 100)
        plans = list(world.engine.ranks[0].queue)[:2]
        assert [len(plan.swaps()) for plan in plans if not isinstance(plan, Step)] == [1, 1]
        world.engine.execute(world.engine.ranks[0], frozenset())
        world.engine.deliver(0)
        assert world.manager.get_stats().counters.loads_confirmed == 1
        assert world.manager.get_stats().plans_in_flight == 1

    def test_a_reset_drops_the_backup_queue(self, worlds: Worlds) -> None:
        world = worlds.new(host=8)
        world.engine.schedule([world.submit(*A, *TAIL)], 100)
        world.settle()
        assert world.manager.get_stats().queued_backups == 1
        world.manager.reset_cache()
        assert world.manager.get_stats().queued_backups == 0

    def test_a_second_request_waits_for_the_first_ones_load_then_hits_the_device(
        self, worlds: Worlds
    ) -> None:
        world = worlds.with_blocks_on_the_host_only()
        first, second = world.submit(*A, *B, *TAIL), world.submit(*A, *B, *C)
        world.engine.schedule([first, second], 100)
        assert (first.running, second.running) == (True, False)
        assert world.manager.get_stats().counters.deferred_lookups == 1
        assert world.manager.get_stats().device.leases == 1
        world.settle()
        world.engine.schedule([second], 100)
        assert second.request.num_cached_tokens == 2 * BLOCK
        assert world.manager.get_stats().counters.blocks_loaded == 2

    def test_a_deferred_request_stops_waiting_at_its_deadline(self, worlds: Worlds) -> None:
        world = worlds.with_blocks_on_the_host_only()
        first, second = world.submit(*A, *B, *TAIL), world.submit(*A, *B, *C)
        world.engine.schedule([first, second], 100)
        world.now = 1.5
        world.engine.schedule([second], 100)
        assert second.running
        assert second.request.num_cached_tokens == 0

    def test_an_abandoned_load_completes_and_belongs_to_nobody(self, worlds: Worlds) -> None:
        world = worlds.with_blocks_on_the_host_only()
        job = world.submit(*A, *B, *TAIL)
        world.engine.schedule([job], 100)
        world.engine.finish(job)
        assert world.manager.get_stats().device.writing == 2
        world.settle()
        assert world.match(*A, *B, *TAIL) == (2, 0)
        world.assert_nothing_is_held()


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
        world.manager.request_finish([request])
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
        world.manager.request_finish([request])
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


class TestWholeCache:
    def test_reset_forgets_everything_and_running_requests_publish_no_more(self, worlds: Worlds) -> None:
        world = worlds.new(host=8)
        world.serve(*A, *TAIL)
        job = world.submit(*B, *C, *TAIL)
        world.engine.schedule([job], 5)
        world.settle()
        assert world.manager.reset_cache() > 0
        world.engine.schedule([job], 100)
        world.settle()
        world.engine.finish(job)
        assert world.match(*A, *TAIL) == (0, 0)
        assert world.match(*B, *C, *TAIL) == (0, 0)
        world.assert_nothing_is_held()

    def test_a_reset_between_match_and_allocate_makes_the_request_match_again(self, worlds: Worlds) -> None:
        world = worlds.with_blocks_on_the_host_only()
        request = Request("r", [*A, *B, *C])
        assert world.manager.match_prefix([request])[0].num_host_blocks == 2
        world.manager.reset_cache()
        answer = world.manager.allocate_device_blocks([(request, 12)])[0]
        assert answer.failure is AllocationFailure.DEFERRED
        assert world.manager.match_prefix([request])[0].num_cached_tokens == 0
        assert world.manager.allocate_device_blocks([(request, 12)])[0].ok

    def test_a_paused_manager_backs_nothing_up(self, worlds: Worlds) -> None:
        world = worlds.new(host=8)
        world.engine.schedule([world.submit(*A, *TAIL)], 100)
        world.settle()
        world.manager.pause()
        assert world.manager.take_plans() == []
        world.manager.wakeup()
        assert len(world.manager.take_plans()) == 1

    def test_sleep_needs_quiet_and_keeps_the_host_tier(self, worlds: Worlds) -> None:
        world = worlds.new(host=8)
        job = world.submit(*A, *TAIL)
        world.engine.schedule([job], 100)
        with pytest.raises(RequestStateError, match="1 requests"):
            world.manager.sleep()
        world.settle()
        world.engine.finish(job)
        world.engine.schedule([], 1)
        world.settle()
        world.manager.sleep()
        assert world.manager.state is ManagerState.ASLEEP
        world.manager.wakeup()
        assert world.match(*A, *TAIL) == (0, 1)


class TestAllocate:
    def test_the_blocks_told_are_those_of_the_table(self, worlds: Worlds) -> None:
        world = worlds.with_blocks_on_the_host_only()
        request = Request("waits", [*A, *B, *TAIL])
        world.manager.match_prefix([request])
        world.engine.schedule([world.submit(*A, *B, *TAIL)], 100)
        world.settle()  # what was on the host alone is on the device now
        told = world.manager.allocate_device_blocks([(request, 9)])[0].block_ids.tolist()
        assert told == request.block_table.tolist()
        assert len(world.manager.allocate_device_blocks([(request, 9)])[0].block_ids) == 0


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
