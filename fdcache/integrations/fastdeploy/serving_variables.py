"""Settings of the engine's serving: processes and interfaces, scheduler, cache manager, disaggregation, storage."""

from __future__ import annotations

from pathlib import Path

from fdcache.settings.kinds import (
    FilePath,
    FilePathOrNone,
    Flag,
    Integer,
    Number,
    Port,
    Ports,
    Seconds,
    Secret,
    Secrets,
    Text,
    Url,
    WholeSeconds,
)
from fdcache.settings.variable import Component, Group, OldType, variable


class ServiceSettings(Group):
    """Settings of the engine's serving: processes and interfaces, scheduler, cache manager, disaggregation, storage."""

    api_keys: Secrets = variable(
        "FD_API_KEY",
        (),
        "Keys that authorise a caller.",
        old=OldType.LIST,
        used_in=(Component.SERVE,),
        acts="the keys of the HTTP interface of `fdcache serve`",
    )
    max_connections: Integer = variable(
        "FD_SUPPORT_MAX_CONNECTIONS", 1024, "Maximum number of connections.", old=OldType.INT, ge=1
    )
    multi_api_server: Flag = variable(
        "FD_ENABLE_MULTI_API_SERVER", False, "Run several API servers.", old=OldType.BOOL
    )
    internal_adapter: Flag = variable(
        "FD_ENABLE_INTERNAL_ADAPTER", False, "Open the internal access to the engine.", old=OldType.INT
    )
    receive_port: Port | None = variable(
        "FD_ZMQ_RECV_REQUEST_SERVER_PORT",
        None,
        "The port on which the adapter receives requests.",
        old=OldType.TEXT,
    )
    send_port: Port | None = variable(
        "FD_ZMQ_SEND_RESPONSE_SERVER_PORT",
        None,
        "The port on which the adapter sends responses.",
        old=OldType.TEXT,
    )
    receive_ports: Ports | None = variable(
        "FD_ZMQ_RECV_REQUEST_SERVER_PORTS",
        None,
        "The ports on which adapters receive requests.",
        old=OldType.TEXT,
    )
    send_ports: Ports | None = variable(
        "FD_ZMQ_SEND_RESPONSE_SERVER_PORTS",
        None,
        "The ports on which adapters send responses.",
        old=OldType.TEXT,
    )
    control_ports: Ports = variable(
        "FD_ZMQ_CONTROL_CMD_SERVER_PORTS",
        (8202,),
        "The ports on which adapters take control commands.",
        old=OldType.TEXT,
    )
    send_high_water_mark: Integer = variable(
        "FD_ZMQ_SNDHWM",
        0,
        "Messages queued per peer before a ZeroMQ send blocks; 0 is no limit.",
        old=OldType.TEXT,
        old_default=0,
        ge=0,
        unit="messages",
    )
    send_batches: Flag = variable(
        "ZMQ_SEND_BATCH_DATA", True, "Send ZeroMQ messages in batches.", old=OldType.INT
    )
    aggregate_send: Flag = variable(
        "FD_USE_AGGREGATE_SEND", False, "Send the outputs of several requests together.", old=OldType.BOOL
    )
    return_text: Flag = variable(
        "FD_ENABLE_RETURN_TEXT", False, "Let the adapter return text.", old=OldType.BOOL
    )
    stop_on_disconnect: Flag = variable(
        "FD_ENABLE_REQUEST_DISCONNECT_STOP_INFERENCE",
        True,
        "Stop a request when its client disconnects.",
        old=OldType.INT,
        live=True,
    )
    save_output_v1: Flag = variable(
        "FD_USE_GET_SAVE_OUTPUT_V1",
        False,
        "Use the new output path between worker and engine.",
        old=OldType.BOOL,
    )
    convert_tensors: Flag = variable(
        "FD_ENABLE_E2W_TENSOR_CONVERT", False, "Convert tensors between engine and worker.", old=OldType.INT
    )
    task_queue_shm: Flag = variable(
        "FD_ENGINE_TASK_QUEUE_WITH_SHM", False, "Pass the task queue through shared memory.", old=OldType.INT
    )
    async_llm: Flag = variable("FD_ENABLE_ASYNC_LLM", False, "Run the asynchronous engine.", old=OldType.INT)
    health_timeout: Seconds = variable(
        "FD_TOKEN_PROCESSOR_HEALTH_TIMEOUT",
        120.0,
        "Time without output after which the token processor counts as unhealthy.",
        old=OldType.FLOAT,
        ge=0,
        unit="s",
    )
    worker_timeout: WholeSeconds = variable(
        "FD_WORKER_ALIVE_TIMEOUT",
        30,
        "Time without a heartbeat after which a worker counts as dead.",
        old=OldType.INT,
        ge=0,
        unit="s",
        live=True,
    )
    message_queue: Secret | None = variable(
        "FMQ_CONFIG_JSON",
        None,
        "The message-queue configuration, which may hold credentials.",
        old=OldType.TEXT,
    )
    ipc_suffix: Text | None = variable(
        "FD_IPC_APPEND_SUFFIX",
        None,
        "Suffix of shared-memory names, different for each engine.",
        old=OldType.TEXT,
        undeclared=True,
    )
    shm_uuid: Text | None = variable(
        "SHM_UUID",
        None,
        "Suffix of shared-memory names, different for each deployment.",
        used_in=(Component.ENVS,),
        acts="the suffix that `fdcache.envs.get_unique_name` adds",
    )


class SchedulingSettings(Group):
    """The block scheduler, its reserves and preemption."""

    v1: Flag = variable(
        "ENABLE_V1_KVCACHE_SCHEDULER",
        True,
        "Use the v1 block scheduler, whose kv_cache_ratio is 1.0.",
        old=OldType.INT,
        checked_against="FD_DISABLED_RECOVER",
    )
    disabled_recover: Flag = variable(
        "FD_DISABLED_RECOVER",
        False,
        "Never recompute a request when the cache is full. Must be off with the v1 scheduler.",
        old=OldType.TEXT,
        checked_against="ENABLE_V1_KVCACHE_SCHEDULER",
    )
    decode_blocks: Integer = variable(
        "FD_ENC_DEC_BLOCK_NUM",
        2,
        "Blocks reserved per request for decoding.",
        old=OldType.INT,
        ge=0,
        unit="blocks",
        used_in=(Component.REPLAY, Component.PADDLE),
        acts="blocks that a decode allocates at a time, in `replay` and the example engine",
    )
    max_prefill: Flag = variable(
        "FD_ENABLE_MAX_PREFILL", False, "Prefill as much as fits in each step.", old=OldType.INT
    )
    disable_chunked_prefill: Flag = variable(
        "FD_DISABLE_CHUNKED_PREFILL",
        False,
        "Disable chunked prefill.",
        old=OldType.BOOL,
    )
    prefill_reserve: Integer = variable(
        "FD_RESERVE_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL",
        16,
        "Blocks reserved for running decodes when a new prefill is scheduled.",
        old=OldType.INT,
        ge=0,
        unit="blocks",
        used_in=(Component.REPLAY, Component.PADDLE),
        acts="blocks that new requests leave to running ones after a preemption, in `replay` and the "
        "example engine",
    )
    prefill_reserve_decay: Number = variable(
        "FD_RESERVE_DECAY_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL",
        0.025,
        "Decay of that reserve per step, in blocks.",
        old=OldType.FLOAT,
        ge=0,
        used_in=(Component.REPLAY, Component.PADDLE),
        acts="blocks by which the reserve of running requests shrinks in each step",
    )
    prefill_reserve_minimum: Integer = variable(
        "FD_RESERVE_MIN_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL",
        0,
        "Minimum of that reserve.",
        old=OldType.INT,
        ge=0,
        unit="blocks",
        used_in=(Component.REPLAY, Component.PADDLE),
        acts="blocks to which the reserve of running requests shrinks at most",
    )
    save_preempted_output: Flag = variable(
        "FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST",
        True,
        "Keep the output blocks of a preempted request in the cache.",
        old=OldType.BOOL,
        used_in=(Component.FASTDEPLOY, Component.REPLAY),
        acts="0: a preempted request leaves only its prompt in the cache, in the adapter and in `replay`",
    )


class EngineCacheSettings(Group):
    """The engine's own cache manager, as far as fdcache does not replace it."""

    v1_manager: Flag = variable(
        "ENABLE_V1_KVCACHE_MANAGER",
        False,
        "Use cache manager v1.",
        old=OldType.INT,
        used_in=(Component.FASTDEPLOY,),
        acts="0: the adapter warns that FastDeploy runs its old manager instead",
    )
    parameters: FilePathOrNone = variable(
        "FD_CACHE_PARAMS",
        None,
        "The folder of KV quantisation parameters.",
        old=OldType.TEXT,
        old_default="none",
    )
    clear_swap_space: Flag = variable(
        "FD_ENABLE_SWAP_SPACE_CLEARING",
        False,
        "Free the host cache when weights are cleared.",
        old=OldType.INT,
        used_in=(Component.FASTDEPLOY,),
        acts="1: the adapter's `CacheController` frees the host cache with the device cache",
    )
    exit_timeout: WholeSeconds = variable(
        "FD_CACHE_PROC_EXIT_TIMEOUT",
        600,
        "Longest wait for the old cache process to exit.",
        old=OldType.INT,
        ge=0,
        unit="s",
        used_in=(Component.SERVE, Component.CONTROLLER),
        acts="`FDCACHE_DRAIN_TIMEOUT` and `FDCACHE_SWAP_DRAIN_TIMEOUT`, where they are not set; 0 applies to the "
        "former alone, since copies in flight need some time, and is a warning",
    )
    error_limit: Integer = variable(
        "FD_CACHE_PROC_ERROR_COUNT",
        10,
        "Errors after which the old cache process exits.",
        old=OldType.INT,
        ge=0,
    )
    head_wise: Flag = variable(
        "FD_HEAD_WISE_KV_CACHE",
        False,
        "Manage KV blocks per attention head.",
        old=OldType.INT,
        undeclared=True,
    )


class DisaggregationSettings(Group):
    """The hand-over from prefill to decode."""

    changeable: Flag = variable(
        "FD_PD_CHANGEABLE",
        False,
        "Let a split deployment become a centralised one: an instance of either role does the other's part, too, as if "
        "FDCACHE_TRANSFER_ROLE were mixed.",
        old=OldType.TEXT,
        used_in=(Component.CONTROLLER, Component.PADDLE),
    )
    cache_task: Flag = variable(
        "FD_ENABLE_CACHE_TASK",
        False,
        "Let the decode side keep requests that wait for preallocation.",
        old=OldType.TEXT,
    )
    max_prefetch: Integer = variable(
        "FD_EP_MAX_PREFETCH_TASK_NUM",
        8,
        "Maximum number of requests that wait for blocks of a prefill instance before they are computed; at least one.",
        old=OldType.INT,
        ge=0,
        used_in=(Component.MANAGER,),
    )
    keep_asking_decode: Flag = variable(
        "PREFILL_CONTINUOUS_REQUEST_DECODE_RESOURCES",
        True,
        "Let a request that finds no room at decode be tried again; without it prefill is told at once that its blocks "
        "are not wanted.",
        old=OldType.INT,
        used_in=(Component.MANAGER,),
    )
    eager_rdma: Flag = variable(
        "FD_ENABLE_PD_RDMA_EAGER_CONNECT",
        False,
        "Connect to prefill instances, and map their memory, when they are named instead of with the first request.",
        old=OldType.BOOL,
        used_in=(Component.CONTROLLER,),
    )
    wait_decode: WholeSeconds = variable(
        "FD_PREFILL_WAIT_DECODE_RESOURCE_SECONDS",
        30,
        "Longest wait of prefill for a decode instance to ask for the blocks of a request.",
        old=OldType.INT,
        ge=0,
        unit="s",
        live=True,
        used_in=(Component.MANAGER,),
    )
    reorder: Flag = variable(
        "FD_PD_REORDER", False, "Reorder requests between prefill and decode.", old=OldType.INT
    )


class StorageSettings(Group):
    """File storage and the object store of features."""

    file_directory: FilePath = variable(
        "FILE_BACKEND_STORAGE_DIR",
        Path("/tmp/fastdeploy"),
        "Folder of the file storage backend.",
        old=OldType.TEXT,
        used_in=(Component.STORAGE,),
        acts="the folder of local storage, if `FDCACHE_STORAGE_DIR` is not set",
    )
    bos_access_key: Secret | None = variable(
        "ENCODE_FEATURE_BOS_AK", None, "The access key of the object store.", old=OldType.TEXT
    )
    bos_secret_key: Secret | None = variable(
        "ENCODE_FEATURE_BOS_SK", None, "The secret key of the object store.", old=OldType.TEXT
    )
    bos_endpoint: Url | None = variable(
        "ENCODE_FEATURE_ENDPOINT", None, "The address of the object store.", old=OldType.TEXT
    )
    attention_store_only_flush: Flag = variable(
        "FD_AS_ONLY_FLUSH",
        False,
        "Only write to AttentionStore, never read from it.",
        old=OldType.BOOL,
        undeclared=True,
    )
