"""RemoteHints: hints for the tiers of a service, and what became of them there."""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import count

from fdcache.hints import MOST_HINTS, GivenHints, Hint, HintOutcome, HintStatus
from fdcache.metadata import HashArray
from fdcache.service.client.session import Session
from fdcache.service.client.session_keeper import SessionKeeper
from fdcache.service.wire.protocol import MAX_BLOCKS, HintGiven, HintResult, Hints

MOST_WAITING = 4096
"""Hints whose outcome is waited for, and outcomes that wait to be taken; of more the oldest are dropped."""

_NO_SERVICE = "there is no session at the service"
_SESSION_ENDED = "the session at the service ended"


class RemoteHints:
    """Hints of this process that a service has. They are sent in the background, after the blocks that they concern.

    Each has an outcome when the service has taken it, and one that keeps blocks another when its time is over.
    """

    def __init__(self, sessions: SessionKeeper) -> None:
        self._sessions = sessions
        self._numbers = count(1)
        self._waiting: OrderedDict[int, tuple[Session, str, Hint]] = OrderedDict()
        self._outcomes: deque[HintOutcome] = deque(maxlen=MOST_WAITING)

    def give(self, path: HashArray, given: GivenHints) -> list[HintOutcome]:
        """Send hints about blocks of a path, up to ``MOST_HINTS``; return SENT for each, or why it cannot be sent."""
        session = self._sessions.session
        if session is None:
            ignored = HintResult(0, HintStatus.IGNORED, reason=_NO_SERVICE)
            return [_outcome(given.request_id, hint, ignored) for hint in given.hints]
        outcomes, sent = [], []
        for hint, (_, _, start, stop, _) in zip(given.hints, given.said, strict=True):
            number = next(self._numbers)
            self._waiting[number] = (session, given.request_id, hint)
            if len(self._waiting) > MOST_WAITING:
                self._waiting.popitem(last=False)
            outcomes.append(_outcome(given.request_id, hint, HintResult(number, HintStatus.SENT)))
            sent.append(_sent(number, hint, start, stop))
        for first in range(0, len(sent), MOST_HINTS):
            part = sent[first : first + MOST_HINTS]
            stop = min(max(each.stop for each in part), MAX_BLOCKS)
            self._sessions.outbox.add(session, Hints(path[:stop].tobytes(), part))
        return outcomes

    def take_outcomes(self) -> list[HintOutcome]:
        """Return the outcomes that the service has told since the last call, each once."""
        for result in self._sessions.take_hint_results():
            if (waiting := self._waiting.get(result.number)) is None:
                continue
            _, request_id, hint = waiting
            if result.status is not HintStatus.TAKEN or not hint.keeps:
                del self._waiting[result.number]
            self._outcomes.append(_outcome(request_id, hint, result))
        present = (self._sessions.session, self._sessions.leaving)
        for number in [number for number, (session, *_) in self._waiting.items() if session not in present]:
            _, request_id, hint = self._waiting.pop(number)
            ended = HintResult(number, HintStatus.IGNORED, reason=_SESSION_ENDED)
            self._outcomes.append(_outcome(request_id, hint, ended))
        taken = list(self._outcomes)
        self._outcomes.clear()
        return taken


def _sent(number: int, hint: Hint, start: int, stop: int) -> HintGiven:
    return HintGiven(
        number=number,
        kind=hint.kind,
        start=start,
        stop=stop,
        seconds=hint.seconds,
        priority=hint.priority,
        whole=hint.has_range,
    )


def _outcome(request_id: str, hint: Hint, result: HintResult) -> HintOutcome:
    return HintOutcome(
        request_id=request_id,
        id=hint.id,
        kind=hint.kind,
        status=result.status,
        blocks=result.blocks,
        lost=result.lost,
        reason=result.reason,
        by_service=True,
    )
