"""Measure the cost of an evicted block as a tier grows, beside an ordered dictionary.

Each tier is filled with paths of `PATH` blocks. Then slots are reserved, `BATCH` at a time, until half of its blocks
are evicted. The figure is the time of these reservations per block. The dictionary has no tree, pins or slots.
"""

import argparse
import json
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import machine
from fdcache import _core

SIZES = (10_000, 100_000, 1_000_000)
PATH = 100
BATCH = 50
ROOT_HASH = bytes(32)


def random_hashes(count: int) -> NDArray[np.uint8]:
    return np.random.default_rng(count).integers(0, 256, (count, 32), np.uint8)


def full_tier(size: int) -> _core.Tier:
    """Return a tier whose slots all hold evictable entries, with paths released in random order."""
    tier = _core.Tier(size)
    hashes = random_hashes(size)
    leases = []
    for first in range(0, size, PATH):
        lease = tier.open_lease()
        taken = tier.reserve(lease, PATH).slots
        tier.commit(lease, ROOT_HASH, hashes[first : first + PATH], taken)
        leases.append(lease)
    for index in np.random.default_rng(0).permutation(len(leases)):
        tier.release(leases[index])
    return tier


def tier_ns(size: int) -> float:
    tier = full_tier(size)
    target = size // 2
    lease = tier.open_lease()
    started = time.perf_counter_ns()
    while tier.stats().evictions < target:
        tier.reserve(lease, BATCH)
    return (time.perf_counter_ns() - started) / tier.stats().evictions


def dictionary_ns(size: int) -> float:
    """Return the time to remove the least recently used key of a dictionary."""
    lru = OrderedDict.fromkeys(row.tobytes() for row in random_hashes(size))
    target = size // 2
    started = time.perf_counter_ns()
    for _ in range(target):
        lru.popitem(last=False)
    return (time.perf_counter_ns() - started) / target


def best(measure: Callable[[int], float], size: int, rounds: int) -> float:
    return min(measure(size) for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="the best of this many counts (default 5)")
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    options = parser.parse_args()
    rows = [
        {
            "entries": size,
            "tier_ns": best(tier_ns, size, options.rounds),
            "dictionary_ns": best(dictionary_ns, size, options.rounds),
        }
        for size in SIZES
    ]
    for row in rows:
        row["ratio"] = row["tier_ns"] / rows[0]["tier_ns"]
        row["dictionary_ratio"] = row["dictionary_ns"] / rows[0]["dictionary_ns"]
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows}))
        return
    print(f"{'entries':>10} {'tier ns/block':>14} {'ratio':>6} {'OrderedDict ns':>15} {'ratio':>6}")
    for row in rows:
        print(
            f"{row['entries']:>10,} {row['tier_ns']:>14.1f} {row['ratio']:>6.2f}"
            f" {row['dictionary_ns']:>15.1f} {row['dictionary_ratio']:>6.2f}"
        )


if __name__ == "__main__":
    main()
