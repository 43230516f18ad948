"""Measure models of several kinds of layers, on a GPU or the CPU: bytes, time to the first token, copies of states.

A stand-in for the model fills device blocks and compares them after they came back from the host.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness import Report, Row
from fdcache.controller.cache_controller import CacheController
from fdcache.devices.base import Device
from fdcache.devices.cpu import CpuDevice
from fdcache.groups import CacheGroup, Reach
from fdcache.layout import KVLayout
from fdcache.layout_planes import PlaneKind, PlaneSpec
from fdcache.manager import NO_BLOCK, LoadStatus, OffloadManager, Request
from fdcache.metadata import Int32Array, TransferReport
from fdcache.settings.cache import CacheSettings, CopySettings, LoadOrRecompute, SwapMethod, WritePolicy

STATE = Reach.STATE


@dataclass(frozen=True)
class Shape:
    """A model as vLLM lays it out: the bytes of each plane of a block, and its groups."""

    plane_bytes: int
    num_planes: int
    page: int
    groups: tuple[CacheGroup, ...] = ()
    part: int = 1
    """Of the tokens of a prompt, so that it fits."""

    def layout(self, name: str, share: int) -> KVLayout:
        """Return the layout, with planes of a ``share`` of the bytes."""
        spec = PlaneSpec(PlaneKind.KEY, "uint8", (max(self.plane_bytes // share, 64),))
        return KVLayout.of_layers(
            [[spec]] * self.num_planes, model=name, revision="1", block_size=self.page, groups=self.groups
        )


SHAPES = {
    "DeepSeek V3 (latents)": Shape(64 * 576 * 2, 61, 64),
    "Qwen3-Next (states + full)": Shape(
        544 * 2048, 12, 544, (CacheGroup(544, STATE),) * 3 + (CacheGroup(544),)
    ),
    "Gemma 3 27B (windows + full)": Shape(
        16 * 16 * 128 * 2 * 2,
        10,
        16,
        (CacheGroup(16, Reach.LAST, 1024),) * 5 + (CacheGroup(16),),
        part=4,
    ),
    "Mamba 2 (states alone)": Shape(1 << 20, 16, 512, (CacheGroup(512, STATE),) * 3),
}


class Engine:
    """A manager, one rank and the device blocks of an engine.

    ``blocks``: of the host tier; the device has twice as many.
    """

    def __init__(self, layout: KVLayout, blocks: int, work: Work) -> None:
        self.layout = layout
        self.arrays = arrays = work.arrays
        settings = CacheSettings(
            host_memory=(blocks + blocks // 2 + 64) * (layout.record_bytes + 128),  # it evicts ahead of need
            write_policy=WritePolicy.WRITE_THROUGH,
            load_or_recompute=LoadOrRecompute.ALWAYS,
        )
        self.manager = OffloadManager(settings, layout)
        self.controller = CacheController(work.copies, layout, device=work.device)
        name = None if arrays is np else "cupy"
        self.tensors = self.controller.initialize_kv_cache(2 * blocks, name)
        self.controller.initialize_host_cache(self.manager.host_cache)
        self.stream = None if arrays is np else arrays.cuda.Stream(non_blocking=True)

    def table(self, request: Request, first: int) -> Int32Array:
        """Return device blocks from ``first`` on: those of a request's pages, then its states."""
        records = len(request.block_hashes) * self.layout.page_records
        return np.arange(first, first + records + self.layout.num_states, dtype=np.int32)

    def in_reach(self, request: Request, table: Int32Array) -> Int32Array:
        """Return a table without the blocks that no layer needs after the prompt."""
        layout, pages, ids = self.layout, len(request.block_hashes), table.copy()
        tokens = pages * layout.block_size
        rows = ids[: pages * layout.page_records].reshape(pages, -1)
        for column, group in enumerate(layout.page_groups):
            if layout.groups and layout.groups[group].is_limited:
                rows[: layout.groups[group].blocks_beyond(tokens), column] = NO_BLOCK
        return ids

    def copied(self) -> list[TransferReport]:
        """Submit the plans of a step, wait for their copies and count them; return the reports."""
        plans = self.manager.take_plans()
        for plan in plans:
            self.controller.submit_swap_tasks(plan, self.stream)
        reports: list[TransferReport] = []
        while len(reports) < len(plans):
            reports += self.controller.wait_reports(60.0)
        self.outcomes = self.manager.apply(reports)
        return reports

    def close(self) -> None:
        self.controller.shutdown()
        self.manager.close()


class Work:
    """The device, its array library, and a step of a model: products of matrices."""

    def __init__(self, kind: str, milliseconds: float, method: SwapMethod) -> None:
        self.copies = CopySettings(swap_method=method)
        self.device: Device = CpuDevice(copy_threads=2)
        self.arrays: Any = np
        if kind == "cuda":
            import cupy

            from fdcache.devices.cuda import CudaDevice

            self.device, self.arrays = CudaDevice(0, settings=self.copies), cupy
        size = 8192 if kind == "cuda" else 512
        self._left = self.arrays.ones((size, size), dtype=np.float32)
        self._times = 1
        one = self._timed()
        self._times = max(round(milliseconds / 1e3 / one), 1)
        self.seconds = statistics.median(self._timed() for _ in range(5))

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.arrays is not np:
            self.arrays.cuda.Device().synchronize()

    def step(self) -> None:
        """Compute a step, and wait for it."""
        for _ in range(self._times):
            self._left @ self._left
        self.synchronize()

    def _timed(self) -> float:
        self.step()
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began

    def link(self, nbytes: int) -> dict[str, float]:
        """Return the GB/s of one large copy in each direction."""
        if self.arrays is np:
            source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
            speed = nbytes / self._least(lambda: np.copyto(target, source)) / 1e9
            return {"H2D": speed, "D2H": speed}
        cupy = self.arrays
        host = np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)
        there = cupy.empty(nbytes, np.uint8)
        return {
            "H2D": nbytes / self._least(lambda: there.set(host)) / 1e9,
            "D2H": nbytes / self._least(lambda: there.get(out=host)) / 1e9,
        }

    def _least(self, copy: Callable[[], object]) -> float:
        found = []
        for _ in range(6):
            self.synchronize()
            began = time.perf_counter()
            copy()
            self.synchronize()
            found.append(time.perf_counter() - began)
        return min(found)


def rate(reports: list[TransferReport]) -> float:
    """Return the GB/s of copies."""
    results = [result for report in reports for result in report.results]
    seconds = sum(result.seconds for result in results)
    return sum(result.copied_bytes for result in results) / max(seconds, 1e-9) / 1e9


def prompts(layout: KVLayout, tokens: int, count: int) -> list[list[int]]:
    """Return prompts of whole pages and a token."""
    random = np.random.default_rng(0)
    size = tokens // layout.block_size * layout.block_size
    return [[int(each) for each in random.integers(3, 30000, size + 1)] for _ in range(count)]


def compute(engine: Engine, request: Request, first: int, work: Work) -> Int32Array:
    """Fill the blocks of a prompt as computing does, and offer them once they are filled."""
    layout, manager = engine.layout, engine.manager
    manager.begin([request])
    ids = engine.table(request, first)
    given = engine.arrays.asarray(ids)
    manager.evicted(ids)
    engine.copied()
    for number, tensor in enumerate(engine.tensors):
        rows = engine.arrays.random.randint(0, 255, (len(given), tensor.shape[1])).astype(np.uint8)
        tensor[given] = rows + np.uint8(number)
    work.synchronize()  # copies follow a stream of their own, which does not wait for this one
    pages = len(request.block_hashes)
    records = pages * layout.page_records
    manager.offer(request, pages * layout.block_size, ids[:records])
    if layout.num_states:
        above = int(ids[records - 1]) if records else NO_BLOCK
        manager.offer_states(request, pages * layout.block_size, ids[records:], above)
    return ids


def same(engine: Engine, one: Int32Array, other: Int32Array) -> bool:
    """Return True if device blocks have equal bytes."""
    use = other != NO_BLOCK
    left, right = (engine.arrays.asarray(each[use]) for each in (one, other))
    return all(bool((tensor[left] == tensor[right]).all()) for tensor in engine.tensors)


def measured(name: str, shape: Shape, options: argparse.Namespace, link: dict[str, float], work: Work) -> Row:
    layout = shape.layout(name, options.share)
    length = options.tokens // shape.part
    each = length // layout.block_size * max(layout.page_records, 1) + layout.num_states
    count = options.rounds
    engine = Engine(layout, each * count, work)
    given = prompts(layout, length, count)
    out, home, first, ratio, wrong = [], [], [], [], 0
    tables = []
    for number, tokens in enumerate(given):
        request = Request(f"first {number}", tokens)
        tables.append(compute(engine, request, number * each, work))
        out.append(rate(engine.copied()))
        while engine.manager.has_pending_work:
            engine.copied()
        engine.manager.finish([request])
    for number, tokens in enumerate(given):
        again = Request(f"again {number}", tokens)
        engine.manager.prepare([again])
        ids = engine.in_reach(again, tables[number] + each * count)
        work.synchronize()
        began = time.perf_counter()
        engine.manager.begin([again])
        found = engine.manager.match(again, 0)
        assert found.num_tokens == len(again.block_hashes) * layout.block_size, found
        engine.manager.load(again, ids)
        reports = engine.copied()
        (outcome,) = engine.outcomes
        assert outcome.status is LoadStatus.CONFIRMED
        work.step()
        first.append(time.perf_counter() - began)
        nbytes = sum(result.copied_bytes for report in reports for result in report.results)
        ratio.append(first[-1] / (nbytes / 1e9 / link["H2D"] + work.seconds))
        home.append(rate(reports))
        wrong += not same(engine, tables[number], ids)
        engine.manager.finish([again])
    engine.close()
    return {
        "model": name,
        "MB of a prompt": nbytes / 1e6,
        "records": layout.page_records + layout.num_states,
        "padding": 1 - layout.payload_bytes / layout.record_bytes,
        "D2H / link": statistics.median(out) / link["D2H"],
        "H2D / link": statistics.median(home) / link["H2D"],
        "TTFT, ms": 1e3 * statistics.median(first),
        "TTFT / (bytes / link + step)": statistics.median(ratio),
        "wrong prompts": wrong,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the device, the length of a prompt and its number."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=6, help="prompts of each model")
    parser.add_argument("--share", type=int, default=1, help="divide the bytes of a plane by this")
    parser.add_argument(
        "--swap-method", choices=list(SwapMethod), default=SwapMethod.AUTO, help="way of copies"
    )
    parser.add_argument("--step", type=float, default=20.0, help="milliseconds of a step")


def measure(options: argparse.Namespace, report: Report) -> bool:
    """Return False if bytes came back wrong."""
    work = Work(options.device, options.step, SwapMethod(options.swap_method))
    link = work.link((1 << 30) // options.share)
    report.note(
        f"link: {link['H2D']:.1f} GB/s to the device, {link['D2H']:.1f} from it; a step: {1e3 * work.seconds:.1f} ms"
    )

    def rows() -> Iterator[Row]:
        for name, shape in SHAPES.items():
            yield measured(name, shape, options, link, work)

    table = report.table("Prompts from the host", rows())
    return not any(row["wrong prompts"] for row in table)
