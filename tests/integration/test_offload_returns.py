"""Requests that end, come back or lose their rank while their blocks are loaded: every outcome names its load.

Device blocks that an outcome gives back are another's from then on: no later plan loads into them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from fdcache.manager import LoadOutcome, LoadStatus, MatchStatus, Request
from fdcache.metadata import TransferPlan
from tests.offload_engine import BLOCK, OffloadEngine, begun, ids, offload_engine, prompt
from tests.offload_streams import BLOCKS, INTO, PROMPT, Served, Streaming, streams_folder, streams_served
from tests.service_help import until

CONFIRMED, FAILED, OVERDUE = LoadStatus.CONFIRMED, LoadStatus.FAILED, LoadStatus.OVERDUE
ELSEWHERE = list(range(9, 9 + BLOCKS - 1))
engine = offload_engine
folder = streams_folder
served = streams_served


@pytest.fixture
def streaming(folder: Path) -> Iterator[Streaming]:
    made = Streaming(folder)
    yield made
    made.close()


def loaded_into(plans: Sequence[TransferPlan]) -> list[int]:
    """Return the device blocks that plans load into."""
    return [block for plan in plans if plan.loads is not None for block in plan.loads.dst_block_ids.tolist()]


# --- blocks that were given back --------------------------------------------------------------------------


def test_nothing_more_is_loaded_after_a_plan_was_overdue(streaming: Streaming) -> None:
    manager, request = streaming.manager, Request("a", PROMPT)
    streaming.promised(request)
    manager.load(request, ids(*INTO))
    late = manager.take_plans()
    streaming.now += manager.settings.plan_timeout + 1
    streaming.read()
    (outcome,) = streaming.outcomes
    assert (outcome.status, outcome.unplanned) == (OVERDUE, tuple(INTO[2:]))
    plans = manager.take_plans()
    assert loaded_into(plans) == []
    streaming.submit([*late, *plans])
    manager.finish([request])


@pytest.mark.parametrize("name", ["same object", "same name"])
def test_nothing_more_is_loaded_for_a_request_that_ended_and_began_anew(
    streaming: Streaming, name: str
) -> None:
    manager, former = streaming.manager, Request("a", PROMPT)
    streaming.loading(former)
    streaming.read()
    again = former if name == "same object" else Request("a", PROMPT)
    manager.finish([former])
    manager.begin([again])
    assert manager.match(again, 0).num_tokens
    (outcome,) = manager.expire()
    assert (outcome.status, outcome.unplanned) == (FAILED, tuple(INTO[2:]))
    for block in outcome.unplanned:
        streaming.fill(block, bytes(range(32)))
    before = [tensor[list(outcome.unplanned)].copy() for tensor in streaming.tensors[0]]
    plans = manager.take_plans()
    assert loaded_into(plans) == []
    streaming.submit(plans)
    assert manager.load(again, ids(*ELSEWHERE)) == BLOCKS - 1
    streaming.open_disks()
    assert streaming.ended().status is CONFIRMED
    assert streaming.holds(again, ELSEWHERE)
    after = [tensor[list(outcome.unplanned)] for tensor in streaming.tensors[0]]
    assert all(map(np.array_equal, before, after))
    manager.finish([again])


def test_nothing_more_is_loaded_from_a_service_after_a_rank_was_lost(served: Served) -> None:
    manager, request = served.engine.manager, Request("a", PROMPT)
    served.loading(request)
    other = Request("b", PROMPT)
    manager.begin([other])
    served.disk.allow(1)
    until(lambda: manager.match(other, 2 * BLOCK).num_tokens == (BLOCKS - 2) * BLOCK, "more has been read")
    (outcome,) = manager.worker_lost(0)
    assert (outcome.status, outcome.recompute_from) == (FAILED, 0)
    assert outcome.unplanned == tuple(INTO[2:])
    assert loaded_into(served.engine.step()) == []
    for each in (request, other):
        manager.finish([each])
    served.disk.gate.set()


def test_an_end_that_was_not_told_counts_for_nothing_once_a_rank_is_lost(streaming: Streaming) -> None:
    manager, request = streaming.manager, Request("a", PROMPT)
    streaming.loading(request)
    manager.finish([request])
    streaming.step()
    (outcome,) = manager.worker_lost(0)
    assert (outcome.status, outcome.recompute_from, outcome.unplanned) == (FAILED, 0, tuple(INTO[2:]))


# --- outcomes name their load -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["same object", "same name"])
def test_the_outcome_of_a_former_load_is_not_that_of_the_present_one(
    engine: OffloadEngine, name: str
) -> None:
    manager = engine.manager
    engine.stored("first", prompt(1, 2, 3), [0, 1, 2])
    former = begun(engine, "second", prompt(1, 2, 3))
    manager.match(former, 0)
    assert manager.load_of(former) == 0
    assert manager.load(former, ids(4, 5, 6)) == 3
    of_former = manager.load_of(former)
    engine.step()
    manager.finish([former])
    assert manager.load_of(former) == 0
    again = former if name == "same object" else begun(engine, "second", prompt(1, 2, 3))
    manager.match(again, 0)
    assert manager.load(again, ids(7, 8, 9)) == 3
    present = manager.load_of(again)
    assert 0 < of_former < present
    assert engine.collect() == [LoadOutcome("second", CONFIRMED, 3 * BLOCK, load=of_former)]
    assert manager.load_of(again) == present, "it is planned only"
    engine.step()
    assert engine.collect() == [LoadOutcome("second", CONFIRMED, 3 * BLOCK, load=present)]
    assert manager.load_of(again) == 0
    assert engine.holds(again, [7, 8, 9])
    manager.finish([again])


def test_two_loads_of_a_request_in_one_plan_are_told_apart(engine: OffloadEngine) -> None:
    manager = engine.manager
    engine.stored("first", prompt(1, 2), [0, 1])
    request = begun(engine, "second", prompt(1, 2))
    numbers = []
    for into in (ids(4, 5), ids(6, 7)):
        manager.match(request, 0)
        manager.load(request, into)
        numbers.append(manager.load_of(request))
        manager.finish([request])
    (plan,) = engine.step()
    assert manager.loads_of(plan.plan_id) == {("second", number): True for number in numbers}
    assert [outcome.load for outcome in engine.collect()] == numbers


def test_a_former_load_that_fails_keeps_the_present_one_from_nothing(folder: Path) -> None:
    streaming = Streaming(folder)
    manager, request = streaming.manager, Request("a", PROMPT)
    streaming.promised(request)
    manager.load(request, ids(*INTO))
    former = manager.load_of(request)
    manager.finish([request])
    manager.begin([request])
    streaming.bad_position = 0
    streaming.step()
    streaming.bad_position = None
    streaming.open_disks()
    until(lambda: streaming.turns() and streaming.outcomes, "the former load has ended")
    assert [(each.status, each.load) for each in streaming.outcomes] == [(FAILED, former)]
    assert not request.device_only
    manager.finish([request])
    streaming.close()


# --- what is found afterwards -----------------------------------------------------------------------------


def test_a_request_whose_open_load_was_ended_finds_what_another_finds(streaming: Streaming) -> None:
    manager, request, other = streaming.manager, Request("a", PROMPT), Request("b", PROMPT)
    streaming.loading(request)
    manager.finish([request])
    assert not request.device_only
    for each in (request, other):
        manager.begin([each])
    streaming.open_disks()
    found = [0, 0]

    def are_found() -> bool:
        streaming.turn()
        found[:] = [manager.match(each, 0).num_tokens for each in (request, other)]
        return all(found)

    until(are_found, "both are found")
    until(lambda: are_found() and found[0] == found[1] == BLOCKS * BLOCK, "both are found whole")
    for each in (request, other):
        manager.finish([each])


def test_a_request_whose_rank_was_lost_finds_what_another_finds(served: Served) -> None:
    manager, request = served.engine.manager, Request("a", PROMPT)
    served.loading(request)
    manager.worker_lost(0)
    assert manager.match(request, 0).status in MatchStatus
    assert not request.device_only
    served.disk.gate.set()
    until(lambda: served.match(request).num_tokens == BLOCKS * BLOCK, "it is found")
    manager.finish([request])


def test_a_request_whose_load_was_overdue_loads_nothing_more(streaming: Streaming) -> None:
    manager, request = streaming.manager, Request("a", PROMPT)
    streaming.promised(request)
    manager.load(request, ids(*INTO))
    late = manager.take_plans()
    streaming.now += manager.settings.plan_timeout + 1
    (outcome,) = manager.expire()
    manager.finish([request])
    manager.begin([request])
    assert outcome.status is OVERDUE
    assert manager.match(request, 0).num_tokens == 0
    streaming.submit(late)
    manager.finish([request])
