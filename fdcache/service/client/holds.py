"""Storage reads that a service does for an engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from fdcache.metadata import HashArray
from fdcache.service.client.session import Session
from fdcache.service.client.session_keeper import SessionKeeper
from fdcache.service.wire.protocol import NOT_FETCHED, EndFetches, Prefetch
from fdcache.tiers.fetches import OnDevice
from fdcache.tiers.waiting_fetches import ReadJudge


class RemoteFetches:
    """Fetches that a service has for the requests of this process, by number. Messages go in the background."""

    def __init__(self, sessions: SessionKeeper) -> None:
        self._sessions = sessions
        self._numbers = count(1)
        self._known: dict[int, Session] = {}
        self._left: set[int] = set()
        self._names: dict[int, str] = {}

    @property
    def is_on(self) -> bool:
        """True while there is a service with storage."""
        session = self._sessions.session
        return session is not None and session.storage

    def number(self, request_id: str = "") -> int:
        """Return a new number, or 0 when the service has no storage."""
        if not self.is_on:
            return 0
        number = next(self._numbers)
        if request_id:
            self._names[number] = request_id
        return number

    def names(self, numbers: Sequence[int]) -> list[str]:
        """Return the ids of the requests with these numbers; nothing if none is known."""
        return [self._names.get(number, "") for number in numbers] if self._names else []

    def begin(
        self, number: int, hashes: HashArray, on_device: OnDevice, judge: ReadJudge | None = None
    ) -> None:
        """Make the service read what is stored of a request's path, unless it knows of the request."""
        session = self._sessions.session
        if session is None or not session.storage or not number or number in self._known:
            return
        if number in self._left:
            return
        start = on_device(hashes)
        if start + len(session.runs.find(hashes, start)) < len(hashes):
            self._known[number] = session
            self._sessions.outbox.add(
                session, Prefetch(number, start, hashes.tobytes(), self._names.get(number, ""))
            )

    def storage_use(self, number: int) -> int:
        """Return 0 without a number, 1 if the service may read blocks for it, 2 if it does."""
        return 0 if not number or number in self._left else 2 if number in self._known else 1

    def __contains__(self, number: int) -> bool:
        """Return True for a request that the service may keep a fetch for."""
        return number in self._known

    def learn(self, session: Session, numbers: Sequence[int], states: Sequence[int]) -> None:
        """Record which of these requests the service keeps a fetch for."""
        for number, state in zip(numbers, states, strict=False):
            if state != NOT_FETCHED:
                self._known[number] = session

    def leave(self, number: int, *, keep: bool) -> None:
        """Make the service forget a request that goes on without its reads."""
        session = self._known.pop(number, None)
        self._left.add(number)
        if session is not None:
            self._sessions.outbox.add(session, EndFetches([number], keep=keep))

    def end(self, number: int) -> None:
        """Make the service forget a request."""
        self._names.pop(number, None)
        self._left.discard(number)
        session = self._known.pop(number, None)
        if session is not None:
            self._sessions.outbox.add(session, EndFetches([number]))
