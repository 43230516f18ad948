"""RemoteHints: hints for the tiers of a service, and what became of them there."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from fdcache.hints import MOST_HINTS, GivenHints, HintOutcome, HintStatus, SentHints
from fdcache.metadata import HashArray
from fdcache.service.client.session import Session
from fdcache.service.client.session_keeper import SessionKeeper
from fdcache.service.wire.protocol import MAX_BLOCKS, HintGiven, HintResult, Hints

MOST_WAITING = 4096
"""Hints whose outcome is waited for, and outcomes that wait to be taken; of more the oldest are dropped."""

_NO_SERVICE = "there is no session at the service"
_SESSION_ENDED = "the session at the service ended"


@dataclass(slots=True, eq=False)
class _Waiting:
    """Hints of a request that were sent with the numbers from ``first`` on, and which of them wait for an outcome."""

    first: int
    session: Session
    given: GivenHints
    left: list[bool]

    def messages(self, path: HashArray) -> Iterator[Hints]:
        """Yield the messages of hints about blocks of a path, up to ``MOST_HINTS`` in each."""
        sent = [
            HintGiven(
                number=number,
                kind=hint.kind,
                start=start,
                stop=stop,
                seconds=hint.seconds,
                priority=hint.priority,
                whole=hint.has_range,
            )
            for number, (hint, (_, _, start, stop, _)) in enumerate(
                zip(self.given.hints, self.given.said, strict=True), self.first
            )
        ]
        for first in range(0, len(sent), MOST_HINTS):
            part = sent[first : first + MOST_HINTS]
            stop = min(max(each.stop for each in part), MAX_BLOCKS)
            yield Hints(path[:stop].tobytes(), part)

    def outcome(self, result: HintResult) -> HintOutcome:
        """Return what the service has told of one of them."""
        hint = self.given.hints[result.number - self.first]
        return HintOutcome(
            request_id=self.given.request_id,
            id=hint.id,
            kind=hint.kind,
            status=result.status,
            blocks=result.blocks,
            lost=result.lost,
            reason=result.reason,
            by_service=True,
        )


class RemoteHints:
    """Hints of this process that a service has. They are sent in the background, after the blocks that they concern.

    Each has an outcome when the service has taken it, and one that keeps blocks another when its time is over.
    """

    def __init__(self, sessions: SessionKeeper) -> None:
        self._sessions = sessions
        self._next = 1
        self._waiting: deque[_Waiting] = deque()
        """By number."""
        self._num_waiting = 0
        self._outcomes: deque[HintOutcome] = deque(maxlen=MOST_WAITING)

    def give(self, path: HashArray, given: GivenHints) -> SentHints:
        """Send hints about blocks of a path, which must not change; return SENT, or why they cannot be sent."""
        session = self._sessions.session
        if session is None:
            return SentHints(given, _NO_SERVICE)
        size = len(given.hints)
        waiting = _Waiting(self._next, session, given, [True] * size)
        self._next += size
        self._waiting.append(waiting)
        self._num_waiting += size
        while self._num_waiting > MOST_WAITING and len(self._waiting) > 1:
            self._num_waiting -= sum(self._waiting.popleft().left)
        self._sessions.outbox.add(session, lambda: waiting.messages(path))
        return SentHints(given)

    def take_outcomes(self) -> list[HintOutcome]:
        """Return the outcomes that the service has told since the last call, each once."""
        for result in self._sessions.take_hint_results():
            if (waiting := self._find(result.number)) is not None:
                self._take(waiting, result, is_last=result.status is not HintStatus.TAKEN)
        present = (self._sessions.session, self._sessions.leaving)
        for waiting in [each for each in self._waiting if each.session not in present]:
            for index, is_left in enumerate(waiting.left):
                if is_left:
                    ended = HintResult(waiting.first + index, HintStatus.IGNORED, reason=_SESSION_ENDED)
                    self._take(waiting, ended, is_last=True)
        taken = list(self._outcomes)
        self._outcomes.clear()
        return taken

    def _find(self, number: int) -> _Waiting | None:
        """Return the hints with this number, None if nothing waits for its outcome."""
        at = bisect_right(self._waiting, number, key=lambda each: each.first) - 1
        found = self._waiting[at] if at >= 0 else None
        is_there = found is not None and number - found.first < len(found.left)
        return found if found is not None and is_there and found.left[number - found.first] else None

    def _take(self, waiting: _Waiting, result: HintResult, *, is_last: bool) -> None:
        """Take an outcome; forget the hint if no other follows, and hints none of which waits."""
        index = result.number - waiting.first
        self._outcomes.append(waiting.outcome(result))
        if not is_last and waiting.given.hints[index].keeps:
            return
        waiting.left[index] = False
        self._num_waiting -= 1
        if not any(waiting.left):
            self._waiting.remove(waiting)
