"""Loads ahead at a service: blocks from its storage go on to the device while their request waits for later ones."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fdcache.manager import MatchResult, MatchStatus, Request
from fdcache.metadata import CacheLevel
from fdcache.settings.cache import PrefetchPolicy
from fdcache.tiers import storage_reads
from fdcache.tiers.statistics import Counters
from tests.integration.test_serve_late_reads import FAST, knowing
from tests.prefetch_stage import BLOCKS, Stage, prefetch_stage
from tests.service_engine import BLOCK, PROMPT, Engine, assert_nothing_is_held, layout
from tests.service_help import until


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A service with a path of ten blocks in its storage, of which each read brings two."""
    with prefetch_stage(tmp_path, monkeypatch) as made:
        monkeypatch.setattr(storage_reads, "MOST_GROUP_BYTES", 2 * layout().record_bytes)
        made.per_read = 2
        yield made


@pytest.fixture
def engine(stage: Stage) -> Engine:
    return stage.engine(PrefetchPolicy.WAIT_COMPLETE)


def match(engine: Engine, request: Request) -> MatchResult:
    return engine.manager.match_prefix([request])[0]


def counters(engine: Engine) -> Counters:
    return engine.manager.get_stats().counters


def on_device(engine: Engine) -> int:
    return len(engine.manager.find_blocks(Request("asks", PROMPT))[CacheLevel.DEVICE])


def waiting(engine: Engine) -> Request:
    request = Request("a", PROMPT)
    assert match(engine, request).status is MatchStatus.DEFERRED
    return request


def loaded(stage: Stage, engine: Engine, request: Request, blocks: int) -> None:
    """Let the disk serve one read, and load what it brings while the request waits."""
    stage.read(1)
    assert match(engine, request).status is MatchStatus.DEFERRED
    engine.carry_out(engine.manager.take_plans())
    assert counters(engine).blocks_loaded == blocks


def finish(stage: Stage, engine: Engine, request: Request) -> MatchResult:
    """Run a request that waits to its end, and compare the bytes that it reuses."""
    stage.store.gate.set()
    stage.store.answer.set()
    found = []

    def ends() -> bool:
        engine.carry_out(engine.manager.take_plans())
        found.append(match(engine, request))
        return found[-1].status is MatchStatus.MATCHED

    until(ends, "the request need not wait")
    assert engine.manager.allocate_device_blocks([(request, len(PROMPT))])[0].ok
    engine.carry_out(engine.manager.take_plans())
    engine.check(request, PROMPT, found[-1].num_cached_tokens // BLOCK)
    engine.manager.finish([request])
    return found[-1]


def test_blocks_are_on_the_device_while_a_service_reads_later_ones(stage: Stage, engine: Engine) -> None:
    request = waiting(engine)
    for blocks in (2, 4, 6, 8):
        loaded(stage, engine, request, blocks)
        assert on_device(engine) == blocks
    found = finish(stage, engine, request)
    assert (found.num_device_blocks, found.num_ahead_blocks, found.num_storage_blocks) == (8, 8, 2)
    assert (counters(engine).storage_hit_tokens, counters(engine).device_hit_tokens) == (BLOCKS * BLOCK, 0)
    assert (counters(engine).blocks_loaded, counters(engine).blocks_loaded_ahead) == (BLOCKS, 8)


@pytest.mark.parametrize("defer_timeout", [0.0, 1.0])
def test_a_request_waits_for_its_load_ahead(stage: Stage, defer_timeout: float) -> None:
    engine = stage.engine(PrefetchPolicy.WAIT_COMPLETE, defer_timeout=defer_timeout)
    request = waiting(engine)
    stage.read(4)
    assert match(engine, request).status is MatchStatus.DEFERRED
    stage.read_ends()
    assert match(engine, request).status is MatchStatus.DEFERRED, "eight blocks are on their way"
    (plan,) = engine.manager.take_plans()
    assert plan.is_ahead and plan.loads is not None and len(plan.loads) == 8
    assert match(engine, request).status is MatchStatus.DEFERRED
    engine.carry_out([plan])
    assert finish(stage, engine, request).num_cached_tokens == BLOCKS * BLOCK


def test_a_read_of_a_service_that_fails_leaves_the_prefix_that_was_loaded(
    stage: Stage, engine: Engine
) -> None:
    request = waiting(engine)
    loaded(stage, engine, request, 2)
    loaded(stage, engine, request, 4)
    stage.store.loses = {0}
    assert finish(stage, engine, request).num_cached_tokens == 4 * BLOCK


def test_a_load_that_is_refused_is_not_repeated_ahead(stage: Stage, engine: Engine) -> None:
    request = waiting(engine)
    stage.read(1)
    assert match(engine, request).status is MatchStatus.DEFERRED
    (plan,) = engine.manager.take_plans()
    engine.ranks[0].refuse(plan, "the test refuses it")
    engine.manager.apply(engine.ranks[0].poll())
    stage.read(1)
    assert match(engine, request).status is MatchStatus.DEFERRED
    assert engine.manager.take_plans() == []
    found = finish(stage, engine, request)
    assert (found.num_ahead_blocks, found.num_storage_blocks) == (0, BLOCKS)


@pytest.mark.parametrize("is_sent", [False, True])
def test_an_abort_leaves_its_loads_as_cached_blocks(stage: Stage, engine: Engine, is_sent: bool) -> None:
    request = waiting(engine)
    loaded(stage, engine, request, 2)
    stage.read(1)
    assert match(engine, request).status is MatchStatus.DEFERRED
    plans = engine.manager.take_plans() if is_sent else []
    engine.manager.finish([request])
    engine.carry_out([*plans, *engine.manager.take_plans()])
    assert on_device(engine) == 4
    usage = engine.manager.get_stats().device
    assert (usage.pins, usage.holds, usage.leases, usage.writing) == (0, 0, 0, 0)
    assert engine.manager.shared_blocks_in_use == 0
    stage.read_ends()


@pytest.mark.parametrize("tier", ["host", "device"])
def test_a_reset_in_the_middle_leaves_right_bytes(stage: Stage, engine: Engine, tier: str) -> None:
    request = waiting(engine)
    loaded(stage, engine, request, 2)
    stage.read(1)
    assert match(engine, request).status is MatchStatus.DEFERRED
    if tier == "device":
        engine.manager.reset_cache()
    else:
        stage.service.ask("reset", tier=tier)
    finish(stage, engine, request)
    assert engine.manager.shared_blocks_in_use == 0


def test_a_lost_rank_takes_back_what_was_loaded_ahead(stage: Stage, engine: Engine) -> None:
    request = waiting(engine)
    stage.read(1)
    assert match(engine, request).status is MatchStatus.DEFERRED
    engine.manager.take_plans()
    assert engine.replace_worker(0) == []
    assert on_device(engine) == 0
    assert finish(stage, engine, request).num_cached_tokens == BLOCKS * BLOCK


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_lost_service_costs_no_byte_and_holds_nothing(stage: Stage, engine: Engine, is_sent: bool) -> None:
    request = waiting(engine)
    loaded(stage, engine, request, 2)
    stage.read(1)
    assert match(engine, request).status is MatchStatus.DEFERRED
    plans = engine.manager.take_plans() if is_sent else []
    sessions = engine.manager._host.sessions  # type: ignore[union-attr]
    sessions.lose(sessions.session, "the test")
    engine.carry_out([*plans, *engine.manager.take_plans()])
    found = finish(stage, engine, request)
    assert found.num_cached_tokens >= 2 * BLOCK
    assert engine.manager.shared_blocks_in_use == 0


DIES = """
import os, signal, sys
from fdcache.manager import Request
from fdcache.settings.cache import StorageTierSettings
from tests.service_engine import PROMPT, Engine

engine = Engine(sys.argv[1], fetches=StorageTierSettings(prefetch_policy="wait_complete"))
request = Request("a", PROMPT)
while not engine.manager.get_stats().counters.blocks_loaded_ahead:
    engine.manager.match_prefix([request])
for plan in engine.manager.take_plans() if sys.argv[2] == "True" else []:
    engine.ranks[0].submit_swap_tasks(plan)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("is_sent", [False, True])
def test_an_engine_killed_while_it_loads_leaves_nothing(stage: Stage, is_sent: bool) -> None:
    command = [sys.executable, "-c", DIES, stage.service.address, str(is_sent)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2]) as process:
        until(lambda: stage.figures()["reading_blocks"] == BLOCKS, "the reads have begun")
        stage.read(1)
        assert process.wait(60) == -signal.SIGKILL
    stage.read_ends()
    assert_nothing_is_held(stage.service)
    engine = stage.engine(PrefetchPolicy.WAIT_COMPLETE)
    request = Request("a", PROMPT)
    assert finish(stage, engine, request).num_cached_tokens == BLOCKS * BLOCK


def test_a_late_read_is_left_with_the_blocks_that_were_loaded(stage: Stage) -> None:
    engine = knowing(stage, compute=0.01, read=FAST)
    request = waiting(engine)
    loaded(stage, engine, request, 2)
    until(lambda: match(engine, request).status is MatchStatus.MATCHED, "computing would be sooner")
    assert request.num_cached_tokens == 2 * BLOCK
    assert engine.manager.get_stats().loads.hedged == 1
    assert engine.manager.allocate_device_blocks([(request, len(PROMPT))])[0].ok
    engine.check(request, PROMPT, 2)
    engine.manager.finish([request])
    stage.read_ends()


def test_an_engine_that_submits_with_steps_alone_loads_nothing_ahead(stage: Stage) -> None:
    engine = stage.engine(PrefetchPolicy.WAIT_COMPLETE, loads_ahead=False)
    request = waiting(engine)
    stage.read(2)
    assert match(engine, request).status is MatchStatus.DEFERRED
    assert engine.manager.take_plans() == []
    found = finish(stage, engine, request)
    assert (found.num_device_blocks, found.num_storage_blocks) == (0, BLOCKS)
