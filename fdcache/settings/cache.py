"""Settings that the cache acts on: deployment, scheduler side, worker side, storage."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from fdcache.settings.kinds import FilePath, Flag, HomePath, Integer, Memory, Seconds, Size, Text
from fdcache.settings.variable import Component, Group, constant, variable


class TraceTarget(StrEnum):
    """Receiver of OpenTelemetry spans."""

    OFF = "off"
    OTLP = "otlp"
    CONSOLE = "console"


class DeploymentSettings(Group):
    """Block size and ranks, which must match the layout, and device memory."""

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
        "Memory for blocks on each rank's device, in place of FDCACHE_DEVICE_BLOCKS. A share is of the device's total "
        "memory; on the CPU, of the machine's memory divided by the ranks.",
        unit="bytes",
    )
    traces: TraceTarget = variable(
        "FDCACHE_TRACES",
        TraceTarget.OFF,
        "Where OpenTelemetry spans of matches, loads and copies go: to the receiver that OTEL_EXPORTER_OTLP_ENDPOINT "
        "names (otlp), or to standard error (console).",
        used_in=(Component.MANAGER, Component.SERVE),
    )
    weights: Text | None = variable(
        "FDCACHE_WEIGHTS",
        None,
        "Name of the weights, such as llama-3-8b@v2: engines with the same name share blocks, and a later start finds "
        "them. Give other weights another name. Unset, their files tell.",
        used_in=(Component.VLLM, Component.SGLANG),
    )


class WritePolicy(StrEnum):
    """When device blocks are copied to the host tier."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class EvictionPolicy(StrEnum):
    """Order in which unpinned blocks are evicted from a full tier."""

    LRU = "lru"
    LEARNED = "learned"


class StatePositions(StrEnum):
    """Positions of a request whose states are stored, of those that the engine offers.

    ``spaced``: the ends of its prompt and of its reply, and between them at growing distances.
    """

    SPACED = "spaced"
    ALL = "all"
    ENDS = "ends"


class LoadOrRecompute(StrEnum):
    """Which cached blocks are loaded: all, or those that would take longer to compute."""

    AUTO = "auto"
    ALWAYS = "always"


class CacheSettings(Group):
    """Settings of ``CacheManager``.

        CacheSettings(device_blocks=4096, host_memory="8GiB", write_policy="write_through")

    Creating them reads no environment; ``Settings.load().cache`` does.
    """

    used_in = (Component.MANAGER,)

    device_blocks: Integer = variable(
        "FDCACHE_DEVICE_BLOCKS", 1024, "Blocks of the device tier.", gt=0, unit="blocks"
    )
    host_memory: Size = variable(
        "FDCACHE_HOST_MEMORY",
        0,
        "Total host memory for blocks: of a service, or of all ranks of an engine in equal parts. With 0 there is no "
        "host tier, and a service takes a quarter of the free memory. Unset, an engine of vLLM takes its part of as "
        "much.",
        ge=0,
        unit="bytes",
        used_in=(Component.MANAGER, Component.SERVE),
    )
    server: Text | None = variable(
        "FDCACHE_SERVER",
        None,
        "Address of the service whose host tier is used, such as ipc:///run/fdcache/serve.sock. Unset, each engine has "
        "its own host tier.",
        used_in=(Component.MANAGER, Component.SERVE, Component.COMMANDS),
    )
    rpc_timeout: Seconds = variable(
        "FDCACHE_RPC_TIMEOUT",
        0.1,
        "Longest wait of a scheduler step for the service, after which it continues without.",
        gt=0,
        unit="s",
    )
    enable_prefix_caching: Flag = variable("FDCACHE_PREFIX_CACHING", True, "Reuse blocks between requests.")
    reuse_grid: Integer = variable(
        "FDCACHE_REUSE_GRID",
        0,
        "Reused prefixes are rounded down to a multiple of this. It must divide the block size or be a multiple of it. "
        "0 selects FD_DETERMINISTIC_SPLIT_KV_SIZE in FD_DETERMINISTIC_MODE, else the block size.",
        ge=0,
        unit="tokens",
    )
    lookahead_tokens: Integer = variable(
        "FDCACHE_LOOKAHEAD_TOKENS",
        0,
        "Tokens after a block on which its KV depends, such as 1 for draft layers that take the next token as input. A "
        "block is reused only where the same tokens follow it. Engines that share blocks need the same number.",
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
        "Hits after which write_through_selective copies a block to the host tier.",
        ge=1,
        unit="hits",
    )
    clean_reserve: Integer = variable(
        "FDCACHE_CLEAN_RESERVE",
        64,
        "Blocks that write_back copies to the host tier ahead of their eviction.",
        ge=0,
        unit="blocks",
    )
    eviction: EvictionPolicy = variable(
        "FDCACHE_EVICTION",
        EvictionPolicy.LEARNED,
        "Order in which blocks are evicted from a full tier: by last use, or by what is learned of their reuse.",
        used_in=(Component.MANAGER, Component.SERVE),
    )
    state_positions: StatePositions = constant(
        StatePositions.SPACED, "Positions whose states are stored, for models that keep states."
    )
    load_or_recompute: LoadOrRecompute = variable(
        "FDCACHE_LOAD_OR_RECOMPUTE",
        LoadOrRecompute.AUTO,
        "Which cached blocks are loaded: always all, or (auto) as many as take less time to load than to compute, by "
        "the speeds of link, storage and prefill as observed. Without observe_prefill both are the same.",
    )
    defer_timeout: Seconds = constant(
        1.0, "Longest wait of a match for another request's copy of the same block.", ge=0
    )
    plan_timeout: Seconds = variable(
        "FDCACHE_PLAN_TIMEOUT",
        30.0,
        "Time after which a plan without a report is overdue.",
        gt=0,
        unit="s",
    )
    event_buffer: Integer = variable(
        "FDCACHE_EVENT_BUFFER",
        0,
        "Maximum number of tier events kept for take_events(); 0 keeps none.",
        ge=0,
        le=100_000_000,
        unit="events",
    )


class SwapMethod(StrEnum):
    """Method of copies between GPU and host memory."""

    AUTO = "auto"
    DMA = "dma"
    KERNEL = "kernel"
    STAGED = "staged"


class Verify(StrEnum):
    """Which blocks are verified against their checksum."""

    OFF = "off"
    STORAGE = "storage"
    ALL = "all"


class CopySettings(Group):
    """Settings of ``CacheController``. Creating them reads no environment."""

    used_in = (Component.CONTROLLER,)

    first_group_layers: Integer = constant(1, "Layers in the first group of a load.", ge=1)
    group_layers: Integer = constant(4, "Layers in each later group of a load.", ge=1)
    queued_bytes: Size = constant(
        1 << 29,
        "Bytes of loads queued on the device behind the one in flight, so that it never idles. Later loads wait and "
        "are submitted in batches of up to this size. A load that a layer is waiting for is submitted at once.",
        ge=1,
    )
    copy_threads: Integer = constant(1, "CPU copy threads per direction.", ge=1, le=64)
    layer_timeout: Seconds = constant(30.0, "Default timeout of wait_for_layer.", gt=0)
    drain_timeout: Seconds = variable(
        "FDCACHE_SWAP_DRAIN_TIMEOUT",
        30.0,
        "Longest wait of shutdown for copies in flight.",
        gt=0,
        unit="s",
    )
    swap_method: SwapMethod = variable(
        "FDCACHE_SWAP_METHOD",
        SwapMethod.AUTO,
        "How blocks are copied between GPU and host memory: by copy engines (dma), by copy engines and a staging ring "
        "(staged), by a kernel that reads host memory in place (kernel), or the fastest as measured (auto).",
    )
    swap_sm_budget: Integer = variable(
        "FDCACHE_SWAP_SM_BUDGET",
        40,
        "Maximum number of threads of a copy kernel, in full multiprocessors. With 0 the copy engines make all copies, "
        "and kernels only checksums and tables of blocks.",
        ge=0,
        unit="multiprocessors",
    )
    verify: Verify = variable(
        "FDCACHE_VERIFY",
        Verify.STORAGE,
        "Which blocks are verified against their checksum. off: blocks of an earlier process, at their first read. "
        "storage: every read from storage as well. all: loads into the device as well.",
        used_in=(Component.CONTROLLER, Component.SERVE),
    )
    calibration_dir: HomePath = variable(
        "FDCACHE_CALIBRATION_DIR",
        "~/.cache/fdcache/calibration",
        "Folder in which `fdcache init` stores its measurements of each GPU.",
        used_in=(Component.CONTROLLER, Component.INIT),
    )


class FsyncPolicy(StrEnum):
    """When written blocks are synced to survive power loss. All survive the end of the process."""

    NEVER = "never"
    INTERVAL = "interval"
    ALWAYS = "always"


class PrefetchPolicy(StrEnum):
    """Limit of a request's wait for blocks in flight from storage."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


class StorageTierSettings(Group):
    """Settings of the storage tier, for scheduler and workers."""

    used_in = (Component.STORAGE,)

    connector: Text = variable(
        "FDCACHE_STORAGE",
        "none",
        "Storage connector: none, local, object, shared, nodes, mooncake, attnstore, or the name of an installed one.",
    )
    directory: FilePath = variable(
        "FDCACHE_STORAGE_DIR", Path("/var/lib/fdcache"), "Folder of the files of local or shared storage."
    )
    size: Size = variable(
        "FDCACHE_STORAGE_SIZE",
        64 * 2**30,
        "Maximum size of local storage for each rank and model; of object and shared storage, for all nodes, ranks and "
        "models together.",
        ge=4096,
        unit="bytes",
    )
    fsync: FsyncPolicy = variable(
        "FDCACHE_STORAGE_FSYNC",
        FsyncPolicy.INTERVAL,
        "When written blocks are synced to survive power loss. A killed process loses none in any case.",
    )
    fsync_interval: Seconds = constant(5.0, "Time between syncs with the policy interval.", gt=0)
    threads: Integer = constant(
        16, "Maximum number of requests to local storage in flight, for each rank.", ge=1, le=256
    )
    retry_after: Seconds = constant(5.0, "Time between retries of a failed storage.", ge=0)
    timeout: Seconds = variable(
        "FDCACHE_STORAGE_TIMEOUT",
        10.0,
        "Time after which a read or write starts no further block.",
        gt=0,
        unit="s",
    )
    prefetch_policy: PrefetchPolicy = variable(
        "FDCACHE_PREFETCH_POLICY",
        PrefetchPolicy.TIMEOUT,
        "How long a request waits for blocks in flight from storage: best_effort does not wait, wait_complete waits "
        "for all, timeout waits up to a budget.",
    )
    prefetch_timeout: Seconds = constant(0.5, "Fixed part of the budget of the policy timeout.", ge=0)
    prefetch_bandwidth: Size = constant(
        256 * 2**20, "Bytes a second by which the budget grows with the bytes to read.", gt=0
    )
    write_blocks: Integer = constant(
        256, "Maximum number of blocks in flight to storage. More wait or are dropped.", ge=1
    )

    object_bytes: Size = constant(
        2**20,
        "Bytes up to which neighbouring records are stored in one object, or file of a shared folder.",
        gt=0,
    )

    @property
    def is_on(self) -> bool:
        """True if there is a storage tier."""
        return self.connector.lower() not in ("", "none")
