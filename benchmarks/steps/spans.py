"""Measure what spans cost a scheduler's step: off, and sent to a receiver that reads them.

Rounds without and with spans alternate in one process, so that whatever else runs disturbs both. ``no hooks`` are
rounds in which the functions of spans are not called at all.
"""

from __future__ import annotations

import argparse
import statistics
import time

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from benchmarks.harness import Report, in_turns
from fdcache import tracing
from fdcache.layout import KVLayout
from fdcache.manager import CacheManager, Request, story
from fdcache.settings.cache import CacheSettings

REQUESTS, BLOCKS, BLOCK, STEPS = 16, 64, 16, 100


class _Reader(SpanExporter):
    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def request_us(manager: CacheManager) -> float:
    """Return microseconds per request of steps that match, allocate and finish requests with a known prefix."""
    began = time.perf_counter()
    for step in range(STEPS):
        batch = [Request(f"{step}-{i}", list(range(BLOCKS * BLOCK + 1))) for i in range(REQUESTS)]
        manager.match_prefix(batch)
        manager.allocate_device_blocks([(each, each.num_tokens) for each in batch])
        manager.take_plans()
        manager.finish(batch)
    return 1e6 * (time.perf_counter() - began) / (STEPS * REQUESTS)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=20)


def measure(options: argparse.Namespace, report: Report) -> None:
    layout = KVLayout.uniform(
        model="bench", revision="1", block_size=BLOCK, num_layers=1, kv_heads=1, head_dim=8, dtype="uint8"
    )
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(_Reader(), max_queue_size=1 << 16))
    on = tracing.Spans(provider.get_tracer("bench"))
    hooks = (story.match_begins, story.matched, story.allocated)

    def without_hooks() -> float:
        story.match_begins = lambda requests: 0
        story.matched = story.allocated = lambda *values: None  # type: ignore[assignment]
        spent = request_us(manager)
        story.match_begins, story.matched, story.allocated = hooks
        return spent

    def with_spans() -> float:
        tracing.spans = on
        spent = request_us(manager)
        tracing.spans = None
        return spent

    with CacheManager(CacheSettings(device_blocks=4096), layout) as manager:
        first = Request("first", list(range(BLOCKS * BLOCK + 1)))
        manager.match_prefix([first])
        manager.allocate_device_blocks([(first, first.num_tokens)])
        manager.commit([(first, first.num_tokens)])
        manager.finish([first])
        request_us(manager)
        runs = {"no hooks": without_hooks, "off": lambda: request_us(manager), "on": with_spans}
        taken = in_turns(runs, options.rounds)
    provider.shutdown()
    report.table(
        "A request with spans",
        (
            {
                "spans": name,
                "least us": min(its),
                "median us": statistics.median(its),
                "of no hooks": statistics.median(
                    mine / none for mine, none in zip(its, taken["no hooks"], strict=True)
                ),
            }
            for name, its in taken.items()
        ),
    )
