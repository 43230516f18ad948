"""An engine's blocks are loaded to its device while its request waits for later ones from storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from fdcache.manager import LoadOutcome, LoadStatus, MatchStatus, Request
from fdcache.metadata import TransferReport
from fdcache.settings.cache import WritePolicy
from tests.offload_engine import BLOCK, GatedDevice, ids, prompt
from tests.offload_streams import BLOCKS, INTO, PROMPT, Served, Streaming, streams_folder, streams_served
from tests.service_help import until
from tests.swaps import PATIENCE

FAILED, CONFIRMED = LoadStatus.FAILED, LoadStatus.CONFIRMED
folder = streams_folder
served = streams_served


@pytest.fixture
def engine(folder: Path) -> Iterator[Streaming]:
    made = Streaming(folder)
    yield made
    made.close()


def test_blocks_are_loaded_while_later_ones_are_read(engine: Streaming) -> None:
    request = Request("a", PROMPT)
    match = engine.promised(request)
    assert (match.num_tokens, match.from_storage) == (BLOCKS * BLOCK, BLOCKS * BLOCK)
    assert engine.manager.load(request, ids(*INTO)) == BLOCKS
    engine.loads(2)
    for have in (2, 4, 6):
        assert engine.holds(request, INTO[:have])
        assert engine.manager.get_stats().counters.blocks_loaded == have
        assert not engine.outcomes and engine.manager.has_pending_work
        engine.read()
        engine.loads(have + 2)
    assert engine.ended() == LoadOutcome("a", CONFIRMED, BLOCKS * BLOCK, load=1)
    assert engine.holds(request, INTO)
    counters = engine.manager.get_stats().counters
    assert (counters.blocks_loaded_ahead, counters.storage_hit_tokens) == (6, BLOCKS * BLOCK)
    assert (counters.loads_confirmed, counters.loads_failed) == (1, 0)
    engine.manager.finish([request])


def test_a_plan_tells_which_loads_end_with_it(engine: Streaming) -> None:
    request = Request("a", PROMPT)
    engine.promised(request)
    engine.manager.load(request, ids(*INTO))
    told = []
    engine.open_disks()
    while not engine.outcomes:
        for plan in engine.manager.take_plans():
            for counter in engine.submit([plan]):
                counter.wait_all()
            told += [(plan.is_ahead, last) for last in engine.manager.loads_of(plan.plan_id).values()]
        engine.outcomes += engine.collect()
    assert told[0] == (False, False) and told[-1] == (True, True)
    assert not any(last for _, last in told[:-1])
    engine.manager.finish([request])


def test_a_request_that_is_not_admitted_is_promised_the_same_again(engine: Streaming) -> None:
    request = Request("a", PROMPT)
    assert engine.promised(request).num_tokens == BLOCKS * BLOCK
    engine.manager.unmatch([request])
    assert engine.manager.match(request, 0).num_tokens == BLOCKS * BLOCK
    assert engine.manager.match(request, BLOCK).num_tokens == (BLOCKS - 1) * BLOCK
    assert engine.manager.match(request, 3 * BLOCK).status is MatchStatus.DEFERRED
    engine.read()
    assert engine.manager.match(request, 3 * BLOCK).num_tokens == (BLOCKS - 3) * BLOCK
    assert engine.manager.load(request, ids(*INTO[3:])) == BLOCKS - 3
    engine.open_disks()
    assert engine.ended().status is CONFIRMED
    assert engine.holds(request, INTO[3:], first=3)
    engine.manager.finish([request])


@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
def test_less_may_be_loaded_than_was_promised(engine: Streaming, blocks: int) -> None:
    request = Request("a", PROMPT)
    engine.promised(request)
    assert engine.manager.load(request, ids(*INTO[:blocks])) == blocks
    engine.open_disks()
    assert engine.ended() == LoadOutcome("a", CONFIRMED, blocks * BLOCK, load=1)
    assert engine.holds(request, INTO[:blocks])
    engine.manager.finish([request])


def test_a_read_that_fails_ends_the_load_there(engine: Streaming) -> None:
    request = Request("a", PROMPT)
    engine.loading(request)
    engine.read()
    engine.loads(4)
    engine.disks[1].fails = True
    engine.open_disks()
    outcome = engine.ended()
    assert (outcome.status, outcome.recompute_from) == (FAILED, 4 * BLOCK)
    assert outcome.unplanned == tuple(INTO[4:])
    assert engine.holds(request, INTO[:4])
    assert engine.manager.match(request, 4 * BLOCK).num_tokens == 0, "it is not loaded a second time"
    engine.manager.finish([request])
    engine.disks[1].fails = False


def test_a_copy_that_fails_ends_the_load_before_it(engine: Streaming) -> None:
    request = Request("a", PROMPT)
    engine.loading(request)
    engine.bad_position = 1
    engine.read()
    outcome = engine.ended()
    assert (outcome.status, outcome.recompute_from) == (FAILED, 3 * BLOCK)
    assert outcome.unplanned == tuple(INTO[4:])
    assert "rank" in str(outcome.error_message)
    assert engine.holds(request, INTO[:3])
    engine.bad_position = None
    engine.manager.finish([request])


@pytest.mark.parametrize("is_planned", [False, True])
def test_an_aborted_load_ends_once_its_copies_have(engine: Streaming, is_planned: bool) -> None:
    request = Request("a", PROMPT)
    engine.loading(request)
    engine.read()
    plans = engine.manager.take_plans() if is_planned else []
    engine.manager.finish([request])
    assert engine.manager.get_stats().live_requests == 0
    if is_planned:
        assert engine.manager.expire() == []
        engine.submit(plans)
    outcome = engine.ended()
    have = 4 if is_planned else 2
    assert (outcome.status, outcome.recompute_from) == (FAILED, have * BLOCK)
    assert outcome.unplanned == tuple(INTO[have:])
    assert outcome.error_message == "the request has ended"


@pytest.mark.parametrize("reset", ["host", "rank"])
@pytest.mark.parametrize("is_loading", [False, True])
def test_a_reset_ends_the_load_with_nothing(engine: Streaming, reset: str, is_loading: bool) -> None:
    request = Request("a", PROMPT)
    engine.loading(request)
    planned = 2
    if is_loading:
        engine.read()
        plans = engine.manager.take_plans()
        engine.submit(plans)
        planned += sum(len(plan.loads or ()) for plan in plans)
        assert planned == 4
        reports: list[TransferReport] = []
        while not {plan.plan_id for plan in plans} <= {report.plan_id for report in reports}:
            reports += engine.ranks[0].wait_reports(PATIENCE)
        assert engine.manager.apply(reports) == []
    if reset == "host":
        engine.manager.reset_cache()
    else:
        engine.outcomes += engine.manager.worker_lost(1)
    engine.open_disks()
    outcome = engine.ended()
    assert (outcome.status, outcome.recompute_from) == (FAILED, 0)
    assert outcome.unplanned == tuple(INTO[planned:])
    engine.manager.finish([request])


def test_a_load_whose_report_is_overdue_ends_once(engine: Streaming) -> None:
    request = Request("a", PROMPT)
    engine.promised(request)
    engine.manager.load(request, ids(*INTO))
    plans = engine.manager.take_plans()
    engine.now += engine.manager.settings.plan_timeout + 1
    (outcome,) = engine.manager.expire()
    assert (outcome.status, outcome.recompute_from) == (LoadStatus.OVERDUE, 0)
    assert outcome.unplanned == tuple(INTO[2:])
    engine.submit(plans)
    engine.open_disks()
    assert engine.settle() == []
    engine.manager.finish([request])


def test_other_requests_share_the_reads_of_a_load(engine: Streaming) -> None:
    first, second = Request("a", PROMPT), Request("b", PROMPT)
    engine.loading(first)
    engine.manager.begin([second])
    assert engine.manager.match(second, 0).num_tokens == BLOCKS * BLOCK
    assert engine.manager.load(second, ids(*range(9, 9 + BLOCKS - 1))) == BLOCKS - 1
    engine.open_disks()
    until(lambda: engine.turns() and len(engine.outcomes) == 2, "both have ended")
    assert {outcome.status for outcome in engine.outcomes} == {CONFIRMED}
    assert engine.holds(first, INTO)
    assert engine.holds(second, list(range(9, 9 + BLOCKS - 1)))
    assert sum(engine.disks[0].reads) == BLOCKS, "nothing is read twice"
    engine.manager.finish([first])
    engine.manager.finish([second])


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_BACK, WritePolicy.WRITE_THROUGH])
def test_no_part_is_loaded_before_its_device_blocks_are_copied_out(folder: Path, policy: WritePolicy) -> None:
    """With write_through the copies are backups of an earlier plan, which the device holds up."""
    engine = Streaming(folder, policy)
    for device in engine.devices:
        cast(GatedDevice, device).is_gated = True
    other = Request("other", prompt(*range(50, 50 + BLOCKS)))
    engine.manager.begin([other])
    assert engine.manager.match(other, 0).num_tokens == 0
    engine.compute(other, INTO)
    engine.manager.offer(other, other.num_tokens, ids(*INTO))
    engine.manager.finish([other])
    request = Request("a", PROMPT)
    engine.promised(request)
    engine.manager.load(request, ids(*INTO))
    first = engine.manager.take_plans()
    engine.submit(first)
    engine.read()
    (second,) = engine.manager.take_plans()
    assert set(second.after) == {first[0].plan_id, *first[0].after}
    engine.submit([second])
    for device in engine.devices:
        cast(GatedDevice, device).open()
    engine.open_disks()
    assert engine.ended().status is CONFIRMED
    assert engine.holds(request, INTO)
    until(lambda: engine.turns() and not engine.manager.has_pending_work, "all copies have ended")
    counters = engine.manager.get_stats().counters
    assert counters.blocks_evicted_to_host + counters.blocks_backed_up == BLOCKS
    assert engine.wrong_records() == 0
    engine.manager.finish([request])
    engine.close()


# --- storage of a service ---------------------------------------------------------------------------------


def test_blocks_of_a_service_are_loaded_while_later_ones_are_read(served: Served) -> None:
    request = Request("a", PROMPT)
    outcomes = served.loading(request)
    for have in (4, 6):
        served.disk.allow(1)
        until(lambda: served.turns(outcomes) and served.counters.blocks_loaded == have, "two more")  # noqa: B023
        assert served.engine.holds(request, INTO[:have]) and not outcomes
    served.disk.gate.set()
    until(lambda: served.turns(outcomes) and outcomes, "all are loaded")
    assert outcomes == [LoadOutcome("a", CONFIRMED, BLOCKS * BLOCK, load=1)]
    assert served.engine.holds(request, INTO)
    counters = served.counters
    assert (counters.blocks_loaded_ahead, counters.storage_hit_tokens) == (6, BLOCKS * BLOCK)
    served.engine.manager.finish([request])


def test_a_read_of_a_service_that_fails_ends_the_load_there(served: Served) -> None:
    request = Request("a", PROMPT)
    outcomes = served.loading(request)
    served.disk.fails = True
    served.disk.gate.set()
    until(lambda: served.turns(outcomes) and outcomes, "the load ends")
    (outcome,) = outcomes
    assert (outcome.status, outcome.recompute_from) == (FAILED, 2 * BLOCK)
    assert outcome.unplanned == tuple(INTO[2:])
    assert served.engine.holds(request, INTO[:2])
    served.disk.fails = False
    served.engine.manager.finish([request])


def test_an_abort_while_a_service_reads_leaves_nothing(served: Served) -> None:
    request = Request("a", PROMPT)
    outcomes = served.loading(request)
    served.engine.manager.finish([request])
    until(lambda: served.turns(outcomes) and outcomes, "the load ends")
    assert [outcome.unplanned for outcome in outcomes] == [tuple(INTO[2:])]


def test_a_service_that_is_lost_ends_the_load(served: Served) -> None:
    request = Request("a", PROMPT)
    outcomes = served.loading(request)
    sessions = served.engine.manager._host.sessions  # type: ignore[attr-defined]
    sessions.lose(sessions.session, "the test")
    until(lambda: served.turns(outcomes) and outcomes, "the load ends")
    (outcome,) = outcomes
    assert (outcome.status, outcome.recompute_from) == (FAILED, 2 * BLOCK)
    served.disk.gate.set()
    served.engine.manager.finish([request])
