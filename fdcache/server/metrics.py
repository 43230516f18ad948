"""The service's figures in the Prometheus text format; those of layouts and clients are in modules of their own."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from fdcache.server.metrics_clients import client_metrics
from fdcache.server.metrics_histograms import add_histogram
from fdcache.server.metrics_layouts import layout_metrics
from fdcache.server.storage_metrics import storage_metrics

Stats = Mapping[str, Any]

_TOTALS = {
    "requests": "Requests answered.",
    "refused": "Requests refused.",
    "undelivered": "Answers and notices that a client's full queue did not take.",
    "clients_registered": "Sessions opened.",
    "clients_lost": "Clients that died.",
    "slots_taken_back": "Slots of clients that died.",
    "runs_given_up": "Pinned runs of silent clients that were given up.",
}
_STATES = ("free", "writing", "ready")


class StatsCollector:
    """Metrics of one snapshot, which ``Views.stats`` gave."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Every metric family, names and units by the Prometheus conventions."""
        yield from self._service()
        yield from self._tiers()
        yield from layout_metrics(self._stats["namespaces"])
        yield from client_metrics(self._stats["clients"])
        yield from storage_metrics(self._stats["storage"])

    def _service(self) -> Iterator[Metric]:
        stats = self._stats
        build = GaugeMetricFamily(
            "fdcache_build_info", "Version of fdcache and Python.", labels=["version", "python"]
        )
        build.add_metric([stats["version"], platform.python_version()], 1)
        yield build
        config = GaugeMetricFamily("fdcache_config_info", "Settings in force.", labels=["fingerprint"])
        config.add_metric([stats["config_fingerprint"]], 1)
        yield config
        yield GaugeMetricFamily("fdcache_uptime_seconds", "Since the start.", value=stats["uptime_seconds"])
        yield GaugeMetricFamily("fdcache_ready", "1 if ready.", value=float(stats["state"] == "ready"))
        yield GaugeMetricFamily(
            "fdcache_awaited_clients",
            "Clients of an earlier service that may still write; no slot is granted until they are back or gone.",
            value=stats["waiting_for_earlier"],
        )
        totals = stats["totals"]
        for name, text in _TOTALS.items():
            yield CounterMetricFamily(f"fdcache_{name}", text, value=totals[name])
        requests = HistogramMetricFamily(
            "fdcache_request_duration_seconds", "Time to carry a request out.", labels=["kind"]
        )
        for kind, histogram in totals["latencies"]["kinds"].items():
            add_histogram(requests, [kind], histogram)
        yield requests

    def _tiers(self) -> Iterator[Metric]:
        host = self._stats["tiers"]["host"]
        blocks = GaugeMetricFamily(
            "fdcache_tier_blocks", "Slots of a tier by what they hold.", labels=["tier", "state"]
        )
        for state in _STATES:
            blocks.add_metric(["host", state], host[state])
        yield blocks
        for name, text in {
            "evictable_blocks": "Blocks that nobody uses.",
            "pins": "Pins on blocks.",
            "leases": "Leases that hold pins and slots.",
        }.items():
            family = GaugeMetricFamily(f"fdcache_tier_{name}", text, labels=["tier"])
            family.add_metric(["host"], host[name.removesuffix("_blocks")])
            yield family
        yield GaugeMetricFamily("fdcache_arena_bytes", "Bytes of the arena.", value=host["bytes"])
        yield GaugeMetricFamily(
            "fdcache_arena_free_bytes",
            "Bytes that no layout has.",
            value=host["free_extents"] * host["extent_bytes"],
        )


def render(stats: Stats) -> bytes:
    """One snapshot as text."""
    registry = CollectorRegistry()
    registry.register(StatsCollector(stats))
    return generate_latest(registry)
