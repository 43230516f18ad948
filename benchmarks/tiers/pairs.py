"""Compare what two tiers hold together under `learned` with what they hold by last use.

A point is a workload, a size of the device tier and of the host tier, and a write policy. Generated workloads are of
seeds that nothing was chosen on; traces are given as arguments. No byte moves: the hits of each request's match count.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import Report, Row
from fdcache.replay.config import ReplayConfig, Shape, Verify
from fdcache.replay.points import run_point
from fdcache.replay.trace import read_trace
from fdcache.replay.workloads import WorkItem, WorkloadName, generate
from fdcache.settings.cache import CacheSettings, EvictionPolicy, WritePolicy
from fdcache.tiers.host import host_block_bytes

TRACE_TIERS = ((1000, 1000), (2000, 2000), (4000, 2000), (1000, 4000))
WORKLOAD_TIERS = ((1000, 1000, 1), (1000, 4000, 16))
TRACE_BLOCK, WORKLOAD_BLOCK = 512, 64


class Place(NamedTuple):
    """A workload with the blocks of both tiers, the write policy, and the requests in flight."""

    name: str
    device: int
    host: int
    policy: WritePolicy
    in_flight: int
    block_size: int


def places(traces: Sequence[Path], workloads: Sequence[WorkloadName]) -> Iterator[Place]:
    for policy in WritePolicy:
        for trace in traces:
            for device, host in TRACE_TIERS:
                yield Place(str(trace), device, host, policy, 1, TRACE_BLOCK)
        for workload in workloads:
            for device, host, in_flight in WORKLOAD_TIERS:
                yield Place(workload.value, device, host, policy, in_flight, WORKLOAD_BLOCK)


def found(items: Sequence[WorkItem], place: Place, eviction: EvictionPolicy) -> tuple[float, float]:
    """Return the share of the prompt tokens found on the device and on the host."""
    layout = Shape().build(place.block_size, 1)
    cache = CacheSettings(
        device_blocks=place.device,
        host_memory=place.host * host_block_bytes(layout),
        eviction=eviction,
        write_policy=place.policy,
    )
    config = ReplayConfig(layout, cache, verify=Verify.OFF, concurrency=place.in_flight)
    result = run_point(items, config)
    device, host = (result.hit_tokens[tier] / result.prompt_tokens for tier in ("device", "host"))
    return device, host


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", type=Path, nargs="*", help="Mooncake JSONL files")
    parser.add_argument("--workload", type=WorkloadName, nargs="*", default=list(WorkloadName))
    parser.add_argument("--seed", type=int, default=9001, help="of the workloads (default 9001)")
    parser.add_argument("--requests", type=int, default=2000, help="of a workload (default 2000)")


def measure(options: argparse.Namespace, report: Report) -> None:
    items: dict[str, list[WorkItem]] = {str(trace): list(read_trace(trace)) for trace in options.traces}
    gains: list[float] = []

    def rows() -> Iterator[Row]:
        for place in places(options.traces, options.workload):
            if place.name not in items:
                items[place.name] = list(generate(WorkloadName(place.name), options.requests, options.seed))
            lru, learned = (
                found(items[place.name], place, each) for each in (EvictionPolicy.LRU, EvictionPolicy.LEARNED)
            )
            gains.append(sum(learned) - sum(lru))
            yield {
                "workload": Path(place.name).stem,
                "device": place.device,
                "host": place.host,
                "policy": place.policy.value,
                "lru, device": lru[0],
                "lru, host": lru[1],
                "learned, device": learned[0],
                "learned, host": learned[1],
                "gain": gains[-1],
            }

    report.table("Share of the prompt tokens found", rows())
    below = sum(gain < -0.003 for gain in gains)
    mean = sum(gains) / len(gains)
    report.note(f"{len(gains)} points: lowest {min(gains):+.4f}, mean {mean:+.4f}, {below} below")
