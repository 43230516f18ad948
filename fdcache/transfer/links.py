"""Peers of one rank: sockets, handshakes, boot ids, and the proof that a peer's process is gone."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from socket import AF_UNIX, socket

import zmq

from fdcache.errors import ConfigurationError, ProtocolError, TransferError
from fdcache.service.wire.address import default_runtime_dir, make_runtime_dir
from fdcache.service.wire.liveness import Watch
from fdcache.settings.kinds import is_port
from fdcache.transfer.messages import (
    NO_BOOT,
    AnyMessage,
    Envelope,
    Hello,
    Identity,
    Refused,
    Stranger,
    Welcome,
    decode,
    difference,
    encode,
)

_MOST_QUEUED = 10_000
_HELLO_EVERY = 0.02
_REFUSED_FOR = 5.0
_MOST_DEAD = 1024
_ANY_HOST = ("*", "0.0.0.0", "[::]")


def machine_id() -> str:
    """Return an id of this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


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
    raise ConfigurationError(
        f"FDCACHE_TRANSFER_ADDRESS={address}: write ipc:///directory/name or tcp://host:port"
    )


def address_error(address: str, error: Exception) -> TransferError:
    """Return the error of an address at which this process cannot answer."""
    return TransferError(
        f"the address {address} cannot be used: {error}; set FDCACHE_TRANSFER_ADDRESS to another"
    )


class LinkState(StrEnum):
    """State of a link to a prefill peer."""

    CONNECTING = "connecting"
    ACCEPTED = "accepted"
    REFUSED = "refused"


@dataclass(slots=True)
class Outgoing:
    """A prefill peer that this rank reads from."""

    address: str
    socket: zmq.Socket[bytes]
    state: LinkState = LinkState.CONNECTING
    identity: Identity | None = None
    error: str | None = None
    next_hello: float = 0.0
    wanted_until: float = 0.0
    refused_until: float = 0.0
    watch: Watch | None = None

    @property
    def boot(self) -> bytes:
        """Boot id of the peer, ``NO_BOOT`` before it was accepted."""
        return NO_BOOT if self.identity is None else self.identity.boot


@dataclass(slots=True)
class Incoming:
    """A decode peer that reads from this rank."""

    identity: Identity
    route: bytes
    watch: Watch | None


@dataclass(slots=True)
class Received:
    """A message for this process, and the boot id of the peer that sent it."""

    peer: bytes
    message: AnyMessage


@dataclass(slots=True)
class LinkEvents:
    """What changed since the last call: messages, and peers that were accepted, refused, or are gone."""

    received: list[Received] = field(default_factory=list)
    accepted: list[Outgoing] = field(default_factory=list)
    refused: list[Outgoing] = field(default_factory=list)
    greeted: list[Identity] = field(default_factory=list)
    """Decode peers that were accepted."""
    gone: list[tuple[bytes, str]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Addresses of prefill peers that are gone."""


class Links:
    """The sockets of one rank. Call every method from one thread.

    Raises ``TransferError`` if the address cannot be used.
    """

    def __init__(self, mine: Identity) -> None:
        self.mine = mine
        self.outgoing: dict[str, Outgoing] = {}
        self.incoming: dict[bytes, Incoming] = {}
        self.events = LinkEvents()
        self.protocol_errors = 0
        self._dead: dict[bytes, None] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            if mine.address.startswith("ipc://"):
                _prepare_socket(Path(mine.address.removeprefix("ipc://")))
            self._router.bind(mine.address)
        except (zmq.ZMQError, OSError) as error:
            self._router.close()
            self._context.term()
            raise address_error(mine.address, error) from error
        self.poller = zmq.Poller()
        self.poller.register(self._router, zmq.POLLIN)

    def connect(self, address: str, now: float, until: float) -> Outgoing:
        """Return the link to a prefill peer; try a handshake until then, unless there was one."""
        link = self.outgoing.get(address)
        if link is None:
            link = self.outgoing[address] = Outgoing(address, self._dealer(address))
        self._look_for_end(link)
        link.wanted_until = max(link.wanted_until, until)
        if link.state is LinkState.REFUSED and now >= link.refused_until:
            link.state = LinkState.CONNECTING
        return link

    def refuse(self, link: Outgoing, error: str, now: float) -> None:
        """Read nothing from a prefill peer until it is asked again, some seconds later."""
        link.state, link.error, link.refused_until = LinkState.REFUSED, error, now + _REFUSED_FOR

    def tick(self, now: float) -> None:
        """Repeat handshakes without an answer, and look for processes that are gone."""
        for link in list(self.outgoing.values()):
            if link.state is LinkState.CONNECTING and link.next_hello <= now <= link.wanted_until:
                link.next_hello = now + _HELLO_EVERY
                self._send(link.socket, NO_BOOT, Hello(self.mine))
            elif link.state is not LinkState.ACCEPTED and now > max(link.wanted_until, link.refused_until):
                self._drop(link)
            else:
                self._look_for_end(link)
        for boot, each in list(self.incoming.items()):
            if each.watch is not None and each.watch.is_gone():
                self._forget(boot, "the decode process is gone")

    def to_prefill(self, boot: bytes, message: AnyMessage) -> None:
        """Send a message to a prefill peer, unless it is gone."""
        link = self._link_of(boot)
        if link is not None:
            self._send(link.socket, boot, message)

    def to_decode(self, boot: bytes, message: AnyMessage) -> None:
        """Send a message to a decode peer, unless it is gone."""
        peer = self.incoming.get(boot)
        if peer is not None:
            self._answer(peer.route, boot, message)

    def receive(self, now: float) -> LinkEvents:
        """Read every message that has arrived; return what changed since the last call."""
        for parts in self._drain(self._router):
            if len(parts) == 2:
                self._from_decode(parts[0], parts[1])
            else:
                self.protocol_errors += 1
        for link in list(self.outgoing.values()):
            for parts in self._drain(link.socket):
                self._from_prefill(link, parts[-1], now)
        events, self.events = self.events, LinkEvents()
        return events

    def take(self, data: bytes, now: float) -> None:
        """Take a message of a prefill peer that did not come through a socket."""
        try:
            link = self._link_of(decode(data)[0].sender)
        except ProtocolError:
            self.protocol_errors += 1
            return
        if link is not None:
            self._from_prefill(link, data, now)

    def close(self) -> None:
        """Close all sockets and stop watching."""
        for link in self.outgoing.values():
            link.socket.close()
            _close(link.watch)
        for each in self.incoming.values():
            _close(each.watch)
        if self.mine.address.startswith("ipc://"):  # while it is this process's: the next may bind it at once
            Path(self.mine.address.removeprefix("ipc://")).unlink(missing_ok=True)
        self._router.close()
        self._context.term()

    # --- messages ---------------------------------------------------------------------------------------------

    def _from_decode(self, route: bytes, data: bytes) -> None:
        try:
            envelope, message = decode(data)
        except ProtocolError as error:
            self.protocol_errors += 1
            self._answer(route, NO_BOOT, Refused("protocol", "readable messages", str(error)))
            return
        if isinstance(message, Hello):
            self._greet(route, message.side)
        elif envelope.target != self.mine.boot or envelope.sender not in self.incoming:
            self._answer(route, envelope.sender, Stranger(envelope.target))
        else:
            self.events.received.append(Received(envelope.sender, message))

    def _greet(self, route: bytes, side: Identity) -> None:
        if side.boot in self._dead:
            return
        refusal = difference(self.mine, side)
        if refusal is not None:
            self._answer(route, side.boot, refusal)
            return
        if side.boot not in self.incoming:
            for boot, each in list(self.incoming.items()):
                if each.identity.address == side.address:
                    self._forget(boot, "another process has its address")
            self.incoming[side.boot] = Incoming(side, route, self._watch(side))
            self.events.greeted.append(side)
        self._answer(route, side.boot, Welcome(self.mine))

    def _from_prefill(self, link: Outgoing, data: bytes, now: float) -> None:
        try:
            envelope, message = decode(data)
        except ProtocolError as error:
            self.protocol_errors += 1
            if link.state is LinkState.CONNECTING:  # as of another version, which cannot say so in this one
                self.refuse(link, f"refused: {error}", now)
                self.events.refused.append(link)
            return
        if envelope.sender in self._dead:
            return
        if link.identity is not None and envelope.sender != link.boot:
            self._died(link.boot)
            self._lost(link, "another process has its address")
        if isinstance(message, Refused):
            reason = f"refused: {message.field} is {message.theirs} here and {message.mine} at prefill"
            self.refuse(link, reason, now)
            self.events.refused.append(link)
        elif isinstance(message, Welcome):
            self._welcomed(link, message.side)
        elif isinstance(message, Stranger):
            if message.target == link.boot != NO_BOOT:
                self._lost(link, "prefill has forgotten this process")
        elif link.identity is not None and envelope.target == self.mine.boot:
            self.events.received.append(Received(link.boot, message))

    def _welcomed(self, link: Outgoing, side: Identity) -> None:
        if link.state is not LinkState.CONNECTING:
            return
        _close(link.watch)
        link.state, link.identity, link.watch = LinkState.ACCEPTED, side, self._watch(side)
        self.events.accepted.append(link)

    def _lost(self, link: Outgoing, reason: str) -> None:
        """Drop the state of the process that was at an address; begin a new handshake when it is needed."""
        self.events.gone.append((link.boot, reason))
        self.events.lost.append(link.address)
        _close(link.watch)
        link.state, link.identity, link.watch, link.next_hello = LinkState.CONNECTING, None, None, 0.0

    def _drop(self, link: Outgoing) -> None:
        """Close the socket to an address that nothing is wanted from."""
        self.poller.unregister(link.socket)
        link.socket.close()
        _close(link.watch)
        del self.outgoing[link.address]

    def _look_for_end(self, link: Outgoing) -> None:
        if link.watch is not None and link.watch.is_gone():
            self._died(link.boot)
            self._lost(link, "the prefill process is gone")

    def _forget(self, boot: bytes, reason: str) -> None:
        self._died(boot)
        _close(self.incoming.pop(boot).watch)
        self.events.gone.append((boot, reason))

    def _died(self, boot: bytes) -> None:
        """Ignore what still arrives from a process."""
        self._dead[boot] = None
        if len(self._dead) > _MOST_DEAD:
            del self._dead[next(iter(self._dead))]

    def _watch(self, side: Identity) -> Watch | None:
        """Return a watch on a process of this machine, None if nothing would prove its end."""
        if side.live is None or side.machine != self.mine.machine:
            return None
        watch = Watch(side.live)
        if watch.pidfd is None and not Path(side.live.path).exists():  # not visible from here
            watch.close()
            return None
        return watch

    def _link_of(self, boot: bytes) -> Outgoing | None:
        return next((link for link in self.outgoing.values() if link.boot == boot != NO_BOOT), None)

    # --- sockets ----------------------------------------------------------------------------------------------

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _MOST_QUEUED)
        socket.setsockopt(zmq.RCVHWM, _MOST_QUEUED)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        return socket

    def _dealer(self, address: str) -> zmq.Socket[bytes]:
        """Return a socket to a prefill peer. Raises ``TransferError``."""
        try:
            socket = self._socket(zmq.DEALER)
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.setsockopt(zmq.ROUTING_ID, b"d" + self.mine.boot)
        except zmq.ZMQError as error:
            raise TransferError(f"no socket to a prefill peer: {error}") from error
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close()
            raise TransferError(f"address {address!r} of a prefill peer: {error}") from error
        self.poller.register(socket, zmq.POLLIN)
        return socket

    def _send(self, socket: zmq.Socket[bytes], target: bytes, message: AnyMessage) -> None:
        with suppress(zmq.Again):  # lost, as a message may be: there is no connection, or its queue is full
            socket.send(encode(Envelope(self.mine.boot, target), message), zmq.NOBLOCK)

    def _answer(self, route: bytes, target: bytes, message: AnyMessage) -> None:
        with suppress(zmq.Again):  # as above
            self._router.send_multipart(
                [route, encode(Envelope(self.mine.boot, target), message)], zmq.NOBLOCK
            )

    @staticmethod
    def _drain(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
        while True:
            try:
                yield socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return


def _prepare_socket(path: Path) -> None:
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


def _close(watch: Watch | None) -> None:
    if watch is not None:
        watch.close()
