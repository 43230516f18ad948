"""What waits for clients that do not read: bounded for each of them, in messages and in bytes."""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

import zmq

MAX_MESSAGES = 4096
MAX_BYTES = 4 << 20
"""Limits of what waits for one client; the message that exceeds the second one is the last."""

_MAX_TRIES = 20


class Sent(Enum):
    """What became of a message."""

    TAKEN = auto()
    """It is on its way, or waits."""
    FULL = auto()
    """The client has not read what waits already."""
    GONE = auto()
    """The client has closed its connection."""


class SendQueues:
    """Sends messages through a ROUTER without waiting.

    ZeroMQ counts messages, not bytes, so its own queues are short, and more waits here.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._waiting: dict[bytes, deque[bytes]] = {}
        self._bytes: dict[bytes, int] = {}
        self._tries = 0

    @property
    def is_draining(self) -> bool:
        """True while it is worth to try again soon: something waits, and was read lately."""
        return bool(self._waiting) and self._tries < _MAX_TRIES

    def send(self, identity: bytes, message: bytes, *, may_wait: bool = True) -> Sent:
        """Send a message after those that wait for the client. One that may not wait here is sent at once or not."""
        if identity not in self._waiting:
            sent = self._try(identity, message)
            if sent is not Sent.FULL or not may_wait:
                return sent
            self._waiting[identity], self._bytes[identity] = deque(), 0
            self._tries = 0
        waiting = self._waiting[identity]
        if not may_wait or len(waiting) >= MAX_MESSAGES or self._bytes[identity] >= MAX_BYTES:
            return Sent.FULL
        waiting.append(message)
        self._bytes[identity] += len(message)
        return Sent.TAKEN

    def flush(self) -> None:
        """Send what waits, as far as clients have read."""
        self._tries += 1
        for identity in list(self._waiting):
            waiting, sent = self._waiting[identity], Sent.TAKEN
            while waiting and (sent := self._try(identity, waiting[0])) is Sent.TAKEN:
                self._bytes[identity] -= len(waiting.popleft())
                self._tries = 0
            if sent is not Sent.FULL:
                del self._waiting[identity], self._bytes[identity]

    def _try(self, identity: bytes, message: bytes) -> Sent:
        try:
            self._socket.send_multipart([identity, message], zmq.NOBLOCK)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError:
            return Sent.GONE
        return Sent.TAKEN
