"""Pinned runs and storage reads that a service holds for an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from fdcache._core import LoadingRuns
from fdcache.metadata import HashArray, Int32Array
from fdcache.service.client.session import Session, SessionKeeper
from fdcache.service.wire.protocol import NOT_FETCHED, EndFetches, Prefetch
from fdcache.tiers.fetches import OnDevice


@dataclass(slots=True)
class Run:
    """A run pinned at the service under its ``number`` in a session; ``unverified``: some of its records are."""

    session: Session
    number: int
    unverified: bool
    released: bool = False


class PinnedRuns:
    """Pinned runs by lease. A run is unpinned once it is released and no load reads it."""

    def __init__(self) -> None:
        self._leases = count(1)
        self._runs: dict[int, Run] = {}
        self._loads = LoadingRuns()
        self._loading: dict[int, Run] = {}

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def slots_loading(self) -> int:
        """Slots that a load reads."""
        return len(self._loads)

    def add(self, session: Session, number: int, *, unverified: bool) -> int:
        """Add a run that is pinned; return its lease."""
        lease = next(self._leases)
        self._runs[lease] = Run(session, number, unverified)
        return lease

    def release(self, lease: int) -> bool:
        """Unpin a run after the loads that read it; return False when it was released before."""
        run = self._runs.pop(lease, None)
        if run is None:
            return False
        run.released = True
        if lease not in self._loads:
            run.session.runs.unpin(run.number)
        return True

    def begin_load(self, lease: int, slots: Int32Array) -> None:
        """Keep these slots of a run pinned until their load ends."""
        if len(slots):
            self._loading[lease] = self._runs[lease]
            self._loads.begin(lease, slots)

    def end_load(self, slots: Int32Array) -> tuple[Session | None, bool]:
        """End a load of these slots; return their session and True if it may have read unverified records."""
        session, unverified = None, False
        for lease in self._loads.end(slots):
            run = self._loading[lease]
            session, unverified = run.session, unverified or run.unverified
            if lease not in self._loads:
                del self._loading[lease]
                if run.released:
                    run.session.runs.unpin(run.number)
        return session, unverified


class RemoteFetches:
    """Fetches that a service has for the requests of this process, by number. Messages go in the background."""

    def __init__(self, sessions: SessionKeeper) -> None:
        self._sessions = sessions
        self._numbers = count(1)
        self._known: dict[int, Session] = {}

    @property
    def is_on(self) -> bool:
        """True while there is a service with storage."""
        session = self._sessions.session
        return session is not None and session.storage

    def number(self) -> int:
        """Return a new number, or 0 when the service has no storage."""
        return next(self._numbers) if self.is_on else 0

    def begin(self, number: int, hashes: HashArray, on_device: OnDevice) -> None:
        """Let the service read what is stored of a request's path, unless it knows of the request."""
        session = self._sessions.session
        if session is None or not session.storage or not number or number in self._known:
            return
        start = on_device(hashes)
        if start + len(session.runs.find(hashes, start)) < len(hashes):
            self._known[number] = session
            self._sessions.outbox.add(session, Prefetch(number, start, hashes.tobytes()))

    def must_wait(self, number: int, hashes: HashArray, on_device: OnDevice) -> bool:
        """Return False: the service answers this with the look-up."""
        return False

    def fetched(self, number: int, start: int, size: int) -> range:
        """Return nothing: the service answers this with the look-up."""
        return range(0)

    def is_reading(self, block_hash: bytes) -> bool:
        """Return False: a service's blocks are not found before they are read."""
        return False

    def unpin(self, number: int) -> None:
        """Do nothing: the service unpins with the look-up."""

    def __contains__(self, number: int) -> bool:
        """Return True for a request that the service may keep a fetch for."""
        return number in self._known

    def learn(self, session: Session, numbers: Sequence[int], states: Sequence[int]) -> None:
        """Note which of these requests the service keeps a fetch for."""
        for number, state in zip(numbers, states, strict=False):
            if state != NOT_FETCHED:
                self._known[number] = session

    def end(self, number: int) -> None:
        """Let the service forget a request."""
        session = self._known.pop(number, None)
        if session is not None:
            self._sessions.outbox.add(session, EndFetches([number]))
