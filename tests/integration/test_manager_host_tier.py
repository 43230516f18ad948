"""Blocks that go to the host tier and come back, with the manager's own tier and a service's."""

from __future__ import annotations

from fdcache.manager import Request
from fdcache.settings.cache import WritePolicy
from tests.manager_world import TAIL, A, B, C, Worlds
from tests.property.engine_model import BLOCK, Step


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
        world.engine.schedule([], 1)  # a quarter of the pool at a time, the block above them first
        world.settle()
        cold = world.manager._device.coldest(2)
        assert world.manager._host is not None
        assert world.manager._host.index.contains(cold.hashes).tolist() == [1, 1]

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

    def test_a_run_that_another_request_has_loaded_is_pinned_on_the_host_no_more(
        self, worlds: Worlds
    ) -> None:
        world = worlds.with_blocks_on_the_host_only()
        late = Request("late", [*A, *B, *TAIL])
        world.manager.match_prefix([late])
        world.serve(*A, *B, *TAIL)
        (allocation,) = world.manager.allocate_device_blocks([(late, 9)])
        assert allocation.ok and not late.is_loading
        assert world.manager.shared_blocks_in_use == 0
        if world.service is None:
            host = world.manager.get_stats().host
            assert host is not None and (host.pins, host.leases) == (0, 0)
        world.manager.finish([late])
        world.assert_nothing_is_held()

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
