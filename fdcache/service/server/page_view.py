"""What the page of a service shows of it, at one moment and over time."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from fdcache import __version__
from fdcache.hints import HintStatus
from fdcache.service.server.arguments import Arguments, number
from fdcache.service.server.clients import RegisteredClient
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.service import Service
from fdcache.service.server.slices import in_batches
from fdcache.service.server.trends import Trends
from fdcache.service.wire.client_views import ClientFigures, ClientView, to_number
from fdcache.service.wire.page_views import (
    ShownClient,
    ShownNamespace,
    ShownService,
    ShownState,
    ShownTenant,
    TrendRow,
)
from fdcache.service.wire.storage_views import StorageView
from fdcache.service.wire.views import MissReason, NamespaceView
from fdcache.tiers.statistics import HintFigures

MOST_NAMESPACES, MOST_CLIENTS = 32, 64
_CLIENTS_A_SLICE, _NAMESPACES_A_SLICE = 8, 8
_MOST = 1 << 53
"""Larger numbers are not exact in a browser."""
_STATES = ("ready", "writing", "free")


class PageView:
    """Answers the question ``page``: all that the page shows without being asked, in one small record."""

    def __init__(
        self,
        service: Service,
        fingerprint: str,
        namespace_view: Callable[[Namespace], NamespaceView],
        client_view: Callable[[RegisteredClient], ClientView],
        storage: Callable[[], StorageView | None],
    ) -> None:
        self._service = service
        self._fingerprint = fingerprint
        self._namespace_view = namespace_view
        self._client_view = client_view
        self._storage = storage
        self.trends = Trends(service)

    def page(self, arguments: Arguments) -> Iterator[bytes]:
        """Yield a ``ShownService`` with the rows after number ``row``."""
        after = int(number(arguments, "row", 0, 0, 1 << 53))
        service = self._service
        every = list(service.namespaces.values())
        chosen = heapq.nlargest(MOST_NAMESPACES, every, key=lambda each: each.memory.nbytes)
        namespaces: list[ShownNamespace] = []
        for some in in_batches(chosen, _NAMESPACES_A_SLICE):
            namespaces += [_namespace(self._namespace_view(each)) for each in some]
            yield b""
        busiest = heapq.nlargest(MOST_CLIENTS, service.clients.values(), key=lambda each: each.lookups)
        clients, device, used = [], ShownState(), 0
        for few in in_batches(busiest, _CLIENTS_A_SLICE):
            clients += [_client(self._client_view(each)) for each in few]
            yield b""
        slot_bytes = {each.id: each.slot_bytes for each in every}
        for client in clients:
            device.blocks += client.device_blocks
            device.bytes += client.device_blocks * slot_bytes.get(client.namespace, 0)
            used += client.device_used
        storage, arena = self._storage(), service.arena
        storages = storage.layouts if storage is not None else []
        yield msgspec.json.encode(
            ShownService(
                version=__version__,
                state=service.state,
                started=service.started,
                time=time.time(),
                fingerprint=self._fingerprint,
                requests=service.totals.requests,
                refused=service.totals.refused,
                clients_lost=service.totals.clients_lost,
                columns=list(TrendRow.__struct_fields__),
                row=self.trends.row,
                rows=self.trends.rows_after(after),
                arena_bytes=arena.total_bytes,
                free_bytes=arena.num_free * arena.manifest.extent_bytes,
                host=_states(every),
                device=device,
                device_used=used,
                storage=None if storage is None else _summary(storage),
                storages=storages[:MOST_NAMESPACES],
                missed=_missed(every),
                hints=_hints(every),
                namespaces=namespaces,
                more_namespaces=len(every) - len(namespaces),
                clients=clients,
                more_clients=len(service.clients) - len(clients),
            )
        )


def _states(namespaces: Iterable[Namespace]) -> dict[str, ShownState]:
    """Return blocks and bytes of the host tiers by state; ``evictable`` ones are part of ``ready``."""
    found = {name: ShownState() for name in (*_STATES, "evictable")}
    for namespace in namespaces:
        if namespace.tier is None:
            continue
        stats = namespace.tier.stats()
        for name, state in found.items():
            blocks = getattr(stats, name)
            state.blocks += blocks
            state.bytes += blocks * namespace.slot_bytes
    return found


def _missed(namespaces: Iterable[Namespace]) -> dict[str, int]:
    found = dict.fromkeys((reason.value for reason in MissReason), 0)
    for namespace in namespaces:
        for reason, blocks in namespace.history.totals.missed.items():
            found[reason.value] += blocks
    return found


def _hints(namespaces: Iterable[Namespace]) -> HintFigures:
    found = HintFigures(outcomes=dict.fromkeys((status.value for status in HintStatus), 0))
    for namespace in namespaces:
        its = namespace.hints.figures
        found.given += its.given
        for outcome, count in its.outcomes.items():
            found.outcomes[outcome] = found.outcomes.get(outcome, 0) + count
        for reason, count in its.evicted_early.items():
            found.evicted_early[reason] = found.evicted_early.get(reason, 0) + count
    return found


def _summary(storage: StorageView) -> dict[str, Any]:
    names = [name for name in storage.__struct_fields__ if name != "layouts"]
    return {name: getattr(storage, name) for name in names}


def _namespace(view: NamespaceView) -> ShownNamespace:
    return ShownNamespace(
        namespace=view.namespace,
        model=view.model,
        revision=view.revision,
        ranks=view.ranks,
        block_size=view.block_size,
        slot_bytes=view.record_bytes * view.ranks,
        bytes=view.bytes,
        ready=view.tier.ready,
        clients=view.clients,
        tenants=[
            ShownTenant(each.tenant, each.blocks, each.bytes, each.most_blocks) for each in view.tenants
        ],
    )


def _client(view: ClientView) -> ShownClient:
    figures = ClientFigures.of(view.figures)
    device = figures.device or {}
    blocks = _count(device.get("blocks"))
    return ShownClient(
        name=view.name,
        session=view.session,
        namespace=view.namespace,
        pid=view.pid,
        ranks=len(view.ranks),
        connected_seconds=view.connected_seconds,
        silent=view.silent,
        writable_slots=view.stock,
        pinned_runs=view.runs,
        lookups=view.lookups,
        stored=view.stored,
        requests=_count(figures.live_requests),
        device_blocks=blocks,
        device_used=max(blocks - _count(device.get("free")), 0),
        queued_backups=_count(figures.queued_backups),
        plans_in_flight=_count(figures.plans_in_flight),
        hit_shares=figures.hit_shares(),
    )


def _count(figure: Any) -> int:
    """Return a client's own figure; 0 for what is no count."""
    value = to_number(figure)
    return int(value) if 0 <= value <= _MOST else 0
