"""Measure the runs of host slots that reservations get as a tier fills up and is refilled, and what they are worth.

6,000 requests that start, continue or branch off conversations reserve slots of a full tier. For comparison, a stack
allocates the slot that was freed last. Copies of both are timed: with ``--device cpu`` one memcpy per run, beside one
memcpy of as many bytes; with ``--device cuda`` loads and evictions of a worker.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Report, Row
from fdcache import _core
from fdcache.metadata import HashArray, Int32Array
from fdcache.tiers.pool import HOST_SPARE

SLOTS = 16_384
EXTENT = 64
"""Slots of an extent: records of 1 MiB."""
RESERVATIONS = 6_000
POINTS = (100, 500, 1_000, 2_000, 4_000, 6_000)
WINDOW = 100
"""Number of reservations before each point that a figure covers."""
IN_FLIGHT = 16
RECORD_BYTES = 64 << 10
"""Record size of the CPU's copies; 1 MiB on a GPU."""
GIB = 1 << 30


@dataclass
class Stack:
    """Slots that a stack of free slots would allocate for the same reservations, ascending."""

    slots: int
    _at: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free = list(range(self.slots))[::-1]

    def take(self, taken: _core.Reservation) -> Int32Array:
        """Allocate slots for a reservation of a tier that evicts on demand only."""
        self._free += [self._at.pop(slot) for slot in taken.evicted.slots.tolist()]
        mine = sorted(self._free[-len(taken) :])
        del self._free[-len(taken) :]
        self._at.update(zip(taken.slots.tolist(), mine, strict=True))
        return np.array(mine, np.int32)


def conversations(seed: int = 0) -> Iterator[HashArray]:
    """Generate the block hashes of each request: of a new conversation, or one that continues or branches."""
    random = np.random.default_rng(seed)
    known: deque[HashArray] = deque(maxlen=2_000)
    while True:
        path = np.empty((0, 32), np.uint8)
        if known and random.random() < 0.6:
            path = known[len(known) - 1 - int(len(known) * random.random() ** 3)]
            if random.random() < 0.3:
                path = path[: random.integers(1, len(path) + 1)]
        added = int(min(1 + random.lognormal(3.9, 1.1), 1_500))
        path = np.concatenate((path, random.integers(0, 256, (added, 32), np.uint8)))[:4_000]
        known.append(path)
        yield path


def recorded(trace: Path, blocks: int = 8) -> Iterator[HashArray]:
    """Generate the block hashes of each request of a Mooncake trace, ``blocks`` per hash of the trace."""
    for line in trace.read_text().splitlines():
        ids = np.array(json.loads(line)["hash_ids"], np.int64)
        words = np.zeros((len(ids) * blocks, 4), np.int64)
        words[:, 1] = np.repeat(ids, blocks) * blocks + np.tile(np.arange(blocks), len(ids)) + 1
        words[:, 0] = words[:, 1] * 0x9E3779B97F4A7C1  # hash tables look at the first bytes
        yield words.view(np.uint8).reshape(-1, 32)


@dataclass
class Traffic:
    """Requests through one tier, ``IN_FLIGHT`` of them at a time."""

    tier: _core.Tier
    hits: int = 0
    blocks: int = 0

    def serve(self, paths: Iterator[HashArray]) -> Iterator[_core.Reservation]:
        """Generate the reservation of each request that needs slots."""
        running: deque[int] = deque()
        for path in paths:
            lease = self.tier.open_lease()
            found = len(self.tier.match(lease, path))
            self.hits += found
            self.blocks += len(path)
            if found < len(path):
                taken = self.tier.reserve(lease, len(path) - found)
                assert not taken.missing
                yield taken
                parent = path[found - 1].tobytes() if found else bytes(32)
                self.tier.commit(lease, parent, np.ascontiguousarray(path[found:]), taken.slots)
            running.append(lease)
            if len(running) > IN_FLIGHT:
                self.tier.release(running.popleft())


def churn() -> tuple[dict[str, list[Int32Array]], dict[str, float]]:
    """Return the slots of every reservation, of the stack and of the tier, and the hit rates."""
    exact = Traffic(_core.Tier(SLOTS))
    stack = Stack(SLOTS)
    slots: dict[str, list[Int32Array]] = {"stack": [], "runs": []}
    for taken in exact.serve(conversations()):
        slots["stack"].append(stack.take(taken))
        if len(slots["stack"]) == RESERVATIONS:
            break
    ahead = Traffic(_core.Tier(SLOTS, extent=EXTENT, spare=HOST_SPARE))
    for taken in ahead.serve(conversations()):
        slots["runs"].append(taken.slots)
        if len(slots["runs"]) == RESERVATIONS:
            break
    return slots, {"stack": exact.hits / exact.blocks, "runs": ahead.hits / ahead.blocks}


def mean_run(reservations: Sequence[Int32Array]) -> float:
    """Return the mean number of blocks in a run; no run crosses an extent."""
    runs = sum(len(_core.find_runs(slots, EXTENT)) for slots in reservations)
    return sum(map(len, reservations)) / runs


class CpuCopies:
    """Copies of records from an arena, one memcpy per run, beside one memcpy of as many bytes."""

    name = "memcpy of runs, to one of the same bytes"

    def __init__(self) -> None:
        self._arena = np.ones((SLOTS, RECORD_BYTES), np.uint8)
        self._target = np.ones((GIB // 8 // RECORD_BYTES, RECORD_BYTES), np.uint8)

    def measure(self, reservations: Sequence[Int32Array]) -> str:
        """Return the rate of the copies of all these reservations, and its ratio to that of large copies."""
        runs = [
            (int(slots[first]), count)
            for slots in reservations
            for first, count in _core.find_runs(slots, EXTENT)
        ]
        whole = [(0, len(slots)) for slots in reservations]
        pairs = [(self._seconds(runs), self._seconds(whole)) for _ in range(7)]
        nbytes = sum(count for _, count in runs) * RECORD_BYTES
        ratio = statistics.median(large / small for small, large in pairs)
        return f"{nbytes / min(seconds for seconds, _ in pairs) / 1e9:.1f} GB/s, {ratio:.2f}"

    def _seconds(self, parts: list[tuple[int, int]]) -> float:
        at = 0
        start = time.perf_counter()
        for first, count in parts:
            if at + count > len(self._target):
                at = 0
            self._target[at : at + count] = self._arena[first : first + count]
            at += count
        return time.perf_counter() - start


class GpuCopies:
    """Loads and evictions of a worker, 1 GiB of the reservations' records each, beside one large pinned copy."""

    name = "H2D, D2H, to one large pinned copy"

    def __init__(self) -> None:
        from benchmarks.swap.peers import Peers
        from benchmarks.swap.worker import SwapWorker, make_layout
        from fdcache.machine.calibration import Calibration

        self._link = Peers().link()
        layout = make_layout(16)
        self._worker = SwapWorker(layout, pool_bytes=SLOTS * layout.record_bytes, calibration=Calibration())
        self._random = np.random.default_rng(0)

    def measure(self, reservations: Sequence[Int32Array]) -> str:
        """Return the rates of loads and evictions, each with its ratio to the link's."""
        found = []
        for way, link in (("load", self._link.to_device), ("evict", self._link.to_host)):
            rate = self._worker.rate(way, lambda nbytes: self._pick(reservations, nbytes), GIB)
            found.append(f"{rate / 1e9:.1f} GB/s, {rate / link:.2f}")
        return "; ".join(found)

    def _pick(self, reservations: Sequence[Int32Array], nbytes: int) -> Any:
        """Return the slots of consecutive reservations, each slot once."""
        from benchmarks.swap.worker import Pick

        count = nbytes // self._worker.layout.record_bytes
        start = int(self._random.integers(len(reservations)))
        joined = np.concatenate([*reservations[start:], *reservations[:start]])
        _, first = np.unique(joined, return_index=True)
        host = joined[np.sort(first)[:count]]
        if len(host) < count:
            raise RuntimeError(f"{len(reservations)} reservations have {len(host)} slots, not {count}")
        return Pick(self._random.permutation(SLOTS)[:count].astype(np.int32), host)


def trace_hit_rates(trace: Path, slots: int = 50_000) -> tuple[float, float]:
    """Return the hit rates of a tier that evicts on demand only, and of one that evicts ahead."""
    rates = []
    for spare in (0.0, HOST_SPARE):
        traffic = Traffic(_core.Tier(slots, extent=EXTENT, spare=spare))
        for _ in traffic.serve(recorded(trace)):
            pass
        rates.append(traffic.hits / traffic.blocks)
    return rates[0], rates[1]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--trace", type=Path, help="a Mooncake trace to compare hit rates on, too")


def measure(options: argparse.Namespace, report: Report) -> None:
    slots, hit_rates = churn()
    copies = CpuCopies() if options.device == "cpu" else GpuCopies()

    def rows() -> Iterator[Row]:
        for point in POINTS:
            row: dict[str, Any] = {"reservations": point}
            parts = {name: each[point - WINDOW : point] for name, each in slots.items()}
            row |= {f"mean run, {name}": mean_run(part) for name, part in parts.items()}
            yield row | {f"copies, {name}": copies.measure(part) for name, part in parts.items()}

    report.note(f"{SLOTS} host slots, extents of {EXTENT}; copies: {copies.name}")
    report.table("Runs of host slots", rows())
    report.note(f"hit rate: {hit_rates['stack']:.4f} with the stack, {hit_rates['runs']:.4f} with runs")
    if options.trace:
        exact, ahead = trace_hit_rates(options.trace)
        report.note(f"hit rate on the trace, 50,000 blocks: {exact:.5f}, and {ahead:.5f} with slots to spare")
