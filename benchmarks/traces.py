"""Measure what spans cost a scheduler's step: off, and sent to a receiver that reads them.

    python -m benchmarks.traces [--rounds 20]

Rounds without and with spans alternate in one process, so that whatever else runs disturbs both. ``no hooks`` are
rounds in which the functions of spans are not called at all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from benchmarks.machine import machine
from fdcache import tracing
from fdcache.layout import KVLayout
from fdcache.manager import CacheManager, Request, story
from fdcache.settings.cache import CacheSettings

REQUESTS, BLOCKS, BLOCK, STEPS = 16, 64, 16, 100


class _Reader(SpanExporter):
    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def steps(manager: CacheManager) -> float:
    """Return microseconds per request of steps that match, allocate and finish requests with a known prefix."""
    began = time.perf_counter()
    for step in range(STEPS):
        batch = [Request(f"{step}-{i}", list(range(BLOCKS * BLOCK + 1))) for i in range(REQUESTS)]
        manager.match_prefix(batch)
        manager.allocate_device_blocks([(each, each.num_tokens) for each in batch])
        manager.take_plans()
        manager.finish(batch)
    return 1e6 * (time.perf_counter() - began) / (STEPS * REQUESTS)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    layout = KVLayout.uniform(
        model="bench", revision="1", block_size=BLOCK, num_layers=1, kv_heads=1, head_dim=8, dtype="uint8"
    )
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(_Reader(), max_queue_size=1 << 16))
    on = tracing.Spans(provider.get_tracer("bench"))
    hooks = (story.match_begins, story.matched, story.allocated)
    taken: dict[str, list[float]] = {"no hooks": [], "off": [], "on": []}
    with CacheManager(CacheSettings(device_blocks=4096), layout) as manager:
        first = Request("first", list(range(BLOCKS * BLOCK + 1)))
        manager.match_prefix([first])
        manager.allocate_device_blocks([(first, first.num_tokens)])
        manager.commit([(first, first.num_tokens)])
        manager.finish([first])
        steps(manager)
        for _ in range(rounds):
            for name, its in taken.items():
                tracing.spans = on if name == "on" else None
                if name == "no hooks":
                    story.match_begins = lambda request_ids: 0
                    story.matched = story.allocated = lambda *values: None  # type: ignore[assignment]
                its.append(steps(manager))
                story.match_begins, story.matched, story.allocated = hooks
        tracing.spans = None
    provider.shutdown()
    print(machine())
    for name, its in taken.items():
        ratios = [mine / none for mine, none in zip(its, taken["no hooks"], strict=True)]
        print(
            f"{name:<9} {min(its):6.2f} us a request at least, {statistics.median(its):6.2f} in the median; "
            f"{statistics.median(ratios):.3f} of no hooks in the median of pairs"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
