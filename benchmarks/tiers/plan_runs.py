"""Measure the runs of host slots in the manager's loads and copies to the host, on a trace."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np

from benchmarks.harness import Report, Row, find_trace
from fdcache import _core
from fdcache.layout import KVLayout
from fdcache.manager.cache_manager import CacheManager
from fdcache.metadata import EXTENT_BYTES, TransferPlan
from fdcache.replay import engine
from fdcache.replay.config import ReplayConfig, Verify
from fdcache.replay.trace import read_trace
from fdcache.settings.cache import CacheSettings, WritePolicy

Runs = dict[str, Counter[int]]
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REAL_RECORD = 1 << 20
"""Bytes of the record whose extents bound the runs; the replayed blocks themselves are small."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, nargs="?", default=find_trace())
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--device-blocks", type=int, default=4096)
    parser.add_argument("--host-blocks", type=int, default=32768)


def measure(options: argparse.Namespace, report: Report) -> None:
    if options.trace is None:
        report.note("plan-runs: needs a TRACE")
        return
    layout = KVLayout.uniform(
        model="trace", revision="1", num_layers=1, block_size=64, kv_heads=1, head_dim=16, dtype="bfloat16"
    )
    cache = CacheSettings(
        device_blocks=options.device_blocks,
        host_memory=options.host_blocks * layout.record_bytes,
        write_policy=WritePolicy.WRITE_THROUGH,
    )
    found: Runs = {"load": Counter(), "to host": Counter()}
    with patch.object(engine, "CacheManager", recording(found)):
        config = ReplayConfig(layout=layout, cache=cache, verify=Verify.OFF)
        engine.replay(read_trace(options.trace, options.requests), config)
    report.table("Share of blocks by the length of their run", shares(found))
    report.note("blocks: " + ", ".join(f"{name} {each.total()}" for name, each in found.items()))


def recording(found: Runs) -> type[CacheManager]:
    """Return a manager that counts the runs of every plan."""
    per_extent = EXTENT_BYTES // REAL_RECORD

    class Recording(CacheManager):
        def take_plans(self) -> list[TransferPlan]:
            plans = super().take_plans()
            for plan in plans:
                for swap in plan.swaps():
                    load = swap is plan.loads
                    slots = np.sort(swap.src_block_ids if load else swap.dst_block_ids)
                    for _, count in _core.find_runs(slots, per_extent):
                        found["load" if load else "to host"][count] += count
            return plans

    return Recording


def shares(found: Runs) -> Iterator[Row]:
    for low, high in zip(BUCKETS, [*BUCKETS[1:], 1 << 30], strict=True):
        name = (
            f"{low}" if high == low + 1 else f"{low} or more" if high == 1 << 30 else f"{low} to {high - 1}"
        )
        row: dict[str, str] = {"blocks of a run": name}
        for kind, each in found.items():
            blocks = sum(count for length, count in each.items() if low <= length < high)
            row[kind] = f"{blocks / max(each.total(), 1):.1%}"
        yield row
