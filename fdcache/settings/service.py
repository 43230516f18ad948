"""The engine's processes, queues and interfaces."""

from fdcache.settings.kinds import Flag, Integer, Port, Ports, Seconds, Secret, Secrets, Text, WholeSeconds
from fdcache.settings.variable import Group, OldType, Place, variable


class ServiceSettings(Group):
    """The engine's processes, queues and interfaces."""

    api_keys: Secrets = variable(
        "FD_API_KEY",
        (),
        "Keys that a caller may present.",
        old=OldType.LIST,
        used_in=(Place.SERVE,),
    )
    max_connections: Integer = variable(
        "FD_SUPPORT_MAX_CONNECTIONS", 1024, "Most connections at a time.", old=OldType.INT, ge=1
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
        "How long the token processor may be silent and still count as healthy.",
        old=OldType.FLOAT,
        ge=0,
        unit="s",
    )
    worker_timeout: WholeSeconds = variable(
        "FD_WORKER_ALIVE_TIMEOUT",
        30,
        "How long a worker may be silent and still count as alive.",
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
        "A suffix that keeps the shared-memory names of several engines apart.",
        old=OldType.TEXT,
        undeclared=True,
    )
    shm_uuid: Text | None = variable(
        "SHM_UUID",
        None,
        "A suffix for unique shared-memory names.",
        used_in=(Place.ENVS,),
    )
