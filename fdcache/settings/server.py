"""Where further settings come from."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from fdcache.settings.kinds import FilePath, Flag, Integer, Number, Seconds, Shares, Size, Text
from fdcache.settings.variable import Component, Group, variable


class FileSettings(Group):
    """Sources beside the environment. Both are read from the environment alone."""

    used_in = (Component.EVERYWHERE,)

    env_file: FilePath | None = variable(
        "FDCACHE_ENV_FILE", None, "A dotenv file with settings; no other is ever read."
    )
    secrets_directory: FilePath | None = variable(
        "FDCACHE_SECRETS_DIR", None, "A folder whose files are named after variables and hold their values."
    )


class LogFormat(StrEnum):
    """How log lines are written."""

    AUTO = "auto"
    TEXT = "text"
    JSON = "json"


class ServerSettings(Group):
    """Settings of the node-wide service; its arena's size is ``FDCACHE_HOST_MEMORY``."""

    used_in = (Component.SERVE,)

    runtime_dir: FilePath | None = variable(
        "FDCACHE_RUNTIME_DIR",
        None,
        "The folder of socket and lock files, mode 0700; unset, XDG_RUNTIME_DIR/fdcache or /tmp/fdcache-UID.",
        used_in=(Component.SERVE, Component.COMMANDS, Component.INIT),
    )
    arena_dir: FilePath = variable(
        "FDCACHE_ARENA_DIR", Path("/dev/shm"), "The folder of the shared arena; a tmpfs or hugetlbfs."
    )
    extent_size: Size = variable(
        "FDCACHE_EXTENT_SIZE",
        64 << 20,
        "Most bytes of an extent, the unit in which memory is given to layouts; small arenas take smaller ones.",
        ge=1 << 16,
        unit="bytes",
    )
    huge_pages: Flag = variable("FDCACHE_HUGE_PAGES", False, "Ask for huge pages for the arena.")
    numa_node: Integer | None = variable(
        "FDCACHE_NUMA_NODE", None, "The NUMA node whose memory the arena takes.", ge=0
    )
    http_address: Text = variable(
        "FDCACHE_HTTP_ADDRESS",
        "127.0.0.1:9470",
        "HOST:PORT of probes, metrics and views; off: none. Other than loopback needs FD_API_KEY.",
    )
    recover: Flag = variable("FDCACHE_RECOVER", True, "Take over the arena of a service that died.")
    drain_timeout: Seconds = variable(
        "FDCACHE_DRAIN_TIMEOUT",
        10.0,
        "How long the service waits for its clients when it is told to end.",
        ge=0,
        unit="s",
    )
    session_timeout: Seconds = variable(
        "FDCACHE_SESSION_TIMEOUT",
        5.0,
        "How long a client may be silent before it gets no new work; what it may be writing stays its own.",
        gt=0,
        unit="s",
    )
    namespace_quota: Number = variable(
        "FDCACHE_NAMESPACE_QUOTA", 1.0, "Most of the arena that one layout may have.", gt=0, le=1
    )
    tenant_quota: Number = variable(
        "FDCACHE_TENANT_QUOTA",
        1.0,
        "Most of a layout's blocks that one tenant may have; from there on it evicts its own.",
        gt=0,
        le=1,
    )
    tenant_quotas: Shares = variable(
        "FDCACHE_TENANT_QUOTAS", (), "Tenants whose quota is another, by name, as search=0.5,batch=0.1."
    )
    eviction_log: Integer = variable(
        "FDCACHE_EVICTION_LOG", 65536, "Evictions remembered for `inspect explain`.", ge=0, unit="blocks"
    )
    log_format: LogFormat = variable(
        "FDCACHE_LOG_FORMAT", LogFormat.AUTO, "Text or JSON lines; auto: text on a terminal."
    )
