"""Settings of the hand-over of blocks between a prefill and a decode instance."""

from __future__ import annotations

import ipaddress
import re
import socket
from enum import StrEnum
from pathlib import Path

from fdcache.settings.kinds import FilePath, Integer, Number, Seconds, Secret, Size, Text, is_port
from fdcache.settings.variable import Component, Group, constant, variable


class TransferRole(StrEnum):
    """Part of an instance in hand-overs."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


ADDRESS_FORMS = "write ipc:///directory/name or tcp://host:port"
_LEAST_KEY_BYTES = 16
_HOST = re.compile(r"[A-Za-z0-9\[:][A-Za-z0-9.\-:%_\[\]]*")
"""What ZeroMQ can connect to; it refuses other hosts, or reads them as more than a host."""


def address_fault(address: str, rank: int = 0) -> tuple[str, str] | None:
    """Return why a rank cannot answer peers if rank 0 has this address, and the remedy; None if it can."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    is_host = _HOST.fullmatch(host) is not None
    if scheme == "tcp" and (host == "*" or (is_host and _is_unspecified(host))):
        return "peers connect to this address", "write the host by which they reach it"
    if scheme == "tcp" and is_host and is_port(port) and 0 < int(port) + rank < 65536:
        return None
    if scheme == "ipc" and rest.startswith("/") and rest.isprintable():
        return None
    return f"no address at which rank {rank} can answer peers", ADDRESS_FORMS


def _is_unspecified(host: str) -> bool:
    """Return True for 0.0.0.0 and [::], at which a process listens and to which nobody connects, however written."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        pass
    try:
        return socket.inet_aton(host) == bytes(4)  # such as 0, 0.0 and 000.0.0.0
    except OSError:
        return False


def key_fault(key: str) -> tuple[str, str] | None:
    """Return why a shared secret protects nothing, and the remedy; None if it does."""
    count = len(key.encode())
    if count >= _LEAST_KEY_BYTES:
        return None
    remedy = f"use at least {_LEAST_KEY_BYTES}, as `openssl rand -hex 32` makes them"
    return f"a key of {count} bytes can be guessed", remedy


class PeerSettings(Group):
    """Settings of hand-overs, for scheduler and workers. Creating them reads no environment."""

    used_in = (Component.MANAGER, Component.CONTROLLER)

    connector: Text = variable(
        "FDCACHE_TRANSFER",
        "none",
        "How blocks are read from a prefill instance: none, ipc (shared memory of one node), rdma (NIXL), or the name "
        "of an installed connector. On a GPU, ipc (CUDA's handles of memory) or rdma.",
    )
    role: TransferRole = variable(
        "FDCACHE_TRANSFER_ROLE",
        TransferRole.MIXED,
        "Whether the instance hands blocks over (prefill), reads them (decode), or both (mixed).",
    )
    address: Text | None = variable(
        "FDCACHE_TRANSFER_ADDRESS",
        None,
        "Address at which rank 0 answers peers, ipc:///directory/name or tcp://host:port. Rank r adds r to the port, "
        "or .r to the name. Unset, a socket of its own in the user's runtime directory.",
    )
    key: Secret | None = variable(
        "FDCACHE_TRANSFER_KEY",
        None,
        "Secret that all instances share, at least 16 bytes. A tcp:// address needs it: links are encrypted, and open "
        "to no one else.",
    )
    directory: FilePath = variable(
        "FDCACHE_TRANSFER_DIR",
        Path("/dev/shm"),
        "Folder of the shared memory of planes on the CPU with ipc, on a tmpfs.",
    )
    peer_ranks: Integer | None = variable(
        "FDCACHE_TRANSFER_PEER_RANKS",
        None,
        "Tensor-parallel ranks of the peer instances, a multiple or a divisor of the own. Unset, as many.",
        ge=1,
        unit="ranks",
    )
    timeout: Seconds = variable(
        "FDCACHE_TRANSFER_TIMEOUT",
        30.0,
        "Longest wait of decode for the blocks of a request, after which it computes them.",
        gt=0,
        unit="s",
    )
    lease: Seconds = variable(
        "FDCACHE_TRANSFER_LEASE",
        10.0,
        "Time for which prefill holds blocks after each message of a decode peer that waits for them.",
        gt=0,
        le=600,
        unit="s",
    )
    held: Number = variable(
        "FDCACHE_TRANSFER_HELD",
        0.25,
        "Share of the device blocks that reads nobody waits for any more may hold; beyond it decode computes.",
        ge=0,
        le=1,
    )
    ring: Size = constant(
        256 << 20,
        "Memory in which rdma packs blocks for its peers, and as much again into which it reads; all for one by role.",
        ge=1 << 20,
    )

    @property
    def is_on(self) -> bool:
        """True if blocks are handed over."""
        return self.connector.lower() not in ("", "none")

    @property
    def rings(self) -> tuple[int, int]:
        """Bytes in which rdma packs blocks for peers, and bytes into which it reads: a role has those of both."""
        both, unused = 2 * self.ring, 1 << 16
        sides = {TransferRole.PREFILL: (both, unused), TransferRole.DECODE: (unused, both)}
        return sides.get(TransferRole(self.role), (self.ring, self.ring))

    @property
    def renew(self) -> float:
        """Seconds between renewals of a lease."""
        return self.lease / 5
