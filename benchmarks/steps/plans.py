"""Measure the manager's side of plans: microseconds per step of the scheduler's thread, by call.

Visitors: each loads 16 blocks from the host and leaves 16 new ones to back up, beside 32 decodes that compute, at the
shape of an 8B model (blocks of 64 tokens and 8 MiB). Prompts: 2,048 tokens that share nothing, in tiers that are full.
Empty: `take_plans` of a step without copies. There are no workers; reports come one step later, and making them is not
measured. Each figure is the median over all steps.

With `--cold` the thread does other things between two steps, as an engine does: it multiplies matrices, runs other
Python code and reads 64 MiB. The manager's code and data have left the processor's caches then.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import textwrap
import time
import tokenize
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.harness import Report, Row, median_us
from fdcache.layout import KVLayout
from fdcache.manager import CacheManager, LoadStatus, MatchStatus, Request
from fdcache.metadata import (
    SLOT_HEADER_BYTES,
    Int32Array,
    StorageScan,
    StorageTask,
    SwapPurpose,
    TransferPlan,
    TransferReport,
    TransferResult,
)
from fdcache.settings.cache import CacheSettings, StorageTierSettings, WritePolicy

BLOCK = 64
HALF = 16 * BLOCK
SEQUENCES, CONTEXT = 32, 1024
PREFIXES = 12
NO_POSITIONS = np.empty(0, np.int32)
Figures = dict[str, float]


def layout() -> KVLayout:
    return KVLayout.uniform(
        model="8b", revision="1", num_layers=32, block_size=BLOCK, kv_heads=8, head_dim=128, dtype="bfloat16"
    )


def make_manager(device_blocks: int, host_blocks: int, policy: WritePolicy) -> CacheManager:
    shape = layout()
    memory = host_blocks * (shape.record_bytes + SLOT_HEADER_BYTES)
    return CacheManager(
        CacheSettings(device_blocks=device_blocks, host_memory=memory, write_policy=policy), shape
    )


def prompt(tokens: int, seed: int) -> Int32Array:
    return np.random.default_rng(seed).integers(0, 128_256, tokens, dtype=np.int32)


class Clock:
    """Nanoseconds by call, of the present step and of all steps before it."""

    def __init__(self) -> None:
        self._step: dict[str, int] = defaultdict(int)
        self._steps: list[dict[str, int]] = []

    @contextmanager
    def measure(self, call: str) -> Iterator[None]:
        since = time.perf_counter_ns()
        yield
        self._step[call] += time.perf_counter_ns() - since

    def wake(self) -> None:
        """Measure nothing, so that the cost of a cold clock is in no call."""
        with self.measure("nothing"):
            pass
        del self._step["nothing"]

    def end_step(self) -> None:
        self._steps.append(self._step)
        self._step = defaultdict(int)

    def medians(self) -> Figures:
        """Return the median microseconds of each call over the steps, and of their sum without `prepare`."""
        calls = dict.fromkeys(call for step in self._steps for call in step)
        rows = {call: [step.get(call, 0) / 1000 for step in self._steps] for call in calls}
        total = [(sum(step.values()) - step.get("prepare", 0)) / 1000 for step in self._steps]
        return {call: float(np.median(spent)) for call, spent in rows.items()} | {
            "total": float(np.median(total))
        }


class OtherWork:
    """Work that drives code and data of the manager out of the processor's caches."""

    def __init__(self) -> None:
        self._matrix = np.random.default_rng(1).random((384, 384), dtype=np.float32)
        self._memory = np.ones(64 << 20, np.uint8)
        modules = (argparse, json, dataclasses, inspect, textwrap, tokenize)
        self._sources = deque(inspect.getsource(module) for module in modules)

    def __call__(self) -> None:
        self._matrix @= self._matrix / np.linalg.norm(self._matrix)
        self._sources.rotate()
        tree = ast.parse(self._sources[0])
        json.dumps([ast.dump(each) for each in tree.body[:20]])
        self._memory[::64].sum()


class Worker:
    """Reports plans as one rank would, all copies done."""

    def __init__(self) -> None:
        self._plans: list[TransferPlan | StorageTask] = []
        self.blocks = 0

    def submit(self, plans: list[TransferPlan]) -> None:
        for plan in plans:
            self._plans += (plan, *plan.storage)

    def poll(self) -> list[TransferReport]:
        plans, self._plans = self._plans, []
        return [self._report(plan) for plan in plans]

    def _report(self, plan: TransferPlan | StorageTask) -> TransferReport:
        results = []
        for swap in plan.swaps():
            self.blocks += len(swap)
            count = 0 if swap.purpose is SwapPurpose.LOAD else len(swap)
            results.append(
                TransferResult(
                    purpose=swap.purpose,
                    failed=NO_POSITIONS,
                    checksums=np.arange(count, dtype=np.uint64),
                    copied_bytes=len(swap) << 23,
                    seconds=1e-3,
                )
            )
        return TransferReport(plan_id=plan.plan_id, rank=0, results=tuple(results))


class Serving:
    """A manager, its worker, and the clock of its calls."""

    def __init__(self, manager: CacheManager) -> None:
        self.manager = manager
        self.worker = Worker()
        self.clock = Clock()
        self._named = 0

    def arrive(self, tokens: Int32Array) -> Request:
        """Make a request and hash it, as the threads that tokenize do beside the steps."""
        self._named += 1
        request = Request(str(self._named), tokens)
        with self.clock.measure("prepare"):
            self.manager.prepare([request])
        return request

    def admit(self, request: Request) -> Request:
        with self.clock.measure("match"):
            (match,) = self.manager.match_prefix([request])
        while match.status is MatchStatus.DEFERRED:  # its blocks are on their way to the host
            self.take_plans()
            self.apply()
            (match,) = self.manager.match_prefix([request])
        with self.clock.measure("allocate"):
            (allocation,) = self.manager.allocate_device_blocks([(request, request.num_tokens)])
        assert allocation.ok
        return request

    def advance(self, requests: list[Request]) -> None:
        """Give each request one more token."""
        with self.clock.measure("advance"):
            added = self.manager.advance(requests, [7] * len(requests))
        assert added.ok

    def take_plans(self) -> None:
        with self.clock.measure("take_plans"):
            plans = self.manager.take_plans()
        self.worker.submit(plans)

    def apply(self) -> None:
        reports = self.worker.poll()
        with self.clock.measure("apply"):
            outcomes = self.manager.apply(reports)
        assert all(outcome.status is LoadStatus.CONFIRMED for outcome in outcomes)

    def finish(self, requests: list[Request]) -> None:
        with self.clock.measure("commit"):
            self.manager.commit([(request, request.num_tokens) for request in requests])
        with self.clock.measure("finish"):
            self.manager.finish(requests)

    def settle(self) -> None:
        """Run steps until nothing is planned any more."""
        while True:
            self.take_plans()
            stats = self.manager.get_stats()
            if not (stats.plans_in_flight or stats.queued_backups or stats.queued_stores):
                return
            self.apply()


def visitors(policy: WritePolicy, each_step: int, steps: int, between: Callable[[], None]) -> Figures:
    """Return the figures of steps in which ``each_step`` visitors arrive, and those of the step before leave."""
    own = SEQUENCES * -(-(CONTEXT + steps) // BLOCK)
    device_blocks = own + 160 * each_step
    host_blocks = own + (PREFIXES + 40) * 16 * each_step
    manager = make_manager(device_blocks, host_blocks, policy)
    serving = Serving(manager)
    running = [serving.admit(serving.arrive(prompt(CONTEXT, seed))) for seed in range(SEQUENCES)]
    prefixes = [prompt(HALF, 1000 + seed) for seed in range(PREFIXES * each_step)]
    for prefix in prefixes:
        for _ in range(2):  # a hit, so that a selective policy keeps them too
            serving.settle()
            serving.finish([serving.admit(serving.arrive(np.append(prefix, np.int32(0))))])
    serving.settle()
    serving.clock = Clock()
    serving.worker.blocks = 0
    staying: list[Request] = []
    for step in range(steps):
        texts = [
            np.concatenate(
                (prefixes[(step * each_step + turn) % len(prefixes)], prompt(HALF, 1 << 20 | step))
            )
            for turn in range(each_step)
        ]
        arrived = [serving.arrive(text) for text in texts]
        between()
        serving.clock.wake()
        serving.apply()
        serving.finish(staying)
        serving.advance(running)
        with serving.clock.measure("can_allocate"):
            assert manager.can_allocate_device_blocks(32 * each_step)
        staying = [serving.admit(request) for request in arrived]
        serving.take_plans()
        serving.clock.end_step()
    return serving.clock.medians() | {"blocks": serving.worker.blocks / steps}


def prompts(policy: WritePolicy, tokens: int, steps: int, between: Callable[[], None]) -> Figures:
    """Return the figures of steps that each serve one prompt, none of which shares a block."""
    manager = make_manager(1024, 4096, policy)
    serving = Serving(manager)
    warm = 6 * 1024 * BLOCK // tokens
    for step in range(warm + steps):
        text = prompt(tokens, step)
        if step == warm:
            serving.clock, serving.worker.blocks = Clock(), 0
        request = serving.arrive(text)
        between()
        serving.clock.wake()
        serving.admit(request)
        serving.take_plans()
        serving.finish([request])
        serving.apply()
        serving.clock.end_step()
    return serving.clock.medians() | {"blocks": serving.worker.blocks / steps}


def no_blocks() -> StorageScan:
    """Return the scan of an empty storage."""
    slots, hashes, sums = np.empty(0, np.int32), np.empty((0, 32), np.uint8), np.empty(0, np.uint64)
    return StorageScan(
        rank=0,
        capacity=4096,
        slots=slots,
        generations=slots.astype(np.uint32),
        hashes=hashes,
        parents=hashes,
        checksums=sums,
        written_ms=sums,
    )


def empty_us(policy: WritePolicy, host_blocks: int, *, storage: bool, calls: int) -> float:
    """Return the microseconds of `take_plans` when nothing is planned."""
    shape = layout()
    tier = StorageTierSettings()
    if storage:
        tier = StorageTierSettings(
            connector="local", directory=Path("/nowhere"), size=4096 * shape.record_bytes
        )
    settings = CacheSettings(
        device_blocks=1024,
        host_memory=host_blocks * (shape.record_bytes + SLOT_HEADER_BYTES),
        write_policy=policy,
    )
    with CacheManager(settings, shape, storage=tier) as manager:
        serving = Serving(manager)
        if storage:
            manager.restore_storage([no_blocks()])
        serving.finish([serving.admit(serving.arrive(prompt(4096, 1)))])
        serving.settle()
        return median_us(manager.take_plans, samples=100, calls=calls // 100)


CALLS = (
    "prepare",
    "apply",
    "commit",
    "finish",
    "advance",
    "can_allocate",
    "match",
    "allocate",
    "take_plans",
    "total",
    "blocks",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--cold", action="store_true", help="do other work between two steps")


def measure(options: argparse.Namespace, report: Report) -> None:
    between = OtherWork() if options.cold else lambda: None

    def steps() -> Iterator[Row]:
        for policy in WritePolicy:
            for count in (1, 8):
                name = f"{count} visitor{'s' * (count > 1)}, {policy.value}"
                yield row(name, visitors(policy, count, max(options.steps // count, 20), between))
        for policy in WritePolicy:
            name = f"prompt of 2,048, {policy.value}"
            yield row(name, prompts(policy, 2048, options.steps, between))

    def row(name: str, figures: Figures) -> Row:
        return {"us per step": name, **{call: figures.get(call, 0.0) for call in CALLS}}

    report.table("A step with copies", steps())
    cases = (
        ("device alone", WritePolicy.WRITE_THROUGH, 0, False),
        ("host, write_through", WritePolicy.WRITE_THROUGH, 4096, False),
        ("host, write_back", WritePolicy.WRITE_BACK, 4096, False),
        ("host and storage, write_through", WritePolicy.WRITE_THROUGH, 4096, True),
    )
    report.table(
        "take_plans of a step without copies",
        (
            {"tiers": name, "us": empty_us(policy, host, storage=storage, calls=20_000)}
            for name, policy, host, storage in cases
        ),
    )
