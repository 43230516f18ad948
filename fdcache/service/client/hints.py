"""RemoteHints: hints for the tiers of a service, and what became of them there."""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import count

from fdcache.hints import Hint, HintOutcome, HintStatus
from fdcache.metadata import HashArray
from fdcache.service.client.session import Session, SessionKeeper
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

    def give(self, request_id: str, hint: Hint, hashes: HashArray) -> HintOutcome:
        """Send a hint about these blocks of a path; return SENT, or why it cannot be sent."""
        session = self._sessions.session
        if session is None:
            return _outcome(request_id, hint, HintResult(0, HintStatus.IGNORED, reason=_NO_SERVICE))
        number = next(self._numbers)
        given = HintGiven(
            number=number,
            kind=hint.kind,
            hashes=hashes[:MAX_BLOCKS].tobytes(),
            seconds=hint.seconds,
            priority=hint.priority,
            whole=hint.has_range,
        )
        self._waiting[number] = (session, request_id, hint)
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popitem(last=False)
        self._sessions.outbox.add(session, Hints([given]))
        return _outcome(request_id, hint, HintResult(number, HintStatus.SENT))

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
