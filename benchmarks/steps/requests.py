"""Measure the scheduler side: microseconds per request by call, and per decode step.

A closed loop of `--concurrency` requests over the recorded trace (or a generated chat workload where there is no
trace) goes through a `CacheManager` without workers: whole prompts in one piece, then a block of output tokens
per call. Hashing is measured separately, over the same prompts; `match` includes it.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Report, Row, find_trace, median_us
from fdcache.hashing import TokenBlocks, root_hash
from fdcache.layout import KVLayout
from fdcache.manager import CacheManager, Request
from fdcache.replay.trace import read_trace
from fdcache.replay.workloads import WorkItem, WorkloadName, generate
from fdcache.settings.cache import CacheSettings

BLOCK = 64
DECODE_STEPS = 512
PHASES = ("hash", "match", "allocate", "commit", "decode", "finish")


@dataclass(slots=True)
class Running:
    """A request in flight, its output, and the number of output tokens so far."""

    request: Request
    output: NDArray[np.int32]
    done: int = 0


class Clock:
    """Nanoseconds by phase and request."""

    def __init__(self) -> None:
        self.spent: dict[str, dict[str, int]] = {phase: defaultdict(int) for phase in PHASES}
        self._since = 0

    def start(self) -> None:
        self._since = time.perf_counter_ns()

    def lap(self, phase: str, request: Request) -> None:
        now = time.perf_counter_ns()
        self.spent[phase][request.request_id] += now - self._since
        self._since = time.perf_counter_ns()

    def rows(self) -> Iterator[Row]:
        """Yield mean and percentiles by phase, in microseconds per request."""
        for phase, spent in self.spent.items():
            values = np.array(list(spent.values()), dtype=np.float64) / 1000
            p50, p99 = np.percentile(values, [50, 99])
            yield {
                "us per request": phase,
                "mean": float(values.mean()),
                "p50": float(p50),
                "p99": float(p99),
            }


def layout() -> KVLayout:
    return KVLayout.uniform(
        model="bench", revision="1", num_layers=2, block_size=BLOCK, kv_heads=1, head_dim=16, dtype="bfloat16"
    )


def drive(items: Iterator[WorkItem], blocks: int, concurrency: int) -> tuple[Clock, float, int]:
    """Run all requests; return the clock, the hit rate and the number of requests."""
    manager = CacheManager(CacheSettings(device_blocks=blocks), layout())
    clock = Clock()
    running: deque[Running] = deque()
    reserved = prompts = hits = count = 0
    pending = next(items, None)
    while running or pending is not None:
        while pending is not None and len(running) < concurrency:
            needed = -(-(pending.prompt_length + pending.output_length) // BLOCK) + 2
            if needed <= blocks and reserved + needed > blocks:
                break
            if needed <= blocks:
                entered = admit(manager, clock, pending)
                running.append(entered)
                reserved += needed
                prompts += pending.prompt_length
                hits += entered.request.num_cached_tokens
                count += 1
            pending = next(items, None)
        for _ in range(len(running)):
            entry = running.popleft()
            if entry.done < len(entry.output):
                decode(manager, clock, entry)
                running.append(entry)
                continue
            reserved -= -(-entry.request.num_tokens // BLOCK) + 2
            clock.start()
            manager.finish([entry.request])
            clock.lap("finish", entry.request)
    return clock, hits / prompts, count


def admit(manager: CacheManager, clock: Clock, item: WorkItem) -> Running:
    tokens = item.tokens(0)
    prompt = tokens[: item.prompt_length]
    request = Request(str(item.index), prompt)
    blocks = TokenBlocks(BLOCK, root_hash(manager.layout.fingerprint))
    clock.start()
    blocks.append(prompt)
    assert len(blocks.hashes) == len(prompt) // BLOCK
    clock.lap("hash", request)
    manager.match_prefix([request])
    clock.lap("match", request)
    (allocation,) = manager.allocate_device_blocks([(request, len(prompt))])
    clock.lap("allocate", request)
    assert allocation.ok
    manager.commit([(request, len(prompt))])
    clock.lap("commit", request)
    clock.spent["decode"][request.request_id] = 0
    return Running(request, tokens[item.prompt_length :])


def decode(manager: CacheManager, clock: Clock, entry: Running) -> None:
    request = entry.request
    tokens = entry.output[entry.done : entry.done + BLOCK]
    clock.start()
    manager.allocate_device_blocks([(request, request.num_tokens + len(tokens))])
    request.append_tokens(tokens)
    manager.commit([(request, request.num_tokens)])
    clock.lap("decode", request)
    entry.done += len(tokens)


def decode_step_us(concurrency: int) -> float:
    """Return the median time of a decode step: one token for every running request, in a full pool."""
    blocks = max(20_000, 128 * concurrency)
    manager = CacheManager(CacheSettings(device_blocks=blocks), layout())
    random = np.random.default_rng(0)
    filler = Request("filler", random.integers(0, 1000, blocks * BLOCK, dtype=np.int32))
    manager.match_prefix([filler])
    manager.allocate_device_blocks([(filler, blocks * BLOCK)])
    manager.commit([(filler, blocks * BLOCK)])
    manager.finish([filler])
    requests = [
        Request(str(i), random.integers(0, 1000, 4096 + 7 * i, dtype=np.int32)) for i in range(concurrency)
    ]
    manager.match_prefix(requests)
    manager.allocate_device_blocks([(request, request.num_tokens) for request in requests])
    token = np.array([7], dtype=np.int32)

    def step() -> None:
        manager.allocate_device_blocks([(request, request.num_tokens + 1) for request in requests])
        for request in requests:
            request.append_tokens(token)
        manager.commit([(request, request.num_tokens) for request in requests])

    return median_us(step, DECODE_STEPS)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--device-blocks", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=32)


def measure(options: argparse.Namespace, report: Report) -> None:
    trace = find_trace()
    items = read_trace(trace) if trace else generate(WorkloadName.CHAT, options.requests, 0)
    clock, hit_rate, count = drive(
        itertools.islice(items, options.requests), options.device_blocks, options.concurrency
    )
    report.note(
        f"{count} requests of {'the recorded trace' if trace else 'a generated chat workload'}, "
        f"{options.device_blocks} blocks of {BLOCK} tokens, {options.concurrency} in flight, hit rate {hit_rate:.1%}"
    )
    report.table("A request, by call", clock.rows())
    report.note("match includes hashing; decode is all output tokens of a request, a block a call")
    step = {"requests": options.concurrency, "a decode step, us": decode_step_us(options.concurrency)}
    report.table("A decode step, a token for each request", [step])
