"""Load or recompute with a service's storage: reads that are not worth a wait, and reads that come late."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fdcache.manager import MatchStatus, Request
from fdcache.settings.cache import PrefetchPolicy
from fdcache.tiers.statistics import LoadDecision
from tests.integration.test_serve_prefetch import finish, match
from tests.prefetch_stage import BLOCKS, Stage, prefetch_stage
from tests.service_engine import BLOCK, PROMPT, Engine
from tests.service_help import until

FAST = 1e-6
"""Seconds of one block."""


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    with prefetch_stage(tmp_path, monkeypatch) as made:
        yield made


def knowing(stage: Stage, *, compute: float, read: float) -> Engine:
    """Return an engine that has observed these seconds for each block."""
    engine = stage.engine(PrefetchPolicy.WAIT_COMPLETE)
    observed, model = Request("observed", PROMPT), engine.manager._choices.model
    for _ in range(40):
        engine.manager.observe_prefill([(observed, 0, 4 * BLOCK)], 4 * compute)
        model.link.observe(4 * engine.layout.payload_bytes, 4 * FAST, time.monotonic())
        model.observe_read(4, 4 * read, time.monotonic())
    return engine


def decision_of(engine: Engine) -> LoadDecision:
    (found,) = engine.manager.get_stats().loads.recent
    return found


def test_a_request_does_not_wait_for_a_read_that_takes_longer_than_computing(stage: Stage) -> None:
    engine = knowing(stage, compute=0.01, read=1000.0)
    request = Request("r", PROMPT)
    until(lambda: match(engine, request).status is MatchStatus.MATCHED, "the service has answered")
    assert request.num_cached_tokens == 0
    decision = decision_of(engine)
    assert (decision.choice, decision.storage_blocks, decision.hedged) == ("nothing", BLOCKS, False)
    assert decision.expected_seconds_whole > 1000.0
    stage.read_ends()
    assert stage.figures()["totals"]["hit_blocks"] == 0
    engine.manager.finish([request])


def test_a_late_read_is_left_and_fills_the_host_tier(stage: Stage) -> None:
    engine = knowing(stage, compute=0.01, read=FAST)
    request = Request("r", PROMPT)
    assert match(engine, request).status is MatchStatus.DEFERRED
    stage.read_comes_late()
    until(lambda: match(engine, request).status is MatchStatus.MATCHED, "computing would be sooner")
    assert request.num_cached_tokens == 0
    decision = decision_of(engine)
    assert (decision.choice, decision.storage_blocks, decision.hedged) == ("whole", BLOCKS, True)
    assert engine.manager.get_stats().loads.hedged == 1
    assert engine.manager.allocate_device_blocks([(request, len(PROMPT))])[0].ok
    engine.manager.finish([request])
    stage.read_ends()
    later = Request("later", PROMPT)
    until(lambda: match(engine, later).status is MatchStatus.MATCHED, "the blocks are on the host")
    assert later.num_cached_tokens == BLOCKS * BLOCK
    assert stage.store.reads == [BLOCKS], "nothing was read again"
    engine.manager.finish([later])


def test_a_disk_that_is_fast_again_is_used_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its speed is learnt from reads that no request waits for: one each ten seconds, here one for each request."""
    monkeypatch.setattr("fdcache.manager.load_choices._PROBE_AFTER", -1.0)
    engine = knowing(stage, compute=1.0, read=1000.0)
    stage.store.gate.set()
    names = map(str, itertools.count())

    def is_waited_for() -> bool:
        stage.service.ask("reset", tier="host")
        request = Request(next(names), PROMPT)
        while match(engine, request).status is not MatchStatus.MATCHED:
            time.sleep(0.01)
        engine.manager.finish([request])
        stage.read_ends()
        return engine.manager.get_stats().loads.recent[-1].choice == "whole"

    until(is_waited_for, "a read is worth it")
    assert engine.manager.get_stats().loads.probes >= 3


def test_a_read_that_was_waited_for_teaches_the_speed_of_storage(stage: Stage) -> None:
    engine = knowing(stage, compute=10.0, read=FAST)
    speed = engine.manager._choices.model.storage._fit
    before = speed.observations
    request = Request("r", PROMPT)
    assert match(engine, request).status is MatchStatus.DEFERRED
    stage.read_ends()
    found = match(engine, request)
    assert (found.status, found.num_storage_blocks) == (MatchStatus.MATCHED, BLOCKS)
    assert speed.observations == before + 1
    finish(engine, request, found)
