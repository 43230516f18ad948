"""Addresses at which ranks answer peers, and who may connect: keys of encrypted links."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from socket import AF_UNIX, socket

import zmq
from zmq.utils import z85

from fdcache.errors import ConfigurationError, TransferError
from fdcache.service.wire.address import default_runtime_dir, make_runtime_dir
from fdcache.service.wire.liveness import LiveFile, live_processes
from fdcache.settings.peers import ADDRESS_FORMS, address_fault, key_fault


def rank_address(address: str | None, rank: int, setting: str = "FDCACHE_TRANSFER_ADDRESS") -> str:
    """Return the address of a rank, from that of rank 0. Raises ``ConfigurationError`` for an invalid one."""
    if address is None:
        directory = default_runtime_dir()
        make_runtime_dir(directory)
        return f"ipc://{directory}/transfer-{os.getpid()}-{time.monotonic_ns():x}.{rank}"
    if (fault := address_fault(address, rank)) is not None:
        raise ConfigurationError(f"{setting}={address}: {'; '.join(fault)}")
    if address.startswith("ipc://"):
        return f"{address}.{rank}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}"


def require_peer_address(address: str) -> None:
    """Raise ``TransferError`` for an address that no rank of a peer can have."""
    if address_fault(address) is not None:
        raise TransferError(f"address {address[:200]!r} of a prefill peer: {ADDRESS_FORMS}")


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


_HANDSHAKES = "inproc://zeromq.zap.01"  # where libzmq asks whether a client may connect, RFC 27
_DOMAIN = b"fdcache-transfer"


@dataclass(frozen=True, slots=True, repr=False)
class LinkKeys:
    """Key pairs of both ends of a link, in Z85."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def derived(cls, secret: str) -> LinkKeys:
        """Return the keys of a shared secret. Raises ``TransferError`` if this libzmq cannot encrypt."""
        if not zmq.has("curve"):
            raise TransferError(
                "FDCACHE_TRANSFER_ADDRESS: this libzmq has no CURVE; install pyzmq's own wheel"
            )
        return cls(*_key_pair(secret, b"server"), *_key_pair(secret, b"client"))

    def protect_server(self, socket: zmq.Socket[bytes]) -> None:
        """Refuse clients without the keys. Call it before ``bind``."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.server_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.server_secret)

    def protect_client(self, socket: zmq.Socket[bytes]) -> None:
        """Talk to a server with the keys alone. Call it before ``connect``."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.client_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.client_secret)


class Gatekeeper:
    """Answers libzmq's question whether a client may connect. Make it before the server binds."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: LinkKeys) -> None:
        self._client = z85.decode(keys.client_public)
        self.refused = 0
        """Clients that did not know the secret."""
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_HANDSHAKES)

    def answer(self) -> None:
        """Answer every question that has arrived."""
        while True:
            try:
                version, number, _, _, _, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            known = mechanism == b"CURVE" and credentials == [self._client]
            self.refused += not known
            status = (b"200", b"OK") if known else (b"400", b"unknown key")
            self.socket.send_multipart([version, number, *status, b"", b""])

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def require_key(address: str, key: str | None) -> LinkKeys | None:
    """Return the keys of links to an address, None for one that only processes of this machine can reach.

    Raises ``ConfigurationError`` if ``tcp://`` has no key, or a short one.
    """
    if not address.startswith("tcp://"):
        return None
    if key is None:
        raise ConfigurationError(
            f"FDCACHE_TRANSFER_ADDRESS={address}: whoever reaches this address could read and change blocks; set "
            "FDCACHE_TRANSFER_KEY or FDCACHE_TRANSFER_KEY_FILE to the same secret on all instances"
        )
    require_long_key(key, "FDCACHE_TRANSFER_KEY")
    return LinkKeys.derived(key)


def require_long_key(key: str, setting: str) -> None:
    """Raise ``ConfigurationError`` for a key that can be guessed."""
    if (fault := key_fault(key)) is not None:
        raise ConfigurationError(f"{setting}: {'; '.join(fault)}")


def _key_pair(secret: str, role: bytes) -> tuple[bytes, bytes]:
    private = z85.encode(
        hashlib.blake2b(role, key=hashlib.sha256(secret.encode()).digest(), digest_size=32).digest()
    )
    return zmq.curve_public(private), private


def open_live_file(address: str) -> LiveFile:
    """Open a live file beside the socket of an address, or in the user's own directory. Raises ``TransferError``."""
    directory = Path(address.removeprefix("ipc://")).parent
    try:
        if address.startswith("ipc://"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        else:
            directory = default_runtime_dir()
            make_runtime_dir(directory)
        deque(live_processes(directory), maxlen=0)  # removes the files of dead ones
        return LiveFile(directory)
    except OSError as error:
        raise address_error(address, error) from error
