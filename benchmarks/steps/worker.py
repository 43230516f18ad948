"""Measure the worker's side of a plan: microseconds of the engine's thread from plan to report.

Each plan loads blocks from the host and backs up as many, from random slots. ``submit`` is ``submit_swap_tasks``,
``layers`` lets a stream wait for every layer (a GPU) or asks for each (the CPU), ``waiting`` is a ``poll`` while the
copies are in flight, ``report`` the ``poll`` that returns the report, ``encode`` packs it. `--cold` evicts the caches
before each phase, as an engine's step does that comes every ten milliseconds. `--profile` adds the Python functions by
time.
"""

from __future__ import annotations

import argparse
import cProfile
import difflib
import gc
import json
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Report, Row
from fdcache.controller.cache_controller import CacheController
from fdcache.layout import KVLayout
from fdcache.metadata import CacheLevel, CacheSwapMetadata, SwapPurpose, TransferPlan, encode
from fdcache.settings.cache import TransferSettings

SIZES = (1, 32, 128, 1000, 4096)
PHASES = ("submit", "layers", "waiting", "report", "encode")
KINDS = ("both", "load", "backup")


class Rank:
    """A controller whose first half of host slots holds blocks to load; backups go to the second half."""

    def __init__(self, device: str, most: int, plane_bytes: int) -> None:
        self.layout = KVLayout.uniform(
            model="benchmark",
            revision="1",
            dtype="bfloat16",
            num_layers=32,
            block_size=plane_bytes // 64,
            kv_heads=1,
            head_dim=32,
        )
        self.most = most
        settings = TransferSettings(drain_timeout=60.0, layer_timeout=60.0)
        self.stream: Any = None
        made = None
        if device == "cuda":
            import cupy

            from fdcache.devices.cuda import CudaDevice

            made = CudaDevice(settings=settings)
            with cupy.cuda.Device(made.gpu.ordinal):
                self.stream = cupy.cuda.Stream(non_blocking=True)
        self.controller = CacheController(settings, self.layout, device=made)
        self.controller.initialize_kv_cache(2 * most)
        self.controller.initialize_host_cache(2 * most)
        self._random = np.random.default_rng(0)
        self._plans = 0
        self._hashes = np.zeros((2 * most, 32), np.uint8)
        self._hashes[:, :8] = np.arange(2 * most, dtype=np.int64).view(np.uint8).reshape(-1, 8)
        for first in range(0, most, 512):
            slots = np.arange(first, min(first + 512, most), dtype=np.int32)
            filling = self._plan(backups=self._swap(SwapPurpose.BACKUP, slots, slots))
            self.controller.submit_swap_tasks(filling, self.stream)
            self.controller.wait_reports()

    def plan(self, count: int, kind: str) -> TransferPlan:
        """Return a plan that loads ``count`` blocks, backs up as many, or does both."""
        device, host = self._random.permutation(2 * self.most), self._random.permutation(self.most)
        swaps = {
            "loads": self._swap(SwapPurpose.LOAD, host[:count], device[:count]),
            "backups": self._swap(SwapPurpose.BACKUP, device[-count:], host[:count] + self.most),
        }
        wanted = swaps if kind == "both" else {f"{kind}s": swaps[f"{kind}s"]}
        return self._plan(**wanted)

    def _plan(self, **swaps: Any) -> TransferPlan:
        self._plans += 1
        return TransferPlan(plan_id=self._plans, **swaps)

    def _swap(self, purpose: SwapPurpose, source: NDArray[Any], target: NDArray[Any]) -> CacheSwapMetadata:
        loads = purpose is SwapPurpose.LOAD
        levels = (CacheLevel.HOST, CacheLevel.DEVICE) if loads else (CacheLevel.DEVICE, CacheLevel.HOST)
        ones = np.ones(len(source), np.uint32)
        hashes = self._hashes[source if loads else target]
        return CacheSwapMetadata(
            purpose=purpose,
            src_type=levels[0],
            dst_type=levels[1],
            src_block_ids=source.astype(np.int32),
            dst_block_ids=target.astype(np.int32),
            src_generations=ones,
            dst_generations=ones,
            hash_values=hashes,
            parent_hashes=np.zeros_like(hashes),
        )


class Eviction:
    """Work between calls that uses the caches of data, instructions and branches for something else."""

    def __init__(self) -> None:
        self._memory = np.ones(64 << 20, np.uint8)
        self._matrix = np.random.default_rng(1).random((256, 256))
        self._texts = [[f"line {n * n % 97}" for n in range(first, first + 60)] for first in (0, 20)]

    def __call__(self) -> None:
        """Multiply matrices, run other Python code and write 64 MB."""
        for _ in range(4):
            self._matrix @ self._matrix
        record = {
            "lines": list(difflib.unified_diff(self._texts[0], self._texts[1])),
            "list": list(range(500)),
        }
        json.loads(json.dumps(record, indent=1))
        self._memory += 1


class Clock:
    """Nanoseconds by phase, one figure for each plan; ``before`` runs before each phase."""

    def __init__(self, before: Callable[[], object] | None = None) -> None:
        self.spent: dict[str, list[int]] = {phase: [] for phase in PHASES}
        self.profile: cProfile.Profile | None = None
        self._before = before

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as this phase."""
        if self._before is not None:
            self._before()
        if self.profile is not None:
            self.profile.enable()
        start = time.perf_counter_ns()
        yield
        self.spent[name].append(time.perf_counter_ns() - start)
        if self.profile is not None:
            self.profile.disable()


def carry_out(rank: Rank, plan: TransferPlan, clock: Clock) -> None:
    """Submit a plan, wait for its layers and take its report."""
    controller = rank.controller
    with clock.phase("submit"):
        counter = controller.submit_swap_tasks(plan, rank.stream)
    with clock.phase("layers"):
        for layer in range(rank.layout.total_layers):
            if rank.stream is not None:
                counter.wait_for_layer(layer, stream=rank.stream)
            else:
                counter.is_layer_done(layer)
    with clock.phase("waiting"):
        reports = controller.poll()
    if not reports:
        if not controller.handler(plan.plan_id).wait(60.0):
            raise RuntimeError("the copies take longer than a minute")
        with clock.phase("report"):
            reports = controller.poll()
    if not all(result.success for report in reports for result in report.results):
        raise RuntimeError(f"copies failed: {reports}")
    with clock.phase("encode"):
        encode(reports[0])


def carry_out_all(rank: Rank, count: int, kind: str, rounds: int, clock: Clock) -> None:
    """Carry out ``rounds`` plans of ``count`` blocks, after some that are not counted."""
    for _ in range(3):
        carry_out(rank, rank.plan(count, kind), Clock())
    plans = [rank.plan(count, kind) for _ in range(rounds)]
    gc.collect()
    for plan in plans:
        carry_out(rank, plan, clock)


def profile_lines(profile: cProfile.Profile, plans: int, most: int = 22) -> Iterator[str]:
    """Yield the functions that take the most time, in microseconds a plan."""
    found: Any = pstats.Stats(profile)
    rows = sorted(found.stats.items(), key=lambda row: -row[1][2])[:most]
    for (file, line, name), (_, calls, own, total, _) in rows:
        where = f"{file.rsplit('/', 1)[-1]}:{line}" if line else ""
        yield (
            f"  {1e6 * own / plans:8.1f} own {1e6 * total / plans:8.1f} all {calls / plans:6.1f}x  {name} {where}"
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--blocks", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--plane", type=int, default=512, metavar="BYTES", help="bytes of each of 64 planes")
    parser.add_argument("--kind", default="both", choices=KINDS)
    parser.add_argument("--cold", action="store_true", help="evict the caches before each phase")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--profile", action="store_true")


def measure(options: argparse.Namespace, report: Report) -> None:
    rank = Rank(options.device, max(options.blocks), options.plane)

    def rows() -> Iterator[Row]:
        for count in options.blocks:
            rounds = max(options.rounds * 128 // max(count, 128), 8)
            clock = Clock(Eviction() if options.cold else None)
            carry_out_all(rank, count, options.kind, rounds, clock)
            yield {"blocks": count, **{phase: median_and_least(clock.spent[phase]) for phase in PHASES}}
            if options.profile:
                clock.profile = cProfile.Profile(time.thread_time)
                carry_out_all(rank, count, options.kind, rounds, clock)
                for line in profile_lines(clock.profile, rounds):
                    report.note(line)

    cold = ", caches evicted" if options.cold else ""
    title = f"A plan on device {options.device}, {options.kind}{cold}: us, median (least)"
    report.table(title, rows())
    rank.controller.shutdown()


def median_and_least(spent: list[int]) -> str:
    return f"{np.median(spent) / 1e3:.1f} ({min(spent) / 1e3:.1f})" if spent else "-"
