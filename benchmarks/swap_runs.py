"""Measure the runs of host slots in the manager's loads and copies to the host, on a trace.

python -m benchmarks.swap_runs TRACE [--requests N]
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import numpy as np

from fdcache import _core
from fdcache.layout import KVLayout
from fdcache.manager.cache_manager import CacheManager
from fdcache.metadata import EXTENT_BYTES, TransferPlan
from fdcache.replay import engine
from fdcache.replay.config import ReplayConfig, VerifyBytes
from fdcache.replay.trace import read_trace
from fdcache.settings.cache import CacheSettings, WritePolicy

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REAL_RECORD = 1 << 20
"""Bytes of the record whose extents bound the runs; the replayed blocks themselves are small."""


def main() -> None:
    """Replay the trace and print, for loads and for copies to the host, the share of blocks by run length."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--device-blocks", type=int, default=4096)
    parser.add_argument("--host-blocks", type=int, default=32768)
    options = parser.parse_args()
    found: dict[str, Counter[int]] = {"load": Counter(), "to host": Counter()}
    per_extent = EXTENT_BYTES // REAL_RECORD

    class Recording(CacheManager):
        """Manager that counts the runs of every plan."""

        def take_plans(self) -> list[TransferPlan]:
            plans = super().take_plans()
            for plan in plans:
                for swap in plan.swaps():
                    load = swap is plan.loads
                    slots = np.sort(swap.src_block_ids if load else swap.dst_block_ids)
                    for _, count in _core.find_runs(slots, per_extent):
                        found["load" if load else "to host"][count] += count
            return plans

    layout = KVLayout.uniform(
        model="trace", revision="1", num_layers=1, block_size=64, kv_heads=1, head_dim=16, dtype="bfloat16"
    )
    cache = CacheSettings(
        device_blocks=options.device_blocks,
        host_memory=options.host_blocks * layout.record_bytes,
        write_policy=WritePolicy.WRITE_THROUGH,
    )
    config = ReplayConfig(layout=layout, cache=cache, verify=VerifyBytes.OFF)
    with patch.object(engine, "CacheManager", Recording):
        engine.replay(read_trace(options.trace, options.requests), config)
    print("| blocks of a run | " + " | ".join(found) + " |")
    print("|---|" + "---|" * len(found))
    for low, high in zip(BUCKETS, [*BUCKETS[1:], 1 << 30], strict=True):
        shares = [
            sum(blocks for length, blocks in each.items() if low <= length < high)
            / max(sum(each.values()), 1)
            for each in found.values()
        ]
        name = (
            f"{low} or more" if high == 1 << 30 else (f"{low}" if high == low + 1 else f"{low} to {high - 1}")
        )
        print(f"| {name} | " + " | ".join(f"{100 * share:.1f}%" for share in shares) + " |")
    print("\nblocks: " + ", ".join(f"{name} {sum(each.values())}" for name, each in found.items()))


if __name__ == "__main__":
    main()
