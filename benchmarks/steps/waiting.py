"""Measure the cost of a scheduler step beyond its own requests: waiting reads, deep paths, many tenants.

Each figure is the median over many calls. `take_plans` is called while requests wait for room to read their blocks from
storage; a store is one more block below a stored path; an addition to `Owners` goes to one that is full.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.harness import Report, Row, median_us
from benchmarks.steps.requests import BLOCK, layout
from fdcache.manager import CacheManager, Request
from fdcache.metadata import SLOT_HEADER_BYTES, CacheLevel, HashArray, StorageScan, SwapPurpose
from fdcache.plans.ledger import StorageOrders
from fdcache.service.client.session import Owners
from fdcache.settings.cache import CacheSettings, PrefetchPolicy, StorageTierSettings, WritePolicy
from fdcache.tiers.host import LocalHostTier
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.statistics import Counters
from fdcache.tiers.storage import StorageWrites
from fdcache.tiers.storage_index import LocalIndex

HOST_BLOCKS = 8192


def prompts(requests: int, blocks: int) -> list[Request]:
    random = np.random.default_rng(0)
    tokens = random.integers(0, 1000, (requests, blocks * BLOCK + 1), dtype=np.int32)
    return [Request(str(i), row) for i, row in enumerate(tokens)]


def scan_of(requests: list[Request]) -> StorageScan:
    """Return the scan of a storage that holds every block of these requests."""
    paths = [request.block_hashes for request in requests]
    hashes = np.concatenate(paths)
    parents = np.concatenate([np.concatenate((np.zeros((1, 32), np.uint8), path[:-1])) for path in paths])
    numbers = np.arange(len(hashes))
    return StorageScan(
        rank=0,
        capacity=len(hashes),
        slots=numbers.astype(np.int32),
        generations=np.ones(len(hashes), np.uint32),
        hashes=hashes,
        parents=parents,
        checksums=numbers.astype(np.uint64),
        written_ms=numbers.astype(np.uint64),
    )


def take_plans_us(waiting: int, blocks: int, calls: int) -> tuple[float, float]:
    """Return the time of `take_plans` and of a match per request, while other reads fill the limit in flight."""
    shape = layout()
    requests = prompts(waiting + 4, blocks)
    settings = CacheSettings(
        device_blocks=1024, host_memory=HOST_BLOCKS * (shape.record_bytes + SLOT_HEADER_BYTES)
    )
    size = 2 * (len(requests) * blocks + 1024) * shape.record_bytes
    storage = StorageTierSettings(
        connector="local",
        directory=Path("/nowhere"),
        size=size,
        prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
    )
    with CacheManager(settings, shape, storage=storage) as manager:
        manager.prepare(requests)
        stored = scan_of(requests)
        assert manager.restore_storage([stored]) == len(requests) * blocks
        manager.begin(requests)
        manager.take_plans()
        assert not manager.take_plans()
        step = median_us(manager.take_plans, calls)
        return step, median_us(lambda: manager.match_prefix(requests), calls) / len(requests)


def chain(length: int) -> HashArray:
    keys = [hashlib.sha256(b"root").digest()]
    for _ in range(length - 1):
        keys.append(hashlib.sha256(keys[-1]).digest())
    return np.frombuffer(b"".join(keys), np.uint8).reshape(length, 32)


def store(tier: BlockPool, parent: bytes, path: HashArray) -> None:
    lease = tier.open_lease()
    tier.commit(lease, parent, path, tier.reserve(lease, len(path)).slots)
    tier.release(lease)


def store_us(depth: int, calls: int) -> float:
    """Return the time to plan the store of one block below a stored path of `depth` blocks."""
    path = chain(depth + calls)
    host = LocalHostTier(CacheLevel.HOST, 2 * len(path))
    index = LocalIndex.make(2 * len(path))
    index.restore([])
    orders = StorageOrders()
    writes = StorageWrites(
        CacheSettings(write_policy=WritePolicy.WRITE_THROUGH),
        StorageTierSettings(),
        host,
        index,
        orders,
        Counters(),
        time.monotonic,
    )
    store(host, bytes(32), path[:depth])
    store(index.pool, bytes(32), path[:depth])
    at = count(depth)
    samples = []
    for _ in range(calls):
        here = next(at)
        store(host, path[here - 1].tobytes(), path[here : here + 1])
        writes.on_arrival(path[here : here + 1])
        since = time.perf_counter_ns()
        writes.plan(0)
        samples.append(time.perf_counter_ns() - since)
        (order,) = orders.take().orders
        swap = order.swap
        assert swap.purpose is SwapPurpose.STORE and len(swap) == 1
        host.unhold(swap.src_block_ids)
        none = np.zeros(1, np.bool_)
        index.end_writes(swap, ~none, np.zeros(1, np.uint64), none, none)
    return float(np.median(samples)) / 1000


def owners_us(most: int, calls: int) -> float:
    """Return the mean time of one addition to a full table, a fifth of which has been replaced."""
    owners = Owners(most)
    numbers = np.arange(most + most // 5 + calls, dtype=np.uint64).tobytes()
    keys = (numbers[at : at + 8] for at in count(0, 8))
    for _ in range(most + most // 5):
        owners.add(next(keys), "tenant")
    since = time.perf_counter_ns()
    for _ in range(calls):
        owners.add(next(keys), "tenant")
    return (time.perf_counter_ns() - since) / calls / 1000


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=2048, help="of each request that waits")
    parser.add_argument("--calls", type=int, default=200)


def measure(options: argparse.Namespace, report: Report) -> None:
    def waits() -> Iterator[Row]:
        for waiting in (0, 16, 128):
            step, match = take_plans_us(waiting, options.blocks, options.calls)
            yield {"requests that wait for room": waiting, "take_plans, us": step, "a match, us": match}

    report.table("Reads that wait", waits())
    report.table(
        "A store below a stored path",
        ({"depth": depth, "us": store_us(depth, options.calls)} for depth in (16, 1024, 8192)),
    )
    report.table(
        "Blocks whose owner is known",
        ({"blocks": most, "an addition, us": owners_us(most, 2000)} for most in (1000, 1 << 20)),
    )
