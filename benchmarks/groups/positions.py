"""Replay traffic of a model with states, with each policy of the positions whose states are stored."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from benchmarks.harness import Report, Row
from fdcache.replay.config import ReplayConfig, Shape
from fdcache.replay.engine import replay
from fdcache.replay.report import Report as ReplayReport
from fdcache.replay.workloads import WorkloadName, generate
from fdcache.settings.cache import CacheSettings, EvictionPolicy, StatePositions, WritePolicy

GROUPS = "state,state,state,all"
DEVICE_BLOCKS = 600
WORKLOADS = (WorkloadName.CHAT, WorkloadName.AGENT)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the length of the traffic and the sizes of host memory."""
    parser.add_argument("--requests", type=int, default=150, help="of each workload")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 16], help="MiB of host memory")


def measure(options: argparse.Namespace, report: Report) -> bool:
    """Return False if a byte was wrong."""
    clean = []

    def rows() -> Iterator[Row]:
        for workload in WORKLOADS:
            for size in options.sizes:
                for positions in StatePositions:
                    found = replayed(workload, options.requests, size, positions)
                    clean.append(found.clean)
                    yield {
                        "traffic": workload.value,
                        "host MiB": size,
                        "positions": positions.value,
                        "hit rate": found.tally.hit_rate,
                        "MiB stored": found.tally.d2h.bytes / (1 << 20),
                    }

    report.table("Positions of states", rows())
    return all(clean)


def replayed(
    workload: WorkloadName,
    requests: int,
    size: int,
    positions: StatePositions,
    eviction: EvictionPolicy = EvictionPolicy.LEARNED,
    seed: int = 0,
) -> ReplayReport:
    """Replay a workload with so many MiB of host memory."""
    layout = Shape(layers=1, groups=GROUPS).build(block_size=64, ranks=1)
    cache = CacheSettings(
        device_blocks=DEVICE_BLOCKS,
        host_memory=size << 20,
        write_policy=WritePolicy.WRITE_THROUGH,
        state_positions=positions,
        eviction=eviction,
    )
    return replay(generate(workload, requests, seed), ReplayConfig(layout, cache))
