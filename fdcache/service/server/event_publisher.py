"""Publisher of events for routers: a stream for each model, what it has for those that come late, and a replay.

A thread owns the sockets. Numbers of messages begin at the microseconds since the epoch, so those of a later service
are higher: consumers take lower ones for old. What is told first after a start, to a new subscriber, and to those that
ask for messages that are not kept any more, is that every tier is empty, and then all blocks that are there.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import zmq

from fdcache.errors import ConfigurationError
from fdcache.service.server import listening
from fdcache.service.wire.router_events import END, AllBlocksCleared, EventBatch

log = logging.getLogger("fdcache.service.server")

MOST_WAITING = 4096
"""Messages that wait for the thread. Beyond that a stream begins again with all blocks."""
MOST_UNREAD = 256
"""Messages that are kept for a subscriber that does not read. It loses the next ones, and sees that by the numbers."""
MOST_KEPT = 1024
"""Messages that can be replayed."""
MOST_KEPT_BYTES = 16 << 20
MOST_BLOCKS = 4096
"""Of a message, after which no more events are added to it."""
MOST_RANKS = 16
"""Ranks that are emptied before all blocks are told: an earlier service may have had more layouts than this one."""
_JOIN_SECONDS, _BIND_SECONDS = 2.0, 1.0
_GATHER_SECONDS = 0.05
"""New subscribers are waited for that long before all blocks are told once for all of them."""
_REST_SECONDS = 0.02
"""After each sending: what comes meanwhile is sent together."""

_REMEDY = "give an address such as tcp://127.0.0.1:5557"

Snapshot = Callable[[], Iterator[list[Any]]]
"""Yields the events of all blocks that are there now, some at a time."""

_encoder = msgspec.msgpack.Encoder()


class LayoutEvents:
    """The part of a layout in a stream, with a rank of its own. Any thread may call it."""

    def __init__(self, stream: EventStream, rank: int, snapshot: Snapshot) -> None:
        self.rank = rank
        self.snapshot = snapshot
        self._stream = stream

    def publish(self, events: Callable[[], list[Any]]) -> None:
        """Queue a message, whose events the publisher's thread asks for.

        Of too many, none is kept: all blocks are told in their place.
        """
        self._stream.publish(self.rank, events)

    def begin_again(self) -> None:
        """Tell all blocks, those of the stream's other layouts too, beginning from nothing."""
        self._stream.begin_again()


class EventStream:
    """The events of one model, under ``topic``: one sequence of numbers, whichever layout an event is of."""

    def __init__(self, topic: str, wake: Callable[[], None]) -> None:
        self.topic = topic.encode()
        self.number = time.time_ns() // 1000
        self.published = 0
        self._sources: tuple[LayoutEvents, ...] = ()
        self._wake = wake
        self._waiting: deque[tuple[int, Callable[[], list[Any]]]] = deque()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=MOST_KEPT)
        self._kept_bytes = 0
        self.begins_again = False
        """True until all blocks are told."""

    def join(self, snapshot: Snapshot) -> LayoutEvents:
        """Return the part of another layout."""
        made = LayoutEvents(self, len(self._sources), snapshot)
        self._sources += (made,)
        self.begin_again()
        return made

    def publish(self, rank: int, events: Callable[[], list[Any]]) -> None:
        """Queue a message of a source."""
        if len(self._waiting) >= MOST_WAITING:
            self.begin_again()
        else:
            self._waiting.append((rank, events))
            self._wake()

    def begin_again(self) -> None:
        """Tell all blocks, beginning from nothing."""
        self._waiting.clear()
        self.begins_again = True
        self._wake()

    def send(self, socket: zmq.Socket[bytes]) -> None:
        """Send what waits. A subscriber whose queue is full does not get it."""
        if self.begins_again:
            self.begins_again = False
            self._forget()
            for payload in self._everything():
                self.number += 1
                self._send(socket, payload)
        while self._waiting:
            try:
                rank, events = self._take()
            except Exception:
                self.begin_again()  # else readers would keep what has changed
                raise
            if events:
                payload = _encode(events, rank)
                self.number += 1
                self._keep(payload)
                self._send(socket, payload)

    def _take(self) -> tuple[int, list[Any]]:
        """Return the rank and the events of the next message: what waits of one source."""
        rank, make = self._waiting.popleft()
        events = make()
        while self._waiting and self._waiting[0][0] == rank and _blocks_in(events) < MOST_BLOCKS:
            events += self._waiting.popleft()[1]()
        return rank, events

    def _send(self, socket: zmq.Socket[bytes], payload: bytes) -> None:
        socket.send_multipart((self.topic, self.number.to_bytes(8, "big"), payload))
        self.published += 1

    def _everything(self) -> Iterator[bytes]:
        """Yield the messages that tell all blocks, after those that empty every rank: readers may know more of them.

        The first blocks are beside the last clearing.
        """
        sources = self._sources
        for rank in range(max(MOST_RANKS, len(sources)) - 1, 0, -1):
            yield _encode([AllBlocksCleared()], rank)
        begun: list[Any] = [AllBlocksCleared()]
        for source in sources:
            for batch in source.snapshot():
                yield _encode(begun + batch, source.rank)
                begun = []
            if begun:
                yield _encode(begun, 0)
                begun = []

    def _keep(self, payload: bytes) -> None:
        if len(self._kept) == MOST_KEPT:
            self._kept_bytes -= len(self._kept[0][1])
        self._kept.append((self.number, payload))
        self._kept_bytes += len(payload)
        while self._kept_bytes > MOST_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _forget(self) -> None:
        self._kept.clear()
        self._kept_bytes = 0

    def replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Yield the messages from a number on, or where these are not kept any more all blocks.

        Those of the blocks have the last numbers that were used, so that the next message follows.
        """
        if first > self.number or (self._kept and first >= self._kept[0][0]):
            yield from [each for each in self._kept if each[0] >= first]
        else:
            batches = list(self._everything())
            yield from zip(range(self.number - len(batches) + 1, self.number + 1), batches, strict=True)


class EventPublisher:
    """Publishes at a ZeroMQ address, and replays at ``replay_address`` if there is one.

    Raises ``ConfigurationError`` for addresses that cannot be bound.
    """

    def __init__(self, address: str, replay_address: str | None) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket: zmq.Socket[bytes] = context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.setsockopt(zmq.SNDHWM, MOST_UNREAD)
        self._replay: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._replay.setsockopt(zmq.SNDHWM, 2 * MOST_KEPT)
        for socket in (self._socket, self._replay):
            socket.setsockopt(zmq.LINGER, 0)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._streams: dict[str, EventStream] = {}
        self._is_ending = False
        try:
            _bind(self._socket, address, "FDCACHE_KV_EVENTS")
            if replay_address is not None:
                _bind(self._replay, replay_address, "FDCACHE_KV_EVENTS_REPLAY")
        except ConfigurationError:
            self._close_sockets()
            os.close(self._wake_fd)
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_address = self._replay.getsockopt_string(zmq.LAST_ENDPOINT) or None
        self._thread = threading.Thread(target=self._run, name="fdcache-events", daemon=True)
        self._thread.start()

    def stream(self, topic: str) -> EventStream:
        """Return the stream of a topic, a new one at first."""
        if topic not in self._streams:
            self._streams[topic] = EventStream(topic, self._wake)
        return self._streams[topic]

    @property
    def published(self) -> int:
        """Messages published so far."""
        return sum(stream.published for stream in list(self._streams.values()))

    def close(self) -> None:
        """Send what waits, and close the sockets."""
        self._is_ending = True
        self._wake()
        self._thread.join(_JOIN_SECONDS)
        if not self._thread.is_alive():
            os.close(self._wake_fd)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._replay, self._wake_fd):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._is_ending:
                ready = dict(poller.poll())
                if self._wake_fd in ready:
                    os.eventfd_read(self._wake_fd)
                if self._socket in ready:
                    self._take_subscriptions()
                if self._replay in ready:
                    self._answer()
                self._send()
                time.sleep(_REST_SECONDS)
            self._send()
        finally:
            self._close_sockets()

    def _send(self) -> None:
        for stream in list(self._streams.values()):
            try:
                stream.send(self._socket)
            except Exception:  # of this stream: the thread serves others
                log.exception("events of %s cannot be published", stream.topic.decode())

    def _take_subscriptions(self) -> None:
        """Send all blocks of the streams to the subscribers that have come."""
        time.sleep(_GATHER_SECONDS)
        while True:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            for stream in list(self._streams.values()):
                if message[:1] == b"\x01" and stream.topic.startswith(message[1:]):
                    stream.begin_again()

    def _answer(self) -> None:
        """Answer a question of the replay socket: a number, for the only stream or with the topic of one."""
        identity, *frames = self._replay.recv_multipart()
        streams = list(self._streams.values())
        if len(frames) == 3:
            streams = [stream for stream in streams if stream.topic == frames[1]]
        if len(frames) not in (2, 3) or len(frames[-1]) != 8:
            return
        for stream in streams[:1]:
            for number, payload in stream.replay(int.from_bytes(frames[-1], "big")):
                self._replay.send_multipart((identity, b"", stream.topic, number.to_bytes(8, "big"), payload))
        self._replay.send_multipart((identity, b"", b"", END, b""))

    def _close_sockets(self) -> None:
        self._socket.close()
        self._replay.close()


def _bind(socket: zmq.Socket[bytes], address: str, variable: str) -> None:
    """Bind a socket, or take over the one that listens there already.

    An address that is taken is tried for a moment: a service that ends gives it back late.
    """
    if not _is_of_processes(address):
        raise ConfigurationError(f"{variable}: {address!r} is no address; {_REMEDY}")
    if (descriptor := listening.take(address)) is not None:
        socket.setsockopt(zmq.USE_FD, descriptor)
    deadline = time.monotonic() + _BIND_SECONDS
    while True:
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            raise ConfigurationError(f"{variable}: {address} cannot be bound: {error}; {_REMEDY}") from error
        return


def _is_of_processes(address: str) -> bool:
    """Return True for an address that other processes can have; ZeroMQ takes a port modulo 65,536."""
    transport, _, place = address.partition("://")
    port = place.rpartition(":")[2]
    return transport == "ipc" or (
        transport == "tcp" and (port == "*" or (port.isdecimal() and int(port) < 1 << 16))
    )


def _blocks_in(events: list[Any]) -> int:
    return sum(len(getattr(each, "block_hashes", ())) for each in events)


def _encode(events: list[Any], rank: int) -> bytes:
    return _encoder.encode(EventBatch(time.time(), events, rank))
