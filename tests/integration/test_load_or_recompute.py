"""Load or recompute: what a manager loads once it knows what loading and computing cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fdcache.errors import RequestStateError
from fdcache.manager import MatchStatus, Request
from fdcache.manager.cost import CostModel, Priors
from fdcache.settings.cache import PrefetchPolicy
from fdcache.tiers.statistics import LoadFigures
from tests.offload_engine import LAYOUT as OFFLOADED
from tests.offload_engine import OffloadEngine, ids, prompt
from tests.storage_engine import BLOCK, LAYOUT, Disk, Engine, counters, store_a_path, tokens_of
from tests.storage_help import storage_layout

BLOCKS = 8
SLOW, FAST = 1.0, 1e-6
"""Seconds of one block."""


@contextmanager
def engine_of(folder: Path, **changes: Any) -> Iterator[Engine]:
    engine = Engine(folder, **changes)
    yield engine
    engine.close()


def model_of(engine: Engine) -> CostModel:
    return engine.manager._choices.model


def learn(engine: Engine, *, compute: float, load: float = FAST, read: float = FAST) -> None:
    """Let the engine have observed these seconds for each block."""
    request = Request("observed", tokens_of(99, 4))
    model = model_of(engine)
    for _ in range(40):
        engine.manager.observe_prefill([(request, 0, 4 * BLOCK)], 4 * compute)
        model.link.observe(4 * LAYOUT.payload_bytes, 4 * load, engine.now)
        model.storage.observe(4 * LAYOUT.record_bytes, 4 * read, engine.now)


def loads(engine: Engine) -> LoadFigures:
    return engine.manager.get_stats().loads


def settle_reads(engine: Engine) -> None:
    engine.store.gate.set()
    engine.settle()


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    store_a_path(tmp_path)
    return tmp_path


def fill_host(engine: Engine) -> None:
    engine.run("fills", tokens_of(1, BLOCKS))
    engine.manager.sleep()
    engine.manager.wakeup()


def test_without_observations_everything_is_loaded(stored: Path) -> None:
    with engine_of(stored) as engine:
        match = engine.run("first", tokens_of(1, BLOCKS))
        assert match.num_storage_blocks == BLOCKS
        assert loads(engine).recent == []


def test_blocks_that_are_sooner_computed_are_not_read(stored: Path) -> None:
    with engine_of(stored) as engine:
        learn(engine, compute=0.1, read=SLOW)
        match = engine.match(request := Request("a", tokens_of(1, BLOCKS)))
        assert match.status is MatchStatus.MATCHED
        assert match.num_cached_tokens == 0
        assert counters(engine).blocks_requested_from_storage == 0
        (decision,) = loads(engine).recent
        assert (decision.choice, decision.storage_blocks, decision.reused_blocks) == ("nothing", BLOCKS, 0)
        assert decision.expected_seconds == pytest.approx(0.1 * (BLOCKS + 1 / BLOCK), rel=0.01)
        assert decision.expected_seconds_whole == pytest.approx(SLOW * BLOCKS, rel=0.02)
        engine.manager.finish([request])


def test_always_reads_what_is_slower(stored: Path) -> None:
    with engine_of(stored, load_or_recompute="always") as engine:
        learn(engine, compute=FAST, read=SLOW, load=SLOW)
        assert engine.run("a", tokens_of(1, BLOCKS)).num_storage_blocks == BLOCKS


def test_host_blocks_that_are_sooner_computed_are_not_loaded(stored: Path) -> None:
    with engine_of(stored) as engine:
        fill_host(engine)
        learn(engine, compute=0.1, load=SLOW)
        match = engine.match(request := Request("a", tokens_of(1, BLOCKS)))
        assert (match.status, match.total_matched_blocks) == (MatchStatus.MATCHED, 0)
        assert engine.allocate(request).ok
        assert not request.is_loading
        engine.compute(request, BLOCKS * BLOCK)
        engine.manager.finish([request])


def test_a_part_is_loaded_while_the_rest_is_computed(stored: Path) -> None:
    with engine_of(stored) as engine:
        fill_host(engine)
        learn(engine, compute=1.0, load=1.0)
        request = Request("a", tokens_of(1, BLOCKS))
        match = engine.match(request)
        assert 0 < match.num_host_blocks < BLOCKS
        assert request.num_cached_tokens == match.num_host_blocks * BLOCK
        assert engine.allocate(request).ok
        engine.settle()
        engine.check(request, match.num_host_blocks)
        engine.compute(request, BLOCKS * BLOCK)
        engine.manager.finish([request])
        (decision,) = loads(engine).recent
        assert decision.choice == "part"
        assert decision.expected_seconds < min(
            decision.expected_seconds_whole, decision.expected_seconds_nothing
        )


def test_a_step_that_waited_for_a_load_shorter_than_it_is_observed(stored: Path) -> None:
    with engine_of(stored) as engine:
        fill_host(engine)
        learn(engine, compute=1.0, load=FAST)
        observed = model_of(engine).prefill._fit.observations
        request = Request("a", tokens_of(1, BLOCKS))
        first = engine.match(request).num_cached_tokens
        assert engine.allocate(request).ok
        engine.settle()
        engine.manager.observe_prefill([(request, first, request.num_tokens)], FAST / 1000, waited=True)
        assert model_of(engine).prefill._fit.observations == observed
        engine.manager.finish([request])
        engine.manager.sleep()
        engine.manager.wakeup()
        again = Request("b", tokens_of(1, BLOCKS))
        engine.match(again)
        assert engine.allocate(again).ok
        engine.settle()
        engine.manager.observe_prefill([(again, first, again.num_tokens)], 3.0, waited=True)
        assert model_of(engine).prefill._fit.observations == observed + 1
        engine.manager.finish([again])


def test_an_old_speed_of_the_link_decides_nothing(stored: Path) -> None:
    with engine_of(stored) as engine:
        fill_host(engine)
        learn(engine, compute=0.1, load=SLOW)
        engine.now += 31
        assert engine.run("a", tokens_of(1, BLOCKS)).num_host_blocks == BLOCKS


def test_an_old_speed_of_storage_is_measured_without_a_wait(stored: Path) -> None:
    with engine_of(stored) as engine:
        learn(engine, compute=0.1, read=SLOW)
        engine.now += 11
        match = engine.match(request := Request("a", tokens_of(1, BLOCKS)))
        assert (match.status, match.num_cached_tokens) == (MatchStatus.MATCHED, 0)
        engine.manager.finish([request])
        engine.settle()
        assert counters(engine).blocks_prefetched == BLOCKS
        assert loads(engine).probes == 1


def test_a_calibrated_speed_of_storage_is_corrected_by_a_read_that_nothing_waits_for(stored: Path) -> None:
    with engine_of(stored, priors=Priors(storage=1.0)) as engine:  # a byte a second
        request = Request("observed", tokens_of(99, 4))
        for _ in range(5):
            engine.manager.observe_prefill([(request, 0, 4 * BLOCK)], 0.4)
            model_of(engine).link.observe(LAYOUT.payload_bytes, FAST, engine.now)
        assert loads(engine).storage.bytes_per_second == 1.0
        for name in ("a", "b"):
            match = engine.match(request := Request(name, tokens_of(1, BLOCKS)))
            assert (match.status, match.num_cached_tokens) == (MatchStatus.MATCHED, 0)
            engine.manager.finish([request])
            assert loads(engine).probes == 1
        engine.settle()
        assert counters(engine).blocks_prefetched == BLOCKS
        assert model_of(engine).storage.observed_at is not None


def test_a_calibrated_link_that_was_not_seen_for_long_decides_nothing(stored: Path) -> None:
    with engine_of(stored, priors=Priors(link=1.0)) as engine:
        fill_host(engine)
        request = Request("observed", tokens_of(99, 4))
        for _ in range(3):
            engine.manager.observe_prefill([(request, 0, 4 * BLOCK)], 0.4)
        assert engine.run("a", tokens_of(1, BLOCKS)).total_matched_blocks == 0
        engine.manager.sleep()
        engine.manager.wakeup()
        engine.now += 31
        assert engine.run("b", tokens_of(1, BLOCKS)).num_host_blocks == BLOCKS


@pytest.mark.parametrize("policy", [PrefetchPolicy.WAIT_COMPLETE, PrefetchPolicy.TIMEOUT])
def test_a_late_read_is_left_to_fill_the_host(stored: Path, policy: PrefetchPolicy) -> None:
    with engine_of(stored, policy=policy) as engine:
        learn(engine, compute=0.1, read=0.01)
        engine.store.gate.clear()
        request = Request("a", tokens_of(1, BLOCKS))
        assert engine.match(request).status is MatchStatus.DEFERRED
        engine.send()
        engine.now += 0.1  # it is late by 0.02 s, and would save 0.8 s
        assert engine.match(request).status is MatchStatus.DEFERRED
        engine.now += 0.9
        match = engine.match(request)
        assert (match.status, match.num_cached_tokens) == (MatchStatus.MATCHED, 0)
        assert engine.allocate(request).ok
        engine.compute(request, BLOCKS * BLOCK)
        assert loads(engine).judged == 0
        engine.compute(request, request.num_tokens)
        engine.manager.finish([request])
        settle_reads(engine)
        assert counters(engine).blocks_prefetched == BLOCKS
        figures = loads(engine)
        (decision,) = figures.recent
        assert (figures.hedged, figures.judged, decision.hedged) == (1, 1, True)
        assert (decision.storage_blocks, decision.reused_blocks) == (BLOCKS, 0)
        assert decision.waited_seconds == pytest.approx(1.0)
        assert decision.true_seconds == pytest.approx(1.0)
        engine.manager.sleep()
        engine.manager.wakeup()
        learn(engine, compute=1.0)
        assert engine.run("b", tokens_of(1, BLOCKS)).num_host_blocks == BLOCKS


@pytest.mark.usefixtures("groups_of_two")
def test_a_match_takes_what_has_arrived_of_a_late_read(stored: Path) -> None:
    with engine_of(stored) as engine:
        learn(engine, compute=0.1, read=0.01)
        disk = Disk(engine)
        request = Request("a", tokens_of(1, BLOCKS))
        assert engine.match(request).status is MatchStatus.DEFERRED
        engine.send()
        disk.serve(2)
        assert engine.match(request).status is MatchStatus.DEFERRED
        disk.load(4)
        engine.now += 1.0
        match = engine.match(request)
        assert (match.status, match.num_device_blocks, match.num_ahead_blocks) == (MatchStatus.MATCHED, 4, 4)
        (decision,) = loads(engine).recent
        assert (decision.reused_blocks, decision.hedged) == (4, True)
        assert engine.allocate(request).ok
        settle_reads(engine)
        engine.check(request, 4)
        assert counters(engine).blocks_prefetched == BLOCKS
        engine.manager.finish([request])


def test_a_wait_is_compared_again_once_its_read_is_late(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(stored) as engine:
        learn(engine, compute=0.1, read=0.01)
        engine.store.gate.clear()
        request = Request("a", tokens_of(1, BLOCKS))
        compared: list[object] = []
        decide = model_of(engine).decide

        def counted(*given: Any) -> Any:
            compared.append(given)
            return decide(*given)

        monkeypatch.setattr(model_of(engine), "decide", counted)
        for _ in range(50):
            assert engine.match(request).status is MatchStatus.DEFERRED
        engine.send()
        assert len(compared) <= 2
        engine.now += 0.1
        assert engine.match(request).status is MatchStatus.DEFERRED
        assert len(compared) == 3
        settle_reads(engine)
        engine.manager.finish([request])


@pytest.mark.usefixtures("groups_of_two")
def test_requests_share_the_reads_of_a_path(stored: Path) -> None:
    """The second one joins one read after the other, also those that began before it came."""
    with engine_of(stored) as engine:
        disk = Disk(engine)
        first, second = Request("a", tokens_of(1, BLOCKS)), Request("b", tokens_of(1, BLOCKS))
        assert engine.match(first).status is MatchStatus.DEFERRED
        engine.send()
        disk.serve(1)
        assert engine.match(second).status is MatchStatus.DEFERRED
        for served in range(3):
            assert engine.match(second).status is MatchStatus.DEFERRED
            disk.load(2 * (served + 1))
            disk.serve(1)
        for request in (first, second):
            match = engine.match(request)
            assert match.total_matched_blocks == BLOCKS
            engine.manager.finish([request])
        assert counters(engine).blocks_requested_from_storage == BLOCKS


@pytest.mark.usefixtures("groups_of_two")
def test_a_failed_read_ends_those_behind_it(stored: Path) -> None:
    with engine_of(stored) as engine:
        disk = Disk(engine)
        request = Request("a", tokens_of(1, BLOCKS))
        assert engine.match(request).status is MatchStatus.DEFERRED
        engine.send()
        disk.serve(1)
        engine.store.fails = True
        settle_reads(engine)
        assert engine.match(request).num_storage_blocks == 2
        engine.manager.finish([request])
        engine.store.fails = False


# --- an engine with a device cache of its own -----------------------------------------------------------------


@pytest.fixture
def offloading() -> Iterator[OffloadEngine]:
    """An engine whose host tier has a path of four blocks."""
    engine = OffloadEngine()
    engine.stored("stored", PATH, [0, 1, 2, 3])
    yield engine
    engine.close()


PATH = prompt(1, 2, 3, 4)


def learn_offloading(engine: OffloadEngine, *, compute: float, load: float) -> None:
    size = OFFLOADED.block_size
    for _ in range(40):
        engine.manager.observe_prefill([(Request("observed", PATH), 0, 4 * size)], 4 * compute)
        engine.manager._choices.model.link.observe(4 * OFFLOADED.payload_bytes, 4 * load, engine.now)


@pytest.mark.parametrize(
    ("compute", "load", "choice"), [(0.1, SLOW, "nothing"), (SLOW, SLOW, "part"), (SLOW, FAST, "whole")]
)
def test_an_engine_with_its_own_device_cache_loads_what_is_worth_it(
    offloading: OffloadEngine, compute: float, load: float, choice: str
) -> None:
    learn_offloading(offloading, compute=compute, load=load)
    request = Request("a", PATH)
    offloading.manager.begin([request])
    match = offloading.manager.match(request, 0)
    blocks = match.num_tokens // OFFLOADED.block_size
    assert choice == ("whole" if blocks == 4 else "part" if blocks else "nothing")
    assert offloading.manager.load(request, ids(*range(8, 12))) == blocks
    offloading.settle()
    offloading.now += 3.0
    offloading.manager.observe_prefill([(request, blocks * OFFLOADED.block_size, len(PATH))], None)
    (decision,) = offloading.manager.get_stats().loads.recent
    assert (decision.choice, decision.host_blocks, decision.reused_blocks) == (choice, 4, blocks)
    assert decision.true_seconds == 3.0
    offloading.manager.finish([request])


def test_an_engine_with_its_own_device_cache_reads_nothing_that_is_sooner_computed(tmp_path: Path) -> None:
    layout = storage_layout(block_size=OFFLOADED.block_size, num_layers=2)
    first = OffloadEngine(layout=layout, folder=tmp_path)
    first.stored("stored", PATH, [0, 1, 2, 3])
    first.close()
    engine = OffloadEngine(layout=layout, folder=tmp_path)
    assert engine.restored == 4
    learn_offloading(engine, compute=0.1, load=FAST)
    for _ in range(3):
        engine.manager._choices.model.storage.observe(4 * layout.record_bytes, 4 * SLOW, engine.now)
    request = Request("a", PATH)
    engine.manager.begin([request])
    match = engine.manager.match(request, 0)
    assert (match.status, match.num_tokens) == (MatchStatus.MATCHED, 0)
    stats = engine.manager.get_stats()
    assert stats.counters.blocks_requested_from_storage == 0
    assert [(each.choice, each.storage_blocks) for each in stats.loads.recent] == [("nothing", 4)]
    engine.manager.finish([request])
    engine.close()


def test_loads_of_an_engine_with_its_own_device_cache_are_observed(offloading: OffloadEngine) -> None:
    for _ in range(3):
        offloading.manager.observe_prefill([(Request("observed", PATH), 0, len(PATH))], SLOW)
    model = offloading.manager._choices.model
    for number in range(3):
        assert not model.link.is_known
        request = Request(f"{number}", PATH)
        offloading.manager.begin([request])
        offloading.manager.match(request, 0)
        assert offloading.manager.load(request, ids(8, 9, 10, 11)) == 4
        offloading.settle()
        offloading.manager.finish([request])
    assert model.link.is_known


def test_chunks_that_are_not_of_the_request_are_refused(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        request = Request("a", tokens_of(1, 2))
        wrong: list[Callable[[], None]] = [
            lambda: engine.manager.observe_prefill([(request, 0, request.num_tokens + 1)], 1.0),
            lambda: engine.manager.observe_prefill([(request, 3, 2)], 1.0),
            lambda: engine.manager.observe_prefill([(request, 0, 2)], 1.0, steps=0),
        ]
        for call in wrong:
            with pytest.raises(RequestStateError, match=r"give the first token computed|at least one step"):
                call()
