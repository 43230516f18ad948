"""What the scheduler side is told: tiers, write policy, deadlines."""

from enum import StrEnum

from fdcache.settings.kinds import Flag, Integer, Seconds, Size, Text
from fdcache.settings.variable import Group, Place, variable


class WritePolicy(StrEnum):
    """When a device block is copied to the host tier."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class EvictionPolicy(StrEnum):
    """The order in which unpinned blocks leave a full tier."""

    LRU = "lru"


class CacheSettings(Group):
    """Settings of ``CacheManager``. It reads no environment; ``Settings.load`` does."""

    used_in = (Place.MANAGER,)

    device_blocks: Integer = variable(
        "FDCACHE_DEVICE_BLOCKS", 1024, "Blocks of the device tier.", gt=0, unit="blocks"
    )
    host_memory: Size = variable(
        "FDCACHE_HOST_MEMORY",
        0,
        "Host memory for blocks, in all: of an engine's ranks together, in equal parts, or of a service. 0 is no host "
        "tier; a service then takes a quarter of what is free.",
        ge=0,
        unit="bytes",
        used_in=(Place.MANAGER, Place.SERVE),
    )
    server: Text | None = variable(
        "FDCACHE_SERVER",
        None,
        "The service whose host tier is used, such as ipc:///run/fdcache/serve.sock; unset, each engine has "
        "its own.",
        used_in=(Place.MANAGER, Place.SERVE, Place.COMMANDS),
    )
    rpc_timeout: Seconds = variable(
        "FDCACHE_RPC_TIMEOUT",
        0.1,
        "How long a scheduler step waits for the service before it goes on without.",
        gt=0,
        unit="s",
    )
    enable_prefix_caching: Flag = variable("FDCACHE_PREFIX_CACHING", True, "Reuse blocks between requests.")
    reuse_grid: Integer = variable(
        "FDCACHE_REUSE_GRID",
        0,
        "Reused prefixes are cut to a multiple of this, the grid on which an engine computes. It must divide the "
        "block size or be a multiple of it. 0 is FD_DETERMINISTIC_SPLIT_KV_SIZE with FD_DETERMINISTIC_MODE, else "
        "the block size.",
        ge=0,
        unit="tokens",
    )
    lookahead_tokens: Integer = variable(
        "FDCACHE_LOOKAHEAD_TOKENS",
        0,
        "Tokens after a block on which its KV depends: 1 for draft layers that are fed the next token. A block is "
        "reused only where the same tokens follow it; engines that share blocks need the same number.",
        ge=0,
        le=65_536,
        unit="tokens",
    )
    write_policy: WritePolicy = variable(
        "FDCACHE_WRITE_POLICY",
        WritePolicy.WRITE_THROUGH_SELECTIVE,
        "When a device block is copied to the host tier.",
    )
    write_through_threshold: Integer = variable(
        "FDCACHE_WRITE_THROUGH_THRESHOLD",
        2,
        "Hits after which write_through_selective backs a block up.",
        ge=1,
        unit="hits",
    )
    clean_reserve: Integer = variable(
        "FDCACHE_CLEAN_RESERVE",
        64,
        "Blocks next to be evicted that write_back keeps backed up in advance.",
        ge=0,
        unit="blocks",
    )
    eviction: EvictionPolicy = variable(
        "FDCACHE_EVICTION", EvictionPolicy.LRU, "The order in which blocks leave a full tier."
    )
    defer_timeout: Seconds = variable(
        "FDCACHE_DEFER_TIMEOUT",
        1.0,
        "How long a match waits for another request's copy of the same block.",
        ge=0,
        unit="s",
    )
    plan_timeout: Seconds = variable(
        "FDCACHE_PLAN_TIMEOUT",
        30.0,
        "How long a plan may go unreported before it is overdue.",
        gt=0,
        unit="s",
    )
    event_buffer: Integer = variable(
        "FDCACHE_EVENT_BUFFER",
        0,
        "Most tier events kept for take_events(); 0 is off.",
        ge=0,
        le=100_000_000,
        unit="events",
    )
