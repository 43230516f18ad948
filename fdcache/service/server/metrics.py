"""Histograms as Prometheus wants them: cumulated."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from fdcache.service.wire.protocol import to_number
from fdcache.tiers.traffic import BOUNDS


def add_histogram(family: HistogramMetricFamily, labels: Sequence[str], histogram: Mapping[str, Any]) -> None:
    """Add a ``Histogram``, given as plain values."""
    seen, buckets = 0, []
    for bound, count in zip((*map(str, BOUNDS), "+Inf"), histogram["counts"], strict=True):
        seen += count
        buckets.append((bound, seen))
    family.add_metric(labels, buckets, sum_value=histogram["total"])


_LABELS = ("client", "session")
_OWN_FIGURES = {
    "plans_in_flight": ("plans_in_flight", "Plans whose reports are out."),
    "queued_backups": ("queued_backup_blocks", "Blocks that wait to be copied to the host."),
    "queued_stores": ("queued_store_blocks", "Blocks that wait to be copied to storage."),
    "live_requests": ("live_requests", "Requests that hold blocks."),
}
_HELD = {
    "stock": ("writable_slots", "Slots that it may be copying into."),
    "runs": ("pinned_runs", "Runs that it may be loading from."),
    "silent_seconds": ("silent_seconds", "Since its last sign of life."),
}
_HIT_TOKENS = ("device", "host", "storage")


def client_metrics(clients: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """What each client holds, and how deep its queues are."""
    yield GaugeMetricFamily("fdcache_clients", "Clients registered.", value=len(clients))
    for key, (name, text) in _HELD.items():
        yield _gauge(name, text, [(each, each[key]) for each in clients])
    for key, (name, text) in _OWN_FIGURES.items():
        yield _gauge(name, text, [(each, to_number(each["figures"].get(key))) for each in clients])
    hits = CounterMetricFamily(
        "fdcache_client_hit_tokens", "Tokens of prompts that were found.", labels=[*_LABELS, "tier"]
    )
    for each in clients:
        counters = each["figures"].get("counters") or {}
        for tier in _HIT_TOKENS:
            labels = [each["name"], each["session"], tier]
            hits.add_metric(labels, to_number(counters.get(f"{tier}_hit_tokens")))
    yield hits


def _gauge(name: str, text: str, values: Sequence[tuple[Mapping[str, Any], float]]) -> Metric:
    family = GaugeMetricFamily(f"fdcache_client_{name}", text, labels=_LABELS)
    for client, value in values:
        family.add_metric([client["name"], client["session"]], value)
    return family


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


_GAUGES = {
    "blocks": ("blocks", "Blocks stored."),
    "capacity_blocks": ("capacity_blocks", "Blocks that there is room for."),
    "bytes": ("bytes", "Bytes of the blocks stored, on all ranks."),
    "quarantined": (
        "quarantined_blocks",
        "Places that held a corrupt record, or cannot be read or written, and are not used again.",
    ),
    "withheld": ("withheld_blocks", "Places that the disk has no room for now."),
    "queued_blocks": ("queued_blocks", "Blocks that wait to be written."),
    "reading_blocks": ("reading_blocks", "Blocks on their way to the host tier."),
    "writing_blocks": ("writing_blocks", "Blocks on their way from the host tier."),
    "erasures_queued": ("queued_erasures", "Resets that the files have not followed yet."),
}
_STORAGE_COUNTERS = {
    "read_bytes": ("read_bytes", "Bytes read, on all ranks."),
    "read_seconds": ("read_seconds", "Time spent reading, summed over the ranks."),
    "written_bytes": ("written_bytes", "Bytes written, on all ranks."),
    "written_seconds": ("written_seconds", "Time spent writing, summed over the ranks."),
    "read_blocks": ("read_blocks", "Blocks that came to the host tier."),
    "stored_blocks": ("stored_blocks", "Blocks written."),
    "dropped_blocks": ("dropped_blocks", "Blocks not written for want of room."),
    "corrupt_blocks": ("corrupt_blocks", "Blocks refused for their checksum."),
    "shared_reads": ("shared_reads", "Reads that a second request joined."),
    "timed_out_reads": ("timed_out_reads", "Requests that went on without what was being read for them."),
    "resets": ("resets", "Resets."),
}
_FAILURES = {
    "errors": "error",
    "timeouts": "timeout",
    "peer_gone": "peer_gone",
    "misses": "gone",
    "no_room": "no_room",
    "bad_slots": "bad_slot",
}
_STORAGE_STATES = ("ready", "full", "read_only", "off")


def storage_metrics(storage: Mapping[str, Any] | None) -> Iterator[Metric]:
    """Every metric family of the tier; none without one."""
    if storage is None:
        return
    layouts = storage["layouts"]
    open_layouts = [each for each in layouts if "totals" in each]
    labels = ["namespace"]
    for key, (name, text) in _GAUGES.items():
        gauge = GaugeMetricFamily(f"fdcache_storage_{name}", text, labels=labels)
        for each in open_layouts:
            if each[key] is not None:
                gauge.add_metric([each["namespace"]], each[key])
        yield gauge
    for key, (name, text) in _STORAGE_COUNTERS.items():
        counter = CounterMetricFamily(f"fdcache_storage_{name}", text, labels=labels)
        for each in open_layouts:
            counter.add_metric([each["namespace"]], each["totals"][key])
        yield counter
    evictions = CounterMetricFamily("fdcache_storage_evicted_blocks", "Blocks evicted.", labels=labels)
    failures = CounterMetricFamily(
        "fdcache_storage_failed_blocks", "Blocks not read or written.", labels=["namespace", "reason"]
    )
    hits = CounterMetricFamily("fdcache_storage_hit_blocks", "Blocks found by requests.", labels=labels)
    for each in open_layouts:
        evictions.add_metric([each["namespace"]], each["evictions"])
        hits.add_metric([each["namespace"]], each["totals"]["hit_blocks"])
        for key, reason in _FAILURES.items():
            failures.add_metric([each["namespace"], reason], each["totals"][key])
    state = GaugeMetricFamily(
        "fdcache_storage_state", "1 for the state of a layout's storage.", labels=["namespace", "state"]
    )
    for each in layouts:
        for name in _STORAGE_STATES:
            state.add_metric([each["namespace"], name], float(each["state"] == name))
    loading = GaugeMetricFamily(
        "fdcache_storage_loading", "1 while the index is loaded.", value=float(storage["loading"]["active"])
    )
    yield from (evictions, hits, failures, state, loading)


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
