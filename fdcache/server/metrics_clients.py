"""Metrics of clients. What a client says of itself may be anything; what is no number counts as 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fdcache.node.figures import number

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
        yield _gauge(name, text, [(each, number(each["figures"].get(key))) for each in clients])
    hits = CounterMetricFamily(
        "fdcache_client_hit_tokens", "Tokens of prompts that were found.", labels=[*_LABELS, "tier"]
    )
    for each in clients:
        counters = each["figures"].get("counters") or {}
        for tier in _HIT_TOKENS:
            labels = [each["name"], each["session"], tier]
            hits.add_metric(labels, number(counters.get(f"{tier}_hit_tokens")))
    yield hits


def _gauge(name: str, text: str, values: Sequence[tuple[Mapping[str, Any], float]]) -> Metric:
    family = GaugeMetricFamily(f"fdcache_client_{name}", text, labels=_LABELS)
    for client, value in values:
        family.add_metric([client["name"], client["session"]], value)
    return family
