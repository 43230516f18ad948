"""Compare what the objectives of the `learned` eviction find, and the computation that this saves.

A token costs 1 + tokens before it / 30,000: the linear layers, and attention, which grows with what is before. One
request at a time, no host tier.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.harness import machine
from fdcache.replay.config import ReplayConfig, Shape, Verify
from fdcache.replay.points import Point
from fdcache.replay.trace import read_trace
from fdcache.replay.workloads import WorkItem, WorkloadName, generate
from fdcache.settings.cache import CacheSettings, EvictionObjective, EvictionPolicy

TOKENS_TO_DOUBLE = 30_000
CHOICES = {
    "lru": (EvictionPolicy.LRU, EvictionObjective.HITS),
    "hits": (EvictionPolicy.LEARNED, EvictionObjective.HITS),
    "compute": (EvictionPolicy.LEARNED, EvictionObjective.COMPUTE),
}


def cost(tokens: int) -> float:
    """Return what the first ``tokens`` of a prompt cost."""
    return tokens + tokens**2 / 2 / TOKENS_TO_DOUBLE


def measured(items: Iterable[WorkItem], choice: str, blocks: int, block_size: int) -> tuple[float, float]:
    """Return the share of the prompt tokens that was found, and that of the computation that it saved."""
    policy, objective = CHOICES[choice]
    config = ReplayConfig(
        layout=Shape().build(block_size, 1),
        cache=CacheSettings(
            device_blocks=blocks, host_memory=0, eviction=policy, eviction_objective=objective
        ),
        verify=Verify.OFF,
        concurrency=1,
    )
    tokens = found = 0
    spent = saved = 0.0
    with Point(config) as point:
        for item in items:
            hits = point.serve(item)
            prompt = int(item.lengths.sum())
            tokens, found = tokens + prompt, found + hits
            spent, saved = spent + cost(prompt), saved + cost(hits)
        point.end()
    return found / tokens, saved / spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?", help="a Mooncake JSONL file")
    parser.add_argument("--workload", type=WorkloadName, help="generated requests instead")
    parser.add_argument("--requests", type=int, default=4000, help="of a workload (default 4000)")
    parser.add_argument("--block-size", type=int, default=64, help="tokens in a block (default 64)")
    parser.add_argument("--blocks", type=int, nargs="+", default=[2000], help="of the tier (default 2000)")
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    options = parser.parse_args()
    if (options.trace is None) == (options.workload is None):
        parser.error("give a trace or a --workload")
    items = list(
        read_trace(options.trace) if options.trace else generate(options.workload, options.requests, 0)
    )
    rows = {
        blocks: {choice: measured(items, choice, blocks, options.block_size) for choice in CHOICES}
        for blocks in options.blocks
    }
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows}))
        return
    print(f"{'blocks':>9} " + " ".join(f"{choice + ': found, saved':>23}" for choice in CHOICES))
    for blocks, row in rows.items():
        print(f"{blocks:>9,} " + " ".join(f"{found:>14.1%}, {saved:>7.1%}" for found, saved in row.values()))


if __name__ == "__main__":
    main()
