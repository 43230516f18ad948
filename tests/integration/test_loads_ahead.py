"""Loads ahead: blocks from storage go on to the device while their request waits for later ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fdcache.manager import MatchStatus, Request
from fdcache.metadata import CacheLevel
from fdcache.settings.cache import WritePolicy
from tests.storage_engine import BLOCK, Disk, Engine, counters, store_a_path, tokens_of

BLOCKS = 8


@pytest.fixture
def engine(tmp_path: Path, groups_of_two: None) -> Iterator[Engine]:
    """An engine with a path of eight blocks in storage, of which each read brings two."""
    store_a_path(tmp_path)
    engine = Engine(tmp_path)
    yield engine
    engine.close()


def waiting(engine: Engine) -> tuple[Disk, Request]:
    """Return a request that waits for storage, and the disk that it waits for."""
    disk, request = Disk(engine), Request("a", tokens_of(1, BLOCKS))
    assert engine.match(request).status is MatchStatus.DEFERRED
    engine.send()
    return disk, request


def on_device(engine: Engine) -> int:
    request = Request("asks", tokens_of(1, BLOCKS))
    return len(engine.manager.find_blocks(request)[CacheLevel.DEVICE])


def serve(engine: Engine, disk: Disk, request: Request, loaded: int) -> None:
    """Read the next two blocks and load them, while the request waits."""
    disk.serve(1)
    assert engine.match(request).status is MatchStatus.DEFERRED
    disk.load(loaded)


def finish(engine: Engine, request: Request) -> int:
    """Run a request that waits to its end; return how many blocks it reused, after a look at their bytes."""
    engine.store.gate.set()
    while (match := engine.match(request)).status is MatchStatus.DEFERRED:
        engine.send()
        engine.manager.apply(engine.controller.wait_reports(30))
    assert engine.allocate(request).ok
    engine.settle()
    engine.check(request, match.total_matched_blocks)
    engine.compute(request, request.num_tokens)
    engine.manager.finish([request])
    return match.total_matched_blocks


def test_blocks_are_on_the_device_while_later_ones_are_read(engine: Engine) -> None:
    disk, request = waiting(engine)
    for loaded in (2, 4, 6):
        serve(engine, disk, request, loaded)
        assert on_device(engine) == loaded
    disk.serve(1)
    match = engine.match(request)
    assert (match.num_device_blocks, match.num_ahead_blocks, match.num_storage_blocks) == (6, 6, 2)
    assert match.num_ahead_from_storage == 6
    assert engine.allocate(request).ok
    assert counters(engine).storage_hit_tokens == BLOCKS * BLOCK
    assert counters(engine).device_hit_tokens == 0
    engine.settle()
    engine.check(request, BLOCKS)
    assert (counters(engine).blocks_loaded, counters(engine).blocks_loaded_ahead) == (8, 6)
    engine.manager.finish([request])


def test_no_step_waits_for_a_load_ahead(engine: Engine) -> None:
    disk, request = waiting(engine)
    disk.serve(1)
    assert engine.match(request).status is MatchStatus.DEFERRED
    (plan,) = engine.manager.take_plans()
    assert plan.is_ahead and plan.loads is not None and len(plan.loads) == 2
    counter = engine.controller.submit_swap_tasks(plan)
    assert counter.is_all_done()
    engine.plans.append(plan)
    assert finish(engine, request) == BLOCKS


def test_a_read_that_fails_leaves_the_prefix_that_was_loaded(engine: Engine) -> None:
    disk, request = waiting(engine)
    serve(engine, disk, request, 2)
    engine.store.fails = True
    assert finish(engine, request) == 2
    engine.store.fails = False


def test_an_aborted_request_leaves_its_loads_as_cached_blocks(engine: Engine) -> None:
    disk, request = waiting(engine)
    serve(engine, disk, request, 2)
    disk.serve(1)
    assert engine.match(request).status is MatchStatus.DEFERRED
    engine.manager.finish([request])
    engine.store.gate.set()
    engine.settle()
    assert on_device(engine) == 4
    usage = engine.manager.get_stats().device
    assert (usage.pins, usage.holds, usage.leases, usage.writing) == (0, 0, 0, 0)
    assert engine.run("again", tokens_of(1, BLOCKS)).num_ahead_blocks <= 4


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_reset_takes_back_what_was_loaded_ahead(engine: Engine, is_sent: bool) -> None:
    disk, request = waiting(engine)
    serve(engine, disk, request, 2)
    disk.serve(1)
    assert engine.match(request).status is MatchStatus.DEFERRED
    if is_sent:
        engine.send()
    engine.manager.reset_cache()
    engine.store.gate.set()
    engine.settle()
    assert on_device(engine) == 0
    assert finish(engine, request) == 0


def test_a_lost_rank_takes_back_what_was_loaded_ahead(engine: Engine) -> None:
    disk, request = waiting(engine)
    disk.serve(1)
    assert engine.match(request).status is MatchStatus.DEFERRED
    engine.manager.take_plans()
    assert engine.manager.worker_lost(0) == []
    assert on_device(engine) == 0
    engine.store.gate.set()
    engine.settle()
    assert finish(engine, request) == 0


def test_a_load_that_fails_is_not_repeated_ahead(engine: Engine) -> None:
    disk, request = waiting(engine)
    disk.serve(1)
    assert engine.match(request).status is MatchStatus.DEFERRED
    (plan,) = engine.manager.take_plans()
    engine.controller.refuse(plan, "the test refuses it")
    engine.manager.apply(engine.controller.poll())
    disk.serve(1)
    assert engine.match(request).status is MatchStatus.DEFERRED
    assert counters(engine).blocks_loaded_ahead == 2
    assert finish(engine, request) == BLOCKS


def test_a_device_without_room_for_the_request_loads_nothing_ahead(engine: Engine) -> None:
    holder = Request("holder", tokens_of(2, 21))
    engine.match(holder)
    assert engine.allocate(holder).ok
    disk, request = waiting(engine)
    disk.serve(1)
    assert engine.match(request).status is MatchStatus.DEFERRED
    assert counters(engine).blocks_loaded_ahead == 0
    engine.manager.finish([holder])
    assert engine.match(request).status is MatchStatus.DEFERRED
    assert counters(engine).blocks_loaded_ahead == 2
    assert finish(engine, request) == BLOCKS


def test_what_a_load_ahead_evicts_is_copied_to_the_host_first(tmp_path: Path, groups_of_two: None) -> None:
    store_a_path(tmp_path)
    engine = Engine(tmp_path, write_policy=WritePolicy.WRITE_BACK, clean_reserve=0)
    evicted = Request("evicted", tokens_of(2, 28))
    engine.match(evicted)
    assert engine.allocate(evicted).ok
    engine.compute(evicted, evicted.num_tokens)
    engine.manager.finish([evicted])
    disk, request = waiting(engine)
    for loaded in (2, 4):  # the first two take free blocks
        serve(engine, disk, request, loaded)
    assert counters(engine).blocks_evicted_to_host > 0
    assert finish(engine, request) == BLOCKS
    assert engine.run("again", tokens_of(2, 28)).num_host_blocks > 0
    engine.close()
