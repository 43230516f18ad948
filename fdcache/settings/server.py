"""Settings of `fdcache serve`, and the files from which every command reads settings."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from fdcache.settings.kinds import FilePath, Flag, Integer, Number, Seconds, Shares, Text
from fdcache.settings.variable import Component, Group, constant, variable


class FileSettings(Group):
    """Sources beside the environment. Only arguments and the environment set them."""

    used_in = (Component.EVERYWHERE,)

    env_file: FilePath | None = variable(
        "FDCACHE_ENV_FILE", None, "Dotenv file with settings; no other is read."
    )
    secrets_directory: FilePath | None = variable(
        "FDCACHE_SECRETS_DIR",
        None,
        "Folder of files that are named after variables and contain their values.",
    )


class LogFormat(StrEnum):
    """Format of log lines."""

    AUTO = "auto"
    TEXT = "text"
    JSON = "json"


class ServerSettings(Group):
    """Settings of the node-wide service. ``FDCACHE_HOST_MEMORY`` is the size of its arena."""

    used_in = (Component.SERVE,)

    runtime_dir: FilePath | None = variable(
        "FDCACHE_RUNTIME_DIR",
        None,
        "Folder of socket and lock files, mode 0700. Unset, XDG_RUNTIME_DIR/fdcache or /tmp/fdcache-UID.",
        used_in=(Component.SERVE, Component.COMMANDS, Component.INIT),
    )
    arena_dir: FilePath = variable(
        "FDCACHE_ARENA_DIR",
        Path("/dev/shm"),
        "Folder of the shared arena, on a tmpfs or hugetlbfs; also of host memory that ranks share.",
        used_in=(Component.SERVE, Component.CONTROLLER),
    )
    huge_pages: Flag = variable("FDCACHE_HUGE_PAGES", False, "Ask for huge pages for the arena.")
    numa_node: Integer | None = variable(
        "FDCACHE_NUMA_NODE", None, "NUMA node whose memory the arena uses.", ge=0
    )
    http_address: Text = variable(
        "FDCACHE_HTTP_ADDRESS",
        "127.0.0.1:9470",
        "HOST:PORT of probes, metrics, views and commands, or off. An address that other machines reach requires "
        "FD_API_KEY.",
    )
    kv_events: Text = variable(
        "FDCACHE_KV_EVENTS",
        "off",
        "ZeroMQ address at which the service tells routers of its blocks, such as tcp://127.0.0.1:5557, or off. The "
        "events have the tokens of prompts, and who reaches the address can read them.",
    )
    kv_events_replay: Text = variable(
        "FDCACHE_KV_EVENTS_REPLAY",
        "off",
        "ZeroMQ address at which routers ask for events that they have missed, such as tcp://127.0.0.1:5558, or off.",
    )
    recover: Flag = variable("FDCACHE_RECOVER", True, "Recover the arena of an earlier service.")
    discard: Flag = variable(
        "FDCACHE_DISCARD",
        False,
        "Remove the arena when the service ends without an error. Unset, it stays for the next service.",
    )
    drain_timeout: Seconds = variable(
        "FDCACHE_DRAIN_TIMEOUT",
        10.0,
        "Longest wait of a service for its clients when it stops.",
        ge=0,
        unit="s",
    )
    session_timeout: Seconds = variable(
        "FDCACHE_SESSION_TIMEOUT",
        5.0,
        "Time without a heartbeat after which a client gets no new work. Blocks that it may still be writing stay "
        "reserved.",
        gt=0,
        unit="s",
    )
    namespace_quota: Number = variable(
        "FDCACHE_NAMESPACE_QUOTA", 1.0, "Maximum share of the arena for one layout.", gt=0, le=1
    )
    tenant_quota: Number = variable(
        "FDCACHE_TENANT_QUOTA",
        1.0,
        "Maximum share of a layout's blocks for one tenant. Beyond it a tenant evicts its own blocks; with 1 it may "
        "evict those of all others.",
        gt=0,
        le=1,
    )
    tenant_quotas: Shares = variable(
        "FDCACHE_TENANT_QUOTAS",
        (),
        "Quotas of single tenants in place of FDCACHE_TENANT_QUOTA, such as search=0.5,batch=0.1.",
    )
    eviction_log: Integer = constant(65536, "Number of evictions recorded for `inspect explain`.", ge=0)
    log_format: LogFormat = variable(
        "FDCACHE_LOG_FORMAT",
        LogFormat.AUTO,
        "Format of log lines: text, json, or auto, which is text on a terminal and JSON elsewhere.",
    )
