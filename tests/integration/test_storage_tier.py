"""Manager and controller with storage between them: who waits, who shares, what a failure costs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache import _core
from fdcache.controller.cache_controller import CacheController
from fdcache.errors import CacheNotReadyError, ConfigurationError, PlanError
from fdcache.manager import Allocation, CacheManager, LoadStatus, MatchResult, MatchStatus, Request
from fdcache.metadata import CacheStatus, SwapPurpose, TransferPlan
from fdcache.node.traffic import Direction
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.settings.storage_tier import PrefetchPolicy, StorageTierSettings
from fdcache.settings.transfer import TransferSettings, Verify
from fdcache.storage.connector import BatchResult, RecordBatch, StorageState
from fdcache.storage.slab import SlabStore
from fdcache.tiers import LocalHostTier
from tests.storage_help import MIB, open_store, storage_layout

LAYOUT = storage_layout()
BLOCK = LAYOUT.block_size
HOST_BLOCKS = 40


class SlowStore(SlabStore):
    """A disk that answers a read when it is told to."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.reads: list[int] = []
        super().__init__(*arguments, **options)

    def get(self, batch: RecordBatch, timeout: float, cancel: _core.CancelFlag | None = None) -> BatchResult:
        self.reads.append(len(batch))
        assert self.gate.wait(60)
        return super().get(batch, timeout, cancel)


class Engine:
    """One rank in this process; it computes nothing, so blocks hold what the device planes held."""

    def __init__(
        self,
        folder: Path,
        *,
        policy: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE,
        verify: Verify = Verify.STORAGE,
        **changes: Any,
    ) -> None:
        self.now = 0.0
        storage = StorageTierSettings(
            connector="local",
            directory=folder,
            size=4 * MIB,
            prefetch_policy=policy,
            prefetch_timeout=1.0,
            retry_after=0.0,
        )
        options = {"device_blocks": 30, "write_policy": WritePolicy.WRITE_THROUGH} | changes
        cache = CacheSettings(host_memory=HOST_BLOCKS * (LAYOUT.record_bytes + 128), **options)
        self.manager = CacheManager(cache, LAYOUT, storage=storage, clock=lambda: self.now)
        self.controller = CacheController(TransferSettings(verify=verify), LAYOUT)
        self.tensors = self.controller.initialize_kv_cache(30)
        self.controller.initialize_host_cache(self.manager.num_host_blocks)
        self.store = SlowStore(folder, LAYOUT, rank=0, size=4 * MIB, threads=2, retry_after=0.0)
        scan = self.controller.initialize_storage(self.store)
        assert scan is not None
        self.restored = self.manager.restore_storage([scan])
        self.plans: list[TransferPlan] = []

    def send(self) -> list[TransferPlan]:
        plans = self.manager.take_plans()
        for plan in plans:
            self.plans.append(plan)
            self.controller.submit_swap_tasks(plan)
        return plans

    def settle(self) -> None:
        """Send and apply until nothing is left to copy."""
        for _ in range(500):
            plans = self.send()
            reports = self.controller.wait_reports(30)
            self.manager.apply(reports)
            if not plans and not reports:
                return
        raise AssertionError("copies never end")

    def compute(self, request: Request, tokens: int) -> None:
        """Fill the request's blocks on the device with what follows from their place in the path."""
        for index, slot in enumerate(request.block_table.tolist()):
            for tensor in self.tensors:
                tensor[slot] = (index * 7 + request._prompt[0]) % 251
        self.manager.commit([(request, tokens)])

    def match(self, request: Request) -> MatchResult:
        return self.manager.match_prefix([request])[0]

    def allocate(self, request: Request) -> Allocation:
        return self.manager.allocate_device_blocks([(request, request.num_tokens)])[0]

    def run(self, name: str, tokens: list[int]) -> MatchResult:
        """A whole request, waiting as long as the match is deferred."""
        request = Request(name, tokens)
        match = self.match(request)
        while match.status is MatchStatus.DEFERRED:
            self.send()
            self.manager.apply(self.controller.wait_reports(30))
            match = self.match(request)
        assert self.allocate(request).ok
        self.settle()
        self.check(request, match.num_cached_tokens // BLOCK)
        self.compute(request, len(tokens))
        self.manager.request_finish([request])
        self.settle()
        self.manager.check_integrity()
        return match

    def check(self, request: Request, cached: int) -> None:
        for index, slot in enumerate(request.block_table[:cached].tolist()):
            expected = (index * 7 + request._prompt[0]) % 251
            for tensor in self.tensors:
                assert (tensor[slot] == expected).all(), f"block {index} holds something else"

    def close(self) -> None:
        self.store.gate.set()
        self.settle()
        self.manager.check_integrity()
        stats = self.manager.get_stats()
        for tier in (stats.device, stats.host, stats.storage):
            assert tier is not None
            assert tier.pins == tier.holds == tier.leases == 0
            assert tier.writing == tier.quarantined
        self.controller.shutdown()


def tokens_of(first: int, blocks: int) -> list[int]:
    return [first] * (blocks * BLOCK + 1)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A folder with a path of 8 blocks that begins with token 1."""
    engine = Engine(tmp_path)
    engine.run("first", tokens_of(1, 8))
    assert engine.manager.get_stats().counters.blocks_stored == 8
    engine.close()
    return tmp_path


@pytest.fixture
def engine(stored: Path) -> Iterator[Engine]:
    engine = Engine(stored)
    assert engine.restored == 8
    yield engine
    engine.close()


def counters(engine: Engine) -> Any:
    return engine.manager.get_stats().counters


def test_a_cold_process_gets_its_blocks_from_storage_with_their_bytes(engine: Engine) -> None:
    match = engine.run("again", tokens_of(1, 8))
    assert (match.num_device_blocks, match.num_host_blocks, match.num_storage_blocks) == (0, 0, 8)
    assert counters(engine).storage_hit_tokens == 8 * BLOCK
    match = engine.run("warm", tokens_of(1, 8))
    assert (match.num_device_blocks, match.num_storage_blocks) == (8, 0)


def test_figures_of_an_engine_with_storage_of_its_own(engine: Engine) -> None:
    engine.store.gate.clear()
    request = Request("r", tokens_of(1, 8))
    engine.manager.prefetch([request])
    engine.send()
    stats = engine.manager.get_stats()
    assert (stats.reading_blocks, stats.storing_blocks, stats.queued_stores) == (8, 0, 0)
    engine.store.gate.set()
    engine.settle()
    engine.manager.request_finish([request])
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


def test_prefetch_at_arrival_needs_no_wait_at_the_match(engine: Engine) -> None:
    request = Request("early", tokens_of(1, 8))
    engine.manager.prefetch([request])
    engine.settle()
    match = engine.match(request)
    assert match.status is MatchStatus.MATCHED
    assert match.num_storage_blocks == 8
    engine.manager.request_finish([request])


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
    engine.manager.request_finish(requests)


def test_a_cancelled_request_takes_back_its_read_when_nobody_else_wants_it(engine: Engine) -> None:
    engine.store.gate.clear()
    other = Request("other", tokens_of(1, 2))
    request = Request("gone", tokens_of(1, 8))
    engine.manager.prefetch([other])
    engine.send()
    engine.manager.request_finish([other])
    engine.manager.prefetch([request])
    engine.send()
    engine.manager.request_finish([request])
    engine.send()
    engine.store.gate.set()
    engine.settle()
    assert sum(len(plan.cancelled) for plan in engine.plans) >= 1
    assert counters(engine).blocks_prefetched < 8
    assert engine.run("later", tokens_of(1, 8)).num_storage_blocks >= 6


def test_best_effort_waits_for_nothing(stored: Path) -> None:
    engine = Engine(stored, policy=PrefetchPolicy.BEST_EFFORT)
    engine.store.gate.clear()
    request = Request("hurry", tokens_of(1, 8))
    engine.manager.prefetch([request])
    engine.send()
    match = engine.match(request)
    assert (match.status, match.num_cached_tokens) == (MatchStatus.MATCHED, 0)
    assert engine.allocate(request).ok
    engine.store.gate.set()
    engine.settle()
    engine.compute(request, request.num_tokens)
    engine.manager.request_finish([request])
    engine.close()


def test_timeout_waits_for_its_budget_and_no_longer(stored: Path) -> None:
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
    engine.manager.request_finish([request])
    engine.close()


def test_the_first_corrupt_block_ends_the_run_and_the_rest_is_computed(engine: Engine) -> None:
    block = engine.store._file.superblock
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
    assert counters(engine).blocks_stored == 3, "what was recomputed is stored anew, elsewhere"


def test_a_read_begins_where_the_host_ends_though_the_device_has_more(engine: Engine) -> None:
    engine.run("warm", tokens_of(1, 4))
    assert engine.manager._host is not None
    engine.manager._host.reset()
    match = engine.run("longer", tokens_of(1, 8))
    assert match.num_device_blocks == 4
    assert match.num_storage_blocks == 4
    assert engine.manager._host.stats().ready == 8


def test_a_reuse_grid_cuts_a_run_whose_tail_came_from_storage(stored: Path) -> None:
    engine = Engine(stored, reuse_grid=3 * BLOCK)
    short = Request("short", tokens_of(1, 2))
    engine.manager.prefetch([short])
    engine.settle()
    engine.manager.request_finish([short])
    match = engine.run("long", tokens_of(1, 8))
    assert (match.num_host_blocks, match.num_storage_blocks) == (2, 4), "of eight blocks six are reused"
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


def test_nothing_is_read_or_written_before_the_files_are_taken_up(stored: Path) -> None:
    engine = Engine(stored)
    engine.manager.worker_lost(0)
    assert engine.run("blind", tokens_of(1, 8)).num_cached_tokens == 0
    assert counters(engine).blocks_stored == 0
    assert engine.manager.restore_storage([engine.store.scan()]) == 8
    engine.manager._host.reset()  # type: ignore[union-attr]
    engine.manager._device.reset()
    assert engine.run("seeing", tokens_of(1, 8)).num_storage_blocks == 8
    engine.close()


def test_a_reset_that_a_lost_rank_may_not_have_heard_of_holds(stored: Path) -> None:
    engine = Engine(stored)
    engine.manager.reset_cache()
    engine.manager.worker_lost(0)
    assert engine.manager.restore_storage([engine.store.scan()]) == 0, "what was forgotten stays so"
    engine.settle()
    assert engine.run("new", tokens_of(2, 3)).num_cached_tokens == 0
    engine.manager.worker_lost(0)
    assert engine.manager.restore_storage([engine.store.scan()]) == 3, "the file was emptied, then written"
    engine.close()


def test_a_read_that_is_overdue_holds_nobody_up(engine: Engine) -> None:
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
    engine.manager.request_finish([first, second])


@pytest.mark.parametrize("policy", WritePolicy)
def test_a_block_is_somewhere_or_counted_as_dropped(tmp_path: Path, policy: WritePolicy) -> None:
    engine = Engine(tmp_path, write_policy=policy, clean_reserve=1, write_through_threshold=1)
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
    assert (lost > 0) == (policy is WritePolicy.WRITE_BACK), "what one copy can store ahead is not enough"
    engine.close()


def test_storage_without_a_host_tier_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="FDCACHE_HOST_MEMORY"):
        CacheManager(
            CacheSettings(device_blocks=4), LAYOUT, storage=StorageTierSettings(connector="local", size=MIB)
        )


def test_a_controller_without_storage_refuses_its_tasks(engine: Engine, tmp_path: Path) -> None:
    request = Request("r", tokens_of(1, 8))
    engine.manager.prefetch([request])
    (plan,) = engine.manager.take_plans()
    assert [swap.purpose for task in plan.storage for swap in task.swaps()] == [SwapPurpose.PREFETCH]
    with CacheController(TransferSettings(), LAYOUT) as other:
        other.initialize_kv_cache(30)
        with pytest.raises(CacheNotReadyError, match="initialize_host_cache"):
            other.initialize_storage(open_store(tmp_path / "none", LAYOUT))
        other.initialize_host_cache(HOST_BLOCKS)
        with pytest.raises(CacheNotReadyError, match="initialize_storage"):
            other.submit_swap_tasks(plan)
    engine.controller.submit_swap_tasks(plan)
    engine.settle()
    engine.manager.request_finish([request])


def test_scans_of_the_wrong_ranks_are_refused(engine: Engine) -> None:
    with pytest.raises(PlanError, match="each of the 1 ranks"):
        engine.manager.restore_storage([])


def test_a_full_host_tier_reads_as_much_as_fits(engine: Engine) -> None:
    engine.run("other", tokens_of(9, 20))
    assert engine.run("again", tokens_of(1, 8)).num_storage_blocks == 8
    assert np.count_nonzero(engine.store.reads) > 0


def test_verify_all_refuses_host_bytes_that_changed_and_forgets_them(stored: Path) -> None:
    engine = Engine(stored, verify=Verify.ALL)
    first = Request("first", tokens_of(1, 8))
    engine.manager.prefetch([first])
    engine.settle()
    arena = engine.controller.host_arena
    assert arena is not None
    changed = next(slot for slot in range(HOST_BLOCKS) if arena.table.header(slot).state == 2)
    arena.table.record(changed)[LAYOUT.planes[-1].offset] ^= 1
    assert engine.match(first).num_cached_tokens == 8 * BLOCK
    assert engine.allocate(first).ok
    engine.send()
    (outcome,) = engine.manager.apply(engine.controller.wait_reports(30))
    assert outcome.status is LoadStatus.FAILED
    assert "checksum" in str(outcome.error_message)
    assert counters(engine).blocks_corrupt_in_host == 1
    engine.settle()
    engine.compute(first, first.num_tokens)
    engine.manager.request_finish([first])
    engine.close()


def spoil_header(engine: Engine) -> None:
    """Overwrite the header of one READY host record; its bytes stay."""
    arena = engine.controller.host_arena
    assert arena is not None
    slot = next(slot for slot in range(HOST_BLOCKS) if arena.table.header(slot).state == 2)
    arena.table.set_header(slot, _core.SlotHeader.from_bytes(b"\x5a" * 128))


def test_a_host_record_that_cannot_be_loaded_is_forgotten_and_computed_once(stored: Path) -> None:
    engine = Engine(stored)
    first = Request("first", tokens_of(1, 8))
    engine.manager.prefetch([first])
    engine.settle()
    spoil_header(engine)
    assert engine.match(first).num_cached_tokens == 8 * BLOCK
    assert engine.allocate(first).ok
    engine.send()
    (outcome,) = engine.manager.apply(engine.controller.wait_reports(30))
    assert outcome.status is LoadStatus.FAILED
    assert counters(engine).blocks_corrupt_in_host == 1
    engine.settle()
    engine.compute(first, first.num_tokens)
    engine.manager.request_finish([first])
    engine.settle()
    engine.manager._device.reset()
    engine.run("again", tokens_of(1, 8))
    assert counters(engine).blocks_corrupt_in_host == 1, "the bad record was met once"
    engine.close()


def test_a_host_record_that_cannot_be_stored_is_forgotten(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    request = Request("first", tokens_of(1, 4))
    engine.match(request)
    assert engine.allocate(request).ok
    engine.compute(request, request.num_tokens)
    engine.send()
    # The copy to the host has been reported, the store is planned and not yet sent.
    engine.manager.apply(engine.controller.wait_reports(30))
    spoil_header(engine)
    engine.settle()
    assert counters(engine).blocks_corrupt_in_host == 1
    assert engine.manager.get_stats().host.ready < 4  # type: ignore[union-attr]
    engine.manager.request_finish([request])
    engine.manager._device.reset()
    assert engine.run("again", tokens_of(1, 4)).num_cached_tokens < 4 * BLOCK
    assert counters(engine).blocks_corrupt_in_host == 1
    engine.close()
