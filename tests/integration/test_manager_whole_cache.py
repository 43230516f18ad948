"""Operations on the whole cache and their effect on its requests, with either host tier."""

from __future__ import annotations

import pytest

from fdcache.errors import RequestStateError
from fdcache.manager import AllocationFailure, ManagerState, Request
from tests.manager_world import TAIL, A, B, C, Worlds


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
