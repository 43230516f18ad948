"""Prometheus metrics, made of the records in ``service/wire/*views.py``."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UnsetType
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from fdcache.hints import EARLY_REASONS, HintStatus
from fdcache.service.wire.client_views import HIT_TIERS, LOAD_CHOICES, ClientFigures, ClientView, to_number
from fdcache.service.wire.records import fields
from fdcache.service.wire.storage_views import (
    LoadingView,
    NamespaceStorageView,
    NodeView,
    StorageTotals,
    StorageView,
)
from fdcache.service.wire.views import (
    ArenaView,
    Latencies,
    NamespaceTotals,
    NamespaceView,
    ServiceTotals,
    ServiceView,
    TenantView,
)
from fdcache.storage.connector import StorageState
from fdcache.tiers.statistics import BOUNDS, HintFigures, Histogram

_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
Rows = Iterable[tuple[Sequence[str], msgspec.Struct]]
"""Records with the values of their labels."""


def render(stats: ServiceView) -> bytes:
    """Return the metrics of a service in the Prometheus text format."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(stats))
    return generate_latest(registry)


class _Snapshot:
    """Collector of the metrics at one moment."""

    def __init__(self, stats: ServiceView) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Return every metric family."""
        families = Families()
        _add_service(families, self._stats)
        _add_namespaces(families, self._stats.namespaces)
        _add_clients(families, self._stats.clients)
        if self._stats.storage is not None:
            _add_storage(families, self._stats.storage)
        yield from families.by_name.values()


class Families:
    """Metric families by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}

    def family(self, kind: str, name: str, text: str, labels: Sequence[str]) -> Any:
        """Return a family, a new one the first time."""
        if name not in self.by_name:
            self.by_name[name] = _FAMILIES[kind](name, text, labels=labels)
        return self.by_name[name]

    def add(self, kind: type[msgspec.Struct], rows: Rows, labels: Sequence[str] = ()) -> None:
        """Add a family for each field of a record type that was described as a metric, and its samples."""
        records = list(rows)
        for field in fields(kind):
            if (metric := field.metric) is None:
                continue
            key_label = [metric.label] if metric.label is not None else []
            names = [*labels, *metric.labels, *key_label]
            family = self.family(metric.kind, metric.name, metric.help or field.description, names)
            for values, record in records:
                value = getattr(record, field.name)
                its = [*values, *metric.labels.values()]
                if metric.label is not None:
                    for key, each in value.items():
                        add_sample(family, [*its, key], each)
                elif value is not None:
                    add_sample(family, its, value)


def add_sample(family: Any, labels: Sequence[str], value: Any) -> None:
    """Add a number, or a histogram with its buckets cumulated."""
    if isinstance(value, Histogram):
        seen, buckets = 0, []
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), value.counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        family.add_metric(labels, buckets, sum_value=value.total)
    else:
        family.add_metric(labels, float(value) if isinstance(value, bool) else to_number(value))


def _add_service(families: Families, stats: ServiceView) -> None:
    versions = families.family(
        "gauge", "fdcache_build_info", "Version of fdcache and Python.", ["version", "python"]
    )
    add_sample(versions, [stats.version, platform.python_version()], 1)
    config = families.family("gauge", "fdcache_config_info", "Settings in force.", ["fingerprint"])
    add_sample(config, [stats.config_fingerprint], 1)
    add_sample(families.family("gauge", "fdcache_ready", "1 if ready.", []), [], stats.state == "ready")
    families.add(ServiceView, [([], stats)])
    families.add(ServiceTotals, [([], stats.totals)])
    families.add(Latencies, [([], stats.totals.latencies)])
    arena = stats.tiers.host
    families.add(ArenaView, [([], arena)])
    free = families.family("gauge", "fdcache_arena_free_bytes", "Bytes that no namespace has.", [])
    add_sample(free, [], arena.free_extents * arena.extent_bytes)


def _add_namespaces(families: Families, namespaces: Sequence[NamespaceView]) -> None:
    families.add(NamespaceTotals, [([each.namespace], each.totals) for each in namespaces], ["namespace"])
    families.add(
        TenantView,
        [([each.namespace, tenant.tenant], tenant) for each in namespaces for tenant in each.tenants],
        ["namespace", "tenant"],
    )
    labels = ["namespace", "direction"]
    copied = families.family("counter", "fdcache_copied_bytes", "Bytes copied by all ranks.", labels)
    durations = families.family(
        "histogram", "fdcache_copy_duration_seconds", "Time of each rank's copies, from begin to end.", labels
    )
    _add_hints(
        families, "fdcache_", (([each.namespace], each.totals.hints) for each in namespaces), ["namespace"]
    )
    for each in namespaces:
        for direction, total in each.totals.traffic.copied.items():
            add_sample(copied, [each.namespace, direction], total.bytes)
            add_sample(durations, [each.namespace, direction], total.durations)


def _add_clients(families: Families, clients: Sequence[ClientView]) -> None:
    add_sample(families.family("gauge", "fdcache_clients", "Clients registered.", []), [], len(clients))
    labels = ["client", "session"]
    figures = {(each.name, each.session): ClientFigures.of(each.figures) for each in clients}
    families.add(ClientView, [((each.name, each.session), each) for each in clients], labels)
    families.add(ClientFigures, figures.items(), labels)
    hits = families.family(
        "counter", "fdcache_client_hit_tokens", "Tokens of prompts that were found.", [*labels, "tier"]
    )
    for client, its in figures.items():
        for tier in HIT_TIERS:
            add_sample(hits, [*client, tier], its.hit_tokens(tier))
    _add_load_choices(families, figures, labels)
    _add_handovers(families, figures, labels)
    _add_hints(
        families, "fdcache_client_", ((key, its.hint_figures()) for key, its in figures.items()), labels
    )


def _add_hints(
    families: Families,
    prefix: str,
    figures: Iterable[tuple[Sequence[str], HintFigures]],
    labels: Sequence[str],
) -> None:
    """Add a sample for each known outcome and reason: what a client reports makes no further ones."""
    given = families.family("counter", f"{prefix}hints_given", "Hints given.", labels)
    outcomes = families.family(
        "counter",
        f"{prefix}hints",
        "Outcomes of hints; one that was taken has another one later.",
        [*labels, "outcome"],
    )
    early = families.family(
        "counter", f"{prefix}hints_evicted_early", "Hints whose blocks did not stay.", [*labels, "reason"]
    )
    for values, found in figures:
        add_sample(given, values, found.given)
        for status in HintStatus:
            add_sample(outcomes, [*values, status.value], found.outcomes.get(status.value, 0))
        for reason in EARLY_REASONS:
            add_sample(early, [*values, reason], found.evicted_early.get(reason, 0))


def _add_load_choices(
    families: Families, figures: Mapping[tuple[str, str], ClientFigures], labels: Sequence[str]
) -> None:
    decisions = families.family(
        "counter", "fdcache_client_load_decisions", "Requests by how much was loaded.", [*labels, "choice"]
    )
    hedged = families.family(
        "counter", "fdcache_client_hedged_reads", "Requests that went on without a late read.", labels
    )
    seconds = families.family(
        "counter",
        "fdcache_client_load_decision_seconds",
        "Time from match to computed prompt of requests with a decision, as expected and true.",
        [*labels, "kind"],
    )
    for client, its in figures.items():
        for choice in LOAD_CHOICES:
            add_sample(decisions, [*client, choice], its.load_figure(choice))
        add_sample(hedged, client, its.load_figure("hedged"))
        for kind in ("expected", "true"):
            add_sample(seconds, [*client, kind], its.load_figure(f"{kind}_seconds"))


_HANDOVERS = {
    "transfers": ("fdcache_client_handovers", "Hand-overs between instances that have ended."),
    "blocks": ("fdcache_client_handover_blocks", "Blocks that hand-overs brought whole."),
    "bytes": ("fdcache_client_handover_bytes", "Bytes of these blocks."),
    "waited_seconds": (
        "fdcache_client_handover_wait_seconds",
        "Time of hand-overs before the first block could be read, or the peer asked.",
    ),
    "moved_seconds": ("fdcache_client_handover_move_seconds", "Time of hand-overs after that."),
}


def _add_handovers(
    families: Families, figures: Mapping[tuple[str, str], ClientFigures], labels: Sequence[str]
) -> None:
    kinds = [*labels, "direction", "peer", "result"]
    totals = {field: families.family("counter", *each, kinds) for field, each in _HANDOVERS.items()}
    leases = families.family(
        "counter",
        "fdcache_client_expired_leases",
        "Sends that ended because no peer asked, or renewed its lease, in time.",
        labels,
    )
    for client, its in figures.items():
        counts = its.handover_counts()
        for each in counts:
            for field, family in totals.items():
                add_sample(family, [*client, each.direction, each.peer, each.result], getattr(each, field))
        add_sample(leases, client, sum(each.transfers for each in counts if each.is_expired_lease))


def _add_storage(families: Families, storage: StorageView) -> None:
    families.add(LoadingView, [([], storage.loading)])
    states = families.family(
        "gauge", "fdcache_storage_state", "1 for the state of a namespace's storage.", ["namespace", "state"]
    )
    for each in storage.layouts:
        for state in StorageState:
            add_sample(states, [each.namespace, state.value], each.state == state.value)
    opened = [
        ([each.namespace], each, each.totals)
        for each in storage.layouts
        if not isinstance(each.totals, UnsetType)
    ]
    families.add(NamespaceStorageView, [(labels, each) for labels, each, _ in opened], ["namespace"])
    families.add(StorageTotals, [(labels, totals) for labels, _, totals in opened], ["namespace"])
    nodes = [([each.namespace, node.address], node) for each in storage.layouts for node in each.nodes]
    if nodes:
        families.add(NodeView, nodes, ["namespace", "node"])
