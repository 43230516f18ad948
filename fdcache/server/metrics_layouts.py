"""Metrics of layouts and their tenants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from fdcache.server.metrics_histograms import add_histogram

_COUNTERS = {
    "lookups": ("lookups", "Paths looked up."),
    "looked_up_blocks": ("lookup_blocks", "Blocks asked for."),
    "in_flight_misses": (
        "in_flight_misses",
        "Look-ups that ended at a block which the same engine was still copying to the host.",
    ),
    "granted": ("granted_slots", "Slots granted to be copied into."),
    "stored": ("backed_up_blocks", "Blocks that clients stored."),
    "evicted": ("evicted_blocks", "Blocks that left the tier."),
    "corrupt": ("corrupt_blocks", "Blocks dropped since their bytes or headers were wrong."),
    "recovered": ("recovered_blocks", "Blocks taken over from an earlier service."),
    "resets": ("resets", "Resets of the tier."),
}
_UNSTORED = {
    "duplicates": "duplicate",
    "orphans": "no_parent",
    "dropped": "not_copied",
    "over_quota": "tenant_quota",
}
Layouts = Sequence[Mapping[str, Any]]


def layout_metrics(layouts: Layouts) -> Iterator[Metric]:
    """Totals of every layout, what was copied for it, and what its largest tenants have."""
    for key, (name, text) in _COUNTERS.items():
        family = CounterMetricFamily(f"fdcache_{name}", text, labels=["namespace"])
        for each in layouts:
            family.add_metric([each["namespace"]], each["totals"][key])
        yield family
    hits = CounterMetricFamily(
        "fdcache_hit_blocks",
        "Blocks found, counted for each request that found them: two requests of a step that find one block are two "
        "hits. Counted as found, so what an engine then leaves out, by its reuse grid, is in it; "
        "fdcache_client_hit_tokens is what engines used.",
        labels=["namespace", "tier"],
    )
    misses = CounterMetricFamily(
        "fdcache_missed_blocks",
        "Blocks asked for and not found, by why the first one of their path was not there.",
        labels=["namespace", "reason"],
    )
    unstored = CounterMetricFamily(
        "fdcache_unstored_blocks", "Copies that were not kept.", labels=["namespace", "reason"]
    )
    for each in layouts:
        totals = each["totals"]
        hits.add_metric([each["namespace"], "host"], totals["hit_blocks"])
        for reason, blocks in totals["missed"].items():
            misses.add_metric([each["namespace"], reason], blocks)
        for key, reason in _UNSTORED.items():
            unstored.add_metric([each["namespace"], reason], totals[key])
    yield from (hits, misses, unstored)
    yield from _traffic(layouts)
    yield from _tenants(layouts)


def _traffic(layouts: Layouts) -> Iterator[Metric]:
    labels = ["namespace", "direction"]
    copied = CounterMetricFamily("fdcache_copied_bytes", "Bytes copied by all ranks.", labels=labels)
    durations = HistogramMetricFamily(
        "fdcache_copy_duration_seconds",
        "Time of each rank's copies, from their begin to their end.",
        labels=labels,
    )
    for each in layouts:
        for direction, figures in each["totals"]["traffic"]["copied"].items():
            copied.add_metric([each["namespace"], direction], figures["bytes"])
            add_histogram(durations, [each["namespace"], direction], figures["durations"])
    yield from (copied, durations)


def _tenants(layouts: Layouts) -> Iterator[Metric]:
    labels = ["namespace", "tenant"]
    blocks = GaugeMetricFamily("fdcache_tenant_blocks", "Blocks of the largest tenants.", labels=labels)
    most = GaugeMetricFamily("fdcache_tenant_quota_blocks", "Blocks that they may have.", labels=labels)
    for each in layouts:
        for tenant in each["tenants"]:
            blocks.add_metric([each["namespace"], tenant["tenant"]], tenant["blocks"])
            most.add_metric([each["namespace"], tenant["tenant"]], tenant["most_blocks"])
    yield from (blocks, most)
