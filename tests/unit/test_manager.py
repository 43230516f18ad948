"""The manager, one behaviour at a time, against the model engine of the property tests."""

from __future__ import annotations

import numpy as np
import pytest

from fdcache.errors import ConfigurationError, HashingError, PlanError, RequestStateError
from fdcache.layout import KVLayout
from fdcache.manager import AllocationFailure, CacheManager, LoadStatus, ManagerState, MatchStatus, Request
from fdcache.manager.events import BlockRemoved, BlocksCleared, BlockStored, EventsLost
from fdcache.metadata import (
    SLOT_HEADER_BYTES,
    CacheLevel,
    CacheStatus,
    SwapPurpose,
    TransferReport,
    TransferResult,
)
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.tiers import LocalHostTier
from tests.property.engine_model import BLOCK, Engine, Job, Step

A = (1,) * BLOCK
B = (2,) * BLOCK
C = (3,) * BLOCK
TAIL = (9,)


def layout(ranks: int = 1) -> KVLayout:
    return KVLayout.uniform(
        model="m",
        revision="1",
        block_size=BLOCK,
        num_layers=1,
        kv_heads=1,
        head_dim=8,
        dtype="float16",
        tp_size=ranks,
    )


class World:
    """A manager, its model engine, and a clock that stands still until told otherwise."""

    def __init__(
        self,
        device: int = 8,
        host: int = 0,
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        **settings: object,
    ) -> None:
        self.now = 0.0
        ranks = int(str(settings.pop("ranks", 1)))
        shape = layout(ranks)
        cache = CacheSettings.model_validate(
            {
                "device_blocks": device,
                "host_memory": host * (shape.record_bytes + SLOT_HEADER_BYTES),
                "write_policy": policy,
                **settings,
            }
        )
        self.manager = CacheManager(cache, shape, clock=lambda: self.now)
        self.engine = Engine(self.manager, ranks)

    def submit(self, *tokens: int, use_cache: bool = True) -> Job:
        self.engine.submit(tokens, use_cache)
        return self.engine.jobs[-1]

    def settle(self) -> None:
        self.engine.drain()

    def execute(self) -> None:
        """The ranks do what they were sent; their reports are not delivered."""
        for rank in self.engine.ranks:
            while rank.queue:
                self.engine.execute(rank, frozenset())

    def serve(self, *tokens: int, use_cache: bool = True) -> Job:
        """One request from start to end; returns its job."""
        job = self.submit(*tokens, use_cache=use_cache)
        self.engine.schedule([job], 100)
        self.settle()
        assert job.running
        self.engine.finish(job)
        self.engine.schedule([], 1)
        self.settle()
        return job

    def match(self, *tokens: int) -> tuple[int, int]:
        """Device and host blocks that a new request finds; it is given up at once."""
        request = Request("probe", list(tokens))
        result = self.manager.match_prefix([request])[0]
        assert result.status is MatchStatus.MATCHED
        self.manager.request_finish([request])
        return result.num_device_blocks, result.num_host_blocks

    def assert_nothing_is_held(self) -> None:
        stats = self.manager.get_stats()
        for tier in filter(None, (stats.device, stats.host)):
            assert (tier.pins, tier.holds, tier.leases, tier.writing) == (0, 0, 0, 0)
        self.manager.check_integrity()


class TestMatch:
    def test_a_finished_request_leaves_its_full_blocks_to_the_next(self) -> None:
        world = World()
        world.serve(*A, *B, *TAIL)
        assert world.match(*A, *B, *C) == (2, 0)
        world.assert_nothing_is_held()

    def test_a_full_hit_recomputes_its_last_block_in_private(self) -> None:
        world = World()
        world.serve(*A, *B, *TAIL)
        job = world.submit(*A, *B)
        world.engine.schedule([job], 100)
        first, second = job.request.block_table.tolist()
        assert job.request.num_cached_tokens == BLOCK
        shared = world.manager._device.find(job.request.block_hashes).slots.tolist()
        assert first == shared[0]
        assert second != shared[1]

    def test_generated_tokens_are_reused_but_not_the_last_sampled_one(self) -> None:
        world = World()
        job = world.submit(*A)
        world.engine.schedule([job], 100)
        world.settle()
        for token in B:
            world.engine.generate(job, token)
            world.engine.schedule([job], 100)
            world.settle()
        world.engine.generate(job, 7)  # sampled, its KV never computed
        world.engine.finish(job)
        assert world.match(*A, *B, 7, 7) == (2, 0)

    def test_a_path_can_be_looked_up_without_pinning_it(self) -> None:
        world = World(host=8)
        world.serve(*A, *B, *TAIL)
        found = world.manager.find_blocks(Request("probe", [*A, *B, *C]))
        device, host = found[CacheLevel.DEVICE], found[CacheLevel.HOST]
        assert [node.depth for node in device] == [node.depth for node in host] == [0, 1]
        assert device[1].parent == device[0].block_id
        assert (device[0].is_leaf, device[1].is_leaf) == (False, True)
        assert {node.cache_status for node in device + host} == {CacheStatus.DEVICE, CacheStatus.HOST}
        world.assert_nothing_is_held()

    def test_opting_out_neither_reuses_nor_leaves_blocks(self) -> None:
        world = World()
        world.serve(*A, *TAIL, use_cache=False)
        assert world.match(*A, *TAIL) == (0, 0)
        world.serve(*A, *TAIL)
        job = world.submit(*A, *TAIL, use_cache=False)
        world.engine.schedule([job], 100)
        assert job.request.num_cached_tokens == 0

    def test_prefix_caching_can_be_off(self) -> None:
        world = World(enable_prefix_caching=False)
        world.serve(*A, *TAIL)
        assert world.match(*A, *TAIL) == (0, 0)

    def test_tenants_and_adapters_never_share(self) -> None:
        manager = World().manager
        for number, options in enumerate(({}, {"tenant": "t"}, {"adapter_id": "a"})):
            request = Request(str(number), [*A, 1], **options)  # type: ignore[arg-type]
            assert manager.match_prefix([request])[0].num_cached_tokens == 0
            manager.allocate_device_blocks([(request, BLOCK + 1)])
            manager.commit([(request, BLOCK + 1)])
            manager.request_finish([request])
        assert manager.get_stats().device.ready == 3

    def test_a_running_request_cannot_be_matched_again_nor_its_id_taken(self) -> None:
        world = World()
        job = world.submit(*A)
        world.engine.schedule([job], 100)
        with pytest.raises(RequestStateError, match="finish it before"):
            world.manager.match_prefix([job.request])
        with pytest.raises(RequestStateError, match="another request"):
            world.manager.match_prefix([Request(job.request.request_id, [1])])

    def test_blocks_are_not_found_before_their_kv_exists(self) -> None:
        world = World()
        job = world.submit(*A, *TAIL)
        world.engine.schedule([job], 100)
        assert world.match(*A, *TAIL) == (0, 0)
        world.engine.stop(job)  # aborted before anything was accepted
        world.settle()
        assert world.match(*A, *TAIL) == (0, 0)


class TestAllOrNothing:
    """A call that takes a list changes nothing when one of its elements is refused."""

    def test_matches(self) -> None:
        world = World()
        running = world.submit(*A)
        world.engine.schedule([running], 100)
        before = world.manager.get_stats()
        new = Request("new", [*A, *TAIL])
        for refused in (running.request, Request("new", [1]), new, Request("huge", [2**40])):
            with pytest.raises((RequestStateError, HashingError)):
                world.manager.match_prefix([new, refused])
            assert world.manager.get_stats() == before
        assert world.manager.match_prefix([new])[0].status is MatchStatus.MATCHED

    def test_allocations(self) -> None:
        world = World()
        world.serve(*A, *B, *TAIL)
        first, short = Request("first", [1, 2, 3]), Request("short", [*A, *B, *C])
        world.manager.match_prefix([first, short])
        for refused in ((short, 3), (Request("unmatched", [1]), 1)):
            with pytest.raises(RequestStateError):
                world.manager.allocate_device_blocks([(first, 3), refused])
            assert len(first.block_table) == 0

    def test_commits(self) -> None:
        world = World()
        first, second = Request("first", [*A, 1]), Request("second", [*B, 1])
        world.manager.match_prefix([first, second])
        world.manager.allocate_device_blocks([(first, 5), (second, 5)])
        for refused in ((second, 6), (second, -1), (Request("unmatched", [1]), 0)):
            with pytest.raises(RequestStateError, match="cannot commit"):
                world.manager.commit([(first, 5), refused])
            assert world.manager.get_stats().device.ready == 0

    def test_reports(self) -> None:
        world = TestHostTier.with_blocks_on_the_host_only()
        world.engine.schedule([world.submit(*A, *B, *TAIL)], 100)
        world.execute()
        (report,) = world.engine.reports
        with pytest.raises(PlanError, match="rank 7"):
            world.manager.apply([report, TransferReport(plan_id=1, rank=7, results=())])
        assert [outcome.status for outcome in world.manager.apply([report])] == [LoadStatus.CONFIRMED]


class TestAllocate:
    def test_all_or_nothing_with_the_shortfall(self) -> None:
        world = World(device=3)
        job = world.submit(*A, *B, *C, *TAIL)
        request = job.request
        world.manager.match_prefix([request])
        answer = world.manager.allocate_device_blocks([(request, 13)])[0]
        assert (answer.ok, answer.failure, answer.shortfall) == (False, AllocationFailure.NO_BLOCKS, 1)
        assert len(request.block_table) == 0
        world.manager.request_finish([request])
        world.assert_nothing_is_held()

    def test_an_unmatched_request_and_too_few_tokens_are_refused(self) -> None:
        world = World()
        with pytest.raises(RequestStateError, match="has to be matched"):
            world.manager.allocate_device_blocks([(Request("r", [1]), 1)])
        world.serve(*A, *B, *TAIL)
        request = Request("r", [*A, *B, *C])
        world.manager.match_prefix([request])
        with pytest.raises(RequestStateError, match="3 tokens are fewer than the 8"):
            world.manager.allocate_device_blocks([(request, 3)])

    def test_what_a_request_found_is_counted_once_however_often_it_grows(self) -> None:
        world = World()
        world.serve(*A, *TAIL)
        request = Request("r", [*A, *B, *C])
        world.manager.match_prefix([request])
        for tokens in (5, 9, 12):
            world.manager.allocate_device_blocks([(request, tokens)])
        counters = world.manager.get_stats().counters
        assert (counters.lookups, counters.lookup_tokens, counters.device_hit_tokens) == (2, 5 + 12, BLOCK)

    def test_committing_more_than_there_is_is_refused(self) -> None:
        world = World()
        request = Request("r", [*A, 1])
        world.manager.match_prefix([request])
        world.manager.allocate_device_blocks([(request, 5)])
        with pytest.raises(RequestStateError, match="cannot commit 6 tokens"):
            world.manager.commit([(request, 6)])
        world.manager.request_finish([request])
        with pytest.raises(RequestStateError, match="cannot commit"):
            world.manager.commit([(request, 1)])

    def test_finishing_twice_is_harmless(self) -> None:
        world = World()
        first, second = world.submit(*A, *TAIL), world.submit(*A, *TAIL)
        world.engine.schedule([first, second], 100)
        world.settle()
        world.manager.request_finish([first.request])
        world.manager.request_finish([first.request])
        assert world.manager.get_stats().live_requests == 1
        world.manager.check_integrity()

    def test_two_requests_computing_one_block_store_it_once(self) -> None:
        world = World()
        jobs = [world.submit(*A, *B, *TAIL), world.submit(*A, *B, *TAIL)]
        world.engine.schedule(jobs, 100)
        world.settle()
        stats = world.manager.get_stats().device
        assert (stats.ready, stats.writing) == (2, 4)
        for job in list(jobs):
            world.engine.finish(job)
        assert world.match(*A, *B, *TAIL) == (2, 0)
        world.assert_nothing_is_held()

    def test_a_request_belongs_to_the_manager_that_matched_it(self) -> None:
        ours, other = World().manager, World().manager
        request = Request("r", [*A, 1])
        ours.match_prefix([request])
        for call in (
            lambda: other.match_prefix([request]),
            lambda: other.allocate_device_blocks([(request, 5)]),
            lambda: other.commit([(request, 0)]),
        ):
            with pytest.raises(RequestStateError):
                call()
        other.request_finish([request])
        assert ours.allocate_device_blocks([(request, 5)])[0].ok
        ours.request_finish([request])
        other_layout = CacheManager(CacheSettings(device_blocks=4), layout(ranks=2))
        with pytest.raises(RequestStateError, match="another layout"):
            other_layout.match_prefix([request])

    def test_tokens_before_the_first_match_are_refused(self) -> None:
        with pytest.raises(RequestStateError, match="has to be matched"):
            Request("r", [1]).append_tokens([2])

    def test_the_blocks_told_are_those_of_the_table(self) -> None:
        world = TestHostTier.with_blocks_on_the_host_only()
        request = Request("waits", [*A, *B, *TAIL])
        world.manager.match_prefix([request])
        world.engine.schedule([world.submit(*A, *B, *TAIL)], 100)
        world.settle()  # what was on the host alone is on the device now
        told = world.manager.allocate_device_blocks([(request, 9)])[0].block_ids.tolist()
        assert told == request.block_table.tolist()
        assert len(world.manager.allocate_device_blocks([(request, 9)])[0].block_ids) == 0


class TestHostTier:
    def test_a_block_evicted_from_the_device_comes_back_from_the_host(self) -> None:
        for policy in WritePolicy:
            world = World(device=4, host=8, policy=policy, write_through_threshold=1, clean_reserve=2)
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

    def test_a_block_is_backed_up_though_its_parents_copy_was_under_way(self) -> None:
        world = World(host=8)
        job = world.submit(*A, *B, *C, *TAIL)
        for _ in range(4):
            world.engine.schedule([job], BLOCK)
            world.execute()
            world.engine.accept_oldest()  # no report so far
        world.settle()
        for _ in range(3):
            world.engine.schedule([], 1)
            world.settle()
        host = world.manager.get_stats().host
        assert host is not None
        assert (host.ready, world.manager.get_stats().queued_backups) == (3, 0)

    def test_a_path_evicted_for_loads_and_new_blocks_alike_is_kept_whole(self) -> None:
        world = World(device=4, host=8, policy=WritePolicy.WRITE_BACK, clean_reserve=0)
        world.serve(*A, *TAIL)
        world.serve(*B, *C, *C, *B)  # takes the whole device
        assert world.match(*A, *TAIL) == (0, 1)
        world.serve(*A, *A, *TAIL)  # one block loaded, two computed: three blocks of the path go
        assert world.match(*B, *C, *C, *B, *TAIL) == (1, 3)
        assert world.manager.get_stats().counters.backups_dropped == 0

    def test_selective_copies_only_what_is_reused(self) -> None:
        world = World(host=8, policy=WritePolicy.WRITE_THROUGH_SELECTIVE, write_through_threshold=2)
        world.serve(*A, *B, *TAIL)
        host = world.manager.get_stats().host
        assert host is not None
        assert host.ready == 0
        world.serve(*A, *C, *TAIL)
        host = world.manager.get_stats().host
        assert host is not None
        assert host.ready == 1

    def test_write_back_keeps_the_blocks_next_to_go_clean(self) -> None:
        world = World(host=8, policy=WritePolicy.WRITE_BACK, clean_reserve=2)
        world.serve(*A, *B, *C, *TAIL)
        cold = world.manager._device.coldest(2)
        assert world.manager._host is not None
        assert world.manager._host.contains(cold.hashes).tolist() == [1, 1]

    def test_write_back_does_not_copy_the_same_blocks_over_and_over(self) -> None:
        world = World(device=8, host=2, policy=WritePolicy.WRITE_BACK, clean_reserve=8)
        world.serve(*A, *B, *TAIL)
        world.serve(*C, *B, *TAIL)
        for _ in range(50):
            world.engine.schedule([], 1)
            world.settle()
        assert world.manager.get_stats().counters.blocks_backed_up <= 8

    def test_loads_are_confirmed_without_waiting_for_backups(self) -> None:
        world = self.with_blocks_on_the_host_only()
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

    def test_backups_in_flight_are_bounded_and_the_others_follow(self) -> None:
        world = World(device=1200, host=1200)
        job = world.submit(*range(1100 * BLOCK), *TAIL)
        world.engine.schedule([job], 1 << 20)
        world.settle()
        sizes = []
        for _ in range(3):
            plans = world.manager.take_plans()
            sizes.append(sum(len(swap) for plan in plans for swap in plan.swaps()))
            for rank in world.engine.ranks:
                rank.queue.extend(plans)
        assert sizes == [1024, 0, 0]
        world.settle()
        world.engine.schedule([], 1)
        world.settle()
        host = world.manager.get_stats().host
        assert host is not None
        assert host.ready == 1100

    def test_the_backup_queue_is_bounded_and_drops_the_oldest(self) -> None:
        world = World(device=20_000, host=1)
        for first in (0, 50_000):
            request = Request(str(first), np.arange(first, first + 10_000 * BLOCK, dtype=np.int32))
            world.manager.match_prefix([request])
            world.manager.allocate_device_blocks([(request, request.num_tokens)])
            world.manager.commit([(request, request.num_tokens)])
        stats = world.manager.get_stats()
        assert (stats.queued_backups, stats.counters.backups_dropped) == (10_000, 10_000)

    def test_a_reset_drops_the_backup_queue(self) -> None:
        world = World(host=8)
        world.engine.schedule([world.submit(*A, *TAIL)], 100)
        world.settle()
        assert world.manager.get_stats().queued_backups == 1
        world.manager.reset_cache()
        assert world.manager.get_stats().queued_backups == 0

    def test_a_host_block_has_the_checksum_of_rank_0s_record(self) -> None:
        world = World(host=8, ranks=2)
        world.engine.schedule([world.submit(*A, *TAIL)], 100)
        world.settle()
        (plan,) = world.manager.take_plans()
        for rank in (1, 0):
            result = TransferResult(
                purpose=SwapPurpose.BACKUP,
                failed=np.empty(0, np.int32),
                checksums=np.array([70 + rank], np.uint64),
                copied_bytes=1,
                seconds=0.0,
            )
            world.manager.apply([TransferReport(plan_id=plan.plan_id, rank=rank, results=(result,))])
        assert plan.backups is not None
        assert isinstance(world.manager._host, LocalHostTier)
        assert world.manager._host.node(int(plan.backups.dst_block_ids[0])).checksum == 70

    def test_no_room_on_the_host_drops_copies_and_delays_nobody(self) -> None:
        world = World(device=4, host=1, policy=WritePolicy.WRITE_BACK, clean_reserve=0)
        world.serve(*A, *B, *C, *TAIL)
        world.serve(*C, *B, *A, *TAIL)
        assert world.manager.get_stats().counters.backups_dropped > 0
        world.assert_nothing_is_held()

    def test_a_second_request_waits_for_the_first_ones_load_then_hits_the_device(self) -> None:
        world = self.with_blocks_on_the_host_only()
        first, second = world.submit(*A, *B, *TAIL), world.submit(*A, *B, *C)
        world.engine.schedule([first, second], 100)
        assert (first.running, second.running) == (True, False)
        assert world.manager.get_stats().counters.deferred_lookups == 1
        assert world.manager.get_stats().device.leases == 1
        world.settle()
        world.engine.schedule([second], 100)
        assert second.request.num_cached_tokens == 2 * BLOCK
        assert world.manager.get_stats().counters.blocks_loaded == 2

    def test_a_deferred_request_stops_waiting_at_its_deadline(self) -> None:
        world = self.with_blocks_on_the_host_only()
        first, second = world.submit(*A, *B, *TAIL), world.submit(*A, *B, *C)
        world.engine.schedule([first, second], 100)
        world.now = 1.5
        world.engine.schedule([second], 100)
        assert second.running
        assert second.request.num_cached_tokens == 0

    def test_an_abandoned_load_completes_and_belongs_to_nobody(self) -> None:
        world = self.with_blocks_on_the_host_only()
        job = world.submit(*A, *B, *TAIL)
        world.engine.schedule([job], 100)
        world.engine.finish(job)
        assert world.manager.get_stats().device.writing == 2
        world.settle()
        assert world.match(*A, *B, *TAIL) == (2, 0)
        world.assert_nothing_is_held()

    def test_host_memory_for_less_than_a_block_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="hold not one block"):
            CacheManager(CacheSettings(device_blocks=1, host_memory=100), layout())

    @staticmethod
    def with_blocks_on_the_host_only() -> World:
        world = World(device=8, host=8)
        world.serve(*A, *B, *TAIL)
        world.manager.sleep()
        world.manager.wakeup()
        assert world.match(*A, *B, *TAIL) == (0, 2)
        return world


class TestFailures:
    @pytest.mark.parametrize("failing_rank", [0, 1])
    @pytest.mark.parametrize("failing_block", [0, 1])
    def test_one_rank_failing_one_block_makes_the_request_recompute_from_there(
        self, failing_rank: int, failing_block: int
    ) -> None:
        world = World(device=8, host=8, ranks=2)
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

    def test_after_a_failed_load_the_prompt_may_be_computed_in_smaller_steps(self) -> None:
        world = TestHostTier.with_blocks_on_the_host_only()
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

    def test_nothing_above_an_unconfirmed_load_is_committed(self) -> None:
        world = TestHostTier.with_blocks_on_the_host_only()
        job = world.submit(*A, *B, *C, *TAIL)
        world.engine.schedule([job], 100)
        plan_of_the_step = world.engine.ranks[0]
        while plan_of_the_step.queue:
            world.engine.execute(plan_of_the_step, frozenset())
        world.engine.accept_oldest()
        assert world.manager.get_stats().device.ready == 0
        world.engine.deliver(0)
        assert world.manager.get_stats().device.ready == 3

    def test_an_overdue_load_keeps_its_slots_until_it_is_reported(self) -> None:
        world = TestHostTier.with_blocks_on_the_host_only()
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

    def test_nobody_is_told_of_an_overdue_load_whose_request_ended(self) -> None:
        world = TestHostTier.with_blocks_on_the_host_only()
        job = world.submit(*A, *B, *TAIL)
        world.engine.schedule([job], 100)
        world.engine.finish(job)
        world.now = 100.0
        assert world.manager.expire() == []

    def test_a_lost_worker_takes_the_cache_with_it_and_leaves_nothing_held(self) -> None:
        world = TestHostTier.with_blocks_on_the_host_only()
        job = world.submit(*A, *B, *TAIL)
        world.engine.schedule([job], 100)
        world.engine.lose(world.engine.ranks[0])
        assert world.match(*A, *B, *TAIL) == (0, 0)
        world.assert_nothing_is_held()

    def test_losing_a_rank_that_there_is_not_changes_nothing(self) -> None:
        world = World()
        world.serve(*A, *TAIL)
        with pytest.raises(PlanError, match="rank 1 is not one of the 1 ranks"):
            world.manager.worker_lost(1)
        assert world.match(*A, *TAIL) == (1, 0)

    def test_a_plan_that_could_not_be_submitted_is_a_failed_load(self) -> None:
        world = TestHostTier.with_blocks_on_the_host_only()
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
    def test_a_load_that_the_cache_forgot_is_a_failed_load(self, end: str) -> None:
        world = TestHostTier.with_blocks_on_the_host_only()
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

    def test_reports_that_do_not_fit_are_refused_and_repeated_ones_counted(self) -> None:
        world = World(host=8)
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
    def test_reset_forgets_everything_and_running_requests_publish_no_more(self) -> None:
        world = World(host=8)
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

    def test_a_reset_between_match_and_allocate_makes_the_request_match_again(self) -> None:
        world = TestHostTier.with_blocks_on_the_host_only()
        request = Request("r", [*A, *B, *C])
        assert world.manager.match_prefix([request])[0].num_host_blocks == 2
        world.manager.reset_cache()
        answer = world.manager.allocate_device_blocks([(request, 12)])[0]
        assert answer.failure is AllocationFailure.DEFERRED
        assert world.manager.match_prefix([request])[0].num_cached_tokens == 0
        assert world.manager.allocate_device_blocks([(request, 12)])[0].ok

    def test_resize_refuses_while_a_block_beyond_is_in_use(self) -> None:
        world = World(device=4)
        job = world.submit(*A, *B, *C, *TAIL)
        world.engine.schedule([job], 100)
        assert not world.manager.resize_device_pool(3)
        assert world.manager.num_device_blocks == 4
        world.settle()
        world.engine.finish(job)
        assert world.manager.resize_device_pool(2)
        assert world.match(*A, *B, *C, *TAIL)[0] <= 2
        assert world.manager.resize_device_pool(16)
        assert world.manager.can_allocate_device_blocks(16)
        assert not world.manager.can_allocate_device_blocks(17)

    @pytest.mark.parametrize("blocks", [0, -1, 2**31])
    def test_a_number_of_blocks_that_cannot_be_is_refused(self, blocks: int) -> None:
        world = World()
        with pytest.raises(ConfigurationError, match=f"{blocks} device blocks"):
            world.manager.resize_device_pool(blocks)
        assert world.manager.num_device_blocks == 8
        with pytest.raises(ConfigurationError, match="host blocks"):
            CacheManager(CacheSettings(device_blocks=1, host_memory=2**31 * 4224), layout())

    def test_pause_defers_and_refuses_and_wakeup_goes_on(self) -> None:
        world = World()
        running, waiting = world.submit(*A, *TAIL), world.submit(*B, *TAIL)
        world.engine.schedule([running], 2)
        assert world.manager.pause() == 0
        assert world.manager.match_prefix([waiting.request])[0].status is MatchStatus.DEFERRED
        answer = world.manager.allocate_device_blocks([(running.request, 5)])[0]
        assert answer.failure is AllocationFailure.PAUSED
        assert not world.manager.can_allocate_device_blocks(1)
        world.manager.wakeup()
        assert world.manager.can_allocate_device_blocks(1)
        assert world.manager.state is ManagerState.RUNNING
        world.engine.schedule([running, waiting], 100)
        assert running.running
        assert waiting.running

    def test_a_paused_manager_backs_nothing_up(self) -> None:
        world = World(host=8)
        world.engine.schedule([world.submit(*A, *TAIL)], 100)
        world.settle()
        world.manager.pause()
        assert world.manager.take_plans() == []
        world.manager.wakeup()
        assert len(world.manager.take_plans()) == 1

    def test_sleep_needs_quiet_and_keeps_the_host_tier(self) -> None:
        world = World(host=8)
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

    def test_memory_usage_counts_bytes_of_both_tiers(self) -> None:
        world = World(device=4, host=2)
        world.serve(*A, *TAIL)
        usage = world.manager.get_memory_usage()
        shape = world.manager.layout
        assert usage[CacheLevel.DEVICE].total_bytes == 4 * shape.payload_bytes
        assert usage[CacheLevel.DEVICE].used_bytes == shape.payload_bytes
        assert usage[CacheLevel.HOST].used_bytes == shape.record_bytes
        assert usage[CacheLevel.HOST].usage == 0.5

    def test_events_tell_what_entered_and_left_each_tier(self) -> None:
        world = World(device=2, host=4, event_buffer=100)
        job = world.serve(*A, *TAIL)
        block = job.request.block_hashes[0].tobytes()
        assert world.manager.take_events() == [
            BlockStored(CacheLevel.DEVICE, block, None, BLOCK),
            BlockStored(CacheLevel.HOST, block, None, BLOCK),
        ]
        other = world.serve(*B, *C)
        first, second = (row.tobytes() for row in other.request.block_hashes)
        events = world.manager.take_events()
        assert BlockRemoved(CacheLevel.DEVICE, block) in events
        assert BlockStored(CacheLevel.DEVICE, second, first, BLOCK) in events
        world.manager.reset_cache()
        assert world.manager.take_events() == [
            BlocksCleared(CacheLevel.DEVICE),
            BlocksCleared(CacheLevel.HOST),
        ]

    def test_a_reader_that_comes_too_late_learns_that_events_are_missing(self) -> None:
        world = World(event_buffer=2)
        world.serve(*A, *B, *C, *TAIL)
        assert EventsLost(CacheLevel.DEVICE) in world.manager.take_events()
