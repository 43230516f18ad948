"""Measure the cost of an evicted block as a tier grows, beside an ordered dictionary.

Each tier is filled with paths of `PATH` blocks. Then slots are reserved, `BATCH` at a time, until half of its blocks
are evicted. The figure is the time of these reservations per block. The dictionary has no tree, pins or slots.
"""

from __future__ import annotations

import argparse
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Report, Row
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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="the best of this many counts (default 5)")


def measure(options: argparse.Namespace, report: Report) -> None:
    def rows() -> Iterator[Row]:
        first: tuple[float, float] | None = None
        for size in SIZES:
            tier, dictionary = (best(each, size, options.rounds) for each in (tier_ns, dictionary_ns))
            first = first or (tier, dictionary)
            yield {
                "entries": size,
                "tier, ns": tier,
                "to the first": tier / first[0],
                "OrderedDict, ns": dictionary,
                "to its first": dictionary / first[1],
            }

    report.table("An evicted block", rows())
