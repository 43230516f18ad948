"""Blocks below a lost one wait for it: they keep their slots, and are found again once it is stored anew."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fdcache.manager import MatchStatus, Request
from fdcache.metadata import CacheLevel, HashArray, StorageScan, SwapPurpose
from fdcache.settings.cache import CacheSettings, PrefetchPolicy, StorageTierSettings, WritePolicy
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.statistics import Counters, TierUsage
from fdcache.tiers.storage import StorageTier, make_index
from fdcache.tiers.storage_index import StoragePool
from fdcache_cli.slab_files import SlabContents, read_file, slab_files, summarize
from tests.offload_engine import BLOCK as OFFLOAD_BLOCK
from tests.offload_engine import OffloadEngine, prompt
from tests.storage_engine import BLOCK, LAYOUT, Engine, counters, store_a_path, tokens_of
from tests.storage_help import MIB, parents_of, path_hashes, storage_layout

POLICIES = list(WritePolicy)


def contents(folder: Path) -> SlabContents:
    (path,) = slab_files(folder)
    found = read_file(path)
    assert isinstance(found, SlabContents)
    return found


def place(folder: Path, depth: int) -> tuple[Path, int, int]:
    """Return the file and the offsets of record and header of the block at a depth of the only path."""
    found = contents(folder)
    slot = int(found.slots[found.depths.tolist().index(depth)])
    record = found.superblock.record_offset + slot * found.superblock.record_bytes
    return found.path, record, found.superblock.header_offset + slot * 128


def damage(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        (byte,) = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([byte ^ 1]), offset)


def storage(engine: Engine) -> TierUsage:
    usage = engine.manager.get_stats().storage
    assert usage is not None
    return usage


def found_blocks(engine: Engine) -> int:
    """Return how many blocks of the path are found."""
    match = engine.run("again", tokens_of(1, 8))
    return match.num_cached_tokens // BLOCK


@pytest.mark.parametrize("policy", POLICIES)
def test_a_lost_block_alone_is_stored_again_and_those_below_are_found(
    tmp_path: Path, policy: WritePolicy
) -> None:
    store_a_path(tmp_path)
    path, record, _ = place(tmp_path, 3)
    damage(path, record)
    engine = Engine(tmp_path, write_policy=policy)
    assert found_blocks(engine) == 3
    assert counters(engine).blocks_corrupt_in_storage == 1
    assert (storage(engine).ready, storage(engine).orphans) == (8, 0)
    assert counters(engine).blocks_stored == 1
    engine.close()
    engine = Engine(tmp_path, write_policy=policy)
    assert engine.restored == 8
    assert found_blocks(engine) == 8
    engine.close()
    assert summarize([contents(tmp_path)], verified=False)["namespaces"][0]["unreachable_blocks"] == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_that_a_start_finds_without_their_ancestor_wait_for_it(
    tmp_path: Path, policy: WritePolicy
) -> None:
    store_a_path(tmp_path)
    path, _, header = place(tmp_path, 2)
    damage(path, header + 40)
    for _ in range(2):  # a start that computes nothing changes nothing
        engine = Engine(tmp_path, write_policy=policy)
        assert engine.restored == 2
        assert (storage(engine).ready, storage(engine).orphans) == (2, 5)
        engine.close()
    engine = Engine(tmp_path, write_policy=policy)
    assert found_blocks(engine) == 2, "a match does not cross the gap"
    assert (storage(engine).ready, storage(engine).orphans) == (8, 0)
    assert counters(engine).blocks_stored == 1
    engine.close()
    engine = Engine(tmp_path, write_policy=policy)
    assert found_blocks(engine) == 8
    engine.close()


def test_a_block_computed_while_its_record_was_read_in_vain_is_stored_again(tmp_path: Path) -> None:
    store_a_path(tmp_path)
    path, record, _ = place(tmp_path, 3)
    damage(path, record)
    engine = Engine(tmp_path, policy=PrefetchPolicy.BEST_EFFORT)
    engine.store.gate.clear()
    reader, writer = Request("reader", tokens_of(1, 8)), Request("writer", tokens_of(1, 8))
    engine.manager.begin([reader])
    engine.send()
    match = engine.match(writer)
    assert match.status is MatchStatus.MATCHED
    assert match.num_cached_tokens == 0
    assert engine.allocate(writer).ok
    engine.compute(writer, writer.num_tokens)
    engine.manager.finish([writer])
    for _ in range(5):  # the policy looks at the new blocks, which the host seems to get from storage
        engine.send()
        engine.manager.apply(engine.controller.poll())
    engine.store.gate.set()
    engine.settle()
    assert (storage(engine).ready, storage(engine).orphans) == (8, 0)
    engine.manager.finish([reader])
    engine.close()


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH_SELECTIVE])
def test_an_engine_with_its_own_device_cache_stores_a_lost_block_again(
    tmp_path: Path, policy: WritePolicy
) -> None:
    layout = storage_layout(block_size=OFFLOAD_BLOCK, num_layers=2)
    tokens = prompt(*range(1, 9))
    engine = OffloadEngine(layout=layout, folder=tmp_path)
    engine.stored("before", tokens, list(range(8)))
    engine.close()
    path, record, _ = place(tmp_path, 3)
    damage(path, record)
    engine = OffloadEngine(layout=layout, folder=tmp_path, policy=policy)
    request = Request("first", tokens)
    engine.manager.begin([request])
    while (match := engine.manager.match(request, 0)).status is MatchStatus.DEFERRED:
        engine.settle()
    assert match.num_tokens == 3 * OFFLOAD_BLOCK
    engine.manager.finish([request])
    engine.stored("second", tokens, list(range(8)))
    third = Request("third", tokens)  # the policy may ask for two hits
    engine.manager.begin([third])
    engine.manager.offer(third, len(tokens), np.arange(8, dtype=np.int32))
    engine.settle()
    engine.manager.finish([third])
    usage = engine.manager.get_stats().storage
    assert usage is not None
    assert (usage.ready, usage.orphans) == (8, 0)
    assert engine.manager.get_stats().counters.blocks_stored == 1
    engine.close()


def test_orphans_make_room_before_blocks_that_can_be_found() -> None:
    pool = StoragePool(12)
    first, second, third = (path_hashes(count, seed) for seed, count in enumerate((4, 6, 6)))
    store(pool, first)
    store(pool, second)
    pool.end_reads(held(pool, second[:1]), np.array([True]), np.array([False]))
    assert pool.usage().orphans == 5
    store(pool, third)
    pool.verify()
    assert (pool.contains(first) == 1).all()
    assert (pool.contains(third) == 1).all()
    assert pool.usage().orphans == 2, "no more than needed"
    store(pool, second[:1])
    pool.verify()
    assert pool.usage().orphans == 0, "the deepest went first, and one for the block above them"
    assert (pool.contains(second) == [1, 1, 0, 0, 0, 0]).all()
    assert (pool.contains(first) == 1).all()


def test_a_lost_orphan_is_forgotten_alone() -> None:
    pool = StoragePool(12)
    path = path_hashes(6)
    store(pool, path)
    nothing, one = np.array([False]), np.array([True])
    orphan = held(pool, path[3:4])
    pool.end_reads(held(pool, path[1:2]), one, nothing)
    assert pool.usage().orphans == 4
    pool.end_reads(orphan, nothing, one)
    assert (pool.usage().orphans, pool.usage().quarantined) == (3, 1)
    store(pool, path[1:2], above=path[0])
    assert (pool.contains(path) == [1, 1, 1, 0, 0, 0]).all()
    store(pool, path[3:4], above=path[2])
    assert (pool.contains(path) == 1).all()
    pool.verify()


def test_a_reset_forgets_orphans() -> None:
    pool = StoragePool(12)
    path = path_hashes(6)
    store(pool, path)
    pool.end_reads(held(pool, path[1:2]), np.array([True]), np.array([False]))
    pool.start_over()
    pool.verify()
    assert (pool.usage().orphans, pool.usage().free) == (0, 12)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_that_the_host_has_already_is_stored_for_those_that_wait_for_it(policy: WritePolicy) -> None:
    settings = CacheSettings(device_blocks=8, host_memory="1MiB", write_policy=policy)
    local = StorageTierSettings(connector="local", directory=Path("/nowhere"), size=4 * MIB)
    host = BlockPool(CacheLevel.HOST, 20)
    path = path_hashes(8)
    store(host, path)
    tier = StorageTier(
        settings, local, LAYOUT, host, make_index(local, LAYOUT, None), Counters(), lambda: 0.0
    )
    kept = [0, 1, 3, 4, 5, 6, 7]
    assert tier.restore([scan_of(path, kept)]) == 2
    tier.plan_work(0)
    (order,) = tier.orders.orders
    assert order.swap.purpose is SwapPurpose.STORE
    assert order.swap.hash_values.tolist() == path[2:3].tolist()
    pool = tier.pool
    assert isinstance(pool, StoragePool)
    pool.end_writes(
        order.swap.dst_block_ids,
        np.array([True]),
        np.zeros(1, np.uint64),
        np.array([False]),
        np.array([False]),
    )
    assert (pool.contains(path) == 1).all()
    pool.verify()


def store(pool: BlockPool, hashes: HashArray, above: HashArray | None = None) -> None:
    parents = parents_of(hashes)
    if above is not None:
        parents[0] = above
    taken = pool.reserve_copies(0, parents, hashes)
    assert not taken.missing
    pool.complete(taken.slots, np.ones(len(taken.slots), np.uint8), np.zeros(len(taken.slots), np.uint64))


def held(pool: StoragePool, hashes: HashArray) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Begin a read of blocks; return their slots."""
    slots = pool.find(hashes).slots
    pool.hold(slots)
    return slots


def scan_of(path: HashArray, kept: list[int]) -> StorageScan:
    count = len(kept)
    return StorageScan(
        rank=0,
        capacity=100,
        slots=np.array(kept, np.int32),
        generations=np.ones(count, np.uint32),
        hashes=path[kept],
        parents=parents_of(path)[kept],
        checksums=np.zeros(count, np.uint64),
        written_ms=np.arange(count, dtype=np.uint64),
    )
