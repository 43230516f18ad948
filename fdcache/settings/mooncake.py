"""Mooncake Store, by the variables that its users know."""

from fdcache.settings.kinds import FilePath, Flag, Integer, Size, Text, TextList
from fdcache.settings.variable import Group, Place, variable


class MooncakeSettings(Group):
    """The client of Mooncake Store. A file at ``MOONCAKE_CONFIG_PATH`` comes before the variables."""

    used_in = (Place.STORAGE,)

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
