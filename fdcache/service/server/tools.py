"""Questions of tools: they wait for the requests of engines, and are answered a slice at a time."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fdcache.errors import FdcacheError, ProtocolError
from fdcache.service.server.send_queues import Sent
from fdcache.service.wire.protocol import Answer, Ask, RefusalError, Refused, Request, ToolAnswer
from fdcache.service.wire.views import ServiceTotals

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
        self._turns: deque[bytes] = deque()

    def __bool__(self) -> bool:
        """True if there is a slice to make or to send."""
        return bool(self._turns)

    def add(self, identity: bytes, question: Question) -> None:
        """Queue a question. Raises ``RefusalError`` if the client has too many."""
        tool = self._tools.get(identity)
        if tool is not None and (
            len(tool.questions) >= MAX_QUESTIONS
            or sum(each.size for each in tool.questions) + question.size > MAX_QUESTION_BYTES
        ):
            raise RefusalError(
                "busy",
                f"{len(tool.questions)} questions of this client wait already; read their answers first",
            )
        if tool is None:
            tool = self._tools[identity] = _Tool()
            self._turns.append(identity)
        tool.questions.append(question)

    def retry(self) -> None:
        """Try again to send to clients whose queues were full."""
        for identity, tool in self._tools.items():
            if tool.is_full:
                tool.is_full = False
                self._turns.append(identity)

    def work(self, send: Send) -> None:
        """Make the next slice of the client whose turn it is, or send a part of its answer."""
        identity = self._turns.popleft()
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
        if not tool.questions:
            del self._tools[identity]
        elif not tool.is_full:
            self._turns.append(identity)

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
        except RefusalError as refusal:
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
