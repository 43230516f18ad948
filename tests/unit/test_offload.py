"""OffloadManager: matches, loads and the whole cache."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fdcache.errors import ConfigurationError, HintError, LayoutError, PlanError, RequestStateError
from fdcache.manager import LoadStatus, MatchStatus, OffloadManager, Request, offloaded
from fdcache.metadata import CacheLevel, TransferReport
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.host import HostTier, find_and_pin
from tests.offload_engine import (
    BLOCK,
    LAYOUT,
    GatedDevice,
    OffloadEngine,
    begun,
    ids,
    loaded,
    offload_engine,
    prompt,
)
from tests.swaps import uniform_layout

engine = offload_engine


@pytest.mark.parametrize("beside", [True, False])
def test_the_gil_is_kept_in_the_engines_thread_and_not_beside_it(engine: OffloadEngine, beside: bool) -> None:
    gate, ran = threading.Lock(), threading.Event()

    def wait() -> None:
        with gate:
            ran.set()

    interval = sys.getswitchinterval()
    gate.acquire()
    thread = threading.Thread(target=wait)
    thread.start()
    prompts = [Request(f"long {i}", np.arange(100_000, dtype=np.int32)) for i in range(100 if beside else 1)]
    sys.setswitchinterval(60)
    try:
        gate.release()
        for request in prompts:
            if beside:
                engine.manager.prepare([request])
            else:
                engine.manager.begin([request])
            if ran_meanwhile := ran.is_set():
                break
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert ran_meanwhile == beside
    assert len(request.block_hashes) == 100_000 // BLOCK
    engine.manager.finish([request])


# --- match ------------------------------------------------------------------------------------------------


def test_what_was_offered_is_found_beyond_the_device_and_loaded(engine: OffloadEngine) -> None:
    engine.stored("first", prompt(1, 2, 3), [0, 1, 2])
    request = begun(engine, "second", prompt(1, 2, 3))
    assert engine.manager.match(request, 0).num_tokens == 3 * BLOCK
    assert engine.manager.match(request, BLOCK).num_tokens == 2 * BLOCK
    outcome = loaded(engine, request, ids(7, 5))
    assert (outcome.request_id, outcome.status) == ("second", LoadStatus.CONFIRMED)
    assert outcome.recompute_from == 3 * BLOCK
    assert engine.holds(request, [7, 5], first=1)
    engine.manager.finish([request])
    counters = engine.manager.get_stats().counters
    assert (counters.lookups, counters.device_hit_tokens, counters.host_hit_tokens) == (2, BLOCK, 2 * BLOCK)


def test_the_last_token_is_left_to_compute_unless_the_whole_prompt_is_wanted(engine: OffloadEngine) -> None:
    engine.stored("first", prompt(1, 2), [0, 1])
    request = begun(engine, "second", prompt(1, 2, tail=0))
    assert engine.manager.match(request, 0).num_tokens == BLOCK
    assert engine.manager.match(request, 0, whole_prompt=True).num_tokens == 2 * BLOCK
    engine.manager.finish([request])


def test_a_match_is_kept_over_repeated_questions(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.stored("first", prompt(1, 2, 3), [0, 1, 2])
    request = begun(engine, "second", prompt(1, 2, 3))
    asked: list[int] = []
    host: Any = engine.manager._host

    def counted(host: HostTier, hashes: Any, start: int, fetch: int = 0) -> Any:
        asked.append(start)
        return find_and_pin(host, hashes, start, fetch)

    monkeypatch.setattr(offloaded, "find_and_pin", counted)
    for device_tokens in (BLOCK, BLOCK, 2 * BLOCK, 3 * BLOCK, BLOCK):
        found = engine.manager.match(request, device_tokens)
        assert found.num_tokens == 3 * BLOCK - device_tokens
    assert asked == [1]
    assert host.in_use == 2 + 1  # two blocks and their lease
    assert engine.manager.match(request, 0).num_tokens == 3 * BLOCK  # the device has lost its block
    assert asked == [1, 0]
    engine.manager.finish([request])
    assert host.in_use == 0


def test_a_question_without_an_answer_is_asked_again_after_a_while(engine: OffloadEngine) -> None:
    request = begun(engine, "second", prompt(1, 2))
    assert engine.manager.match(request, 0).num_tokens == 0
    engine.stored("first", prompt(1, 2), [0, 1])
    assert engine.manager.match(request, 0).num_tokens == 0
    engine.now += 0.2
    assert engine.manager.match(request, 0).num_tokens == 2 * BLOCK
    engine.manager.finish([request])


def test_blocks_of_a_match_are_not_evicted_before_the_load() -> None:
    engine = OffloadEngine(host_blocks=4)
    engine.stored("first", prompt(1, 2), [0, 1])
    request = begun(engine, "second", prompt(1, 2))
    assert engine.manager.match(request, 0).num_tokens == 2 * BLOCK
    engine.stored("third", prompt(4, 5, 6), [2, 3, 4])
    assert loaded(engine, request, ids(8, 9)).status is LoadStatus.CONFIRMED
    assert engine.holds(request, [8, 9])
    engine.manager.finish([request])
    engine.close()


def test_a_match_that_nothing_asks_for_is_unpinned_and_found_anew(engine: OffloadEngine) -> None:
    engine.stored("first", prompt(1, 2), [0, 1])
    request = begun(engine, "second", prompt(1, 2))
    engine.manager.match(request, 0)
    assert engine.manager._host.in_use
    engine.now += engine.manager.settings.plan_timeout + 1
    assert engine.manager.expire() == []
    assert engine.manager._host.in_use == 0
    assert engine.manager.match(request, 0).num_tokens == 2 * BLOCK
    engine.manager.finish([request])


def test_a_match_in_the_middle_of_a_block_finds_nothing(engine: OffloadEngine) -> None:
    engine.stored("first", prompt(1, 2), [0, 1])
    request = begun(engine, "second", prompt(1, 2))
    assert engine.manager.match(request, 1).num_tokens == 0
    engine.manager.finish([request])


def test_requests_that_may_not_load_find_nothing(engine: OffloadEngine) -> None:
    engine.stored("first", prompt(1, 2), [0, 1])
    for name, options in {"none": {"use_cache": False}, "device": {"device_only": True}}.items():
        request = begun(engine, name, prompt(1, 2), **options)
        found = engine.manager.match(request, 0)
        assert (found.status, found.num_tokens) == (MatchStatus.MATCHED, 0)
        engine.manager.finish([request])
    limited = begun(engine, "limited", prompt(1, 2), max_cached_tokens=2 * BLOCK - 1)
    assert engine.manager.match(limited, 0).num_tokens == BLOCK
    engine.manager.finish([limited])


def test_other_tenants_and_adapters_find_nothing(engine: OffloadEngine) -> None:
    engine.stored("first", prompt(1, 2), [0, 1], tenant="a", adapter_id="x")
    for name, options in (
        ("t", {"tenant": "b", "adapter_id": "x"}),
        ("a", {"tenant": "a", "adapter_id": "y"}),
    ):
        request = begun(engine, name, prompt(1, 2), **options)
        assert engine.manager.match(request, 0).num_tokens == 0
        engine.manager.finish([request])


def test_the_reuse_grid_rounds_the_sum_of_device_and_host() -> None:
    engine = OffloadEngine(reuse_grid=2 * BLOCK)
    engine.stored("first", prompt(1, 2, 3), [0, 1, 2])
    request = begun(engine, "second", prompt(1, 2, 3))
    assert engine.manager.match(request, 0).num_tokens == 2 * BLOCK
    assert engine.manager.match(request, BLOCK).num_tokens == BLOCK
    engine.manager.finish([request])
    engine.close()


def test_a_match_waits_for_a_block_on_its_way_to_the_host() -> None:
    engine = OffloadEngine(defer_timeout=1.0)
    device = engine.devices[0]
    assert isinstance(device, GatedDevice)
    device.is_gated = True
    first = begun(engine, "first", prompt(1, 2))
    engine.step()
    engine.compute(first, [0, 1])
    engine.manager.offer(first, 2 * BLOCK, ids(0, 1))
    engine.step()
    second = begun(engine, "second", prompt(1, 2))
    assert engine.manager.match(second, 0).status is MatchStatus.DEFERRED
    assert engine.manager.match(second, 2 * BLOCK).status is MatchStatus.MATCHED
    device.open()
    engine.collect()
    assert engine.manager.match(second, 0).num_tokens == 2 * BLOCK
    for request in (first, second):
        engine.manager.finish([request])
    engine.close()


def test_the_wait_for_another_copy_has_an_end() -> None:
    engine = OffloadEngine(defer_timeout=1.0)
    engine.devices[0].is_gated = True  # type: ignore[attr-defined]
    first, second = (begun(engine, name, prompt(1)) for name in ("first", "second"))
    engine.compute(first, [0])
    engine.manager.offer(first, BLOCK, ids(0))
    engine.step()
    assert engine.manager.match(second, 0).status is MatchStatus.DEFERRED
    engine.now += 2
    assert engine.manager.match(second, 0).status is MatchStatus.MATCHED
    for request in (first, second):
        engine.manager.finish([request])
    engine.close()


# --- loads ------------------------------------------------------------------------------------------------


def failing(positions: list[int]) -> Any:
    return lambda: GatedDevice(lambda swap: [position for position in positions if position < len(swap)])


def test_a_failed_load_is_not_promised_again_and_the_request_loads_nothing_more() -> None:
    engine = OffloadEngine(device=failing([1]))
    engine.stored("first", prompt(1, 2, 3), [0, 1, 2])
    request = begun(engine, "second", prompt(1, 2, 3))
    assert engine.manager.match(request, 0).num_tokens == 3 * BLOCK
    outcome = loaded(engine, request, ids(5, 6, 7))
    assert (outcome.status, outcome.recompute_from) == (LoadStatus.FAILED, BLOCK)
    assert engine.holds(request, [5])
    assert engine.manager.match(request, 0).num_tokens == 0
    assert request.device_only
    other = begun(engine, "third", prompt(1, 2, 3))
    assert engine.manager.match(other, 0).num_tokens == BLOCK
    for each in (request, other):
        engine.manager.finish([each])
    engine.close()


def test_what_a_failed_load_lacks_is_computed_and_stored_again() -> None:
    engine = OffloadEngine(device=failing([0]))
    engine.stored("first", prompt(1, 2), [0, 1])
    request = begun(engine, "second", prompt(1, 2))
    engine.manager.match(request, 0)
    assert loaded(engine, request, ids(5, 6)).recompute_from == 0
    engine.step()
    engine.compute(request, [5, 6])
    engine.manager.offer(request, 2 * BLOCK, ids(5, 6))
    engine.settle()
    assert len(engine.manager.find_blocks(request)[CacheLevel.HOST]) == 2
    engine.manager.finish([request])
    assert engine.wrong_records() == 0
    engine.close()


def test_a_load_in_flight_ends_with_an_outcome_after_the_end_of_its_request(engine: OffloadEngine) -> None:
    engine.stored("first", prompt(1, 2), [0, 1])
    request = begun(engine, "second", prompt(1, 2))
    engine.manager.match(request, 0)
    assert engine.manager.load(request, ids(5, 6)) == 2
    engine.manager.finish([request])
    engine.manager.finish([request])
    engine.step()
    (outcome,) = engine.collect()
    assert (outcome.request_id, outcome.status) == ("second", LoadStatus.CONFIRMED)


def test_an_overdue_load_has_one_outcome(engine: OffloadEngine) -> None:
    engine.stored("first", prompt(1, 2), [0, 1])
    request = begun(engine, "second", prompt(1, 2))
    engine.manager.match(request, 0)
    engine.manager.load(request, ids(5, 6))
    engine.step()
    engine.now += engine.manager.settings.plan_timeout + 1
    (outcome,) = engine.manager.expire()
    assert outcome.status is LoadStatus.OVERDUE
    assert engine.collect() == []
    assert engine.manager.match(request, 0).num_tokens == 0
    engine.manager.finish([request])


def test_a_load_of_fewer_blocks_than_were_found_takes_the_first_ones(engine: OffloadEngine) -> None:
    engine.stored("first", prompt(1, 2, 3), [0, 1, 2])
    request = begun(engine, "second", prompt(1, 2, 3))
    engine.manager.match(request, BLOCK)
    assert loaded(engine, request, ids(9)).recompute_from == 2 * BLOCK
    assert engine.holds(request, [9], first=1)
    engine.manager.finish([request])


def test_a_load_without_blocks_gives_the_pin_back(engine: OffloadEngine) -> None:
    engine.stored("first", prompt(1, 2), [0, 1])
    request = begun(engine, "second", prompt(1, 2))
    engine.manager.match(request, 0)
    assert engine.manager.load(request, ids()) == 0
    assert engine.manager._host.in_use == 0
    assert engine.manager.load(request, ids(5)) == 0
    engine.manager.finish([request])


def test_a_reset_between_match_and_load_leaves_nothing_to_load(engine: OffloadEngine) -> None:
    engine.stored("first", prompt(1, 2), [0, 1])
    request = begun(engine, "second", prompt(1, 2))
    engine.manager.match(request, 0)
    assert engine.manager.reset_cache() == 2
    assert engine.manager.load(request, ids(5, 6)) == 0
    assert engine.manager.match(request, 0).num_tokens == 0
    engine.manager.finish([request])


def test_a_load_in_flight_at_a_reset_fails(engine: OffloadEngine) -> None:
    engine.stored("first", prompt(1, 2), [0, 1])
    request = begun(engine, "second", prompt(1, 2))
    engine.manager.match(request, 0)
    engine.manager.load(request, ids(5, 6))
    engine.manager.reset_cache()
    engine.step()
    (outcome,) = engine.collect()
    assert (outcome.status, outcome.recompute_from) == (LoadStatus.FAILED, 0)
    engine.manager.finish([request])


def test_a_refused_plan_fails_its_load() -> None:
    engine = OffloadEngine(layout=uniform_layout(block_size=BLOCK, num_layers=2, tp_size=2))
    engine.stored("first", prompt(1, 2), [0, 1])
    request = begun(engine, "second", prompt(1, 2))
    engine.manager.match(request, 0)
    engine.manager.load(request, ids(5, 6))
    plans = engine.manager.take_plans()
    engine.ranks[0].submit_swap_tasks(plans[0])
    refused = [TransferReport.refusal(plan, 1, "it never came") for plan in plans]
    (outcome,) = engine.manager.apply([*engine.ranks[0].wait_reports(30), *refused])
    assert outcome.status is LoadStatus.FAILED
    other = begun(engine, "third", prompt(1, 2))
    assert engine.manager.match(other, 0).num_tokens == 0, "whatever the reason, it is not promised again"
    for each in (request, other):
        engine.manager.finish([each])
    engine.close()


def test_blocks_that_are_being_loaded_are_not_offered(engine: OffloadEngine) -> None:
    engine.stored("first", prompt(1, 2), [0, 1])
    request = begun(engine, "second", prompt(1, 2, 3))
    assert engine.manager.match(request, BLOCK).num_tokens == BLOCK
    engine.manager.load(request, ids(5))
    engine.step()
    engine.manager.offer(request, 3 * BLOCK, ids(0, 5, 6))
    assert engine.step() == []
    engine.collect()
    engine.fill(6, request.block_hashes[2].tobytes())
    engine.manager.offer(request, 3 * BLOCK, ids(0, 5, 6))
    (plan,) = engine.step()
    assert plan.backups is not None
    assert plan.backups.src_block_ids.tolist() == [6]
    engine.collect()
    engine.manager.finish([request])


def test_a_load_of_a_request_that_has_begun_anew_does_not_end_with_the_former_one() -> None:
    fails: list[int] = []
    engine = OffloadEngine(device=lambda: GatedDevice(lambda swap: fails))
    engine.stored("first", prompt(1, 2), [0, 1])
    request = begun(engine, "second", prompt(1, 2))
    engine.manager.match(request, 0)
    engine.manager.load(request, ids(3, 4))
    engine.step()
    former = engine.reports()
    engine.manager.finish([request])
    engine.manager.begin([request])
    engine.manager.match(request, 0)
    engine.manager.load(request, ids(5, 6))
    fails[:] = [0, 1]
    engine.step()
    engine.manager.apply(former)
    engine.manager.offer(request, 2 * BLOCK, ids(5, 6))
    (outcome,) = engine.collect()
    assert (outcome.status, outcome.recompute_from) == (LoadStatus.FAILED, 0)
    engine.manager.evicted(ids(5, 6))
    engine.settle()
    assert engine.wrong_records() == 0
    engine.manager.finish([request])
    engine.close()


# --- the whole cache --------------------------------------------------------------------------------------


def test_another_revision_finds_nothing_of_the_former(engine: OffloadEngine) -> None:
    engine.stored("first", prompt(1, 2), [0, 1])
    old = begun(engine, "old", prompt(1, 2))
    engine.manager.match(old, 0)
    assert engine.manager.change_revision("2") == 2
    assert engine.manager.match(old, 0).num_tokens == 0
    engine.manager.offer(old, 2 * BLOCK, ids(0, 1))
    new = begun(engine, "new", prompt(1, 2))
    assert engine.manager.match(new, 0).num_tokens == 0
    assert not engine.manager.has_pending_work
    with pytest.raises(LayoutError):
        engine.manager.change_revision("2")
    for request in (old, new):
        engine.manager.finish([request])


def test_a_lost_worker_ends_its_loads_and_empties_the_own_host_tier(engine: OffloadEngine) -> None:
    engine.stored("first", prompt(1, 2), [0, 1])
    request = begun(engine, "second", prompt(1, 2))
    engine.manager.match(request, 0)
    engine.manager.load(request, ids(5, 6))
    engine.manager.take_plans()
    (outcome,) = engine.manager.worker_lost(0)
    assert outcome.status is LoadStatus.FAILED
    assert engine.manager.match(request, 0).num_tokens == 0
    engine.manager.finish([request])


@pytest.mark.parametrize("wrong", [-1, 2.5, None, "4"])
def test_numbers_of_tokens_that_are_none_are_refused_by_name(engine: OffloadEngine, wrong: Any) -> None:
    request = Request("wrong", prompt(1, 2))
    with pytest.raises(RequestStateError, match="device_tokens"):
        engine.manager.match(request, wrong)
    with pytest.raises(RequestStateError, match="num_tokens"):
        engine.manager.offer(request, wrong, ids(0, 1))
    assert engine.manager.get_stats().live_requests == 0


def test_a_request_that_is_not_in_a_list_is_refused(engine: OffloadEngine) -> None:
    request: Any = Request("alone", prompt(1))
    for call in (engine.manager.begin, engine.manager.unmatch, engine.manager.finish):
        with pytest.raises(RequestStateError, match="has to be a list of requests, got Request"):
            call(request)


@pytest.mark.parametrize("wrong", [None, "second", 7])
def test_what_is_no_request_report_or_rank_is_refused_by_name(engine: OffloadEngine, wrong: Any) -> None:
    manager = engine.manager
    calls: list[Callable[[], object]] = [
        lambda: manager.begin([wrong]),
        lambda: manager.prepare([wrong]),
        lambda: manager.match(wrong, 0),
        lambda: manager.unmatch([wrong]),
        lambda: manager.load(wrong, ids(0)),
        lambda: manager.offer(wrong, 4, ids(0)),
        lambda: manager.finish([wrong]),
    ]
    for call in calls:
        with pytest.raises(RequestStateError, match="has to be a Request or KeyedRequest"):
            call()
    with pytest.raises(PlanError, match="is not a TransferReport"):
        manager.apply([wrong])
    with pytest.raises(PlanError, match="is not one of the 1 ranks"):
        manager.worker_lost(wrong)
    with pytest.raises(PlanError, match="a scan of each"):
        manager.restore_storage([wrong])
    with pytest.raises(HintError, match="is not a Hint"):
        manager.hint(Request("over", prompt(1)), [wrong])


def test_a_device_block_is_loaded_once(engine: OffloadEngine) -> None:
    engine.stored("first", prompt(1, 2), [0, 1])
    request = begun(engine, "second", prompt(1, 2))
    engine.manager.match(request, 0)
    with pytest.raises(PlanError, match="twice"):
        engine.manager.load(request, ids(5, 5))
    assert loaded(engine, request, ids(5, 6)).status is LoadStatus.CONFIRMED
    engine.manager.finish([request])


def test_every_call_takes_unknown_requests_and_blocks(engine: OffloadEngine) -> None:
    request = Request("unknown", prompt(1))
    engine.manager.unmatch([request])
    engine.manager.finish([request])
    assert engine.manager.load(request, ids(3)) == 0
    engine.manager.evicted(ids(3, 400_000))
    engine.manager.next_evicted(ids(3, 400_000))
    assert engine.step() == []


def test_another_request_with_the_same_id_ends_the_first(engine: OffloadEngine) -> None:
    engine.stored("first", prompt(1, 2), [0, 1])
    first, second = begun(engine, "same", prompt(1, 2)), Request("same", prompt(1, 2))
    engine.manager.match(first, 0)
    engine.manager.begin([second])
    assert engine.manager._host.in_use == 0
    engine.manager.finish([first])
    assert engine.manager.get_stats().live_requests == 1
    engine.manager.finish([second])


def test_without_a_host_tier_there_is_no_manager() -> None:
    with pytest.raises(ConfigurationError, match="FDCACHE_HOST_MEMORY"):
        OffloadManager(CacheSettings(), LAYOUT)
