"""Reads of a service for its clients: waiting, sharing and cancelling."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fdcache.errors import ConfigurationError
from fdcache.manager import CacheManager, MatchResult, MatchStatus, Request
from fdcache.settings.cache import CacheSettings, PrefetchPolicy, StorageTierSettings
from tests.prefetch_stage import BLOCKS, OTHER, Stage, prefetch_stage
from tests.service_engine import BLOCK, PROMPT, Engine, layout, round_trips
from tests.service_help import until


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    with prefetch_stage(tmp_path, monkeypatch) as made:
        yield made


def match(engine: Engine, request: Request) -> MatchResult:
    return engine.manager.match_prefix([request])[0]


def finish(engine: Engine, request: Request, found: MatchResult) -> None:
    """Let a matched request load what was found, check its bytes, and end."""
    assert engine.manager.allocate_device_blocks([(request, len(PROMPT))])[0].ok
    engine.carry_out(engine.manager.take_plans())
    engine.check(request, PROMPT, found.num_cached_tokens // BLOCK)
    engine.manager.finish([request])


def test_a_request_waits_until_all_is_read(stage: Stage) -> None:
    engine = stage.engine(PrefetchPolicy.WAIT_COMPLETE)
    request = Request("r", PROMPT)
    assert match(engine, request).status is MatchStatus.DEFERRED
    stage.read_begins()
    assert match(engine, request).status is MatchStatus.DEFERRED
    stage.read_ends()
    found = match(engine, request)
    assert (found.status, found.num_storage_blocks, found.num_host_blocks) == (
        MatchStatus.MATCHED,
        BLOCKS,
        0,
    )
    finish(engine, request, found)
    assert engine.manager.get_stats().counters.storage_hit_tokens == BLOCKS * BLOCK
    assert stage.figures()["totals"]["hit_blocks"] == BLOCKS
    assert stage.store.reads == [BLOCKS]


def test_a_path_on_the_host_is_neither_prefetched_nor_asked_for(stage: Stage) -> None:
    first, second = (stage.engine(PrefetchPolicy.WAIT_COMPLETE) for _ in range(2))
    read = Request("read", PROMPT)
    assert match(first, read).status is MatchStatus.DEFERRED
    stage.read_ends()
    finish(first, read, match(first, read))
    before = round_trips(stage.service)
    known = Request("known", PROMPT)
    second.manager.begin([known])
    found = match(second, known)
    assert (found.num_host_blocks, found.num_storage_blocks) == (BLOCKS, 0)
    assert round_trips(stage.service) == before
    assert "prefetch" not in stage.service.service.totals.latencies.kinds
    longer = Request("longer", [*PROMPT[: BLOCKS * BLOCK], *range(500, 500 + BLOCK + 1)])
    assert match(second, longer).num_host_blocks == BLOCKS
    assert round_trips(stage.service) == before + 1, "storage may have the rest"
    finish(second, known, found)
    second.manager.finish([longer])


def test_a_request_that_loads_nothing_neither_reads_nor_waits(stage: Stage) -> None:
    engine = stage.engine(PrefetchPolicy.WAIT_COMPLETE)
    request = Request("late before", PROMPT, device_only=True)
    engine.manager.begin([request])
    found = match(engine, request)
    assert (found.status, found.total_matched_blocks) == (MatchStatus.MATCHED, 0)
    other = Request("other", PROMPT[: 4 * BLOCK + 1])
    assert match(engine, other).status is MatchStatus.DEFERRED
    stage.read_begins()
    assert stage.store.reads == [4], "nothing was read for the first"
    engine.manager.finish([request, other])


def test_with_best_effort_a_match_takes_what_has_come(stage: Stage) -> None:
    engine = stage.engine(PrefetchPolicy.BEST_EFFORT)
    early, late = Request("early", PROMPT), Request("late", PROMPT)
    assert match(engine, Request("none", PROMPT)).num_storage_blocks == 0
    assert stage.store.reads == []
    engine.manager.begin([early, late])
    stage.read_begins()
    assert match(engine, early).num_cached_tokens == 0
    stage.read_ends()
    found = match(engine, late)
    assert found.num_storage_blocks == BLOCKS
    finish(engine, late, found)
    assert stage.store.reads == [BLOCKS], "both requests wanted the same read"
    engine.manager.finish([early])


def test_with_timeout_a_request_waits_for_its_budget(stage: Stage) -> None:
    engine = stage.engine(PrefetchPolicy.TIMEOUT, timeout=0.05)
    request = Request("r", PROMPT)
    engine.manager.begin([request])
    stage.read_comes_late()
    until(lambda: match(engine, request).status is MatchStatus.MATCHED, "the budget is used up")
    assert request.num_cached_tokens == 0
    assert stage.figures()["totals"]["timed_out_reads"] == 1
    stage.read_ends()
    other = Request("other", PROMPT)
    found = match(engine, other)
    assert found.num_host_blocks == BLOCKS, "what was begun has come all the same"
    engine.manager.finish([request])
    finish(engine, other, found)


def test_two_clients_share_one_read(stage: Stage) -> None:
    engines = [stage.engine(PrefetchPolicy.WAIT_COMPLETE) for _ in range(2)]
    requests = [Request(f"r{index}", PROMPT) for index in range(2)]
    for engine, request in zip(engines, requests, strict=True):
        assert match(engine, request).status is MatchStatus.DEFERRED
    assert stage.figures()["totals"]["shared_reads"] == 1
    stage.read_ends()
    for engine, request in zip(engines, requests, strict=True):
        found = match(engine, request)
        assert found.num_storage_blocks == BLOCKS
        finish(engine, request, found)
    assert stage.store.reads == [BLOCKS]


def test_the_read_of_an_ended_request_is_cancelled(stage: Stage) -> None:
    engine = stage.engine(PrefetchPolicy.WAIT_COMPLETE)
    first, second = Request("first", PROMPT[: 4 * BLOCK + 1]), Request("second", PROMPT)
    assert match(engine, first).status is MatchStatus.DEFERRED
    stage.read_begins()
    engine.manager.begin([second])
    until(lambda: stage.figures()["totals"]["shared_reads"] == 1, "the second waits for the first's read")
    engine.manager.finish([first, second])
    until(
        lambda: not next(iter(stage.service.service.clients.values())).fetches._fetches,
        "the service has forgotten both",
    )
    (cancel,) = stage.store.cancels
    assert cancel is not None
    until(lambda: cancel.is_set, "the read is taken back")
    stage.read_ends()
    third = Request("third", PROMPT)
    until(lambda: match(engine, third).status is MatchStatus.MATCHED, "everything is read")
    assert stage.store.reads == [4, BLOCKS]
    engine.manager.finish([third])


def test_a_cancelled_read_that_has_not_begun_never_begins(stage: Stage) -> None:
    engine = stage.engine(PrefetchPolicy.WAIT_COMPLETE)
    first, queued = Request("first", PROMPT[: 4 * BLOCK + 1]), Request("queued", OTHER)
    assert match(engine, first).status is MatchStatus.DEFERRED
    stage.read_begins()
    engine.manager.begin([queued])
    until(lambda: stage.figures()["reading_blocks"] == 4 + BLOCKS, "its read is queued behind the first")
    engine.manager.finish([queued])
    until(lambda: stage.figures()["reading_blocks"] == 4, "it is taken back")
    stage.read_ends()
    assert match(engine, first).num_storage_blocks == 4
    engine.manager.finish([first])
    assert stage.store.reads == [4]


def test_the_first_failure_ends_the_run_and_the_rest_is_computed(stage: Stage) -> None:
    stage.store.loses = {6}
    stage.store.gate.set()
    engine = stage.engine(PrefetchPolicy.WAIT_COMPLETE)
    request = Request("r", PROMPT)
    until(lambda: match(engine, request).status is MatchStatus.MATCHED, "the read has ended")
    assert request.num_cached_tokens == 6 * BLOCK
    found = MatchResult("r", MatchStatus.MATCHED, num_cached_tokens=6 * BLOCK)
    finish(engine, request, found)


def test_a_reuse_grid_cuts_a_run_whose_tail_came_from_storage(stage: Stage) -> None:
    stage.store.gate.set()
    first = stage.engine(PrefetchPolicy.WAIT_COMPLETE)
    short = Request("short", PROMPT[: 3 * BLOCK + 1])
    until(lambda: match(first, short).status is MatchStatus.MATCHED, "three blocks are read")
    first.manager.finish([short])
    engine = stage.engine(PrefetchPolicy.WAIT_COMPLETE, reuse_grid=4 * BLOCK)
    request = Request("r", PROMPT)
    assert match(engine, request).status is MatchStatus.DEFERRED
    engine.carry_out(engine.manager.take_plans())
    stage.read_ends()
    found = match(engine, request)
    assert (found.num_device_blocks, found.num_storage_blocks) == (3, 5), "of ten blocks eight are reused"
    assert found.num_ahead_blocks == 3
    finish(engine, request, found)
    counters = engine.manager.get_stats().counters
    assert (counters.host_hit_tokens, counters.storage_hit_tokens) == (3 * BLOCK, 5 * BLOCK)


def test_a_cut_run_counts_storage_hits_anywhere_in_it(stage: Stage) -> None:
    stage.store.gate.set()
    stage.store.loses = {6}
    engine = stage.engine(PrefetchPolicy.BEST_EFFORT, reuse_grid=4 * BLOCK)
    request = Request("r", PROMPT)
    engine.manager.begin([request])
    stage.read_begins()
    stage.read_ends()
    other = stage.engine(PrefetchPolicy.BEST_EFFORT)
    assert other.serve(PROMPT)[0] == 6, "it computes the blocks behind those that were read"
    until(
        lambda: stage.service.ask("stats")["tiers"]["host"]["ready"] == BLOCKS, "and the service has them all"
    )
    found = match(engine, request)
    assert (found.num_storage_blocks, found.num_host_blocks) == (6, 2)
    finish(engine, request, found)


def test_a_client_that_disconnects_leaves_no_read_and_no_pin(stage: Stage) -> None:
    leaving, staying = (stage.engine(PrefetchPolicy.WAIT_COMPLETE) for _ in range(2))
    assert match(leaving, Request("gone", PROMPT)).status is MatchStatus.DEFERRED
    stage.read_comes_late()
    leaving.close()
    stage.engines.remove(leaving)
    until(lambda: len(stage.service.ask("clients")) == 1, "it has said goodbye")
    stage.read_ends()
    assert stage.service.ask("integrity") == [], "every lease has an owner that is there"
    request = Request("r", PROMPT)
    found = match(staying, request)
    assert found.num_host_blocks == BLOCKS
    finish(staying, request, found)


def test_an_engine_cannot_have_storage_of_its_own(stage: Stage, tmp_path: Path) -> None:
    settings = CacheSettings(server=stage.service.address)
    storage = StorageTierSettings(connector="local", directory=tmp_path)
    with pytest.raises(
        ConfigurationError, match="FDCACHE_STORAGE=local: with FDCACHE_SERVER the storage belongs"
    ):
        CacheManager(settings, layout(), storage=storage)


def test_a_reset_by_an_engine_empties_the_storage_too(stage: Stage) -> None:
    engine = stage.engine(PrefetchPolicy.WAIT_COMPLETE)
    engine.manager.reset_cache()
    request = Request("r", PROMPT)
    assert match(engine, request).status is MatchStatus.MATCHED
    assert request.num_cached_tokens == 0
    assert stage.figures()["blocks"] == 0
    engine.manager.finish([request])
