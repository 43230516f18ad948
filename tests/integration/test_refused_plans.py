"""Plans that a rank refuses cost nothing: every slot, pin and storage task comes free."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fdcache.manager import CacheManager, MatchStatus, Request
from fdcache.metadata import SLOT_HEADER_BYTES, SwapPurpose, TransferPlan, TransferReport
from fdcache.settings.cache import CacheSettings, WritePolicy
from tests.manager_world import TAIL, layout
from tests.property.engine_model import BLOCK, Engine
from tests.property.test_manager_storage import storage_of

BLOCKS = 12
PROMPT = (*(token for block in range(6) for token in (block,) * BLOCK), *TAIL)


class Refusing:
    """A manager of two ranks with all three tiers, whose plans are the test's to answer."""

    def __init__(self) -> None:
        shape = layout(2)
        settings = CacheSettings(
            device_blocks=BLOCKS,
            host_memory=BLOCKS * (shape.record_bytes + SLOT_HEADER_BYTES),
            write_policy=WritePolicy.WRITE_THROUGH,
        )
        self.manager = CacheManager(settings, shape, storage=storage_of(shape, BLOCKS))
        self.engine = Engine(self.manager, 2)
        self.manager.restore_storage([rank.disk.scan(rank.index, BLOCKS) for rank in self.engine.ranks])

    def compute(self) -> None:
        """A request from start to end; its backups and stores are still to be planned."""
        self.engine.submit(PROMPT)
        (job,) = self.engine.jobs
        self.engine.schedule([job], 100)
        self.engine.drain()
        self.engine.finish(job)

    def settle(self) -> None:
        """Carry out every copy."""
        while True:
            self.engine.schedule([], 1)
            self.engine.drain()
            stats = self.manager.get_stats()
            if not (stats.plans_in_flight or stats.queued_backups or stats.queued_stores):
                return

    def forget(self, *, host: bool = False) -> None:
        self.manager._reset_device()
        if host:
            assert self.manager._host is not None
            self.manager._host.reset()

    def refuse(self, purpose: SwapPurpose, ranks: tuple[int, ...] = (0, 1)) -> list[TransferPlan]:
        """Refuse the plans of this moment, among them one for this purpose."""
        plans = self.manager.take_plans()
        purposes = {swap.purpose for plan in plans for swap in plan.swaps()}
        purposes |= {task.swap.purpose for plan in plans for task in plan.storage}
        assert purpose in purposes
        for rank in ranks:
            self.manager.apply([TransferReport.refusal(plan, rank, "refused") for plan in plans])
        return plans

    def assert_nothing_is_held(self) -> None:
        stats = self.manager.get_stats()
        assert stats.plans_in_flight == stats.storing_blocks == stats.reading_blocks == 0
        for tier in (stats.device, stats.host, stats.storage):
            assert tier is not None
            assert (tier.pins, tier.holds, tier.leases, tier.writing) == (0, 0, 0, tier.quarantined)
            assert tier.free + tier.evictable + tier.quarantined == tier.blocks
        self.manager.check_integrity()


@pytest.fixture
def refusing() -> Iterator[Refusing]:
    made = Refusing()
    yield made
    made.engine.close()


def test_refused_backups_hold_no_slot_of_either_tier(refusing: Refusing) -> None:
    refusing.compute()
    refusing.refuse(SwapPurpose.BACKUP)
    refusing.assert_nothing_is_held()


def test_refused_stores_hold_no_slot_of_host_or_storage(refusing: Refusing) -> None:
    refusing.compute()
    refusing.engine.schedule([], 1)
    refusing.engine.drain()
    refusing.refuse(SwapPurpose.STORE)
    refusing.assert_nothing_is_held()


def test_refused_loads_are_failed_loads_and_hold_nothing(refusing: Refusing) -> None:
    refusing.compute()
    refusing.settle()
    refusing.forget()
    request = Request("second", list(PROMPT))
    assert refusing.manager.match_prefix([request])[0].num_host_blocks == 6
    refusing.manager.allocate_device_blocks([(request, len(PROMPT))])
    refusing.refuse(SwapPurpose.LOAD)
    assert request.num_cached_tokens == 0
    refusing.manager.finish([request])
    refusing.assert_nothing_is_held()


def test_refused_reads_from_storage_keep_no_request_waiting(refusing: Refusing) -> None:
    refusing.compute()
    refusing.settle()
    refusing.forget(host=True)
    request = Request("second", list(PROMPT))
    refusing.manager.begin([request])
    refusing.refuse(SwapPurpose.PREFETCH)
    (match,) = refusing.manager.match_prefix([request])
    assert (match.status, match.total_matched_blocks) == (MatchStatus.MATCHED, 0)
    refusing.manager.finish([request])
    refusing.assert_nothing_is_held()


def test_one_rank_refuses_what_the_other_carries_out(refusing: Refusing) -> None:
    refusing.compute()
    refusing.engine.schedule([], 1)
    refusing.engine.drain()
    plans = refusing.refuse(SwapPurpose.STORE, ranks=(1,))
    assert refusing.manager.get_stats().storing_blocks > 0, "one rank writes still"
    refusing.engine.ranks[0].queue.extend(plans)
    refusing.engine.drain()
    stats = refusing.manager.get_stats()
    assert stats.storage is not None and stats.storage.ready == 0
    refusing.assert_nothing_is_held()


def test_a_refused_reset_of_the_storage_is_asked_for_again(refusing: Refusing) -> None:
    refusing.compute()
    refusing.settle()
    refusing.manager.reset_cache()
    for plan in refusing.manager.take_plans():
        assert plan.clear_storage
        refusing.manager.apply([TransferReport.refusal(plan, rank, "refused") for rank in (0, 1)])
    assert all(rank.disk.slots for rank in refusing.engine.ranks)
    refusing.settle()
    assert not any(rank.disk.slots for rank in refusing.engine.ranks)
    refusing.assert_nothing_is_held()
