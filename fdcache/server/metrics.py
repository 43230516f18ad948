"""The service's figures in the Prometheus text format."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from fdcache.server.latency import BOUNDS
from fdcache.server.storage_metrics import storage_metrics

Stats = Mapping[str, Any]

_HOST_GAUGES = {
    "slots": "Slots of the tier.",
    "free": "Slots that hold nothing.",
    "writing": "Slots that are being written or granted to be.",
    "ready": "Blocks that can be found.",
    "evictable": "Blocks that nobody uses.",
}
_NAMESPACE_COUNTERS = {
    "lookups": ("lookups", "Paths looked up."),
    "looked_up_blocks": ("lookup_blocks", "Blocks asked for."),
    "granted": ("granted_slots", "Slots granted to be copied into."),
    "stored": ("backed_up_blocks", "Blocks that clients stored."),
    "evicted": ("evicted_blocks", "Blocks that left the tier."),
    "corrupt": ("corrupt_blocks", "Blocks dropped since their bytes or headers were wrong."),
    "recovered": ("recovered_blocks", "Blocks taken over from an earlier service."),
    "resets": ("resets", "Resets of the tier."),
}
_UNSTORED = {"duplicates": "duplicate", "orphans": "no_parent", "dropped": "not_copied"}
_CLIENT_COUNTERS = {
    "blocks_loaded": ("h2d", "client_copied_blocks"),
    "blocks_backed_up": ("d2h", "client_copied_blocks"),
}


class StatsCollector:
    """Metrics of one snapshot, which ``Views.stats`` gave."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Every metric family, names and units by the Prometheus conventions."""
        yield from self._service()
        yield from self._tier()
        yield from self._namespaces()
        yield from self._clients()
        yield self._latencies()
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
        totals = stats["totals"]
        for name, text in {
            "requests": "Requests answered.",
            "refused": "Requests refused.",
            "undelivered": "Answers and notices that a client's full queue did not take.",
            "clients_registered": "Sessions opened.",
            "clients_lost": "Clients that died.",
            "slots_taken_back": "Slots of clients that died.",
            "runs_given_up": "Pinned runs of silent clients that were given up.",
        }.items():
            yield CounterMetricFamily(f"fdcache_{name}", text, value=totals[name])

    def _tier(self) -> Iterator[Metric]:
        host = self._stats["tiers"]["host"]
        for name, text in _HOST_GAUGES.items():
            yield GaugeMetricFamily(f"fdcache_host_{name}_blocks", text, value=host[name])
        yield GaugeMetricFamily("fdcache_host_pins", "Pins.", value=host["pins"])
        yield GaugeMetricFamily("fdcache_host_leases", "Leases.", value=host["leases"])
        yield GaugeMetricFamily("fdcache_arena_bytes", "Bytes of the arena.", value=host["bytes"])
        yield GaugeMetricFamily(
            "fdcache_arena_free_bytes",
            "Bytes that no layout has.",
            value=host["free_extents"] * host["extent_bytes"],
        )

    def _namespaces(self) -> Iterator[Metric]:
        labels = ["namespace"]
        namespaces = self._stats["namespaces"]
        for key, (name, text) in _NAMESPACE_COUNTERS.items():
            family = CounterMetricFamily(f"fdcache_{name}", text, labels=labels)
            for each in namespaces:
                family.add_metric([each["namespace"]], each["totals"][key])
            yield family
        hits = CounterMetricFamily("fdcache_hit_blocks", "Blocks found.", labels=["namespace", "tier"])
        misses = CounterMetricFamily(
            "fdcache_missed_blocks", "Blocks asked for and not found.", labels=["namespace", "tier"]
        )
        unstored = CounterMetricFamily(
            "fdcache_unstored_blocks", "Copies that were not kept.", labels=["namespace", "reason"]
        )
        for each in namespaces:
            totals = each["totals"]
            hits.add_metric([each["namespace"], "host"], totals["hit_blocks"])
            misses.add_metric([each["namespace"], "host"], totals["looked_up_blocks"] - totals["hit_blocks"])
            for key, reason in _UNSTORED.items():
                unstored.add_metric([each["namespace"], reason], totals[key])
        yield from (hits, misses, unstored)

    def _clients(self) -> Iterator[Metric]:
        clients = self._stats["clients"]
        yield GaugeMetricFamily("fdcache_clients", "Clients registered.", value=len(clients))
        in_flight = GaugeMetricFamily("fdcache_client_plans_in_flight", "Plans.", labels=["client"])
        queued = GaugeMetricFamily("fdcache_client_queued_backups", "Blocks waiting.", labels=["client"])
        copied = CounterMetricFamily(
            "fdcache_client_copied_blocks", "Blocks copied.", labels=["client", "direction"]
        )
        device = CounterMetricFamily("fdcache_client_hit_tokens", "Tokens found.", labels=["client", "tier"])
        for each in clients:
            figures, name = each["figures"], each["name"]
            counters = figures.get("counters", {})
            in_flight.add_metric([name], figures.get("plans_in_flight", 0))
            queued.add_metric([name], figures.get("queued_backups", 0))
            for key, (direction, _) in _CLIENT_COUNTERS.items():
                copied.add_metric([name, direction], counters.get(key, 0))
            for tier in ("device", "host", "storage"):
                device.add_metric([name, tier], counters.get(f"{tier}_hit_tokens", 0))
        yield from (in_flight, queued, copied, device)

    def _latencies(self) -> Metric:
        family = HistogramMetricFamily(
            "fdcache_request_seconds", "Time to carry a request out.", labels=["kind"]
        )
        for kind, histogram in self._stats["totals"]["latencies"]["kinds"].items():
            seen, buckets = 0, []
            for bound, count in zip((*map(str, BOUNDS), "+Inf"), histogram["counts"], strict=True):
                seen += count
                buckets.append((bound, seen))
            family.add_metric([kind], buckets, sum_value=histogram["total"])
        return family


def render(stats: Stats) -> bytes:
    """One snapshot as text."""
    registry = CollectorRegistry()
    registry.register(StatsCollector(stats))
    return generate_latest(registry)
