"""CacheManager: tiers as a whole, bounds of backups, pause, events and statistics."""

from __future__ import annotations

import numpy as np
import pytest

from fdcache.errors import ConfigurationError, PlanError
from fdcache.manager import AllocationFailure, CacheManager, ManagerState, MatchStatus, Request
from fdcache.metadata import (
    SLOT_HEADER_BYTES,
    CacheLevel,
    SwapPurpose,
    TransferReport,
    TransferResult,
)
from fdcache.settings.cache import CacheSettings, EvictionPolicy, WritePolicy
from fdcache.tiers.events import BlockRemoved, BlocksCleared, BlockStored, EventsLost
from fdcache.tiers.host import LocalHostTier
from tests.manager_world import TAIL, A, B, C, World, layout
from tests.property.engine_model import BLOCK
from tests.tier_help import OTHER, PATH, copy_in, eviction_order, report, store


class TestHostTier:
    @pytest.mark.parametrize("policy", WritePolicy)
    def test_the_device_tier_evicts_first_what_the_host_holds(self, policy: WritePolicy) -> None:
        world = World(device=9, host=20, policy=policy, eviction=EvictionPolicy.LEARNED)
        device, host = world.manager._tiers.device, world.manager._tiers.host
        assert isinstance(host, LocalHostTier) and device is not None
        device.set_clock(0)
        store(device, PATH)
        second = store(device, OTHER)
        report(host, copy_in(host, OTHER))
        device.set_clock(1)
        assert eviction_order(device)[0] == second[-1]

    def test_write_back_copies_a_block_once(self) -> None:
        world = World(device=8, host=2, policy=WritePolicy.WRITE_BACK, clean_reserve=8)
        world.serve(*A, *B, *TAIL)
        world.serve(*C, *B, *TAIL)
        for _ in range(50):
            world.engine.schedule([], 1)
            world.settle()
        assert world.manager.get_stats().counters.blocks_backed_up <= 8

    def test_backups_in_flight_are_bounded_and_the_rest_follow(self) -> None:
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
        assert sizes == [600, 0, 0], "half of the pool"
        for _ in range(4):
            world.settle()
            world.engine.schedule([], 1)
        world.settle()
        host = world.manager.get_stats().host
        assert host is not None
        assert host.ready == 1100

    def test_the_backup_queue_is_no_longer_than_the_device_tier_and_drops_nothing(self) -> None:
        world = World(device=20_000, host=1)
        for first in (0, 50_000, 100_000):
            request = Request(str(first), np.arange(first, first + 10_000 * BLOCK, dtype=np.int32))
            world.manager.match_prefix([request])
            world.manager.allocate_device_blocks([(request, request.num_tokens)])
            world.manager.commit([(request, request.num_tokens)])
            world.manager.finish([request])
        assert world.manager.get_stats().queued_backups == 20_000

    def test_a_host_block_has_the_checksum_of_rank_0(self) -> None:
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

    def test_backups_without_room_on_the_host_are_dropped(self) -> None:
        world = World(device=4, host=1, policy=WritePolicy.WRITE_BACK, clean_reserve=0)
        world.serve(*A, *B, *C, *TAIL)
        world.serve(*C, *B, *A, *TAIL)
        assert world.manager.get_stats().counters.backups_dropped > 0
        world.assert_nothing_is_held()

    def test_host_memory_for_less_than_a_block_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="less than one block"):
            CacheManager(CacheSettings(device_blocks=1, host_memory=100), layout())


class TestFailures:
    def test_losing_an_unknown_rank_changes_nothing(self) -> None:
        world = World()
        world.serve(*A, *TAIL)
        with pytest.raises(PlanError, match="rank 1 is not one of the 1 ranks"):
            world.manager.worker_lost(1)
        assert world.match(*A, *TAIL) == (1, 0)


class TestWholeCache:
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
    def test_an_impossible_number_of_blocks_is_refused(self, blocks: int) -> None:
        world = World()
        with pytest.raises(ConfigurationError, match=f"{blocks} device blocks"):
            world.manager.resize_device_pool(blocks)
        assert world.manager.num_device_blocks == 8
        with pytest.raises(ConfigurationError, match="host blocks"):
            CacheManager(CacheSettings(device_blocks=1, host_memory=2**31 * 4224), layout())

    def test_pause_defers_matches_and_refuses_allocations_until_wakeup(self) -> None:
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

    def test_memory_usage_counts_bytes_of_both_tiers(self) -> None:
        world = World(device=4, host=2)
        world.serve(*A, *TAIL)
        usage = world.manager.get_memory_usage()
        shape = world.manager.layout
        assert usage[CacheLevel.DEVICE].total_bytes == 4 * shape.payload_bytes
        assert usage[CacheLevel.DEVICE].used_bytes == shape.payload_bytes
        assert usage[CacheLevel.HOST].used_bytes == shape.record_bytes
        assert usage[CacheLevel.HOST].usage == 0.5

    def test_events_list_what_entered_and_left_each_tier(self) -> None:
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

    def test_dropped_events_are_reported_as_lost(self) -> None:
        world = World(event_buffer=2)
        world.serve(*A, *B, *C, *TAIL)
        assert EventsLost(CacheLevel.DEVICE) in world.manager.take_events()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_host_memory_is_that_of_all_ranks_together(ranks: int) -> None:
    one = layout(ranks).record_bytes + SLOT_HEADER_BYTES
    settings = CacheSettings(device_blocks=1, host_memory=12 * one + one // 2)
    manager = CacheManager(settings, layout(ranks))
    assert manager.num_host_blocks == manager.host_cache.num_blocks == 12 // ranks
    with pytest.raises(ConfigurationError, match="host_memory"):
        CacheManager(CacheSettings(host_memory=ranks * one - 1), layout(ranks))
