"""Copies of an OffloadManager to the host: offers and blocks that change hands."""

from __future__ import annotations

from msgspec.structs import replace

from fdcache.metadata import CacheLevel, TransferPlan
from fdcache.settings.cache import WritePolicy
from tests.offload_engine import BLOCK, GatedDevice, OffloadEngine, begun, ids, offload_engine, prompt

engine = offload_engine

# --- offers -----------------------------------------------------------------------------------------------


def test_offers_are_copied_by_the_next_plan_and_only_once(engine: OffloadEngine) -> None:
    request = begun(engine, "first", prompt(1, 2, 3))
    assert engine.step() == []
    engine.compute(request, [0, 1, 2])
    engine.manager.offer(request, 2 * BLOCK + 3, ids(0, 1, 2))
    engine.manager.offer(request, 2 * BLOCK + 3, ids(0, 1, 2))
    assert engine.manager.get_stats().queued_backups == 2
    (plan,) = engine.step()
    assert plan.backups is not None
    assert plan.backups.src_block_ids.tolist() == [0, 1]
    assert engine.step() == []
    engine.collect()
    engine.manager.offer(request, 3 * BLOCK, ids(0, 1, 2))
    (plan,) = engine.step()
    assert plan.backups is not None
    assert plan.backups.src_block_ids.tolist() == [2]
    engine.collect()
    assert not engine.manager.has_pending_work
    engine.manager.finish([request])
    assert engine.wrong_records() == 0


def test_a_patient_plan_leaves_a_few_blocks_to_a_later_one(engine: OffloadEngine) -> None:
    request = begun(engine, "first", prompt(1, 2, 3))
    engine.compute(request, [0, 1, 2])
    engine.manager.offer(request, 2 * BLOCK, ids(0, 1, 2))
    assert engine.manager.take_plans(is_patient=True) == []
    engine.manager.offer(request, 3 * BLOCK, ids(0, 1, 2))
    assert engine.manager.take_plans(is_patient=True) == []
    assert engine.manager.has_pending_work
    (plan,) = engine.step()
    assert plan.backups is not None
    assert plan.backups.src_block_ids.tolist() == [0, 1, 2]
    engine.collect()
    engine.manager.finish([request])
    assert engine.wrong_records() == 0


def test_patience_has_an_end(engine: OffloadEngine) -> None:
    request = begun(engine, "first", prompt(1))
    engine.compute(request, [0])
    engine.manager.offer(request, BLOCK, ids(0))
    plans = next(filter(None, (engine.manager.take_plans(is_patient=True) for _ in range(64))))
    assert [plan.backups is not None for plan in plans] == [True]
    engine.submit(plans)
    engine.collect()
    engine.manager.finish([request])
    assert engine.wrong_records() == 0


def test_blocks_that_wait_for_others_are_copied_before_they_are_given_away(engine: OffloadEngine) -> None:
    request = begun(engine, "first", prompt(1, 2))
    engine.compute(request, [0, 1])
    engine.manager.offer(request, 2 * BLOCK, ids(0, 1))
    assert engine.manager.take_plans(is_patient=True) == []
    engine.manager.evicted(ids(1))
    (plan,) = engine.step()
    assert plan.evictions is not None
    assert plan.evictions.src_block_ids.tolist() == [0, 1]
    engine.collect()
    engine.manager.finish([request])
    assert engine.wrong_records() == 0


def test_the_chunk_after_one_in_flight_is_stored() -> None:
    engine = OffloadEngine()
    device = engine.devices[0]
    assert isinstance(device, GatedDevice)
    device.is_gated = True
    request = begun(engine, "first", prompt(1, 2, 3, 4))
    engine.compute(request, [0, 1, 2, 3])
    for tokens in (BLOCK, 2 * BLOCK, 4 * BLOCK):
        engine.manager.offer(request, tokens, ids(0, 1, 2, 3))
        engine.step()
    device.is_gated = False
    device.open()
    engine.settle()
    assert len(engine.manager.find_blocks(request)[CacheLevel.HOST]) == 4
    assert engine.manager.get_stats().counters.backups_dropped == 0
    engine.manager.finish([request])
    assert engine.wrong_records() == 0
    engine.close()


def test_generated_tokens_are_offered_as_their_blocks_become_whole(engine: OffloadEngine) -> None:
    request = begun(engine, "first", prompt(1))
    for token in range(2 * BLOCK):
        request.append_tokens(token)
    engine.compute(request, [4, 5, 6])
    engine.manager.offer(request, request.num_tokens - 1, ids(4, 5, 6))
    engine.settle()
    assert len(engine.manager.find_blocks(request)[CacheLevel.HOST]) == 3
    engine.manager.finish([request])


def test_selective_copies_blocks_that_a_second_request_uses() -> None:
    engine = OffloadEngine(policy=WritePolicy.WRITE_THROUGH_SELECTIVE)
    engine.stored("first", prompt(1, 2), [0, 1])
    assert engine.manager.get_stats().counters.blocks_backed_up == 0
    second = begun(engine, "second", prompt(1, 5))
    engine.manager.match(second, BLOCK)
    engine.step()
    engine.compute(second, [0, 2])
    for _ in range(2):  # preempted and matched again: still one hit of each block
        engine.manager.match(second, BLOCK)
        engine.manager.offer(second, 2 * BLOCK, ids(0, 2))
    engine.settle()
    assert len(engine.manager.find_blocks(second)[CacheLevel.HOST]) == 1
    engine.manager.finish([second])
    engine.close()


def test_copies_that_find_no_room_are_dropped() -> None:
    engine = OffloadEngine(host_blocks=4)
    pinned = engine.stored("first", prompt(1, 2, 3, 4), [0, 1, 2, 3])
    request = begun(engine, "second", [*pinned.tokens.tolist()])
    engine.manager.match(request, 0)
    engine.stored("third", prompt(5, 6), [4, 5])
    assert engine.manager.get_stats().counters.backups_dropped >= 2
    assert not engine.manager.has_pending_work
    engine.manager.finish([request])
    engine.close()


# --- blocks that change hands -----------------------------------------------------------------------------


def test_write_back_copies_blocks_when_they_are_given_away_with_what_is_above_them() -> None:
    engine = OffloadEngine(policy=WritePolicy.WRITE_BACK)
    request = engine.stored("first", prompt(1, 2, 3), [0, 1, 2])
    assert engine.manager.find_blocks(request)[CacheLevel.HOST] == []
    engine.manager.evicted(ids(2))
    (plan,) = engine.step()
    assert plan.evictions is not None
    assert plan.evictions.src_block_ids.tolist() == [0, 1, 2]
    engine.fill(2, None)
    engine.collect()
    engine.manager.evicted(ids(1, 0))
    assert engine.step() == []
    assert len(engine.manager.find_blocks(request)[CacheLevel.HOST]) == 3
    assert engine.wrong_records() == 0
    engine.close()


def test_blocks_below_one_that_only_the_host_has_are_copied_in_path_order() -> None:
    engine = OffloadEngine(policy=WritePolicy.WRITE_BACK)
    request = engine.stored("first", prompt(1, 2, 3, 4), [0, 1, 2, 3])
    engine.manager.evicted(ids(0))
    engine.settle()
    engine.fill(0, None)
    engine.manager.evicted(ids(3, 2))
    (plan,) = engine.step()
    assert plan.evictions is not None
    assert plan.evictions.src_block_ids.tolist() == [1, 2, 3]
    engine.collect()
    assert len(engine.manager.find_blocks(request)[CacheLevel.HOST]) == 4
    assert engine.wrong_records() == 0
    engine.close()


def test_write_back_keeps_the_coldest_blocks_clean() -> None:
    engine = OffloadEngine(policy=WritePolicy.WRITE_BACK, clean_reserve=2)
    request = engine.stored("first", prompt(1, 2, 3), [0, 1, 2])
    engine.manager.next_evicted(ids(9, 0, 1, 2))
    (plan,) = engine.step()
    assert plan.backups is not None
    assert plan.backups.src_block_ids.tolist() == [0, 1]
    engine.collect()
    engine.manager.evicted(ids(1, 0))
    (plan,) = engine.step()
    assert plan.evictions is None
    assert plan.backups is not None
    assert plan.backups.src_block_ids.tolist() == [2], "it is the next one now"
    engine.collect()
    assert len(engine.manager.find_blocks(request)[CacheLevel.HOST]) == 3
    engine.close()


def test_a_queued_block_that_is_given_away_is_copied_by_the_plan_of_that_step(engine: OffloadEngine) -> None:
    request = begun(engine, "first", prompt(1, 2))
    engine.compute(request, [0, 1])
    engine.manager.offer(request, 2 * BLOCK, ids(0, 1))
    engine.manager.finish([request])
    engine.manager.evicted(ids(0, 1))
    (plan,) = engine.step()
    assert plan.backups is None
    assert plan.evictions is not None
    engine.fill(0, None)
    engine.fill(1, None)
    engine.collect()
    assert len(engine.manager.find_blocks(request)[CacheLevel.HOST]) == 2
    assert engine.wrong_records() == 0


class Handover:
    """A block whose backup is held by the device, and that the next step loads another block into."""

    def __init__(self) -> None:
        engine = self.engine = OffloadEngine()
        device = engine.devices[0]
        assert isinstance(device, GatedDevice)
        self.device = device
        engine.stored("other", prompt(7), [9])
        device.is_gated = True
        first = begun(engine, "first", prompt(1))
        engine.compute(first, [0])
        engine.manager.offer(first, BLOCK, ids(0))
        (self.backup,) = engine.step()
        engine.manager.finish([first])
        self.request = begun(engine, "second", prompt(7))
        engine.manager.match(self.request, 0)
        engine.manager.load(self.request, ids(0))
        (self.plan,) = engine.manager.take_plans()

    def finish(self, plan: TransferPlan) -> int:
        """Submit the plan; return how many records are wrong in the end."""
        counters = self.engine.submit([plan])
        if not plan.after:
            counters[0].wait_all()
        self.device.open()
        counters[0].wait_all()
        assert self.engine.holds(self.request, [0])
        while self.engine.manager.get_stats().plans_in_flight:
            self.engine.collect()
        self.engine.manager.finish([self.request])
        wrong = self.engine.wrong_records()
        self.engine.close()
        return wrong


def test_a_load_waits_for_the_backup_that_still_reads_its_block() -> None:
    handover = Handover()
    assert handover.plan.after == (handover.backup.plan_id,)
    assert handover.finish(handover.plan) == 0


def test_without_after_the_backup_stores_bytes_of_the_next_owner() -> None:
    handover = Handover()
    assert handover.finish(replace(handover.plan, after=())) == 1


def test_a_plan_without_copies_carries_what_the_compute_waits_for(engine: OffloadEngine) -> None:
    device = engine.devices[0]
    assert isinstance(device, GatedDevice)
    device.is_gated = True
    first = begun(engine, "first", prompt(1))
    engine.compute(first, [0])
    engine.manager.offer(first, BLOCK, ids(0))
    (backup,) = engine.step()
    engine.manager.evicted(ids(0))
    (plan,) = engine.manager.take_plans()
    assert (plan.after, plan.swaps()) == ((backup.plan_id,), ())
    (counter,) = engine.submit([plan])
    assert not counter.is_all_done()
    device.open()
    counter.wait_all()
    engine.collect()
    engine.manager.evicted(ids(0))
    assert engine.manager.take_plans() == []
    engine.manager.finish([first])
