"""RemoteFetches: the requests of this engine for which the service reads storage, or keeps what it has read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np

from fdcache.metadata import HashArray
from fdcache.node.protocol import NOT_FETCHED, EndFetches, Prefetch
from fdcache.tiers.session import Session
from fdcache.tiers.session_keeper import SessionKeeper


class RemoteFetches:
    """Requests by the numbers that the service knows them by. Everything is told in the background."""

    def __init__(self, keeper: SessionKeeper) -> None:
        self._keeper = keeper
        self._numbers = count(1)
        self._known: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._known)

    def number(self) -> int:
        """A number for one more request; 0 where there is no storage to read."""
        session = self._keeper.session
        return next(self._numbers) if session is not None and session.storage else 0

    def begin(self, number: int, hashes: HashArray, start: int) -> None:
        """Have the service read what is stored of a request's path, whose first ``start`` blocks are on the device."""
        session = self._keeper.session
        if session is not None and session.storage:
            self._known[number] = session
            self._keeper.outbox.tell(session, Prefetch(number, start, hashes.tobytes()))

    def learn(self, session: Session, numbers: Sequence[int], states: Sequence[int]) -> None:
        """What the service says that it keeps for these requests."""
        for number, state in zip(numbers, states, strict=False):
            if state != NOT_FETCHED:
                self._known[number] = session

    def end(self, number: int) -> None:
        """The request has ended."""
        session = self._known.pop(number, None)
        if session is not None:
            self._keeper.outbox.tell(session, EndFetches([number]))


def numbers_of(fetches: Sequence[int]) -> bytes:
    """The numbers as they travel; nothing when there is none."""
    return np.array(fetches, np.int64).tobytes() if any(fetches) else b""
