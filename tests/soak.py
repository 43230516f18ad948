"""Soak: generated traffic through managers without workers, for as long as it takes to see memory grow.

    python -m tests.soak --requests 10000000 --minutes 60

Several managers run beside each other, one for each write policy and one without a host tier. Each serves requests
of all kinds of generated traffic, a thirty-second as long as ``fdcache replay`` has them, step by step: match,
allocate, plan, decode, commit, finish. The reports of the plans are made here: no bytes are copied. Some copies fail,
some requests are preempted or aborted, and the cache is reset, slept and resized. Exits with 1 unless every invariant
holds and memory stays flat after the warm-up.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fdcache.layout import KVLayout
from fdcache.manager import CacheManager, LoadStatus, MatchStatus, Request
from fdcache.metadata import CacheSwapMetadata, TransferPlan, TransferReport, TransferResult
from fdcache.replay.workloads import WorkItem, WorkloadName, generate, stream_tokens
from fdcache.settings.cache import CacheSettings

BLOCK = 4
SHORTER = 32
DEVICE_BLOCKS = 300
HOST_BLOCKS = 500
RUNNING = 24
POLICIES = ("write_through", "write_through_selective", "write_back", None)
CHECK_EVERY = 5000
"""Requests after which a manager checks its invariants and samples its memory."""
PROGRESS_EVERY = 30.0
"""Seconds."""
WARM_UP = 0.2
MOST_GROWTH = 16 << 20
"""Bytes by which a process may grow from the warm-up to the end, however many requests it serves."""
MOST_OBJECTS = 20_000
"""The same of allocated Python objects."""


def layout(ranks: int) -> KVLayout:
    return KVLayout.uniform(
        model="soak",
        revision="1",
        num_layers=1,
        block_size=BLOCK,
        kv_heads=ranks,
        head_dim=16,
        dtype="bfloat16",
        tp_size=ranks,
    )


def traffic(count: int, seed: int) -> Iterator[WorkItem]:
    """Generate requests of all kinds in turn."""
    kinds = [generate(name, count, seed + i) for i, name in enumerate(WorkloadName)]
    return itertools.islice(itertools.chain.from_iterable(zip(*kinds, strict=True)), count)


def shortened(item: WorkItem, seed: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the prompt and the output."""
    streams = np.append(item.streams, np.uint64(item.output_stream))
    lengths = np.append(item.lengths, item.output_length) // SHORTER + 1
    tokens = stream_tokens(streams, lengths, seed)
    return tokens[: -lengths[-1]], tokens[-lengths[-1] :]


@dataclass(eq=False, slots=True)
class Job:
    """A request, and the output tokens that it is still to get."""

    request: Request
    output: NDArray[np.int32]
    done: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory of a process after so many requests."""

    requests: int
    resident: int
    objects: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one manager did, and what was wrong."""

    name: str
    requests: int
    seconds: float
    counts: dict[str, int]
    samples: list[Sample]
    faults: list[str]


def sample(requests: int) -> Sample:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(requests, pages * os.sysconf("SC_PAGE_SIZE"), sys.getallocatedblocks())


def growth(samples: Sequence[Sample], of: Callable[[Sample], int]) -> float:
    """Return by how much a figure grows from the end of the warm-up to the last sample: a straight line's rise."""
    last = samples[-1].requests
    steady = [each for each in samples if each.requests >= WARM_UP * last]
    if len(steady) < 3:
        return 0.0
    slope, _ = np.polyfit([each.requests for each in steady], [of(each) for each in steady], 1)
    return float(slope * (last - steady[0].requests))


def resident_growth(samples: Sequence[Sample]) -> float:
    return growth(samples, lambda each: each.resident)


def object_growth(samples: Sequence[Sample]) -> float:
    return growth(samples, lambda each: each.objects)


def leaks(samples: Sequence[Sample]) -> list[str]:
    """Return what does not stay flat."""
    found = []
    if (grown := resident_growth(samples)) > MOST_GROWTH:
        found.append(f"memory grows by {grown / (1 << 20):.1f} MiB")
    if (objects := object_growth(samples)) > MOST_OBJECTS:
        found.append(f"{objects:,.0f} Python objects more are kept")
    return found


@dataclass(slots=True)
class Soak:
    """One manager and its requests."""

    policy: str | None
    seed: int
    manager: CacheManager = field(init=False)
    random: random.Random = field(init=False)
    ranks: int = 2
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    due: deque[list[TransferReport]] = field(default_factory=deque)
    counts: dict[str, int] = field(default_factory=dict)
    arrived: int = 0
    finished: int = 0

    def __post_init__(self) -> None:
        shape = layout(self.ranks)
        host = {"host_memory": HOST_BLOCKS * shape.record_bytes * self.ranks, "write_policy": self.policy}
        settings = CacheSettings(device_blocks=DEVICE_BLOCKS, **(host if self.policy else {}))
        self.manager = CacheManager(settings, shape)
        self.random = random.Random(self.seed)

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + number

    def step(self, arrivals: Iterator[WorkItem]) -> None:
        """Run one step of an engine."""
        self.admit(arrivals)
        self.decode()
        plans = self.manager.take_plans()
        self.due.append([self.report(plan, rank) for plan in plans for rank in range(self.ranks)])
        self.manager.commit([(job.request, job.request.num_tokens) for job in self.running])
        while len(self.due) > self.random.randrange(4):
            self.apply(self.due.popleft())
        self.finish()

    def admit(self, arrivals: Iterator[WorkItem]) -> None:
        while len(self.waiting) + len(self.running) < RUNNING and (item := next(arrivals, None)):
            prompt, output = shortened(item, self.seed)
            self.arrived += 1
            self.waiting.append(Job(Request(str(self.arrived), prompt), output))
        batch = [self.waiting.popleft() for _ in range(min(4, len(self.waiting)))]
        for job, result in zip(batch, self.manager.match_prefix([job.request for job in batch]), strict=True):
            if result.status is MatchStatus.DEFERRED:
                self.count("deferred")
                self.waiting.append(job)
                continue
            (allocation,) = self.manager.allocate_device_blocks([(job.request, job.request.num_tokens)])
            if allocation.ok:
                self.count("tokens reused", job.request.num_cached_tokens)
                self.running.append(job)
            else:
                self.count("no room")
                self.preempt(job)

    def preempt(self, job: Job) -> None:
        self.manager.finish([job.request])
        self.waiting.appendleft(job)

    def decode(self) -> None:
        for job in list(self.running):
            tokens = job.output[job.done : job.done + self.random.randrange(1, 6)]
            if not len(tokens):
                continue
            wanted = job.request.num_tokens + len(tokens)
            (allocation,) = self.manager.allocate_device_blocks([(job.request, wanted)])
            if not allocation.ok:
                self.count("preempted")
                self.running.remove(job)
                self.preempt(job)
                continue
            job.request.append_tokens(tokens)
            job.done += len(tokens)

    def report(self, plan: TransferPlan, rank: int) -> TransferReport:
        return TransferReport(
            plan_id=plan.plan_id, rank=rank, results=tuple(self.copied(swap) for swap in plan.swaps())
        )

    def copied(self, swap: CacheSwapMetadata) -> TransferResult:
        self.count(f"{swap.purpose.value} blocks", len(swap))
        failed = [self.random.randrange(len(swap))] if self.random.random() < 0.02 else []
        return TransferResult(
            purpose=swap.purpose,
            failed=np.array(failed, np.int32),
            checksums=np.zeros(len(swap), np.uint64),
            copied_bytes=0,
            seconds=0.0,
            error_message="injected" if failed else None,
        )

    def apply(self, reports: list[TransferReport]) -> None:
        for outcome in self.manager.apply(reports):
            if outcome.status is LoadStatus.FAILED:
                self.count("failed loads")

    def finish(self) -> None:
        """End requests that have their output, and abort a few others."""
        ended = [job for job in self.running if job.done == len(job.output) or self.random.random() < 0.005]
        self.running = [job for job in self.running if job not in ended]
        self.manager.finish([job.request for job in ended])
        self.finished += len(ended)

    def disturb(self) -> None:
        """Do what operators do, between steps."""
        match self.random.randrange(4):
            case 0:
                self.count("resets")
                self.manager.reset_cache()
            case 1:
                self.count("sleeps")
                while self.running:
                    self.preempt(self.running.pop())
                self.settle()
                self.manager.sleep()
                self.manager.wakeup()
            case 2:
                smaller = DEVICE_BLOCKS - self.random.randrange(DEVICE_BLOCKS // 3)
                self.count("resizes", self.manager.resize_device_pool(smaller))
            case _:
                self.manager.resize_device_pool(DEVICE_BLOCKS)

    def settle(self) -> None:
        """Report everything that is in flight, and what that leads to."""
        while plans := self.manager.take_plans():
            self.due.append([self.report(plan, rank) for plan in plans for rank in range(self.ranks)])
            self.drain()
        self.drain()

    def drain(self) -> None:
        while self.due:
            self.apply(self.due.popleft())

    def check_end(self) -> list[str]:
        """Return what is left of requests that have all ended."""
        self.settle()
        stats = self.manager.get_stats()
        tiers = [stats.device] if stats.host is None else [stats.device, stats.host]
        left = {
            "requests": stats.live_requests,
            "plans": stats.plans_in_flight,
            "pins": sum(tier.pins for tier in tiers),
            "holds": sum(tier.holds for tier in tiers),
            "leases": sum(tier.leases for tier in tiers),
        }
        return [f"{number} {what} are left" for what, number in left.items() if number]


def soak(
    policy: str | None, requests: int, deadline: float, seed: int, check_every: int = CHECK_EVERY
) -> Outcome:
    """Serve requests until there have been enough, or it is late."""
    name = policy or "no host tier"
    one = Soak(policy, seed)
    arrivals = traffic(requests, seed)
    start = shown = time.monotonic()
    samples = [sample(0)]
    while one.finished < requests and time.time() < deadline:
        one.step(arrivals)
        if one.finished < samples[-1].requests + check_every:
            continue
        one.manager.check_integrity()
        samples.append(sample(one.finished))
        one.disturb()
        if (now := time.monotonic()) > shown + PROGRESS_EVERY:
            shown = now
            print(
                f"{name}: {one.finished:,} requests, {samples[-1].resident >> 20} MiB, {now - start:.0f} s",
                flush=True,
            )
    one.manager.finish([job.request for job in one.running])
    faults = one.check_end()
    one.manager.check_integrity()
    one.manager.close()
    spent = time.monotonic() - start
    return Outcome(name, one.finished, spent, one.counts, samples, faults + leaks(samples))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000_000, help="of all managers together")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="after which no further requests are served"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    each = -(-options.requests // len(POLICIES))
    deadline = time.time() + 60 * options.minutes
    with ProcessPoolExecutor(len(POLICIES)) as pool:
        outcomes = list(
            pool.map(
                soak,
                POLICIES,
                itertools.repeat(each),
                itertools.repeat(deadline),
                itertools.count(options.seed, 10),
            )
        )
    for outcome in outcomes:
        did = ", ".join(f"{number:,} {what}" for what, number in sorted(outcome.counts.items()))
        print(
            f"{outcome.name}: {outcome.requests:,} requests in {outcome.seconds:.0f} s ({did}); memory "
            f"{resident_growth(outcome.samples) / (1 << 20):+.1f} MiB, "
            f"{object_growth(outcome.samples):+,.0f} objects after the warm-up"
        )
        for fault in outcome.faults:
            print(f"{outcome.name}: {fault}", file=sys.stderr)
    served = sum(outcome.requests for outcome in outcomes)
    print(f"{served:,} of {options.requests:,} requests in at most {options.minutes:g} minutes")
    return 1 if any(outcome.faults for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
