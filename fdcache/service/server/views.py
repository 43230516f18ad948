"""Views and commands of the service: what tools, HTTP and metrics ask."""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from fdcache import __version__
from fdcache._core import Tier
from fdcache.errors import RefusedError
from fdcache.metadata import SwapPurpose
from fdcache.service.server.arguments import (
    ArgumentError,
    Arguments,
    number,
    select_namespace,
    select_namespaces,
)
from fdcache.service.server.block_views import BlockViews
from fdcache.service.server.clients import RegisteredClient
from fdcache.service.server.control import ControlCommands
from fdcache.service.server.layout_storage import LayoutStorage
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.page_view import PageView
from fdcache.service.server.resets import reset
from fdcache.service.server.service import Service
from fdcache.service.server.slices import in_batches, json_list, json_object
from fdcache.service.wire.client_views import ClientFigures, ClientView, CopiedView, TransferView
from fdcache.service.wire.protocol import Ask
from fdcache.service.wire.records import total
from fdcache.service.wire.storage_views import (
    LoadingView,
    NamespaceStorageView,
    NodeView,
    StorageTotals,
    StorageView,
    StoredBlocks,
)
from fdcache.service.wire.views import (
    ArenaView,
    ConfigView,
    MemoryTiersView,
    NamedTenantView,
    NamespaceTierView,
    NamespaceView,
    ReuseView,
    ServiceView,
    StateView,
    TenantView,
    TiersView,
)
from fdcache.settings.effective import EffectiveValue
from fdcache.storage.connector import NodeStats, StorageState, StorageStats
from fdcache.tiers.reuse import ReuseReport
from fdcache.tiers.storage_index import LocalIndex

MAX_TENANTS = 100_000
CLIENTS_A_SLICE, NAMESPACES_A_SLICE, TENANTS_A_SLICE = 8, 8, 256
_TENANTS_SHOWN = 20
"""Tenants of each namespace in ``namespaces`` and the metrics: there may be very many."""
_WORST_FIRST = (StorageState.OFF, StorageState.READ_ONLY, StorageState.FULL, StorageState.READY)


class Views:
    """Answers ``Ask`` requests. It runs in the service's thread and reads its state directly.

    ``b"".join(views.slices(Ask("tree", {"limit": 10})))`` is a JSON list of the ten hottest blocks.
    """

    def __init__(self, service: Service, config: Mapping[str, EffectiveValue], fingerprint: str) -> None:
        self._service = service
        self._config = config
        self._fingerprint = fingerprint
        blocks = BlockViews(service)
        self.control = ControlCommands(service)
        self.page = PageView(service, fingerprint, self._namespace, self._client, self.storage)
        self._answers: dict[str, Callable[[Arguments], Any]] = {
            "stats": lambda arguments: self.stats(),
            "tiers": lambda arguments: self.tiers(),
            "storage": lambda arguments: self.storage(),
            "namespaces": lambda arguments: json_list(in_batches(self.namespaces(), NAMESPACES_A_SLICE)),
            "clients": lambda arguments: json_list(in_batches(self.clients(), CLIENTS_A_SLICE)),
            "tenants": lambda arguments: json_list(in_batches(self.tenants(arguments), TENANTS_A_SLICE)),
            "transfers": lambda arguments: json_list(in_batches(self.transfers(), CLIENTS_A_SLICE)),
            "eviction": self.eviction,
            "tree": blocks.tree,
            "block": blocks.block,
            "explain": blocks.explain,
            "page": self.page.page,
            "layout": self.layout,
            "config": lambda arguments: self.config(),
            "reset": lambda arguments: reset(self._service, arguments),
            "pause": lambda arguments: self._pause(True),
            "resume": lambda arguments: self._pause(False),
            "integrity": lambda arguments: check_integrity(self._service, self.control),
            **self.control.answers,
        }

    def slices(self, ask: Ask) -> Iterator[bytes]:
        """Carry out a view or command and yield its answer, JSON, in parts. Raises ``RefusedError``.

        Each part takes a moment; requests of engines may be carried out between two of them.
        """
        if ask.what not in self._answers:
            raise RefusedError("unknown", f"{ask.what!r} is none of {', '.join(self._answers)}")
        try:
            answer = self._answers[ask.what](ask.arguments)
            if isinstance(answer, Iterator):
                yield from answer
            else:
                yield msgspec.json.encode(answer)
        except ArgumentError as error:
            raise RefusedError(error.code, str(error)) from error

    # --- the service --------------------------------------------------------------------------------------

    def stats(self) -> Iterator[bytes]:
        """Yield the whole service, a ``ServiceView``."""
        service = self._service
        namespaces, clients = [], []
        for some in in_batches(self.namespaces(), NAMESPACES_A_SLICE):
            namespaces += some
            yield b""
        for few in in_batches(self.clients(), CLIENTS_A_SLICE):
            clients += few
            yield b""
        view = ServiceView(
            version=__version__,
            state=service.state,
            uptime_seconds=time.time() - service.started,
            config_fingerprint=self._fingerprint,
            waiting_for_earlier=len(service.clients.earlier),
            totals=service.totals,
            tiers=MemoryTiersView(self._arena(namespaces), _devices(clients)),
            storage=self.storage(),
            namespaces=namespaces,
            clients=clients,
        )
        lists = {
            "namespaces": in_batches(namespaces, NAMESPACES_A_SLICE),
            "clients": in_batches(clients, CLIENTS_A_SLICE),
        }
        yield from json_object(**{name: getattr(view, name) for name in view.__struct_fields__} | lists)

    def tiers(self) -> TiersView:
        """Return the host, device and storage tiers."""
        return TiersView(self._arena(self.namespaces()), _devices(self.clients()), self.storage())

    def _arena(self, namespaces: Iterable[NamespaceView]) -> ArenaView:
        arena = self._service.arena
        return total(
            (each.tier for each in namespaces),
            ArenaView,
            bytes=arena.total_bytes,
            extent_bytes=arena.manifest.extent_bytes,
            extents=arena.manifest.extents,
            free_extents=arena.num_free,
        )

    def config(self) -> ConfigView:
        """Return the settings in force by name, each with every value that was given for it. Secrets are masked."""
        return ConfigView(__version__, os.getpid(), self._fingerprint, dict(self._config))

    def _pause(self, paused: bool) -> StateView:
        self._service.paused = paused
        return StateView(self._service.state)

    # --- namespaces and tenants ---------------------------------------------------------------------------

    def namespaces(self) -> Iterator[NamespaceView]:
        """Yield every namespace."""
        return (self._namespace(each) for each in list(self._service.namespaces.values()))

    def _namespace(self, namespace: Namespace) -> NamespaceView:
        storage = self._service.storage_of(namespace)
        return NamespaceView(
            namespace=namespace.id,
            model=namespace.layout.model,
            revision=namespace.layout.revision,
            ranks=namespace.ranks,
            block_size=namespace.layout.block_size,
            record_bytes=namespace.layout.record_bytes,
            extents=namespace.num_extents * namespace.ranks,
            bytes=namespace.memory.nbytes,
            clients=len(self._service.clients.of(namespace)),
            unverified=len(namespace.unverified),
            tier=_tier_view(namespace),
            tenants=list(_tenant_views(namespace, _TENANTS_SHOWN)),
            totals=namespace.history.totals,
            storage=_storage_view(storage) if storage is not None else None,
        )

    def layout(self, arguments: Arguments) -> Any:
        """Return the layout of a namespace."""
        return msgspec.json.decode(select_namespace(self._service, arguments).layout.to_json())

    def tenants(self, arguments: Arguments) -> Iterator[NamedTenantView]:
        """Yield the tenants with the most blocks, by namespace."""
        limit = int(number(arguments, "limit", 100, 1, MAX_TENANTS))
        chosen = select_namespaces(self._service, arguments)
        return (
            NamedTenantView(namespace=namespace.id, **msgspec.structs.asdict(each))
            for namespace in chosen
            for each in _tenant_views(namespace, limit)
        )

    # --- storage ------------------------------------------------------------------------------------------

    def storage(self) -> StorageView | None:
        """Return the storage tier; None without one."""
        storage = self._service.storage
        if storage is None:
            return None
        done, slots = storage.progress
        namespaces = [_storage_view(each) for each in storage.layouts.values()]
        namespaces += [
            NamespaceStorageView(namespace=name, state=StorageState.OFF.value, error=error)
            for name, error in storage.errors().items()
        ]
        return StorageView(
            connector=storage.settings.connector,
            state=_worst_state([each.state for each in namespaces]),
            loading=LoadingView(storage.is_loading, done, slots),
            layouts=namespaces,
            **msgspec.structs.asdict(total(namespaces, StoredBlocks)),
        )

    # --- clients ------------------------------------------------------------------------------------------

    def clients(self) -> Iterator[ClientView]:
        """Yield every client."""
        return (self._client(each) for each in list(self._service.clients.values()))

    def _client(self, client: RegisteredClient) -> ClientView:
        return ClientView(
            session=f"{client.session:x}",
            name=client.name,
            namespace=client.namespace.id,
            pid=client.live.pid,
            ranks=sorted(client.ranks.values()),
            connected_seconds=time.time() - client.since,
            silent_seconds=time.monotonic() - client.heartbeat_at,
            silent=client.silent,
            stock=len(client.stock),
            stock_bytes=len(client.stock) * client.namespace.slot_bytes,
            runs=len(client.runs),
            lookups=client.lookups,
            stored=client.stored,
            device_resets=client.device_resets,
            device_resets_applied=client.device_resets_applied,
            figures=client.reported(),
        )

    def transfers(self) -> Iterator[TransferView]:
        """Yield what each client may copy, has queued and has copied."""
        for client in list(self._service.clients.values()):
            figures = client.reported()
            yield (
                TransferView(
                    client=client.name,
                    writable_slots=len(client.stock),
                    pinned_runs=len(client.runs),
                    plans_in_flight=figures.get("plans_in_flight", 0),
                    queued_backups=figures.get("queued_backups", 0),
                    sending_blocks=figures.get("sending_blocks", 0),
                    fetching_blocks=figures.get("fetching_blocks", 0),
                    held_blocks=figures.get("held_blocks", 0),
                    handovers=ClientFigures.of(figures).handover_counts(),
                    copied={
                        direction: CopiedView(copied.bytes, copied.durations.total)
                        for direction, copied in client.traffic.copied.items()
                    },
                )
            )

    def eviction(self, arguments: Arguments) -> list[ReuseView]:
        """Return what the orders of eviction have learned: host and storage tiers, and those that clients report."""
        found = []
        for namespace in select_namespaces(self._service, arguments):
            pools: dict[str, Tier] = {}
            if namespace.tier is not None:
                pools["host"] = namespace.tier
            storage = self._service.storage_of(namespace)
            if storage is not None and isinstance(storage.index, LocalIndex):
                pools["storage"] = storage.index.pool
            for tier, pool in pools.items():
                tables = pool.reuse()
                report = None if tables is None else ReuseReport.of(tables)
                found.append(ReuseView(tier, "service", namespace.id, report))
            for client in self._service.clients.of(namespace):
                learned = ClientFigures.of(client.reported()).learned()
                found += [
                    ReuseView(tier, client.name, namespace.id, report) for tier, report in learned.items()
                ]
        return found


def _devices(clients: Iterable[ClientView]) -> list[dict[str, Any]]:
    """Return the device tiers that clients report."""
    return [{**device, "client": each.name} for each in clients if (device := each.figures.get("device"))]


def _tier_view(namespace: Namespace) -> NamespaceTierView:
    if namespace.tier is None:
        return NamespaceTierView()
    stats = namespace.tier.stats()
    return NamespaceTierView(**{name: getattr(stats, name) for name in NamespaceTierView.__struct_fields__})


def _tenant_views(namespace: Namespace, limit: int) -> Iterator[TenantView]:
    """Yield the tenants with the most blocks, and those without any that have a quota of their own."""
    if namespace.tier is None:
        return
    tenants = namespace.tenants
    counts = tenants.blocks(namespace.tier)
    counts |= {key: 0 for key in tenants.quotas.own if key not in counts}
    for key, count in heapq.nlargest(limit, counts.items(), key=lambda each: each[1]):
        yield TenantView(
            tenant=tenants.quotas.name(key),
            blocks=count,
            bytes=count * namespace.slot_bytes,
            quota=tenants.quotas.share(key),
            most_blocks=min(tenants.most_blocks(key), namespace.storable_slots),
        )


def _worst_state(states: list[str]) -> str:
    return next((state.value for state in _WORST_FIRST if state.value in states), StorageState.READY.value)


def _storage_view(storage: LayoutStorage) -> NamespaceStorageView:
    ranks = [queue.stats for queue in storage.queues]
    pool = storage.index.pool.stats() if isinstance(storage.index, LocalIndex) else None
    errors = [*(rank.error for rank in ranks), *(queue.clear_error for queue in storage.queues)]
    layout = storage.layout
    return NamespaceStorageView(
        namespace=storage.id,
        model=layout.model,
        revision=layout.revision,
        ranks=layout.record_ranks,
        state=_worst_state([rank.state.value for rank in ranks]),
        error=next((error for error in errors if error), None),
        blocks=pool.ready if pool else None,
        capacity_blocks=pool.slots if pool else None,
        bytes=pool.ready * layout.block_bytes if pool else None,
        quarantined=pool.quarantined if pool else 0,
        withheld=pool.withheld if pool else 0,
        orphans=pool.orphans if pool else 0,
        evictions=pool.evictions if pool else 0,
        restored_blocks=storage.restored,
        store_bytes=max((rank.store_bytes for rank in ranks if rank.store_bytes is not None), default=None),
        store_objects=max(
            (rank.store_objects for rank in ranks if rank.store_objects is not None), default=None
        ),
        removed_objects=sum(rank.removed_objects for rank in ranks),
        queued_blocks=storage.queued,
        reading_blocks=storage.blocks_in_flight(SwapPurpose.PREFETCH),
        writing_blocks=storage.blocks_in_flight(SwapPurpose.STORE),
        erasures_queued=sum(queue.erasures_queued for queue in storage.queues),
        totals=_storage_totals(storage, ranks),
        nodes=[_node_view(each) for each in storage.nodes()],
    )


def _node_view(node: NodeStats) -> NodeView:
    return NodeView(
        address=node.address,
        well=node.failure is None,
        hits=node.hits,
        read_bytes=node.read_bytes,
        answers=node.answers,
        seconds=node.seconds,
        latency=node.seconds / node.answers if node.answers else 0.0,
        failures=node.failures,
        last_error=node.last_error,
    )


def _storage_totals(storage: LayoutStorage, ranks: list[StorageStats]) -> StorageTotals:
    read, written = storage.moved[SwapPurpose.PREFETCH], storage.moved[SwapPurpose.STORE]
    counters = storage.counters
    return StorageTotals(
        hit_blocks=storage.hit_blocks,
        read_blocks=counters.blocks_prefetched,
        stored_blocks=counters.blocks_stored,
        dropped_blocks=counters.stores_dropped,
        shared_reads=counters.prefetches_shared,
        timed_out_reads=counters.prefetches_timed_out,
        corrupt_blocks=counters.blocks_corrupt_in_storage,
        resets=storage.resets,
        read_bytes=read.bytes,
        read_seconds=read.seconds,
        written_bytes=written.bytes,
        written_seconds=written.seconds,
        misses=sum(rank.misses for rank in ranks),
        errors=sum(rank.errors for rank in ranks),
        timeouts=sum(rank.timeouts for rank in ranks),
        peer_gone=sum(rank.peer_gone for rank in ranks),
        no_room=sum(rank.no_room for rank in ranks),
        bad_slots=sum(rank.bad_slots for rank in ranks),
    )


def check_integrity(service: Service, control: ControlCommands) -> list[str]:
    """Return the invariants that do not hold, one sentence each."""
    broken = []
    for namespace in service.namespaces.values():
        if namespace.tier is None:
            continue
        broken += [f"namespace {namespace.id}: {text}" for text in namespace.tier.check_integrity()]
        clients = service.clients.of(namespace)
        stats = namespace.tier.stats()
        stocked = sum(len(client.stock) for client in clients)
        leases = control.leases(namespace) + sum(
            1 + len(client.runs) + len(client.stale_stock) + client.fetches.num_leases for client in clients
        )
        if (reads := service.reads_of(namespace)) is not None:
            leases += reads.pursued.num_leases
        if stats.writing < stocked:
            broken.append(f"namespace {namespace.id}: {stats.writing} slots are written, {stocked} granted")
        if stats.leases != leases:
            broken.append(f"namespace {namespace.id}: {stats.leases} leases, {leases} known")
    return broken
