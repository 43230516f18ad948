"""Measure block copies on the CPU: the record checksum beside plain memory copies, and swaps by plane size.

Run with ``python -m benchmarks.copies``; prints the machine, GB/s and ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks.machine import machine
from fdcache import _core
from fdcache.controller.cache_controller import CacheController
from fdcache.layout import KVLayout
from fdcache.metadata import CacheLevel, CacheSwapMetadata, SwapPurpose, TransferPlan
from fdcache.settings.cache import CopySettings

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


def checksum_rates(label: str, size: int) -> None:
    source = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    target = np.zeros_like(source)
    repeats = max(BUFFER_BYTES // size, 1)

    def repeated(work: Callable[[], object]) -> float:
        return rate(repeats * size, lambda: [work() for _ in range(repeats)])

    plain = repeated(lambda: np.copyto(target, source))
    fused = repeated(lambda: _core.copy_with_checksum(target, source))
    alone = repeated(lambda: _core.record_checksum(source, [0], [size]))
    print(
        f"{label:>10}: memcpy {plain:6.1f} GB/s   copy with checksum {fused:6.1f} GB/s "
        f"(ratio {fused / plain:.2f})   checksum alone {alone:6.1f} GB/s"
    )


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


def swap_rates(plane_bytes: int, threads: int) -> None:
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
    with CacheController(CopySettings(copy_threads=threads), layout) as controller:
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
    print(
        f"{plane_bytes >> 10:6d} KiB planes, {threads} threads: D2H {rates['D2H']:6.1f} GB/s with checksum   "
        f"H2D {rates['H2D']:6.1f} GB/s   "
        f"submission of {blocks} blocks {1e6 * statistics.median(submit):7.0f} us"
    )


def main() -> None:
    print(machine())
    for label, size in (("in cache", 16 << 10), ("in memory", BUFFER_BYTES)):
        checksum_rates(label, size)
    print("scattered swaps of 256 MiB, 16 layers x (key, value), loads in layer groups:")
    for plane_bytes in (4 << 10, 16 << 10, 32 << 10, 128 << 10):
        for threads in (1, 2):
            swap_rates(plane_bytes, threads)


if __name__ == "__main__":
    main()
