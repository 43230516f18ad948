"""The variables of Mooncake Store's client."""

from __future__ import annotations

from collections.abc import Iterator

from fdcache.settings.extensions import Extension, GivenSettings
from fdcache.settings.kinds import FilePath, Flag, Integer, Size, Text, TextList
from fdcache.settings.problems import Problem
from fdcache.settings.variable import Component, Group, variable


class MooncakeSettings(Group):
    """The client of Mooncake Store. The file ``MOONCAKE_CONFIG_PATH`` overrides the variables."""

    used_in = (Component.STORAGE,)

    config_path: FilePath | None = variable(
        "MOONCAKE_CONFIG_PATH", None, "JSON file with the settings below, which it overrides."
    )
    local_hostname: Text | None = variable(
        "MOONCAKE_LOCAL_HOSTNAME",
        None,
        "Name or address at which other nodes reach this one. Unset, its address towards the master.",
    )
    metadata_server: Text = variable(
        "MOONCAKE_METADATA_SERVER", "P2PHANDSHAKE", "The metadata server; P2PHANDSHAKE needs none."
    )
    master: Text | None = variable("MOONCAKE_MASTER_SERVER_ADDR", None, "Host and port of the master.")
    global_segment_size: Size = variable(
        "MOONCAKE_GLOBAL_SEGMENT_SIZE",
        2**30,
        "Memory that each rank contributes to the store.",
        ge=0,
        unit="bytes",
    )
    local_buffer_size: Size = variable(
        "MOONCAKE_LOCAL_BUFFER_SIZE", 16 * 2**20, "The client's own buffer.", ge=0, unit="bytes"
    )
    protocol: Text = variable("MOONCAKE_PROTOCOL", "rdma", "Transport of records: rdma or tcp.")
    rdma_devices: TextList = variable(
        "MOONCAKE_RDMA_DEVICES", (), "Network devices; rank r uses the one at index r modulo their number."
    )
    tcp_connection_pool: Flag = variable(
        "MC_TCP_ENABLE_CONNECTION_POOL", True, "Reuse connections with the protocol tcp."
    )
    log_level: Integer = variable(
        "FDCACHE_MOONCAKE_LOG_LEVEL",
        2,
        "Lowest level that the client logs to standard error: 0 info, 1 warnings, 2 errors, 3 fatal errors.",
        ge=0,
        le=3,
    )


def _check(settings: GivenSettings) -> Iterator[Problem]:
    mooncake = settings.group(MooncakeSettings)
    if settings.storage_tier.connector.lower() == "mooncake" and not (
        mooncake.master or mooncake.config_path
    ):
        yield settings.conflict(
            ("FDCACHE_STORAGE", "MOONCAKE_MASTER_SERVER_ADDR"),
            "mooncake storage needs the address of a master",
            "set MOONCAKE_MASTER_SERVER_ADDR, such as master:50051, or MOONCAKE_CONFIG_PATH",
        )


EXTENSION = Extension({"mooncake": MooncakeSettings}, check=_check)
