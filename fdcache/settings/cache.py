"""What the cache and its engine must agree on."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from fdcache.settings.kinds import FilePath, Flag, HomePath, Integer, Memory, Seconds, Size, Text, TextList
from fdcache.settings.variable import Component, Group, variable


class DeploymentSettings(Group):
    """Block size and ranks, which the layout must match, and the device memory given to blocks."""

    used_in = (
        Component.MANAGER,
        Component.CONTROLLER,
        Component.REPLAY,
    )

    block_size: Integer = variable("FDCACHE_BLOCK_SIZE", 64, "Tokens of a block.", ge=1, unit="tokens")
    ranks: Integer = variable(
        "FDCACHE_RANKS", 1, "Tensor-parallel ranks, each with its own device.", ge=1, le=1024, unit="ranks"
    )
    device_memory: Memory | None = variable(
        "FDCACHE_DEVICE_MEMORY",
        None,
        "Memory for blocks on each rank's device, in place of FDCACHE_DEVICE_BLOCKS; as a share, of all the device "
        "has, on the CPU of a rank's part of the machine's.",
        unit="bytes",
    )


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

    used_in = (Component.MANAGER,)

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
        used_in=(Component.MANAGER, Component.SERVE),
    )
    server: Text | None = variable(
        "FDCACHE_SERVER",
        None,
        "The service whose host tier is used, such as ipc:///run/fdcache/serve.sock; unset, each engine has "
        "its own.",
        used_in=(Component.MANAGER, Component.SERVE, Component.COMMANDS),
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


class SwapMethod(StrEnum):
    """How blocks travel between GPU and host memory."""

    AUTO = "auto"
    DMA = "dma"
    KERNEL = "kernel"
    STAGED = "staged"


class Verify(StrEnum):
    """Which blocks are compared with their checksum."""

    OFF = "off"
    STORAGE = "storage"
    ALL = "all"


class TransferSettings(Group):
    """Settings of ``CacheController``. It reads no environment."""

    used_in = (Component.CONTROLLER,)

    first_group_layers: Integer = variable(
        "FDCACHE_FIRST_GROUP_LAYERS", 1, "Layers in the first group of a load.", ge=1, unit="layers"
    )
    group_layers: Integer = variable(
        "FDCACHE_GROUP_LAYERS", 4, "Layers in each later group of a load.", ge=1, unit="layers"
    )
    loads_ahead: Size = variable(
        "FDCACHE_LOADS_AHEAD",
        1 << 29,
        "Bytes of loads that are put on the device behind the one being copied, so that it never runs dry. Later "
        "loads wait, and go together in batches of up to as much; one that a layer is waited for goes at once.",
        ge=1,
        unit="bytes",
    )
    copy_threads: Integer = variable(
        "FDCACHE_COPY_THREADS", 1, "CPU copy threads per direction.", ge=1, le=64, unit="threads"
    )
    layer_timeout: Seconds = variable(
        "FDCACHE_LAYER_TIMEOUT", 30.0, "How long wait_for_layer waits by default.", gt=0, unit="s"
    )
    drain_timeout: Seconds = variable(
        "FDCACHE_SWAP_DRAIN_TIMEOUT",
        30.0,
        "How long shutdown waits for copies in flight.",
        gt=0,
        unit="s",
    )
    swap_method: SwapMethod = variable(
        "FDCACHE_SWAP_METHOD",
        SwapMethod.AUTO,
        "How blocks travel between GPU and host memory: copy engines alone (dma), copy engines and a staging "
        "ring (staged), a kernel that reads host memory in place (kernel), or what was measured as fastest.",
    )
    swap_ctas: Integer = variable(
        "FDCACHE_SWAP_CTAS",
        0,
        "Thread blocks of the kernel that copies scattered blocks, within the budget of multiprocessors; 0 takes the "
        "calibrated number.",
        ge=0,
        le=1024,
        unit="thread blocks",
    )
    swap_sm_budget: Integer = variable(
        "FDCACHE_SWAP_SM_BUDGET",
        40,
        "Most multiprocessors that the threads of a copy kernel may fill, be they spread over more of them; 0 leaves "
        "copies to the copy engines, and to kernels only checksums and tables of blocks.",
        ge=0,
        unit="multiprocessors",
    )
    verify: Verify = variable(
        "FDCACHE_VERIFY",
        Verify.STORAGE,
        "Which blocks are compared with their checksum: off checks what an earlier process left at its first read, "
        "storage every read from storage, all loads into the device too.",
        used_in=(Component.CONTROLLER, Component.SERVE),
    )
    calibration_dir: HomePath = variable(
        "FDCACHE_CALIBRATION_DIR",
        "~/.cache/fdcache/calibration",
        "Where `fdcache init` keeps what it measured of each GPU.",
        used_in=(Component.CONTROLLER, Component.INIT),
    )


class FsyncPolicy(StrEnum):
    """When written blocks are made to survive power loss; all of them survive the end of the process."""

    NEVER = "never"
    INTERVAL = "interval"
    ALWAYS = "always"


class PrefetchPolicy(StrEnum):
    """How long a request waits for blocks that are being read from storage."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


class StorageTierSettings(Group):
    """Settings of the storage tier, for the scheduler and the workers alike."""

    used_in = (Component.STORAGE,)

    connector: Text = variable(
        "FDCACHE_STORAGE",
        "none",
        "What keeps blocks: none, local, mooncake, attnstore, or the name of an installed connector.",
    )
    directory: FilePath = variable(
        "FDCACHE_STORAGE_DIR", Path("/var/lib/fdcache"), "The folder of the local storage's files."
    )
    size: Size = variable(
        "FDCACHE_STORAGE_SIZE",
        64 * 2**30,
        "The most bytes of local storage for each rank and model.",
        ge=4096,
        unit="bytes",
    )
    fsync: FsyncPolicy = variable(
        "FDCACHE_STORAGE_FSYNC",
        FsyncPolicy.INTERVAL,
        "When written blocks are made to survive power loss; a killed process loses none either way.",
    )
    fsync_interval: Seconds = variable(
        "FDCACHE_STORAGE_FSYNC_INTERVAL",
        5.0,
        "The time between syncs of the policy interval.",
        gt=0,
        unit="s",
    )
    threads: Integer = variable(
        "FDCACHE_STORAGE_THREADS",
        16,
        "Requests to the local storage in flight at once, for each rank.",
        ge=1,
        le=256,
        unit="threads",
    )
    retry_after: Seconds = variable(
        "FDCACHE_STORAGE_RETRY", 5.0, "How long a failed storage is left alone.", ge=0, unit="s"
    )
    timeout: Seconds = variable(
        "FDCACHE_STORAGE_TIMEOUT",
        10.0,
        "How long after its start one read or write begins no further block.",
        gt=0,
        unit="s",
    )
    prefetch_policy: PrefetchPolicy = variable(
        "FDCACHE_PREFETCH_POLICY",
        PrefetchPolicy.TIMEOUT,
        "How long a request waits for blocks being read: not at all, until the end, or within a budget.",
    )
    prefetch_timeout: Seconds = variable(
        "FDCACHE_PREFETCH_TIMEOUT", 0.5, "What the budget of the policy timeout begins with.", ge=0, unit="s"
    )
    prefetch_bandwidth: Size = variable(
        "FDCACHE_PREFETCH_BANDWIDTH",
        256 * 2**20,
        "Bytes a second that the budget reckons with beyond that.",
        gt=0,
        unit="bytes/s",
    )
    write_blocks: Integer = variable(
        "FDCACHE_STORAGE_WRITE_BLOCKS",
        256,
        "Most blocks on their way to storage at once; more wait or are dropped.",
        ge=1,
        unit="blocks",
    )

    @property
    def is_on(self) -> bool:
        """Whether there is a storage tier."""
        return self.connector.lower() not in ("", "none")


class MooncakeSettings(Group):
    """The client of Mooncake Store. A file at ``MOONCAKE_CONFIG_PATH`` comes before the variables."""

    used_in = (Component.STORAGE,)

    config_path: FilePath | None = variable(
        "MOONCAKE_CONFIG_PATH", None, "A JSON file with the settings below."
    )
    local_hostname: Text | None = variable(
        "MOONCAKE_LOCAL_HOSTNAME",
        None,
        "The name or address by which other nodes reach this one; unset, its address towards the master.",
    )
    metadata_server: Text = variable(
        "MOONCAKE_METADATA_SERVER", "P2PHANDSHAKE", "The metadata server; P2PHANDSHAKE needs none."
    )
    master: Text | None = variable("MOONCAKE_MASTER_SERVER_ADDR", None, "Host and port of the master.")
    global_segment_size: Size = variable(
        "MOONCAKE_GLOBAL_SEGMENT_SIZE", 2**30, "Memory that each rank gives to the store.", ge=0, unit="bytes"
    )
    local_buffer_size: Size = variable(
        "MOONCAKE_LOCAL_BUFFER_SIZE", 16 * 2**20, "The client's own buffer.", ge=0, unit="bytes"
    )
    protocol: Text = variable("MOONCAKE_PROTOCOL", "rdma", "How records travel: rdma or tcp.")
    rdma_devices: TextList = variable(
        "MOONCAKE_RDMA_DEVICES", (), "Network devices; rank r takes the one at r modulo their number."
    )
    tcp_connection_pool: Flag = variable(
        "MC_TCP_ENABLE_CONNECTION_POOL", True, "Keep connections open with the protocol tcp."
    )
    log_level: Integer = variable(
        "FDCACHE_MOONCAKE_LOG_LEVEL",
        2,
        "What the client writes to standard error: 0 all, 1 warnings, 2 errors, 3 fatal errors.",
        ge=0,
        le=3,
    )
