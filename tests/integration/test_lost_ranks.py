"""A rank is lost between the calls of a step: copies that were planned and not sent are not carried out.

Its device memory is gone. Copied to the host tier of a service, what a new process has there would be found by all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fdcache.controller.cache_controller import CacheController
from fdcache.manager import LoadStatus, Request
from fdcache.settings.cache import CacheSettings, CopySettings, WritePolicy
from tests.offload_engine import BLOCK, OffloadEngine, begun, ids, prompt
from tests.service_engine import PROMPT, Engine, assert_nothing_is_held, ready_blocks
from tests.service_help import TIMEOUT, LocalService, local_service, until
from tests.swaps import PATIENCE, uniform_layout

LAYOUT = uniform_layout(block_size=BLOCK, num_layers=2, tp_size=2)
POLICIES = [WritePolicy.WRITE_BACK, WritePolicy.WRITE_THROUGH]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    with local_service(tmp_path) as running:
        yield running


def end(engine: OffloadEngine | Engine, service: LocalService) -> None:
    """End an engine, which may leave nothing behind."""
    engine.close()
    assert_nothing_is_held(service)


def replace_worker(engine: OffloadEngine, rank: int) -> None:
    """Begin another process for a rank: its device memory has other bytes."""
    engine.ranks[rank].shutdown()
    transfer = CopySettings(drain_timeout=PATIENCE, layer_timeout=PATIENCE)
    fresh = CacheController(transfer, engine.layout, rank=rank, device=engine.devices[rank])
    engine.ranks[rank] = fresh
    engine.tensors[rank] = fresh.initialize_kv_cache(16)
    fresh.initialize_host_cache(engine.manager.host_cache)


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_given_away_in_a_step_that_loses_a_rank_are_not_stored(
    service: LocalService, policy: WritePolicy
) -> None:
    engine = OffloadEngine(layout=LAYOUT, server=service.address, rpc_timeout=TIMEOUT, policy=policy)
    manager = engine.manager
    until(lambda: manager._host.index.room >= 3, "slots are granted")
    request = begun(engine, "a", prompt(1, 2, 3))
    engine.compute(request, [0, 1, 2])
    manager.offer(request, 3 * BLOCK, ids(0, 1, 2))
    manager.finish([request])
    manager.evicted(ids(0, 1, 2))
    assert manager.worker_lost(1) == []
    replace_worker(engine, 1)
    assert engine.settle() == []
    assert manager.get_stats().counters.blocks_evicted_to_host == 0
    assert ready_blocks(service) == 0
    stored = engine.stored("b", prompt(1, 2, 3), [4, 5, 6])
    manager.evicted(ids(4, 5, 6))
    engine.settle()
    until(lambda: ready_blocks(service) == 3, "they are stored once they are computed again")
    again = begun(engine, "c", stored.tokens.tolist())
    assert manager.match(again, 0).num_tokens == 3 * BLOCK
    assert manager.load(again, ids(7, 8, 9)) == 3
    engine.settle()
    assert engine.holds(again, [7, 8, 9])
    manager.finish([again])
    end(engine, service)


def test_a_load_planned_in_a_step_that_loses_a_rank_ends_at_once(service: LocalService) -> None:
    engine = OffloadEngine(layout=LAYOUT, server=service.address, rpc_timeout=TIMEOUT)
    manager = engine.manager
    until(lambda: manager._host.index.room >= 3, "slots are granted")
    engine.stored("a", prompt(1, 2, 3), [0, 1, 2])
    until(lambda: ready_blocks(service) == 3, "they are stored")
    request = begun(engine, "b", prompt(1, 2, 3))
    manager.match(request, 0)
    assert manager.load(request, ids(5, 6, 7)) == 3
    (outcome,) = manager.worker_lost(1)
    assert (outcome.status, outcome.recompute_from, outcome.unplanned) == (LoadStatus.FAILED, 0, ())
    assert all(plan.loads is None for plan in manager.take_plans())
    replace_worker(engine, 1)
    assert manager.match(request, 0).num_tokens == 3 * BLOCK
    assert manager.load(request, ids(8, 9, 10)) == 3
    (outcome,) = engine.settle()
    assert outcome.status is LoadStatus.CONFIRMED
    assert engine.holds(request, [8, 9, 10])
    manager.finish([request])
    end(engine, service)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_manager_stores_nothing_of_the_lost_rank_either(
    service: LocalService, policy: WritePolicy
) -> None:
    settings = CacheSettings(
        server=service.address, device_blocks=12, write_policy=policy, rpc_timeout=TIMEOUT
    )
    engine = Engine(service.address, device_blocks=12, settings=settings)
    manager = engine.manager
    first = Request("first", PROMPT)
    manager.match_prefix([first])
    manager.allocate_device_blocks([(first, len(PROMPT))])
    engine.carry_out(manager.take_plans())
    engine.compute(first, PROMPT, 0)
    manager.commit([(first, len(PROMPT))])
    manager.finish([first])
    other = Request("other", [500 + token for token in PROMPT])
    manager.match_prefix([other])
    assert manager.allocate_device_blocks([(other, len(PROMPT))])[0].ok
    assert engine.replace_worker(0) == []
    manager.finish([other])
    while plans := manager.take_plans():
        engine.carry_out(plans)
    assert manager.get_stats().counters.blocks_evicted_to_host == 0
    assert ready_blocks(service) == 0
    found, _ = engine.serve(PROMPT)
    assert found == 0
    manager.check_integrity()
    end(engine, service)


def test_a_load_of_a_cache_manager_fails_with_the_rank(service: LocalService) -> None:
    engine = Engine(service.address)
    manager = engine.manager
    engine.serve(PROMPT)
    until(lambda: ready_blocks(service) == 10, "they are stored")
    manager._reset_device()
    request = Request("again", PROMPT)
    manager.match_prefix([request])
    assert manager.allocate_device_blocks([(request, len(PROMPT))])[0].ok
    (outcome,) = engine.replace_worker(0)
    assert (outcome.status, outcome.recompute_from) == (LoadStatus.FAILED, 0)
    assert all(plan.loads is None for plan in manager.take_plans())
    manager.finish([request])
    assert engine.serve(PROMPT)[0] == 10
    manager.check_integrity()
    end(engine, service)
