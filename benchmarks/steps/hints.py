"""Measure what the hints of a request cost its end: ``CacheManager.finish`` with as many as a request may have.

One request of 131,072 tokens is matched and finished again and again, without and with hints in turns, so that whatever
else runs disturbs both. A pair is two ends of one round; the ratio is the median of those of the pairs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.harness import Report, Row, in_turns
from fdcache.hints import MOST_HINTS, Hint, HintKind
from fdcache.layout import KVLayout
from fdcache.manager import CacheManager, Request
from fdcache.settings.cache import CacheSettings

TOKENS, SLOTS, CALLS = 131_072, 1 << 16, 8
PARTS = TOKENS // MOST_HINTS

HINTS: dict[str, list[Hint]] = {
    "no hint": [],
    "one for all blocks": [Hint.retain(300)],
    "16 for a part each": [
        Hint(kind=HintKind.RETAIN, seconds=60.0 * (i + 1), start=i * PARTS, end=(i + 1) * PARTS)
        for i in range(MOST_HINTS)
    ],
    "16 for all blocks": [
        Hint(kind=HintKind.RETAIN, seconds=60.0 * (i + 1), end=TOKENS) for i in range(MOST_HINTS)
    ],
    "16 that release a part each": [
        Hint(kind=HintKind.RELEASE, start=i * PARTS, end=(i + 1) * PARTS) for i in range(MOST_HINTS)
    ],
}


def finish_us(manager: CacheManager, request: Request, hints: Sequence[Hint]) -> float:
    """Return the least microseconds that the end of a request takes."""
    spent = []
    for _ in range(CALLS):
        manager.match_prefix([request])
        manager.allocate_device_blocks([(request, request.num_tokens)])
        manager.take_plans()
        request.hints = hints
        since = time.perf_counter_ns()
        manager.finish([request])
        spent.append(time.perf_counter_ns() - since)
        manager.take_hint_outcomes()
    return min(spent) / 1000


def rows(block: int, rounds: int) -> Iterator[Row]:
    layout = KVLayout.uniform(
        model="bench", revision="1", block_size=block, num_layers=1, kv_heads=1, head_dim=8, dtype="uint8"
    )
    with CacheManager(CacheSettings(device_blocks=SLOTS, eviction="learned"), layout) as manager:
        request = Request("long", np.arange(TOKENS + 1, dtype=np.int32))
        manager.match_prefix([request])
        manager.allocate_device_blocks([(request, request.num_tokens)])
        manager.commit([(request, request.num_tokens)])
        manager.finish([request])
        runs = {name: lambda hints=hints: finish_us(manager, request, hints) for name, hints in HINTS.items()}
        taken = in_turns(runs, rounds)
    for name, its in taken.items():
        pairs = zip(its, taken["no hint"], strict=True)
        yield {
            "block": block,
            "hints": name,
            "least us": min(its),
            "median us": statistics.median(its),
            "of no hint": statistics.median(mine / none for mine, none in pairs),
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=20)


def measure(options: argparse.Namespace, report: Report) -> None:
    found = (row for block in (16, 64) for row in rows(block, options.rounds))
    report.table("The end of a request of 131,072 tokens", found)
