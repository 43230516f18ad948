"""Measure block copies on the CPU: the record checksum beside plain memory copies, and swaps by plane size."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.harness import Report, Row, run
from fdcache import _core
from fdcache.controller.cache_controller import CacheController
from fdcache.layout import KVLayout
from fdcache.metadata import CacheLevel, CacheSwapMetadata, SwapPurpose, TransferPlan
from fdcache.settings.cache import TransferSettings

BUFFER_BYTES = 128 << 20
SWAP_BYTES = 256 << 20
ROUNDS = 7


def rate(nbytes: int, work: Callable[[], object]) -> float:
    """Return GB/s, the median of several rounds after a warm-up round."""
    work()
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return nbytes / statistics.median(seconds) / 1e9


def checksum_rates(label: str, size: int) -> Row:
    source = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    target = np.zeros_like(source)
    repeats = max(BUFFER_BYTES // size, 1)

    def repeated(work: Callable[[], object]) -> float:
        return rate(repeats * size, lambda: [work() for _ in range(repeats)])

    plain = repeated(lambda: np.copyto(target, source))
    fused = repeated(lambda: _core.copy_with_checksum(target, source))
    alone = repeated(lambda: _core.record_checksum(source, [0], [size]))
    return {
        "GB/s": label,
        "memcpy": plain,
        "copy with checksum": fused,
        "ratio": fused / plain,
        "checksum alone": alone,
    }


def swap(purpose: SwapPurpose, device: np.ndarray, host: np.ndarray) -> CacheSwapMetadata:
    levels = (CacheLevel.HOST, CacheLevel.DEVICE)
    source, target = (host, device) if purpose is SwapPurpose.LOAD else (device, host)
    if purpose is not SwapPurpose.LOAD:
        levels = (CacheLevel.DEVICE, CacheLevel.HOST)
    hashes = np.zeros((len(device), 32), np.uint8)
    hashes[:, :4] = host.view(np.uint8).reshape(-1, 4)
    ones = np.ones(len(device), np.uint32)
    return CacheSwapMetadata(
        purpose=purpose,
        src_type=levels[0],
        dst_type=levels[1],
        src_block_ids=source,
        dst_block_ids=target,
        src_generations=ones,
        dst_generations=ones,
        hash_values=hashes,
        parent_hashes=hashes,
    )


def swap_rates(plane_bytes: int, threads: int) -> Row:
    layout = KVLayout.uniform(
        model="benchmark",
        revision="1",
        num_layers=16,
        block_size=16,
        kv_heads=plane_bytes // 4096,
        head_dim=128,
        dtype="bfloat16",
    )
    blocks = SWAP_BYTES // layout.payload_bytes
    rng = np.random.default_rng(0)
    device = rng.permutation(blocks).astype(np.int32)
    host = rng.permutation(blocks).astype(np.int32)
    plans = {
        "D2H": TransferPlan(plan_id=1, evictions=swap(SwapPurpose.EVICT, device, host)),
        "H2D": TransferPlan(plan_id=1, loads=swap(SwapPurpose.LOAD, device, host)),
    }
    rates = {}
    submit: list[float] = []
    with CacheController(TransferSettings(copy_threads=threads), layout) as controller:
        controller.initialize_kv_cache(blocks)
        controller.initialize_host_cache(blocks)
        for direction, plan in plans.items():

            def run(plan: TransferPlan = plan) -> None:
                start = time.perf_counter()
                controller.submit_swap_tasks(plan)
                submit.append(time.perf_counter() - start)
                (report,) = controller.wait_reports()
                assert report.results[0].success

            rates[direction] = rate(blocks * layout.payload_bytes, run)
    return {
        "KiB of a plane": plane_bytes >> 10,
        "threads": threads,
        "D2H with checksum, GB/s": rates["D2H"],
        "H2D, GB/s": rates["H2D"],
        "blocks": blocks,
        "submission, us": 1e6 * statistics.median(submit),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add no options."""


def measure(_: argparse.Namespace, report: Report) -> None:
    sizes = (("in cache", 16 << 10), ("in memory", BUFFER_BYTES))
    report.table("The checksum of a record", (checksum_rates(label, size) for label, size in sizes))

    def swaps() -> Iterator[Row]:
        for plane_bytes in (4 << 10, 16 << 10, 32 << 10, 128 << 10):
            for threads in (1, 2):
                yield swap_rates(plane_bytes, threads)

    report.table(
        "Scattered swaps of 256 MiB, 16 layers of keys and values, loads in groups of layers", swaps()
    )


if __name__ == "__main__":
    sys.exit(run("copies", (sys.modules[__name__],)))
