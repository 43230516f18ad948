"""Compare what two tiers hold together under `learned` with what they hold by last use.

A point is a workload, a size of the device tier and of the host tier, and a write policy. Generated workloads are of
seeds that nothing was chosen on; traces are given as arguments. No byte moves: the hits of each request's match count.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import machine
from fdcache.replay.config import ReplayConfig, Shape, VerifyBytes
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
    config = ReplayConfig(layout, cache, verify=VerifyBytes.OFF, concurrency=place.in_flight)
    result = run_point(items, config)
    device, host = (result.hit_tokens[tier] / result.prompt_tokens for tier in ("device", "host"))
    return device, host


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, nargs="*", help="Mooncake JSONL files")
    parser.add_argument("--workload", type=WorkloadName, nargs="*", default=list(WorkloadName))
    parser.add_argument("--seed", type=int, default=9001, help="of the workloads (default 9001)")
    parser.add_argument("--requests", type=int, default=2000, help="of a workload (default 2000)")
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    options = parser.parse_args()
    items: dict[str, list[WorkItem]] = {str(trace): list(read_trace(trace)) for trace in options.traces}
    rows = []
    for place in places(options.traces, options.workload):
        if place.name not in items:
            items[place.name] = list(generate(WorkloadName(place.name), options.requests, options.seed))
        lru, learned = (
            found(items[place.name], place, each) for each in (EvictionPolicy.LRU, EvictionPolicy.LEARNED)
        )
        rows.append({**place._asdict(), "lru": lru, "learned": learned})
        if not options.json:
            print(
                f"{Path(place.name).stem:20} {place.device:>5,} {place.host:>5,} {place.policy:24}"
                f" {lru[0]:.4f} + {lru[1]:.4f}  {learned[0]:.4f} + {learned[1]:.4f}"
                f"  {sum(learned) - sum(lru):+.4f}",
                flush=True,
            )
    gains = [sum(row["learned"]) - sum(row["lru"]) for row in rows]
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows}))
    else:
        below = sum(gain < -0.003 for gain in gains)
        print(
            f"{len(gains)} points: lowest {min(gains):+.4f}, mean {sum(gains) / len(gains):+.4f}, {below} below"
        )


if __name__ == "__main__":
    main()
