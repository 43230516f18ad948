"""Addresses of ranks: a socket of one node, ``ipc://``, or a host and port, ``tcp://``."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from socket import AF_UNIX, socket

from fdcache.errors import ConfigurationError, TransferError
from fdcache.service.wire.address import default_runtime_dir, make_runtime_dir
from fdcache.settings.kinds import is_port

_ANY_HOST = ("*", "0.0.0.0", "[::]")
_FORMS = "write ipc:///directory/name or tcp://host:port"


def rank_address(address: str | None, rank: int) -> str:
    """Return the address of a rank, from that of rank 0. Raises ``ConfigurationError`` for an invalid one."""
    if address is None:
        directory = default_runtime_dir()
        make_runtime_dir(directory)
        return f"ipc://{directory}/transfer-{os.getpid()}-{time.monotonic_ns():x}.{rank}"
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host in _ANY_HOST:
        raise ConfigurationError(
            f"FDCACHE_TRANSFER_ADDRESS={address}: peers connect to this address; write the host by which they reach it"
        )
    if scheme == "tcp" and host and is_port(port) and 0 < int(port) + rank < 65536:
        return f"tcp://{host}:{int(port) + rank}"
    if scheme == "ipc" and rest.startswith("/"):
        return f"ipc://{rest}.{rank}"
    raise ConfigurationError(f"FDCACHE_TRANSFER_ADDRESS={address}: {_FORMS}")


def require_peer_address(address: str) -> None:
    """Raise ``TransferError`` for an address that no rank of a peer can have."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    is_host = host.isascii() and host.isprintable() and host not in ("", *_ANY_HOST)
    is_socket = scheme == "ipc" and rest.startswith("/") and rest.isprintable()
    is_port_of_host = scheme == "tcp" and is_host and is_port(port) and 0 < int(port) < 65536
    if not (is_socket or is_port_of_host):
        raise TransferError(f"address {address[:200]!r} of a prefill peer: {_FORMS}")


def address_error(address: str, error: Exception) -> TransferError:
    """Return the error of an address at which this process cannot answer."""
    return TransferError(
        f"the address {address} cannot be used: {error}; set FDCACHE_TRANSFER_ADDRESS to another"
    )


def prepare_socket(path: Path) -> None:
    """Make the folder of a socket. Raises ``OSError`` if a process listens there: binding would take its address."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with socket(AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except BlockingIOError:  # it does not take connections now
            pass
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
