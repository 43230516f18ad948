"""Records of the page of a service: what it shows now, and the totals that its curves are made of."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from fdcache.service.wire.records import shown
from fdcache.service.wire.storage_views import NamespaceStorageView
from fdcache.tiers.statistics import HintFigures


class TrendRow(msgspec.Struct, array_like=True):
    """Totals at one moment, over all namespaces: a curve is the difference of two rows. Sent as an array."""

    time: float = 0.0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    missed_sample: int = 0
    missed_estimated: int = 0
    missed_known: int = 0
    missed_blocks: int = 0
    stored_blocks: int = 0
    evicted_blocks: int = 0
    storage_evicted_blocks: int = 0
    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0
    storage_to_host_bytes: int = 0
    host_to_storage_bytes: int = 0
    peer_bytes: int = 0
    host_blocks: int = 0
    host_bytes: int = 0
    storage_blocks: int = 0
    storage_reading: int = 0
    storage_writing: int = 0
    storage_queued: int = 0


class ShownState(msgspec.Struct):
    """Blocks of a tier in one state, and their bytes."""

    blocks: int = 0
    bytes: int = 0


class ShownNamespace(msgspec.Struct):
    """A namespace, as the page lists it."""

    namespace: str
    model: str
    revision: str
    ranks: int
    block_size: int
    slot_bytes: int
    bytes: int
    ready: int
    clients: int
    tenants: list[ShownTenant]


class ShownTenant(msgspec.Struct):
    """Blocks of a tenant, as the page lists them."""

    tenant: str
    blocks: int
    bytes: int
    most_blocks: int


class ShownClient(msgspec.Struct):
    """A client, with figures that it reported as numbers; what makes no sense is 0."""

    name: str
    session: str
    namespace: str
    pid: int
    ranks: int
    connected_seconds: float
    silent: bool
    writable_slots: int
    pinned_runs: int
    lookups: int
    stored: int
    requests: int
    device_blocks: int
    device_used: int
    queued_backups: int
    plans_in_flight: int
    hit_shares: dict[str, float]


class ShownService(msgspec.Struct):
    """What the page shows. ``rows`` are those after the row that was asked for; the last one is ``row``."""

    version: Annotated[str, shown("Version of fdcache.")]
    state: Annotated[str, shown("One of ready, loading, recovering, paused and draining.")]
    started: Annotated[float, shown("When the service started: another one means a restart.")]
    time: float
    fingerprint: str
    requests: int
    refused: int
    clients_lost: int
    columns: list[str]
    row: int
    rows: list[TrendRow]
    arena_bytes: int
    free_bytes: Annotated[int, shown("Bytes that no namespace has.")]
    host: dict[str, ShownState]
    device: ShownState
    device_used: int
    storage: dict[str, Any] | None
    storages: list[NamespaceStorageView]
    missed: dict[str, int]
    hints: HintFigures
    namespaces: list[ShownNamespace]
    more_namespaces: int
    clients: list[ShownClient]
    more_clients: int
