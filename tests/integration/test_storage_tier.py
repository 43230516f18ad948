"""Manager and controller with storage: waiting for reads, sharing them, and failures."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fdcache.controller.cache_controller import CacheController
from fdcache.errors import CacheNotReadyError, ConfigurationError, PlanError
from fdcache.hashing import hash_blocks, root_hash
from fdcache.manager import CacheManager, MatchStatus, Request
from fdcache.metadata import CacheLevel, CacheStatus, SwapPurpose
from fdcache.settings.cache import (
    CacheSettings,
    CopySettings,
    PrefetchPolicy,
    StorageTierSettings,
    WritePolicy,
)
from fdcache.storage.connector import StorageState
from fdcache.tiers.events import BlocksCleared, BlockStored
from fdcache.tiers.host import LocalHostTier
from fdcache.tiers.statistics import Direction
from tests.service_help import until
from tests.storage_engine import BLOCK, HOST_BLOCKS, LAYOUT, Engine, counters, store_a_path, tokens_of
from tests.storage_help import MIB, open_store


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A folder with a path of 8 blocks that begins with token 1."""
    store_a_path(tmp_path)
    return tmp_path


@pytest.fixture
def engine(request: pytest.FixtureRequest, stored: Path) -> Iterator[Engine]:
    engine = Engine(stored, **getattr(request, "param", {}))
    assert engine.restored == 8
    yield engine
    engine.close()


def test_a_cold_process_gets_its_blocks_from_storage_with_their_bytes(engine: Engine) -> None:
    match = engine.run("again", tokens_of(1, 8))
    assert (match.num_device_blocks, match.num_host_blocks, match.num_storage_blocks) == (0, 0, 8)
    assert counters(engine).storage_hit_tokens == 8 * BLOCK
    match = engine.run("warm", tokens_of(1, 8))
    assert (match.num_device_blocks, match.num_storage_blocks) == (8, 0)


def test_statistics_of_an_engine_with_storage_of_its_own(engine: Engine) -> None:
    engine.store.gate.clear()
    request = Request("r", tokens_of(1, 8))
    engine.manager.begin([request])
    engine.send()
    stats = engine.manager.get_stats()
    assert (stats.reading_blocks, stats.storing_blocks, stats.queued_stores) == (8, 0, 0)
    engine.store.gate.set()
    engine.settle()
    engine.manager.finish([request])
    engine.run("other", tokens_of(2, 3))
    stats = engine.manager.get_stats()
    assert (stats.reading_blocks, stats.storing_blocks) == (0, 0)
    read, written = (
        stats.traffic.copied[way] for way in (Direction.STORAGE_TO_HOST, Direction.HOST_TO_STORAGE)
    )
    assert (read.bytes, written.bytes) == (8 * LAYOUT.record_bytes, 3 * LAYOUT.record_bytes)
    assert read.durations.total > 0
    assert written.durations.total > 0
    rank = engine.controller.storage_stats()
    assert rank is not None
    assert (rank.state, rank.error) == (StorageState.READY, None)
    assert (rank.hits, rank.stored, rank.blocks_found_on_start) == (8, 3, 8)
    assert (rank.read_bytes, rank.written_bytes) == (read.bytes, written.bytes)
    assert (rank.misses, rank.corrupt, rank.errors, rank.timeouts, rank.peer_gone) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("engine", [{"event_buffer": 100}], indirect=True)
def test_events_list_stored_blocks(engine: Engine) -> None:
    path = engine.manager.take_events()
    assert [(type(event), event.tier) for event in path] == [(BlockStored, CacheLevel.STORAGE)] * 8
    engine.run("other", tokens_of(2, 1))
    block = hash_blocks(tokens_of(2, 1), BLOCK, parent=root_hash(LAYOUT.fingerprint))[0].tobytes()
    assert engine.manager.take_events() == [
        BlockStored(tier, block, None, BLOCK)
        for tier in (CacheLevel.DEVICE, CacheLevel.HOST, CacheLevel.STORAGE)
    ]
    engine.manager.reset_cache()
    assert BlocksCleared(CacheLevel.STORAGE) in engine.manager.take_events()


def test_prefetch_at_arrival_needs_no_wait_at_the_match(engine: Engine) -> None:
    request = Request("early", tokens_of(1, 8))
    engine.manager.begin([request])
    engine.settle()
    match = engine.match(request)
    assert match.status is MatchStatus.MATCHED
    assert match.num_storage_blocks == 8
    engine.manager.finish([request])


def test_a_request_that_loads_nothing_neither_reads_nor_waits(engine: Engine) -> None:
    request = Request("late before", tokens_of(1, 8), device_only=True)
    engine.manager.begin([request])
    match = engine.match(request)
    assert (match.status, match.total_matched_blocks) == (MatchStatus.MATCHED, 0)
    assert engine.send() == []
    engine.manager.finish([request])


def test_two_requests_share_one_read(engine: Engine) -> None:
    engine.store.gate.clear()
    requests = [Request(f"r{i}", tokens_of(1, 8)) for i in range(3)]
    for request in requests:
        assert engine.match(request).status is MatchStatus.DEFERRED
        engine.send()
    host = engine.manager._host
    assert isinstance(host, LocalHostTier)
    assert {node.cache_status for node in host.nodes(range(HOST_BLOCKS))} == {
        CacheStatus.LOADING_FROM_STORAGE
    }
    engine.store.gate.set()
    engine.settle()
    for request in requests:
        match = engine.match(request)
        assert match.status is MatchStatus.MATCHED
        assert match.num_storage_blocks == 8
    assert engine.store.reads == [8]
    assert counters(engine).prefetches_shared == 2
    engine.manager.finish(requests)


def test_a_cancelled_request_cancels_its_read_when_no_other_needs_it(engine: Engine) -> None:
    engine.store.gate.clear()
    other = Request("other", tokens_of(1, 2))
    request = Request("gone", tokens_of(1, 8))
    engine.manager.begin([other])
    engine.send()
    engine.manager.finish([other])
    engine.manager.begin([request])
    engine.send()
    engine.manager.finish([request])
    engine.send()
    engine.store.gate.set()
    engine.settle()
    assert sum(len(plan.cancelled) for plan in engine.plans) >= 1
    assert counters(engine).blocks_prefetched < 8
    assert engine.run("later", tokens_of(1, 8)).num_storage_blocks >= 6


def test_with_best_effort_no_request_waits(stored: Path) -> None:
    engine = Engine(stored, policy=PrefetchPolicy.BEST_EFFORT)
    engine.store.gate.clear()
    request = Request("hurry", tokens_of(1, 8))
    engine.manager.begin([request])
    engine.send()
    match = engine.match(request)
    assert (match.status, match.num_cached_tokens) == (MatchStatus.MATCHED, 0)
    assert engine.allocate(request).ok
    engine.store.gate.set()
    engine.settle()
    engine.compute(request, request.num_tokens)
    engine.manager.finish([request])
    engine.close()


def test_with_timeout_a_request_waits_for_its_budget(stored: Path) -> None:
    engine = Engine(stored, policy=PrefetchPolicy.TIMEOUT)
    engine.store.gate.clear()
    request = Request("patient", tokens_of(1, 8))
    assert engine.match(request).status is MatchStatus.DEFERRED
    engine.send()
    engine.now = 0.9
    assert engine.match(request).status is MatchStatus.DEFERRED
    engine.now = 2.0
    match = engine.match(request)
    assert (match.status, match.num_cached_tokens) == (MatchStatus.MATCHED, 0)
    assert counters(engine).prefetches_timed_out == 1
    engine.manager.finish([request])
    engine.close()


def test_the_first_corrupt_block_ends_the_run_and_the_rest_is_computed(engine: Engine) -> None:
    block = engine.store.file.superblock
    with engine.store.path.open("r+b") as file:
        file.seek(block.record_offset + 5 * block.record_bytes)
        file.write(b"\xde\xad")
    match = engine.run("damaged", tokens_of(1, 8))
    assert match.num_storage_blocks == 5
    assert counters(engine).blocks_corrupt_in_storage == 1
    storage = engine.manager.get_stats().storage
    assert storage is not None
    assert storage.quarantined == 1
    engine.settle()
    assert counters(engine).blocks_stored == 1, "the corrupt block is stored anew, elsewhere"
    after = engine.manager.get_stats().storage
    assert after is not None
    assert (after.ready, after.orphans) == (8, 0), "the others kept their slots"


def test_a_read_begins_where_the_host_ends_though_the_device_has_more(engine: Engine) -> None:
    engine.run("warm", tokens_of(1, 4))
    assert engine.manager._host is not None
    engine.manager._host.reset()
    match = engine.run("longer", tokens_of(1, 8))
    assert match.num_device_blocks == 4
    assert match.num_storage_blocks == 4
    assert engine.manager._host.usage().ready == 8


def test_a_reuse_grid_cuts_a_run_whose_tail_came_from_storage(stored: Path) -> None:
    engine = Engine(stored, reuse_grid=3 * BLOCK)
    short = Request("short", tokens_of(1, 2))
    engine.manager.begin([short])
    engine.settle()
    engine.manager.finish([short])
    match = engine.run("long", tokens_of(1, 8))
    assert (match.num_ahead_blocks, match.num_storage_blocks) == (2, 4), "of eight blocks six are reused"
    assert match.num_ahead_from_storage == 0, "the first two were on the host"
    found = counters(engine)
    assert (found.host_hit_tokens, found.storage_hit_tokens) == (2 * BLOCK, 4 * BLOCK)
    assert counters(engine).storage_hit_tokens == 4 * BLOCK
    engine.close()


def test_a_reset_forgets_the_files_too(engine: Engine) -> None:
    assert engine.manager.reset_cache() == 8
    engine.settle()
    assert engine.run("again", tokens_of(1, 8)).num_cached_tokens == 0
    assert engine.manager.reset_cache() > 0
    engine.settle()
    engine.controller.wait_reports(0)
    engine.close()
    assert len(open_store(engine.store.path.parent, LAYOUT).scan().slots) == 0


def test_nothing_is_read_or_written_before_the_files_are_restored(stored: Path) -> None:
    engine = Engine(stored)
    engine.manager.worker_lost(0)
    assert engine.run("blind", tokens_of(1, 8)).num_cached_tokens == 0
    assert counters(engine).blocks_stored == 0
    assert engine.manager.restore_storage([engine.store.scan()]) == 8
    engine.manager._host.reset()  # type: ignore[union-attr]
    engine.manager._device.reset()
    assert engine.run("seeing", tokens_of(1, 8)).num_storage_blocks == 8
    engine.close()


def test_a_reset_holds_when_a_rank_was_lost_before_it_cleared_its_file(stored: Path) -> None:
    engine = Engine(stored)
    engine.manager.reset_cache()
    engine.manager.worker_lost(0)
    assert engine.manager.restore_storage([engine.store.scan()]) == 0, "what was forgotten stays so"
    engine.settle()
    assert engine.run("new", tokens_of(2, 3)).num_cached_tokens == 0
    engine.manager.worker_lost(0)
    assert engine.manager.restore_storage([engine.store.scan()]) == 3, "the file was emptied, then written"
    engine.close()


def test_an_overdue_read_holds_up_no_request(engine: Engine) -> None:
    engine.store.gate.clear()
    first, second = Request("first", tokens_of(1, 8)), Request("second", tokens_of(1, 8))
    assert engine.match(first).status is MatchStatus.DEFERRED
    engine.send()
    engine.now = 1000.0
    engine.manager.expire()
    for request in (first, second):
        match = engine.match(request)
        assert (match.status, match.num_cached_tokens) == (MatchStatus.MATCHED, 0)
    host = engine.manager.get_stats().host
    assert host is not None
    assert host.holds == 8, "the slots are the read's until it ends"
    engine.store.gate.set()
    engine.settle()
    engine.manager.finish([first, second])


def lost_of_fifteen_paths(folder: Path, policy: WritePolicy) -> int:
    """Return how many blocks are in no tier after more paths than the upper tiers hold; the counter must agree."""
    engine = Engine(folder, write_policy=policy, clean_reserve=1, write_through_threshold=1, eviction="lru")
    for first in range(1, 16):
        engine.run(f"r{first}", tokens_of(first, 8))
    paths = [Request(f"look{first}", tokens_of(first, 8)) for first in range(1, 16)]
    found = [
        {node.hash_value for tier in engine.manager.find_blocks(path).values() for node in tier}
        for path in paths
    ]
    lost = 15 * 8 - sum(map(len, found))
    assert counters(engine).backups_dropped == 0
    assert counters(engine).stores_dropped == lost
    engine.close()
    return lost


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH_SELECTIVE])
def test_every_block_is_somewhere(tmp_path: Path, policy: WritePolicy) -> None:
    assert lost_of_fifteen_paths(tmp_path, policy) == 0


def test_a_block_that_write_back_cannot_keep_is_counted_as_dropped(tmp_path: Path) -> None:
    # What is stored ahead is enough now and then, when the machine is busy elsewhere.
    runs = itertools.count()
    until(
        lambda: lost_of_fifteen_paths(tmp_path / str(next(runs)), WritePolicy.WRITE_BACK),
        "what one copy can store ahead is not enough",
    )


def test_storage_without_a_host_tier_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="FDCACHE_HOST_MEMORY"):
        CacheManager(
            CacheSettings(device_blocks=4), LAYOUT, storage=StorageTierSettings(connector="local", size=MIB)
        )


def test_a_controller_without_storage_refuses_its_tasks(engine: Engine, tmp_path: Path) -> None:
    request = Request("r", tokens_of(1, 8))
    engine.manager.begin([request])
    (plan,) = engine.manager.take_plans()
    assert [swap.purpose for task in plan.storage for swap in task.swaps()] == [SwapPurpose.PREFETCH]
    with CacheController(CopySettings(), LAYOUT) as other:
        other.initialize_kv_cache(30)
        with pytest.raises(CacheNotReadyError, match="initialize_host_cache"):
            other.initialize_storage(open_store(tmp_path / "none", LAYOUT))
        other.initialize_host_cache(HOST_BLOCKS)
        with pytest.raises(CacheNotReadyError, match="initialize_storage"):
            other.submit_swap_tasks(plan)
    engine.controller.submit_swap_tasks(plan)
    engine.settle()
    engine.manager.finish([request])


def test_scans_of_the_wrong_ranks_are_refused(engine: Engine) -> None:
    with pytest.raises(PlanError, match="each of the 1 ranks"):
        engine.manager.restore_storage([])


def test_a_full_host_tier_reads_as_much_as_fits(engine: Engine) -> None:
    engine.run("other", tokens_of(9, 20))
    assert engine.run("again", tokens_of(1, 8)).num_storage_blocks == 8
    assert np.count_nonzero(engine.store.reads) > 0
