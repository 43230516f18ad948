"""Trust between instances: links over ``tcp://`` are encrypted and open only to who knows a shared secret.

    keys = LinkKeys.derived(settings.key)
    keys.protect_server(router)           # before it binds
    keys.protect_client(dealer)           # before it connects
    gate = Gatekeeper(context, keys)      # and gate.answer() whenever its socket is readable

CurveZMQ (libzmq, RFC 26) does the work. Both key pairs are derived from the secret, so a client proves with the
server's public key, and then with its own, that it knows the secret, before any of its messages is read.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from fdcache.errors import ConfigurationError, TransferError

LEAST_KEY_BYTES = 16
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
    if len(key.encode()) < LEAST_KEY_BYTES:
        raise ConfigurationError(
            f"FDCACHE_TRANSFER_KEY: a key of {len(key.encode())} bytes can be guessed; use at least "
            f"{LEAST_KEY_BYTES}, as `openssl rand -hex 32` makes them"
        )
    return LinkKeys.derived(key)


def _key_pair(secret: str, role: bytes) -> tuple[bytes, bytes]:
    private = z85.encode(
        hashlib.blake2b(role, key=hashlib.sha256(secret.encode()).digest(), digest_size=32).digest()
    )
    return zmq.curve_public(private), private
