"""The client of Mooncake Store: its settings, its connection, its return codes."""

from __future__ import annotations

import importlib
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fdcache.errors import ConnectorNotFoundError, StorageError, StorageGoneError
from fdcache.settings.cache import MooncakeSettings
from fdcache.settings.kinds import parse_list, parse_size
from fdcache.storage.connector import Outcome

_LOCAL_NAMES = ("localhost", "127.", "::1")
_NO_SPACE, _BAD_SIZE, _NOT_READY, _NOT_FOUND, _EXISTS, _TRANSFER, _RPC, _RPC_LATE = (
    -200,
    -600,
    -703,
    -704,
    -705,
    -800,
    -900,
    -901,
)
_OUTCOMES = {
    _NOT_FOUND: Outcome.MISS,
    _NOT_READY: Outcome.MISS,
    _BAD_SIZE: Outcome.CORRUPT,
    _TRANSFER: Outcome.PEER_GONE,
    _RPC: Outcome.PEER_GONE,
    _RPC_LATE: Outcome.PEER_GONE,
}


def outcome_of(code: int) -> Outcome:
    """What a negative return code means."""
    return _OUTCOMES.get(code, Outcome.ERROR)


def in_words(code: int) -> str:
    """A negative return code for people."""
    words = {
        _NO_SPACE: "the store has no room",
        _TRANSFER: "the node that holds the record does not answer",
        _RPC: "the master does not answer",
        _RPC_LATE: "the master does not answer in time",
    }
    return f"mooncake: {words.get(code, 'the store failed')} (code {code})"


def is_stored(code: int) -> bool:
    """Whether a put left the record in the store."""
    return code in (0, _EXISTS)


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """What the client is set up with, the configuration file taken into account."""

    local_hostname: str
    metadata_server: str
    master: str
    segment_bytes: int
    buffer_bytes: int
    protocol: str
    device: str
    tcp_connection_pool: bool
    log_level: int

    @classmethod
    def resolve(cls, settings: MooncakeSettings, rank: int | None) -> ClientOptions:
        """Take the file at ``config_path`` before the variables. Raises ``StorageError`` naming what is wrong."""
        given = _read_file(settings.config_path) if settings.config_path else {}

        def value(otherwise: object, *names: str) -> Any:
            return next((given[name] for name in names if name in given), otherwise)

        master = str(value(settings.master, "master_server_addr", "master_server_address") or "")
        if not master:
            raise StorageError(
                "FDCACHE_STORAGE=mooncake needs MOONCAKE_MASTER_SERVER_ADDR, such as master:50051"
            )
        devices = value(settings.rdma_devices, "rdma_devices", "device_name")
        devices = parse_list(devices) if isinstance(devices, str) else tuple(devices)
        try:
            segment = parse_size(value(settings.global_segment_size, "global_segment_size"))
            buffer = parse_size(value(settings.local_buffer_size, "local_buffer_size"))
        except ValueError as error:
            raise StorageError(f"{settings.config_path}: a size is not one: {error}") from error
        return cls(
            local_hostname=_local_name(str(value(settings.local_hostname, "local_hostname") or ""), master),
            metadata_server=str(value(settings.metadata_server, "metadata_server")),
            master=master,
            segment_bytes=segment if rank is not None else 0,
            buffer_bytes=buffer,
            protocol=str(value(settings.protocol, "protocol")),
            device=devices[(rank or 0) % len(devices)] if devices else "",
            tcp_connection_pool=settings.tcp_connection_pool,
            log_level=settings.log_level,
        )


def _read_file(path: Path) -> dict[str, Any]:
    try:
        given = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StorageError(f"MOONCAKE_CONFIG_PATH: {path} cannot be read: {error}") from error
    if not isinstance(given, dict):
        raise StorageError(f"MOONCAKE_CONFIG_PATH: {path} must hold one JSON object")
    return given


def _local_name(name: str, master: str) -> str:
    """How others reach this machine. A loopback name would make every node's records unreachable for the others."""
    remote = not master.startswith(_LOCAL_NAMES)
    if name and remote and name.startswith(_LOCAL_NAMES):
        raise StorageError(
            f"MOONCAKE_LOCAL_HOSTNAME={name} is this machine for every node; give the address that the others "
            f"reach it by, or none to use the one it has towards {master}"
        )
    return name or _address_towards(master)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise StorageError(
            f"MOONCAKE_MASTER_SERVER_ADDR={address}: write host and port, such as master:50051"
        )
    return host, int(port)


def _address_towards(master: str) -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_split(master))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StorageGoneError(f"MOONCAKE_MASTER_SERVER_ADDR={master} cannot be resolved: {error}") from error


def connect(options: ClientOptions, timeout: float) -> Any:
    """A client that is set up. Raises ``StorageGoneError`` for a master that does not answer within ``timeout``."""
    try:
        with socket.create_connection(_split(options.master), timeout):
            pass  # the client itself tries a dead master for a minute and a half
    except OSError as error:
        raise StorageGoneError(
            f"mooncake: the master at {options.master} does not answer: {error}"
        ) from error
    # The client is a C++ library that knows no other way to be told.
    os.putenv("GLOG_minloglevel", str(options.log_level))
    os.putenv("MC_TCP_ENABLE_CONNECTION_POOL", str(int(options.tcp_connection_pool)))
    client = load_client().MooncakeDistributedStore()
    code = client.setup(
        options.local_hostname,
        options.metadata_server,
        options.segment_bytes,
        options.buffer_bytes,
        options.protocol,
        options.device,
        options.master,
    )
    if code:
        raise StorageGoneError(f"mooncake: setup with the master at {options.master} failed with code {code}")
    return client


def load_client() -> Any:
    """The client's package. Raises ``ConnectorNotFoundError`` where it is not installed."""
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ConnectorNotFoundError(
            "FDCACHE_STORAGE=mooncake: the Mooncake client cannot be loaded "
            f"({error}); install it with `pip install fdcache[mooncake]`, on Debian also "
            "libibverbs1 libnuma1 libcurl4"
        ) from error
