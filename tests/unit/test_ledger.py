"""The ledger of plans in flight."""

from __future__ import annotations

import numpy as np
import pytest

from fdcache.errors import PlanError
from fdcache.metadata import SwapPurpose, TransferReport, TransferResult
from fdcache.plans.ledger import Blocks, OpenPlan, PlanLedger, StorageOrders

BLOCKS = 4


def blocks(first: int) -> Blocks:
    slots = np.arange(first, first + BLOCKS, dtype=np.int32)
    hashes = np.zeros((BLOCKS, 32), np.uint8)
    return Blocks(slots, np.ones(BLOCKS, np.uint32), hashes, hashes)


def result(purpose: SwapPurpose, failed: list[int], **causes: list[int]) -> TransferResult:
    return TransferResult(
        purpose=purpose,
        failed=np.array(failed, np.int32),
        checksums=np.empty(0, np.uint64),
        copied_bytes=0,
        seconds=0.0,
        error_message="broken" if failed else None,
        **{cause: np.array(positions, np.int32) for cause, positions in causes.items()},
    )


def with_storage(ledger: PlanLedger) -> tuple[int, int, int]:
    """Send a plan with one transfer and two storage tasks; return their numbers."""
    plan, storage = OpenPlan(), StorageOrders()
    plan.add(SwapPurpose.BACKUP, blocks(0), blocks(8).slots, blocks(8).generations)
    for first in (0, 4):
        storage.add(SwapPurpose.PREFETCH, blocks(first), blocks(20).slots, blocks(20).generations, 1.0)
    sent = ledger.send(plan, 0.0, storage=storage.take())
    assert storage.is_empty
    first_task, second_task = sent.storage
    return sent.plan_id, first_task.plan_id, second_task.plan_id


def test_parts_of_one_purpose_become_one_transfer_in_the_order_planned() -> None:
    plan = OpenPlan()
    assert plan.is_empty
    assert plan.add(SwapPurpose.LOAD, blocks(0), blocks(8).slots, blocks(8).generations) == 0
    assert plan.add(SwapPurpose.LOAD, blocks(4), blocks(12).slots, blocks(12).generations) == BLOCKS
    sent = PlanLedger(1, 1.0).send(plan, 0.0)
    assert sent.evictions is None and sent.backups is None and sent.loads is not None
    assert sent.loads.src_block_ids.tolist() == list(range(8))
    assert sent.loads.dst_block_ids.tolist() == list(range(8, 16))
    assert (sent.loads.src_type, sent.loads.dst_type) == (SwapPurpose.LOAD.source, SwapPurpose.LOAD.target)
    assert sent.loads.unverified is None


def test_a_transfer_marks_the_recovered_blocks_of_any_of_its_parts() -> None:
    plan, marked = OpenPlan(), blocks(4)
    marked = Blocks(
        marked.slots, marked.generations, marked.hashes, marked.parents, np.ones(BLOCKS, np.uint8)
    )
    for part in (blocks(0), marked):
        plan.add(SwapPurpose.LOAD, part, part.slots, part.generations)
    loads = PlanLedger(1, 1.0).send(plan, 0.0).loads
    assert loads is not None and loads.unverified is not None
    assert loads.unverified.tolist() == [0] * BLOCKS + [1] * BLOCKS


def test_a_plan_ends_with_the_report_of_the_last_rank_and_counts_every_failure() -> None:
    ledger, orders = PlanLedger(2, 1.0), StorageOrders()
    orders.add(SwapPurpose.STORE, blocks(0), blocks(8).slots, blocks(8).generations, 1.0)
    (task,) = ledger.send_storage(orders.take(), 0.0)
    reports = [
        TransferReport(plan_id=task.plan_id, rank=0, results=(result(SwapPurpose.STORE, [1], no_room=[1]),)),
        TransferReport(plan_id=task.plan_id, rank=1, results=(result(SwapPurpose.STORE, [2], corrupt=[2]),)),
    ]
    assert ledger.record(reports[0]) == []
    assert not ledger.expects(reports[0])
    (flight,) = ledger.record(reports[1])
    stored = flight.swaps[SwapPurpose.STORE]
    assert stored.copied.tolist() == [True, False, False, True]
    assert stored.no_room.tolist() == [False, True, False, False]
    assert stored.corrupt.tolist() == [False, False, True, False]
    assert not stored.lost.any() and not stored.bad_slots.any()
    assert (stored.swap.success, stored.swap.error_message) == (False, "rank 0: broken; rank 1: broken")
    assert len(ledger) == ledger.blocks_in_flight(SwapPurpose.STORE) == 0


def test_blocks_in_flight_and_deadlines_are_those_of_plans_that_have_not_ended() -> None:
    ledger = PlanLedger(1, 5.0)
    plan, first, second = with_storage(ledger)
    assert ledger.blocks_in_flight(SwapPurpose.PREFETCH) == 2 * BLOCKS
    ledger.record(TransferReport(plan_id=first, rank=0, results=(result(SwapPurpose.PREFETCH, []),)))
    assert ledger.blocks_in_flight(SwapPurpose.PREFETCH) == BLOCKS
    late = [
        [flight.plan.plan_id for flight in ledger.newly_overdue(now)] for now in (1.0, 3.0, 4.0, 9.0, 10.0)
    ]
    assert late == [[], [second], [], [plan], []]
    ledger.lose_rank(0)
    assert ledger.blocks_in_flight(SwapPurpose.PREFETCH) == len(ledger) == 0


def test_a_refused_plan_fails_its_storage_tasks() -> None:
    ledger = PlanLedger(1, 5.0)
    plan, first, second = with_storage(ledger)
    refused = TransferReport(
        plan_id=plan, rank=0, results=(result(SwapPurpose.BACKUP, [0, 1, 2, 3]),), refused=True
    )
    ended = ledger.record(refused)
    assert [flight.plan.plan_id for flight in ended] == [plan, first, second]
    assert not any(each.copied.any() for flight in ended for each in flight.swaps.values())


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ((), "other transfers than the plan"),
        ((result(SwapPurpose.LOAD, []),), "other transfers than the plan"),
        ((result(SwapPurpose.BACKUP, [BLOCKS]),), "failed positions must be below 4"),
    ],
)
def test_a_report_that_does_not_fit_its_plan_is_an_error(
    results: tuple[TransferResult, ...], message: str
) -> None:
    ledger = PlanLedger(1, 5.0)
    plan, _, _ = with_storage(ledger)
    with pytest.raises(PlanError, match=message):
        ledger.check(TransferReport(plan_id=plan, rank=0, results=results))
    with pytest.raises(PlanError, match="rank 1 is not one of the 1 ranks"):
        ledger.check(TransferReport(plan_id=plan, rank=1, results=results))


def test_a_plan_is_sent_for_what_it_waits_for_alone_and_once() -> None:
    ledger, plan = PlanLedger(1, 30.0), OpenPlan()
    plan.after = (3, 5)
    assert not plan.is_empty
    sent = ledger.send(plan, 0.0)
    assert (sent.after, sent.swaps()) == ((3, 5), ())
    assert plan.take_after() == ()
    assert sent.plan_id in ledger
    ledger.record(TransferReport(plan_id=sent.plan_id, rank=0, results=()))
    assert sent.plan_id not in ledger
