"""Peers of one rank: sockets, handshakes, boot ids, and the proof that a peer's process is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from fdcache.errors import ProtocolError, TransferError
from fdcache.service.wire.liveness import Live, Watch
from fdcache.transfer.access import (
    Gatekeeper,
    LinkKeys,
    address_error,
    prepare_socket,
    require_key,
    require_peer_address,
)
from fdcache.transfer.messages import (
    MOST_BYTES,
    NO_BOOT,
    AnyMessage,
    Envelope,
    FromDecode,
    FromPrefill,
    Identity,
    LinkHello,
    LinkRefused,
    LinkWelcome,
    Stranger,
    decode,
    difference,
    encode,
)

_MOST_QUEUED = 10_000
_HELLO_EVERY = 0.02
_REFUSED_FOR = 5.0
_MOST_DEAD = 1024
_MOST_PEERS = 1024
_MOST_PEER_BYTES = 64 << 20
"""Of what decode peers say of themselves."""
_IDLE_SECONDS = 60.0
_UNREACHABLE_SECONDS = 2.0
"""After so long without a connection a prefill peer is not waited for."""
_HEARTBEAT_MS, _SILENT_MS = 1000, 3000
_MOST_SOCKETS = 8192
_MOST_AT_ONCE = 256
"""Messages of a socket that are read before everything else has its turn."""
_WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


def machine_id() -> str:
    """Return an id of this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


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
    monitor: zmq.Socket[bytes]
    """Reports when the connection is made and when it is lost."""
    state: LinkState = LinkState.CONNECTING
    identity: Identity | None = None
    error: str | None = None
    next_hello: float = 0.0
    wanted_until: float = 0.0
    refused_until: float = 0.0
    watch: Watch | None = None
    unconnected_since: float | None = None
    """When the connection was lost, or could not be made; None while there is one, or before the first try."""

    def is_unreachable(self, now: float) -> bool:
        """Return True if there has been no connection for too long."""
        return self.unconnected_since is not None and now >= self.unconnected_since + _UNREACHABLE_SECONDS

    @property
    def boot(self) -> bytes:
        """Boot id of the peer, ``NO_BOOT`` before it was accepted."""
        return NO_BOOT if self.identity is None else self.identity.boot


@dataclass(slots=True)
class Incoming:
    """A decode peer that reads from this rank. ``heard``: when its last message came."""

    identity: Identity
    nbytes: int
    """Of what it says of itself."""
    route: bytes
    watch: Watch | None
    heard: float


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
    reconnected: list[bytes] = field(default_factory=list)
    """Boot ids of accepted prefill peers whose connection was lost and is there again."""
    unheard: list[bytes] = field(default_factory=list)
    """Boot ids of prefill peers of ``gone`` to which what was asked did not come; it may be asked again."""
    gone: list[tuple[bytes, str]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Addresses of prefill peers that are gone."""


class Links:
    """The sockets of one rank. Call every method from one thread.

    ``key``: the secret that instances share, for addresses with ``tcp://``. Raises ``ConfigurationError`` if such an
    address has no key, ``TransferError`` if it cannot be used.
    """

    def __init__(self, mine: Identity, key: str | None = None) -> None:
        own_keys = require_key(mine.address, key)
        self._keys = LinkKeys.derived(key) if key is not None else None
        self.mine = mine
        self.outgoing: dict[str, Outgoing] = {}
        self.incoming: dict[bytes, Incoming] = {}
        self.events = LinkEvents()
        self.protocol_errors = 0
        self._dead: dict[bytes, Live] = {}
        """What proved the end of the last processes that are gone, by boot id."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
        self._gate = Gatekeeper(self._context, own_keys) if own_keys is not None else None
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that connects again keeps its route
        if own_keys is not None:
            own_keys.protect_server(self._router)
        try:
            if mine.address.startswith("ipc://"):
                prepare_socket(Path(mine.address.removeprefix("ipc://")))
            self._router.bind(mine.address)
        except (zmq.ZMQError, OSError) as error:
            self._close_server()
            raise address_error(mine.address, error) from error
        self.poller = zmq.Poller()
        self.poller.register(self._router, zmq.POLLIN)
        if self._gate is not None:
            self.poller.register(self._gate.socket, zmq.POLLIN)

    def connect(self, address: str, now: float, until: float) -> Outgoing:
        """Return the link to a prefill peer; try a handshake until then, unless there was one."""
        link = self.outgoing.get(address)
        if link is None:
            link = self.outgoing[address] = Outgoing(address, *self._dealer(address))
        self._look_for_end(link)
        link.wanted_until = max(link.wanted_until, until)
        if link.state is LinkState.REFUSED and now >= link.refused_until:
            link.state = LinkState.CONNECTING
        return link

    def refuse(self, link: Outgoing, error: str, now: float) -> None:
        """Refuse a prefill peer; retry the handshake after a few seconds."""
        link.state, link.error, link.refused_until = LinkState.REFUSED, error, now + _REFUSED_FOR

    def tick(self, now: float) -> None:
        """Repeat handshakes without an answer, and look for processes that are gone."""
        for link in list(self.outgoing.values()):
            self._watch_connection(link, now)
            if link.state is LinkState.CONNECTING and link.next_hello <= now <= link.wanted_until:
                link.next_hello = now + _HELLO_EVERY
                self._send(link.socket, NO_BOOT, LinkHello(self.mine))
            elif link.state is not LinkState.ACCEPTED and now > max(link.wanted_until, link.refused_until):
                self._drop(link)
            else:
                self._look_for_end(link)
        for boot, each in list(self.incoming.items()):
            if each.watch is not None and each.watch.is_gone():
                self._died(boot, each.watch)
                self._forget(boot, "the decode process is gone")
            elif each.watch is None and now > each.heard + _IDLE_SECONDS:
                self._forget(boot, "the decode process was silent")

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
        """Read messages that have arrived; return what changed since the last call."""
        if self._gate is not None:
            self._gate.answer()
        for parts in self._drain(self._router):
            if len(parts) == 2:
                self._from_decode(parts[0], parts[1], now)
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
            self._close_client(link)
        for each in self.incoming.values():
            _close(each.watch)
        if self.mine.address.startswith("ipc://"):  # while it is this process's: the next may bind it at once
            Path(self.mine.address.removeprefix("ipc://")).unlink(missing_ok=True)
        self._close_server()

    def _close_client(self, link: Outgoing) -> None:
        link.socket.disable_monitor()
        link.socket.close()
        link.monitor.close()
        _close(link.watch)

    def _close_server(self) -> None:
        self._router.close()
        if self._gate is not None:
            self._gate.close()
        self._context.term()

    # --- messages ---------------------------------------------------------------------------------------------

    def _from_decode(self, route: bytes, data: bytes, now: float) -> None:
        try:
            envelope, message = decode(data)
        except ProtocolError as error:
            self.protocol_errors += 1
            self._answer(route, NO_BOOT, LinkRefused("protocol", "readable messages", str(error)))
            return
        sender = message.side.boot if isinstance(message, LinkHello) else envelope.sender
        if route != _route(sender):  # it speaks for another
            self.protocol_errors += 1
        elif isinstance(message, LinkHello):
            self._greet(route, message.side, len(data), now)
        elif envelope.target != self.mine.boot or sender not in self.incoming:
            self._answer(route, sender, Stranger(envelope.target))
        elif isinstance(message, FromDecode):
            self.incoming[sender].heard = now
            self.events.received.append(Received(sender, message))
        else:
            self.protocol_errors += 1

    def _greet(self, route: bytes, side: Identity, nbytes: int, now: float) -> None:
        if self._is_dead(side):
            return
        refusal = difference(self.mine, side)
        if refusal is None and side.boot not in self.incoming:
            refusal = self._no_room(nbytes)
        if refusal is not None:
            self._answer(route, side.boot, refusal)
            return
        if side.boot not in self.incoming:
            self.incoming[side.boot] = Incoming(side, nbytes, route, self._watch(side), now)
            self.events.greeted.append(side)
        self.incoming[side.boot].heard = now
        self._answer(route, side.boot, LinkWelcome(self.mine))

    def _no_room(self, nbytes: int) -> LinkRefused | None:
        """Return why a decode peer that says this much of itself is not taken, None if it is."""
        count, taken = len(self.incoming), sum(each.nbytes for each in self.incoming.values())
        if count < _MOST_PEERS and taken + nbytes <= _MOST_PEER_BYTES:
            return None
        theirs = "one more" if count >= _MOST_PEERS else f"one more of {nbytes >> 20} MiB"
        return LinkRefused("peers", f"full with {count}, {taken >> 20} MiB", theirs)

    def _from_prefill(self, link: Outgoing, data: bytes, now: float) -> None:
        try:
            envelope, message = decode(data)
        except ProtocolError as error:
            self.protocol_errors += 1
            if link.state is LinkState.CONNECTING:  # as of another version, which cannot say so in this one
                self.refuse(link, f"refused: {error}", now)
                self.events.refused.append(link)
            return
        if (
            envelope.sender in self._dead
            and envelope.sender != link.boot
            and not isinstance(message, LinkWelcome)
        ):
            return
        if isinstance(message, Stranger):
            if message.target == link.boot != NO_BOOT:
                self.events.unheard.append(link.boot)
                is_other = envelope.sender != link.boot
                self._lost(
                    link,
                    "another process has its address" if is_other else "prefill has forgotten this process",
                )
        elif link.identity is not None and envelope.sender != link.boot:
            pass  # of a former process at the address, or of nobody
        elif isinstance(message, LinkRefused):
            reason = f"refused: {message.field} is {message.theirs} here and {message.mine} at prefill"
            self.refuse(link, reason, now)
            self.events.refused.append(link)
        elif isinstance(message, LinkWelcome):
            self._welcomed(link, message.side)
        elif not isinstance(message, FromPrefill):
            self.protocol_errors += 1
        elif link.identity is not None and envelope.target == self.mine.boot:
            self.events.received.append(Received(link.boot, message))

    def _is_dead(self, side: Identity) -> bool:
        """Return True for a process that is gone, not for another that had its boot id."""
        return side.boot in self._dead and self._dead[side.boot] == side.live

    def _welcomed(self, link: Outgoing, side: Identity) -> None:
        if link.state is not LinkState.CONNECTING or self._is_dead(side):
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
        self.poller.unregister(link.monitor)
        self._close_client(link)
        del self.outgoing[link.address]

    def _watch_connection(self, link: Outgoing, now: float) -> None:
        """Record what became of the connection; wait no longer for a peer without one."""
        for parts in self._drain(link.monitor):
            if parse_monitor_message(parts)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if link.state is LinkState.ACCEPTED and link.unconnected_since is not None:
                    self.events.reconnected.append(link.boot)
                link.unconnected_since = None
                if link.state is LinkState.REFUSED and link.error == _unreachable(link.address):
                    link.state, link.refused_until, link.next_hello = LinkState.CONNECTING, 0.0, 0.0
            elif link.unconnected_since is None:
                link.unconnected_since = now
        if not link.is_unreachable(now):
            return
        if link.state is LinkState.ACCEPTED:
            self._lost(link, "the connection to prefill was lost")
        if link.state is LinkState.CONNECTING:
            self.refuse(link, _unreachable(link.address), now)
            self.events.refused.append(link)

    def _look_for_end(self, link: Outgoing) -> None:
        if link.watch is not None and link.watch.is_gone():
            self._died(link.boot, link.watch)
            self._lost(link, "the prefill process is gone")

    def _forget(self, boot: bytes, reason: str) -> None:
        _close(self.incoming.pop(boot).watch)
        self.events.gone.append((boot, reason))

    def _died(self, boot: bytes, watch: Watch) -> None:
        """Ignore what still arrives from a process."""
        self._dead[boot] = watch.live
        if len(self._dead) > _MOST_DEAD:
            del self._dead[next(iter(self._dead))]

    def _watch(self, side: Identity) -> Watch | None:
        """Return a watch on a process of this machine, None if nothing would prove its end."""
        if side.live is None or side.machine != self.mine.machine:
            return None
        watch = Watch(side.live)
        if not watch.is_visible:
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
        socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _SILENT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _SILENT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        return socket

    def _dealer(self, address: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Return a socket to a prefill peer and its monitor. Raises ``TransferError``."""
        require_peer_address(address)
        is_remote = address.startswith("tcp://")
        if is_remote and self._keys is None:
            raise TransferError(f"{address}: a prefill peer at tcp:// needs FDCACHE_TRANSFER_KEY")
        try:
            socket = self._socket(zmq.DEALER)
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.setsockopt(zmq.ROUTING_ID, _route(self.mine.boot))
            if is_remote and self._keys is not None:
                self._keys.protect_client(socket)
        except zmq.ZMQError as error:
            raise TransferError(f"no socket to a prefill peer: {error}") from error
        try:
            monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_WATCHED)
            monitor.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.disable_monitor()
            socket.close()
            raise TransferError(f"address {address!r} of a prefill peer: {error}") from error
        for each in (socket, monitor):
            self.poller.register(each, zmq.POLLIN)
        return socket, monitor

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
        for _ in range(_MOST_AT_ONCE):
            try:
                yield socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return


def _unreachable(address: str) -> str:
    return f"no peer answers at {address}"


def _route(boot: bytes) -> bytes:
    """Return the routing id of a decode process."""
    return b"d" + boot


def _close(watch: Watch | None) -> None:
    if watch is not None:
        watch.close()
