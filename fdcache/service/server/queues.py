"""What waits in the service: messages to clients that do not read, bounded for each, and the questions of tools.

Questions wait for the requests of engines, and are answered a slice at a time.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import zmq

from fdcache.errors import FdcacheError, ProtocolError, RefusedError
from fdcache.service.wire.protocol import Answer, Ask, Refused, Request, ToolAnswer
from fdcache.service.wire.views import ServiceTotals

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
        self.waiting: dict[bytes, deque[bytes]] = {}
        """Messages that clients have no room for; ``flush`` sends them."""

        self._bytes: dict[bytes, int] = {}
        self._tries = 0

    @property
    def is_draining(self) -> bool:
        """True while it is worth to try again soon: something waits, and was read lately."""
        return bool(self.waiting) and self._tries < _MAX_TRIES

    def send(self, identity: bytes, message: bytes, *, may_wait: bool = True) -> Sent:
        """Send a message after those that wait for the client. One that may not wait here is sent at once or not."""
        if identity not in self.waiting:
            sent = self._try(identity, message)
            if sent is not Sent.FULL or not may_wait:
                return sent
            self.waiting[identity], self._bytes[identity] = deque(), 0
            self._tries = 0
        waiting = self.waiting[identity]
        if not may_wait or len(waiting) >= MAX_MESSAGES or self._bytes[identity] >= MAX_BYTES:
            return Sent.FULL
        waiting.append(message)
        self._bytes[identity] += len(message)
        return Sent.TAKEN

    def flush(self) -> None:
        """Send what waits, as far as clients have read."""
        self._tries += 1
        for identity in list(self.waiting):
            waiting, sent = self.waiting[identity], Sent.TAKEN
            while waiting and (sent := self._try(identity, waiting[0])) is Sent.TAKEN:
                self._bytes[identity] -= len(waiting.popleft())
                self._tries = 0
            if sent is not Sent.FULL:
                del self.waiting[identity], self._bytes[identity]

    def _try(self, identity: bytes, message: bytes) -> Sent:
        try:
            self._socket.send_multipart([identity, message], zmq.NOBLOCK)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError:
            return Sent.GONE
        return Sent.TAKEN


log = logging.getLogger("fdcache.service.server")

MAX_QUESTIONS = 16
MAX_QUESTION_BYTES = 16 << 20
"""Limits of the questions of one client that wait."""
PART_BYTES = 256 << 10
"""Size of a part of an answer, which a client reads before the next one is made."""

Send = Callable[[bytes, int, Answer], Sent]
"""Sends an answer to a client at once or not."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question in wait: ``read`` decodes it, ``size`` are its bytes."""

    number: int
    size: int
    read: Callable[[], Request]


@dataclass(slots=True)
class _Tool:
    """One client: its questions in wait, and the answer to the first of them."""

    questions: deque[Question] = field(default_factory=deque)
    slices: Iterator[bytes] | None = None
    part: bytearray = field(default_factory=bytearray)
    is_complete: bool = False
    refusal: Refused | None = None
    is_full: bool = False
    """Its queue is full: it is tried again with the next tick."""
    seconds: float = 0.0


class ToolQueue:
    """Answers the questions of tools in turn, one slice of each.

    A client has one answer in the making at a time, of which one part waits to be sent.
    """

    def __init__(self, slices: Callable[[Ask], Iterator[bytes]], totals: ServiceTotals) -> None:
        self._slices = slices
        self._totals = totals
        self._tools: dict[bytes, _Tool] = {}
        self.turns: deque[bytes] = deque()
        """Clients for which there is a slice to make or to send."""

        self.has_full = False
        """Some client had no room for its answer; ``retry`` sends it again."""

    def add(self, identity: bytes, question: Question) -> None:
        """Queue a question. Raises ``RefusedError`` if the client has too many."""
        tool = self._tools.get(identity)
        if tool is not None and (
            len(tool.questions) >= MAX_QUESTIONS
            or sum(each.size for each in tool.questions) + question.size > MAX_QUESTION_BYTES
        ):
            raise RefusedError(
                "busy",
                f"{len(tool.questions)} questions of this client wait already; read their answers first",
            )
        if tool is None:
            tool = self._tools[identity] = _Tool()
            self.turns.append(identity)
        tool.questions.append(question)

    def retry(self) -> None:
        """Try again to send to clients whose queues were full."""
        self.has_full = False
        for identity, tool in self._tools.items():
            if tool.is_full:
                tool.is_full = False
                self.turns.append(identity)

    def work(self, send: Send) -> None:
        """Make the next slice of the client whose turn it is, or send a part of its answer."""
        identity = self.turns.popleft()
        tool = self._tools[identity]
        if not tool.is_complete and len(tool.part) < PART_BYTES:
            self._make_slice(tool)
        if tool.is_complete or len(tool.part) >= PART_BYTES:
            sent = self._send_part(identity, tool, send)
            if sent is Sent.GONE:
                self._totals.undelivered += 1
                del self._tools[identity]
                return
            tool.is_full = sent is Sent.FULL
            self.has_full |= tool.is_full
        if not tool.questions:
            del self._tools[identity]
        elif not tool.is_full:
            self.turns.append(identity)

    def _make_slice(self, tool: _Tool) -> None:
        began = time.perf_counter()
        try:
            if tool.slices is None:
                question = tool.questions[0].read()
                assert isinstance(question, Ask), question
                tool.slices = self._slices(question)
            tool.part += next(tool.slices)
        except StopIteration:
            tool.is_complete = True
        except RefusedError as refusal:
            tool.refusal = Refused(refusal.code, str(refusal))
        except ProtocolError as error:
            tool.refusal = Refused("malformed", str(error))
        except FdcacheError as error:
            tool.refusal = Refused(type(error).__name__, str(error))
        except Exception:
            log.exception("a question cannot be answered")
            tool.refusal = Refused(
                "internal", "the service cannot answer this question; its log has the cause"
            )
        tool.is_complete = tool.is_complete or tool.refusal is not None
        tool.seconds += time.perf_counter() - began

    def _send_part(self, identity: bytes, tool: _Tool, send: Send) -> Sent:
        number = tool.questions[0].number
        if tool.refusal is not None:
            sent = send(identity, number, tool.refusal)
        else:
            is_last = tool.is_complete and len(tool.part) <= PART_BYTES
            sent = send(identity, number, ToolAnswer(bytes(tool.part[:PART_BYTES]), more=not is_last))
            if sent is Sent.TAKEN:
                del tool.part[:PART_BYTES]
            if not is_last:
                return sent
        if sent is Sent.TAKEN:
            self._end(tool)
        return sent

    def _end(self, tool: _Tool) -> None:
        self._totals.refused += tool.refusal is not None
        self._totals.latencies.observe("ask", tool.seconds)
        tool.questions.popleft()
        tool.slices, tool.refusal, tool.is_complete, tool.seconds = None, None, False, 0.0
        tool.part.clear()
