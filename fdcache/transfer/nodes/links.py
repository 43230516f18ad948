"""NodeLinks: the connections of one connector to other nodes, and what has become of its questions."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import zmq

from fdcache.errors import ProtocolError
from fdcache.storage.breaker import CircuitBreaker
from fdcache.transfer.access import LinkKeys
from fdcache.transfer.nodes.messages import Answer, Request, decode_answer, encode

_PATIENCE = 2.0
"""Seconds for which a node that has been asked may say nothing."""
_AT_ONCE = 4
"""Requests of one exchange that are under way to a node."""
_POLL_MS = 200
_RECONNECT_MS, _LONGEST_RECONNECT_MS = 100, 2000
_HEARTBEAT_MS, _SILENT_MS = 1000, 5000
_GONE = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(slots=True, eq=False)
class Node:
    """Another node. One that has failed is asked again now and then, and waited for once it has answered."""

    address: str
    breaker: CircuitBreaker
    socket: zmq.Socket[bytes] | None = None
    monitor: zmq.Socket[bytes] | None = None

    def close(self) -> None:
        """Disconnect."""
        if self.socket is not None:
            self.socket.disable_monitor()
            self.socket.close(linger=0)
        if self.monitor is not None:
            self.monitor.close(linger=0)
        self.socket = self.monitor = None


@dataclass(slots=True, eq=False)
class Reply:
    """What a node has answered to the request with this index, after how many seconds: None if it has failed."""

    index: int
    answer: Answer | None
    seconds: float = 0.0
    frames: list[zmq.Frame] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Lane:
    """The requests of an exchange to one node."""

    node: Node
    waiting: deque[tuple[int, Request]]
    under_way: dict[bytes, tuple[int, float]] = field(default_factory=dict)
    """Index of each, and when it was sent."""

    heard: float = 0.0

    @property
    def is_over(self) -> bool:
        return not (self.waiting or self.under_way)


class NodeLinks:
    """Connections to other nodes. One exchange at a time; calls may come from any thread.

    ``breakers``: what is known of each node, by its address. ``most_frame``: bytes of the largest frame that a node may
    send.
    """

    def __init__(self, keys: LinkKeys, breakers: Callable[[str], CircuitBreaker], most_frame: int) -> None:
        self._keys, self._breakers, self._most_frame = keys, breakers, most_frame
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._nodes: dict[str, Node] = {}
        self._numbers = count(1)
        self._closed = False

    def forget_others(self, addresses: Iterable[str]) -> None:
        """Disconnect from nodes that are not among these."""
        wanted = set(addresses)
        with self._lock:
            for address in [each for each in self._nodes if each not in wanted]:
                self._nodes.pop(address).close()

    @contextmanager
    def _locked(self, deadline: float) -> Iterator[bool]:
        held = self._lock.acquire(timeout=max(deadline - time.monotonic(), 0.0))
        try:
            yield held and not self._closed
        finally:
            if held:
                self._lock.release()

    def exchange(self, requests: Iterable[tuple[str, Request]], deadline: float) -> Iterator[Reply]:
        """Send requests, each to an address, and yield the reply to each as it comes, until the deadline at the latest.

        A reply without an answer: the node has failed, or was not waited for. Without a reply: too late.
        """
        with self._locked(deadline) as may:
            if may:
                yield from self._exchange(requests, deadline)

    def tell(self, messages: Iterable[tuple[str, Request]], deadline: float) -> None:
        """Send messages that have no answer to nodes that are there. One that cannot be sent at once is dropped."""
        with self._locked(deadline) as may:
            for address, message in messages if may else ():
                node = self._nodes.get(address)
                if node is not None and node.socket is not None and node.breaker.reason is None:
                    self._send(node, message)

    def _exchange(self, requests: Iterable[tuple[str, Request]], deadline: float) -> Iterator[Reply]:
        for node in self._nodes.values():
            self._take_late(node)
        lanes: dict[str, _Lane] = {}
        for index, (address, request) in enumerate(requests):
            lane = lanes.get(address)
            if lane is None:
                lane = lanes[address] = _Lane(self._node(address), deque(), heard=time.monotonic())
            lane.waiting.append((index, request))
        for lane in lanes.values():
            if lane.node.breaker.reason is not None:
                self._try_again(lane)
                yield from self._give_up(lane)
        while open_lanes := [each for each in lanes.values() if not each.is_over]:
            now = time.monotonic()
            if now >= deadline:
                return
            for lane in open_lanes:
                self._fill(lane)
            until = min(deadline, *(each.heard + _PATIENCE for each in open_lanes))
            self._wait(open_lanes, until - now)
            for lane in open_lanes:
                yield from self._receive(lane)

    def _node(self, address: str) -> Node:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = Node(address, self._breakers(address))
        if node.socket is None:
            self._connect(node)
        return node

    def _connect(self, node: Node) -> None:
        node.socket = socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, self._most_frame),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _LONGEST_RECONNECT_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _SILENT_MS),
        ):
            socket.setsockopt(option, value)
        self._keys.protect_client(socket)
        node.monitor = socket.get_monitor_socket(_GONE)
        node.monitor.setsockopt(zmq.LINGER, 0)
        socket.connect(node.address)

    def _try_again(self, lane: _Lane) -> None:
        """Ask a node that has failed, if it is time to, on a new connection. Nobody waits for the answer."""
        if lane.node.breaker.refuses() is None:
            lane.node.close()
            self._connect(lane.node)
            self._send(lane.node, lane.waiting[0][1])

    def _fill(self, lane: _Lane) -> None:
        while lane.waiting and len(lane.under_way) < _AT_ONCE:
            index, request = lane.waiting[0]
            number = self._send(lane.node, request)
            if number is None:
                return
            lane.waiting.popleft()
            lane.under_way[number] = index, time.monotonic()

    def _send(self, node: Node, request: Request) -> bytes | None:
        assert node.socket is not None
        number = next(self._numbers).to_bytes(8, "little")
        try:
            node.socket.send_multipart([number, encode(request)], zmq.NOBLOCK)
        except zmq.Again:
            return None
        return number

    @staticmethod
    def _wait(lanes: Iterable[_Lane], seconds: float) -> None:
        poller = zmq.Poller()
        for lane in lanes:
            for each in (lane.node.socket, lane.node.monitor):
                poller.register(each, zmq.POLLIN)
        poller.poll(min(max(int(seconds * 1000), 0) + 1, _POLL_MS))

    def _receive(self, lane: _Lane) -> Iterator[Reply]:
        """Yield what has come from a node; give up one that is gone, or silent for too long."""
        node = lane.node
        for frames in self._take(node):
            lane.heard = time.monotonic()
            asked = lane.under_way.pop(frames[0].bytes, None)
            if asked is None:
                continue  # to an earlier exchange
            index, sent = asked
            try:
                yield Reply(index, decode_answer(frames[1].bytes), lane.heard - sent, frames[2:])
            except (ProtocolError, IndexError) as error:
                self._fail(node, f"{node.address}: {error}")
                yield Reply(index, None)
        if lane.is_over:
            return
        if node.breaker.reason is None and self._is_gone(node):
            self._fail(node, f"{node.address}: no connection")
        elif node.breaker.reason is None and time.monotonic() > lane.heard + _PATIENCE:
            self._fail(node, f"{node.address}: no answer within {_PATIENCE:g} s")
        if node.breaker.reason is not None:
            yield from self._give_up(lane)

    @staticmethod
    def _give_up(lane: _Lane) -> Iterator[Reply]:
        for index, _ in (*lane.under_way.values(), *lane.waiting):
            yield Reply(index, None)
        lane.under_way.clear()
        lane.waiting.clear()

    @staticmethod
    def _fail(node: Node, reason: str) -> None:
        node.breaker.failed(reason)

    def _take_late(self, node: Node) -> None:
        """Drop what has come since the last exchange. A node that has answered is waited for again."""
        for _ in self._take(node):
            node.breaker.succeeded()
        self._is_gone(node)

    @staticmethod
    def _take(node: Node) -> Iterator[list[zmq.Frame]]:
        while node.socket is not None:
            try:
                yield node.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return

    @staticmethod
    def _is_gone(node: Node) -> bool:
        """Return True if the connection was lost, or could not be made, since the last call."""
        gone = False
        while node.monitor is not None:
            try:
                node.monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            gone = True
        return gone

    def close(self) -> None:
        """Disconnect from every node."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for node in self._nodes.values():
                    node.close()
                self._context.destroy(linger=0)
