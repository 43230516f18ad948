"""Views and commands of the service: what tools, HTTP and metrics ask."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from fdcache import __version__
from fdcache._core import Tier
from fdcache.metadata import HashArray, SwapPurpose
from fdcache.service.server.arguments import (
    ArgumentError,
    Arguments,
    hashes_of_path,
    number,
    select_namespace,
    select_namespaces,
)
from fdcache.service.server.layout_storage import LayoutStorage
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.resets import reset
from fdcache.service.server.service import Service
from fdcache.service.wire.client_views import ClientFigures, ClientView, CopiedView, TransferView
from fdcache.service.wire.protocol import Answer, Ask, Refused, ToolAnswer
from fdcache.service.wire.records import total
from fdcache.service.wire.storage_views import (
    LoadingView,
    NamespaceStorageView,
    StorageTotals,
    StorageView,
    StoredBlocks,
)
from fdcache.service.wire.views import (
    ArenaView,
    BlockView,
    ConfigView,
    ExplainedBlock,
    ExplainView,
    MemoryTiersView,
    NamedTenantView,
    NamespaceTierView,
    NamespaceView,
    ReuseView,
    ServiceView,
    StateView,
    TenantView,
    TiersView,
    TreeNode,
)
from fdcache.settings.effective import EffectiveValue
from fdcache.storage.connector import StorageState, StorageStats
from fdcache.tiers.reuse import ReuseReport
from fdcache.tiers.storage_index import LocalIndex

MAX_TREE = 1000
MAX_TENANTS = 100_000
_TENANTS_SHOWN = 20
"""Tenants of each namespace in ``namespaces`` and the metrics: there may be very many."""
_WORST_FIRST = (StorageState.OFF, StorageState.READ_ONLY, StorageState.FULL, StorageState.READY)


class Views:
    """Answers ``Ask`` requests. It runs in the service's thread and reads its state directly.

    ``answer(Ask("tree", {"limit": 10}))`` returns the ten hottest blocks, encoded in a ``ToolAnswer``.
    """

    def __init__(self, service: Service, config: Mapping[str, EffectiveValue], fingerprint: str) -> None:
        self._service = service
        self._config = config
        self._fingerprint = fingerprint
        self._answers: dict[str, Callable[[Arguments], Any]] = {
            "stats": lambda arguments: self.stats(),
            "tiers": lambda arguments: self.tiers(),
            "storage": lambda arguments: self.storage(),
            "namespaces": lambda arguments: self.namespaces(),
            "clients": lambda arguments: self.clients(),
            "tenants": self.tenants,
            "transfers": lambda arguments: self.transfers(),
            "eviction": self.eviction,
            "tree": self.tree,
            "block": self.block,
            "explain": self.explain,
            "layout": self.layout,
            "config": lambda arguments: self.config(),
            "reset": lambda arguments: reset(self._service, arguments),
            "pause": lambda arguments: self._pause(True),
            "resume": lambda arguments: self._pause(False),
            "integrity": lambda arguments: check_integrity(self._service),
        }

    def answer(self, ask: Ask) -> Answer:
        """Carry out a view or command."""
        if ask.what not in self._answers:
            return Refused("unknown", f"{ask.what!r} is none of {', '.join(self._answers)}")
        try:
            return ToolAnswer(msgspec.json.encode(self._answers[ask.what](ask.arguments)))
        except ArgumentError as error:
            return Refused("malformed", str(error))

    # --- the service --------------------------------------------------------------------------------------

    def stats(self) -> ServiceView:
        """Return the whole service."""
        service = self._service
        namespaces = self.namespaces()
        return ServiceView(
            version=__version__,
            state=service.state,
            uptime_seconds=time.time() - service.started,
            config_fingerprint=self._fingerprint,
            waiting_for_earlier=len(service.clients.earlier),
            totals=service.totals,
            tiers=MemoryTiersView(self._arena(namespaces), self._devices()),
            storage=self.storage(),
            namespaces=namespaces,
            clients=self.clients(),
        )

    def tiers(self) -> TiersView:
        """Return the host, device and storage tiers."""
        return TiersView(self._arena(self.namespaces()), self._devices(), self.storage())

    def _arena(self, namespaces: list[NamespaceView]) -> ArenaView:
        arena = self._service.arena
        return total(
            (each.tier for each in namespaces),
            ArenaView,
            bytes=arena.total_bytes,
            extent_bytes=arena.manifest.extent_bytes,
            extents=arena.manifest.extents,
            free_extents=arena.num_free,
        )

    def _devices(self) -> list[dict[str, Any]]:
        return [
            {**device, "client": client.name}
            for client in self._service.clients.values()
            if (device := client.reported().get("device"))
        ]

    def config(self) -> ConfigView:
        """Return the settings in force by name, each with every value that was given for it. Secrets are masked."""
        return ConfigView(__version__, os.getpid(), self._fingerprint, dict(self._config))

    def _pause(self, paused: bool) -> StateView:
        self._service.paused = paused
        return StateView(self._service.state)

    # --- namespaces and tenants ---------------------------------------------------------------------------

    def namespaces(self) -> list[NamespaceView]:
        """Return every namespace."""
        return [self._namespace(each) for each in self._service.namespaces.values()]

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
            tenants=_tenant_views(namespace, _TENANTS_SHOWN),
            totals=namespace.history.totals,
            storage=_storage_view(storage) if storage is not None else None,
        )

    def layout(self, arguments: Arguments) -> Any:
        """Return the layout of a namespace."""
        return msgspec.json.decode(select_namespace(self._service, arguments).layout.to_json())

    def tenants(self, arguments: Arguments) -> list[NamedTenantView]:
        """Return the tenants with the most blocks, by namespace."""
        limit = int(number(arguments, "limit", 100, 1, MAX_TENANTS))
        return [
            NamedTenantView(namespace=namespace.id, **msgspec.structs.asdict(each))
            for namespace in select_namespaces(self._service, arguments)
            for each in _tenant_views(namespace, limit)
        ]

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

    def clients(self) -> list[ClientView]:
        """Return every client."""
        now = time.monotonic()
        return [
            ClientView(
                session=f"{client.session:x}",
                name=client.name,
                namespace=client.namespace.id,
                pid=client.live.pid,
                ranks=sorted(client.ranks.values()),
                connected_seconds=time.time() - client.since,
                silent_seconds=now - client.heartbeat_at,
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
            for client in self._service.clients.values()
        ]

    def transfers(self) -> list[TransferView]:
        """Return what each client may copy, has queued and has copied."""
        found = []
        for client in self._service.clients.values():
            figures = client.reported()
            found.append(
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
        return found

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

    # --- blocks -------------------------------------------------------------------------------------------

    def tree(self, arguments: Arguments) -> list[TreeNode]:
        """Return the hottest blocks, each with its ancestors, parents first."""
        limit = int(number(arguments, "limit", 30, 1, MAX_TREE))
        found = []
        for namespace in select_namespaces(self._service, arguments):
            tier = namespace.tier
            if tier is None:
                continue
            blocks = tier.ancestry(tier.hottest(limit).slots)
            for slot, parent in zip(blocks.slots.tolist(), blocks.parents, strict=True):
                node = tier.node(slot)
                found.append(
                    TreeNode(
                        namespace=namespace.id,
                        hash=node.hash.hex(),
                        parent=parent.tobytes().hex() if parent.any() else None,
                        depth=node.depth,
                        hits=node.hits,
                        children=node.children,
                        pins=node.pins,
                        idle_seconds=node.idle_seconds,
                    )
                )
        return found

    def block(self, arguments: Arguments) -> list[BlockView]:
        """Return the blocks whose hash begins with ``hash``, at least 4 hexadecimal digits."""
        prefix = str(arguments.get("hash", "")).lower()
        if not 4 <= len(prefix) <= 64 or any(letter not in "0123456789abcdef" for letter in prefix):
            raise ArgumentError("hash: give 4 to 64 hexadecimal digits")
        return [
            block
            for namespace in select_namespaces(self._service, arguments)
            for block in self._blocks_of(namespace, prefix)
        ]

    def _blocks_of(self, namespace: Namespace, prefix: str) -> list[BlockView]:
        tier, found = namespace.tier, []
        if tier is not None:
            for slot in tier.starting_with(bytes.fromhex(prefix[: len(prefix) // 2 * 2])).slots.tolist():
                node = tier.node(slot)
                if node.hash.hex().startswith(prefix):
                    found.append(
                        BlockView(
                            namespace=namespace.id,
                            tenant=namespace.tenants.name_of(node.tenant),
                            hash=node.hash.hex(),
                            slot=slot,
                            generation=node.generation,
                            depth=node.depth,
                            children=node.children,
                            pins=node.pins,
                            hits=node.hits,
                            stored_at=time.time() - node.ready_seconds,
                            idle_seconds=node.idle_seconds,
                            checksum=f"{node.checksum:016x}",
                            unverified=slot in namespace.unverified,
                        )
                    )
        found += [
            BlockView(namespace=namespace.id, hash=key.hex(), reason=reason, left_at=when)
            for key, when, reason in namespace.history.evictions.starting_with(prefix)
        ]
        # Storage finds whole hashes only: those found above, or the one that was given in full.
        candidates = found or ([BlockView(namespace.id, prefix)] if len(prefix) == 64 else [])
        if candidates:
            stored = self._stored(namespace, hashes_of_path([each.hash for each in candidates]))
            for each in candidates:
                each.stored = bytes.fromhex(each.hash) in stored
        return [each for each in candidates if each in found or each.stored]

    def explain(self, arguments: Arguments) -> ExplainView:
        """Return where each block of a path is. ``hashes`` are hexadecimal, in path order."""
        namespace = select_namespace(self._service, arguments)
        hashes = hashes_of_path(arguments.get("hashes"))
        namespace.collect_events()
        tier, evictions = namespace.tier, namespace.history.evictions
        slots: dict[bytes, int] = {}
        if tier is not None:
            found = tier.find(hashes)
            slots = {
                row.tobytes(): slot for row, slot in zip(found.hashes, found.slots.tolist(), strict=True)
            }
        stored = self._stored(namespace, hashes)
        blocks = []
        for position, row in enumerate(hashes):
            key = row.tobytes()
            block = ExplainedBlock(position=position, hash=key.hex(), tier=None)
            if tier is not None and key in slots:
                node = tier.node(slots[key])
                block.tier, block.slot, block.hits = "host", node.slot, node.hits
                block.stored_at, block.idle_seconds = time.time() - node.ready_seconds, node.idle_seconds
            elif key in stored:
                block.tier = "storage"
                block.left_host_at, _ = evictions.find(key)
            else:
                block.left_at, block.reason = evictions.find(key)
            blocks.append(block)
        broken_at = next((block.position for block in blocks if block.tier is None), None)
        return ExplainView(namespace.id, blocks, broken_at)

    def _stored(self, namespace: Namespace, hashes: HashArray) -> set[bytes]:
        """Return the blocks known to be stored; of a shared store, those that went through this service."""
        storage = self._service.storage_of(namespace)
        if storage is None:
            return set()
        absent = storage.index.is_absent(hashes).tolist()
        return {row.tobytes() for row, gone in zip(hashes, absent, strict=True) if not gone}


def _tier_view(namespace: Namespace) -> NamespaceTierView:
    if namespace.tier is None:
        return NamespaceTierView()
    stats = namespace.tier.stats()
    return NamespaceTierView(**{name: getattr(stats, name) for name in NamespaceTierView.__struct_fields__})


def _tenant_views(namespace: Namespace, limit: int) -> list[TenantView]:
    """Return the tenants with the most blocks."""
    if namespace.tier is None:
        return []
    tenants = namespace.tenants
    blocks = sorted(tenants.blocks(namespace.tier).items(), key=lambda each: -each[1])[:limit]
    return [
        TenantView(
            tenant=tenants.quotas.name(key),
            blocks=count,
            bytes=count * namespace.slot_bytes,
            quota=tenants.quotas.share(key),
            most_blocks=min(tenants.most_blocks(key), namespace.max_slots),
        )
        for key, count in blocks
    ]


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
        ranks=layout.tp_size,
        state=_worst_state([rank.state.value for rank in ranks]),
        error=next((error for error in errors if error), None),
        blocks=pool.ready if pool else None,
        capacity_blocks=pool.slots if pool else None,
        bytes=pool.ready * layout.record_bytes * layout.tp_size if pool else None,
        quarantined=pool.quarantined if pool else 0,
        withheld=pool.withheld if pool else 0,
        orphans=pool.orphans if pool else 0,
        evictions=pool.evictions if pool else 0,
        restored_blocks=storage.restored,
        queued_blocks=storage.queued,
        reading_blocks=storage.blocks_in_flight(SwapPurpose.PREFETCH),
        writing_blocks=storage.blocks_in_flight(SwapPurpose.STORE),
        erasures_queued=sum(queue.erasures_queued for queue in storage.queues),
        totals=_storage_totals(storage, ranks),
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


def check_integrity(service: Service) -> list[str]:
    """Return the invariants that do not hold, one sentence each."""
    broken = []
    for namespace in service.namespaces.values():
        if namespace.tier is None:
            continue
        broken += [f"namespace {namespace.id}: {text}" for text in namespace.tier.check_integrity()]
        clients = service.clients.of(namespace)
        stats = namespace.tier.stats()
        stocked = sum(len(client.stock) for client in clients)
        leases = sum(
            1 + len(client.runs) + len(client.stale_stock) + client.fetches.num_leases for client in clients
        )
        if stats.writing < stocked:
            broken.append(f"namespace {namespace.id}: {stats.writing} slots are written, {stocked} granted")
        if stats.leases != leases:
            broken.append(f"namespace {namespace.id}: {stats.leases} leases, {leases} known")
    return broken
