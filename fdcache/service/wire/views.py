"""Records of a running service, for RPC views, HTTP, metrics and the tables of ``fdcache inspect``.

``records.py`` explains the annotations.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from fdcache.service.wire.client_views import HIT_TIERS, ClientView
from fdcache.service.wire.records import Unit, counter, gauge, histogram, shown
from fdcache.service.wire.storage_views import NamespaceStorageView, StorageView
from fdcache.settings.effective import EffectiveValue
from fdcache.tiers.reuse import ReuseReport
from fdcache.tiers.statistics import HintFigures, Histogram, Traffic

# --- the host tier -----------------------------------------------------------------------------------------

_TIER_BLOCKS = "Slots of a tier by state."


class TierView(msgspec.Struct):
    """Slots of a host tier, and their use."""

    slots: Annotated[int, shown("Slots of the tier.")] = 0
    free: Annotated[
        int,
        shown(
            "Free slots.",
            gauge("fdcache_tier_blocks", _TIER_BLOCKS, tier="host", state="free"),
            column="free",
        ),
    ] = 0
    writing: Annotated[
        int,
        shown(
            "Slots being copied into.",
            gauge("fdcache_tier_blocks", _TIER_BLOCKS, tier="host", state="writing"),
        ),
    ] = 0
    ready: Annotated[
        int,
        shown(
            "Blocks that look-ups find.",
            gauge("fdcache_tier_blocks", _TIER_BLOCKS, tier="host", state="ready"),
            column="ready",
        ),
    ] = 0
    evictable: Annotated[
        int, shown("Evictable blocks.", gauge("fdcache_tier_evictable_blocks", tier="host"))
    ] = 0
    pins: Annotated[int, shown("Pins on blocks.", gauge("fdcache_tier_pins", tier="host"))] = 0
    leases: Annotated[
        int, shown("Leases that hold pins and slots.", gauge("fdcache_tier_leases", tier="host"))
    ] = 0
    evictions: Annotated[int, shown("Blocks evicted.")] = 0


class NamespaceTierView(TierView):
    """The host tier of one namespace."""

    epoch: Annotated[int, shown("Resets of the tier.")] = 0
    unjoined: Annotated[int, shown("Blocks of which nobody has told what precedes them.")] = 0
    contradictions: Annotated[int, shown("Look-ups of keys that contradict those stored.")] = 0


class ArenaView(TierView, kw_only=True):
    """The arena, and the host tiers of all namespaces together."""

    bytes: Annotated[int, shown("Bytes of the arena.", gauge("fdcache_arena_bytes"))]
    extent_bytes: Annotated[int, shown("Bytes of an extent.")]
    extents: Annotated[int, shown("Extents of the arena.")]
    free_extents: Annotated[int, shown("Extents that no namespace has.")]


class TenantView(msgspec.Struct):
    """Blocks of a tenant in one namespace."""

    tenant: Annotated[
        str,
        shown("Name of the tenant where a quota names it, else the beginning of its key.", column="tenant"),
    ]
    blocks: Annotated[
        int,
        shown(
            "Blocks of the tenant.",
            gauge("fdcache_tenant_blocks", "Blocks of the largest tenants."),
            column="blocks",
        ),
    ] = 0
    bytes: Annotated[int, shown("Bytes of these blocks, on all ranks.", column="memory", unit=Unit.BYTES)] = 0
    quota: Annotated[
        float, shown("Share of the namespace that the tenant may have.", column="quota", unit=Unit.SHARE)
    ] = 1.0
    most_blocks: Annotated[
        int,
        shown(
            "Blocks that the tenant may have.",
            gauge("fdcache_tenant_quota_blocks", "Blocks that the largest tenants may have."),
            column="most blocks",
        ),
    ] = 0


class NamedTenantView(TenantView, kw_only=True):
    """Blocks of a tenant, with the namespace that they are in."""

    namespace: Annotated[str, shown("Name of the namespace.", column="namespace")]


class MissReason(StrEnum):
    """Why a block was not found in the host tier."""

    NOT_STORED = "not_stored"
    """It was never stored, or the eviction log has forgotten it."""
    EVICTED = "evicted"
    BROKEN_RUN = "broken_run"
    """A block above it was missing, so it was not kept."""
    TENANT_QUOTA = "tenant_quota"
    CORRUPT = "corrupt"
    NOT_COPIED = "not_copied"
    """Its copy to the host failed on some rank."""
    RESET = "reset"
    DELETED = "deleted"
    """A command deleted its prefix."""
    MOVED = "moved"
    """A command moved its prefix to storage."""
    PAUSED = "paused"
    TOO_MANY_RUNS = "too_many_runs"


_HITS = (
    "Blocks found, counted for each request that found them: two requests of a step that find one block are two hits. "
    "Blocks that an engine then leaves out, by its reuse grid, are counted; fdcache_client_hit_tokens is what engines "
    "used."
)
_UNSTORED = "Copies that were not kept."


class NamespaceTotals(msgspec.Struct):
    """Totals of a namespace since the service started."""

    lookups: Annotated[int, shown("Paths looked up.", counter("fdcache_lookups"))] = 0
    looked_up_blocks: Annotated[
        int, shown("Blocks looked up.", counter("fdcache_lookup_blocks"), column="asked")
    ] = 0
    hit_blocks: Annotated[int, shown(_HITS, counter("fdcache_hit_blocks", tier="host"), column="hits")] = 0
    missed: Annotated[
        dict[MissReason, int],
        shown(
            "Blocks not found, by why the first one of their path was absent.",
            counter("fdcache_missed_blocks", label="reason"),
        ),
    ] = msgspec.field(default_factory=lambda: dict.fromkeys(MissReason, 0))
    prompt_tokens: Annotated[
        int, shown("Tokens of prompts that engines looked up, as they say.", counter("fdcache_prompt_tokens"))
    ] = 0
    prompt_hit_tokens: Annotated[
        dict[str, int],
        shown(
            "Tokens of prompts that engines found and used, as they say.",
            counter("fdcache_prompt_hit_tokens", label="tier"),
        ),
    ] = msgspec.field(default_factory=lambda: dict.fromkeys(HIT_TIERS, 0))
    missed_sample: Annotated[
        int, shown("Missing blocks in the sample.", counter("fdcache_missed_sample_blocks"))
    ] = 0
    missed_estimated: Annotated[
        int,
        shown("Missing blocks that the sample stands for.", counter("fdcache_missed_estimated_blocks")),
    ] = 0
    missed_known: Annotated[
        int,
        shown(
            "Those of them that had been looked up or copied before, which an endless cache would have found.",
            counter("fdcache_missed_known_blocks"),
        ),
    ] = 0
    in_flight_misses: Annotated[
        int,
        shown(
            "Look-ups that ended at a block which the same engine was still copying to the host.",
            counter("fdcache_in_flight_misses"),
        ),
    ] = 0
    granted: Annotated[int, shown("Slots granted to be copied into.", counter("fdcache_granted_slots"))] = 0
    stored: Annotated[
        int, shown("Blocks that clients stored.", counter("fdcache_backed_up_blocks"), column="stored")
    ] = 0
    duplicates: Annotated[
        int,
        shown(
            "Copies of blocks that were there already.",
            counter("fdcache_unstored_blocks", _UNSTORED, reason="duplicate"),
        ),
    ] = 0
    orphans: Annotated[
        int,
        shown(
            "Copies of blocks without a parent.",
            counter("fdcache_unstored_blocks", _UNSTORED, reason="no_parent"),
        ),
    ] = 0
    dropped: Annotated[
        int,
        shown(
            "Copies that failed on some rank.",
            counter("fdcache_unstored_blocks", _UNSTORED, reason="not_copied"),
        ),
    ] = 0
    over_quota: Annotated[
        int,
        shown(
            "Copies for a tenant that had its quota.",
            counter("fdcache_unstored_blocks", _UNSTORED, reason="tenant_quota"),
        ),
    ] = 0
    evicted: Annotated[
        int, shown("Blocks that left the tier.", counter("fdcache_evicted_blocks"), column="evicted")
    ] = 0
    corrupt: Annotated[
        int,
        shown(
            "Blocks dropped because their bytes or headers were wrong.",
            counter("fdcache_corrupt_blocks"),
            column="corrupt",
        ),
    ] = 0
    recovered: Annotated[
        int, shown("Blocks recovered from an earlier service.", counter("fdcache_recovered_blocks"))
    ] = 0
    resets: Annotated[int, shown("Resets of the tier.", counter("fdcache_resets"))] = 0
    traffic: Traffic = msgspec.field(default_factory=Traffic)
    hints: HintFigures = msgspec.field(default_factory=HintFigures)


# --- namespaces --------------------------------------------------------------------------------------------


class NamespaceView(msgspec.Struct):
    """One namespace: its layout, its memory and its use."""

    namespace: Annotated[
        str, shown("Name: the first 16 digits of the layout's fingerprint.", column="namespace")
    ]
    model: Annotated[str, shown("Name of the model.", column="model")]
    revision: Annotated[str, shown("Revision of the model.")]
    ranks: Annotated[int, shown("Ranks of the model that hold bytes of their own.", column="ranks")]
    block_size: Annotated[int, shown("Tokens of a block.", column="block")]
    record_bytes: Annotated[int, shown("Bytes of a block on one rank.", column="record", unit=Unit.BYTES)]
    extents: Annotated[int, shown("Extents of all ranks.")] = 0
    bytes: Annotated[int, shown("Bytes of these extents.", column="memory", unit=Unit.BYTES)] = 0
    clients: Annotated[int, shown("Registered clients.", column="clients")] = 0
    unverified: Annotated[int, shown("Recovered blocks that no load has verified yet.")] = 0
    tier: Annotated[NamespaceTierView, shown("Slots of its host tier.", inline=True)] = msgspec.field(
        default_factory=NamespaceTierView
    )
    tenants: list[TenantView] = []
    totals: Annotated[NamespaceTotals, shown("Totals since the start.", inline=True)] = msgspec.field(
        default_factory=NamespaceTotals
    )
    storage: NamespaceStorageView | None = None


# --- the service -------------------------------------------------------------------------------------------


class Latencies(msgspec.Struct):
    """Durations of requests, by kind."""

    kinds: Annotated[
        dict[str, Histogram],
        shown("Time to carry a request out.", histogram("fdcache_request_duration_seconds", label="kind")),
    ] = {}

    def observe(self, kind: str, seconds: float) -> None:
        """Count one request."""
        self.kinds.setdefault(kind, Histogram()).observe(seconds)


class ServiceTotals(msgspec.Struct):
    """Totals of the service since it started."""

    requests: Annotated[int, shown("Requests answered.", counter("fdcache_requests"))] = 0
    refused: Annotated[int, shown("Requests refused.", counter("fdcache_refused"))] = 0
    undelivered: Annotated[
        int,
        shown("Answers and notices for which a client's queue was full.", counter("fdcache_undelivered")),
    ] = 0
    clients_registered: Annotated[int, shown("Sessions opened.", counter("fdcache_clients_registered"))] = 0
    clients_lost: Annotated[int, shown("Clients that died.", counter("fdcache_clients_lost"))] = 0
    slots_taken_back: Annotated[
        int, shown("Slots of clients that died.", counter("fdcache_slots_taken_back"))
    ] = 0
    runs_given_up: Annotated[
        int, shown("Pinned runs of silent clients that were released.", counter("fdcache_runs_given_up"))
    ] = 0
    latencies: Latencies = msgspec.field(default_factory=Latencies)


class TiersView(msgspec.Struct):
    """Host, device and storage tier; ``device`` as the clients report it."""

    host: ArenaView
    device: list[dict[str, Any]]
    storage: StorageView | None = None


class MemoryTiersView(msgspec.Struct):
    """Host and device tiers."""

    host: ArenaView
    device: list[dict[str, Any]]


class ServiceView(msgspec.Struct):
    """The whole service."""

    version: Annotated[str, shown("Version of fdcache.")]
    state: Annotated[str, shown("One of ready, loading, recovering, paused and draining.")]
    uptime_seconds: Annotated[float, shown("Since the start.", gauge("fdcache_uptime_seconds"))]
    config_fingerprint: Annotated[str, shown("Fingerprint of the settings in force.")]
    waiting_for_earlier: Annotated[
        int,
        shown(
            "Clients of an earlier service that may still write; no slot is granted until they are back or gone.",
            gauge("fdcache_awaited_clients"),
        ),
    ]
    totals: ServiceTotals
    tiers: MemoryTiersView
    storage: StorageView | None
    namespaces: list[NamespaceView]
    clients: list[ClientView]


class ConfigView(msgspec.Struct):
    """Settings in force, by variable. Secrets are masked."""

    version: Annotated[str, shown("Version of fdcache.")]
    pid: Annotated[int, shown("Process id of the service.")]
    fingerprint: Annotated[str, shown("Fingerprint of the settings.")]
    settings: dict[str, EffectiveValue]


class StateView(msgspec.Struct):
    """State of the service."""

    state: str


# --- blocks ------------------------------------------------------------------------------------------------


class BlockView(msgspec.Struct):
    """A block in the host tier or in storage, or one that left: then with ``reason`` and ``left_at``.

    ``devices``: how many engines have it on their device, as far as they tell a service that tells routers.
    """

    namespace: Annotated[str, shown("Name of the namespace.", column="namespace")]
    hash: Annotated[str, shown("Hash of the block, in hexadecimal.", column="hash", unit=Unit.HASH)]
    tenant: str | UnsetType = UNSET
    slot: Annotated[int | UnsetType, shown("Slot in the host tier.", column="slot")] = UNSET
    generation: int | UnsetType = UNSET
    depth: Annotated[int | UnsetType, shown("Position in its path.", column="depth")] = UNSET
    children: int | UnsetType = UNSET
    pins: Annotated[int | UnsetType, shown("Pins on the block.", column="pins")] = UNSET
    hits: Annotated[int | UnsetType, shown("Look-ups that found it.", column="hits")] = UNSET
    idle_seconds: Annotated[
        float | UnsetType, shown("Since its last use.", column="idle", unit=Unit.SECONDS)
    ] = UNSET
    stored_at: Annotated[
        float | UnsetType, shown("When it was stored.", column="since", unit=Unit.MOMENT)
    ] = UNSET
    checksum: str | UnsetType = UNSET
    unverified: bool | UnsetType = UNSET
    stored: Annotated[bool | UnsetType, shown("True if storage has it.", column="stored", unit=Unit.FLAG)] = (
        UNSET
    )
    reason: Annotated[str | UnsetType, shown("Why it left the host tier.", column="left")] = UNSET
    left_at: Annotated[float | UnsetType, shown("When it left.", column="at", unit=Unit.MOMENT)] = UNSET
    devices: int | UnsetType = UNSET


class ExplainedBlock(msgspec.Struct):
    """A block of a prompt: in tier ``host`` or ``storage``, or None with the reason why it is in neither.

    ``devices``: how many engines have it on their device, as far as they tell a service that tells routers. In a layout
    with groups of layers a block is a page of all of them: ``group`` is the first that has nothing of it, and
    ``states`` whether those at its end are there. ``node``: on whose host it was when other nodes were last asked.
    """

    position: int
    hash: str
    tier: str | None
    slot: int | UnsetType = UNSET
    stored_at: float | UnsetType = UNSET
    idle_seconds: float | UnsetType = UNSET
    hits: int | UnsetType = UNSET
    left_host_at: float | UnsetType | None = UNSET
    reason: str | UnsetType = UNSET
    left_at: float | UnsetType | None = UNSET
    devices: int | UnsetType = UNSET
    group: int | UnsetType = UNSET
    states: bool | UnsetType = UNSET
    node: str | UnsetType = UNSET


class ExplainView(msgspec.Struct):
    """The blocks of a prompt; ``broken_at`` is the first that is missing, None for a full hit.

    ``usable`` blocks are of use to a request: with states, up to the last that has them. ``ended_by``: the group of
    layers that ends them, as "2 of 3: state, blocks of 544 tokens"; None without groups, and for a full hit.
    """

    namespace: str
    blocks: list[ExplainedBlock]
    broken_at: int | None
    usable: int = 0
    ended_by: str | None = None


class ReuseView(msgspec.Struct):
    """What the order of eviction of one tier has learned. ``learned`` is None for an order that learns nothing."""

    tier: Annotated[str, shown("Kind of the tier.")]
    of: Annotated[str, shown("The client that it belongs to, or the service.")]
    namespace: Annotated[str, shown("Name of the namespace.")]
    learned: ReuseReport | None


# --- resets ------------------------------------------------------------------------------------------------


class InFlightView(msgspec.Struct):
    """A client that is loading from a host tier."""

    client: str
    session: str
    namespace: str
    pid: int
    pinned_runs: int


class HostResetView(msgspec.Struct):
    """Blocks removed from a host tier; ``in_use`` of them stay with their users until these end."""

    namespace: str
    blocks: int
    bytes: int
    in_use: int


class StorageResetView(msgspec.Struct):
    """Blocks removed from a storage; None where other services store into the same place."""

    namespace: str
    blocks: int | None
    bytes: int | None


class DeviceResetView(msgspec.Struct):
    """Blocks of a client's device tier, as it reported them."""

    client: str
    session: str
    blocks: Any


class ResetView(msgspec.Struct):
    """Result of a reset. With clients in ``in_flight``, nothing was removed unless ``dry_run``."""

    dry_run: bool
    in_flight: list[InFlightView] = []
    host: list[HostResetView] = []
    storage: list[StorageResetView] = []
    device: list[DeviceResetView] = []
