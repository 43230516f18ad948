"""Pinned runs and storage reads that a service holds for an engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from fdcache.metadata import HashArray, Int32Array
from fdcache.service.client.session import Session, SessionKeeper
from fdcache.service.wire.protocol import NOT_FETCHED, EndFetches, Prefetch


@dataclass(slots=True)
class Run:
    """A run pinned at the service; unpinned once it is released and no load reads it."""

    session: Session
    remote: int
    loading: int = 0
    released: bool = False


class PinnedRuns:
    """Pinned runs by lease, and the runs that pin each slot being loaded. ``unpin`` releases one at the service."""

    def __init__(self, unpin: Callable[[Session, int], None]) -> None:
        self._unpin = unpin
        self._leases = count(1)
        self._runs: dict[int, Run] = {}
        self._loading: defaultdict[int, list[Run]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def slots_loading(self) -> int:
        """Slots that a load reads."""
        return len(self._loading)

    def add(self, session: Session, remote: int) -> int:
        """Add a run that the service pinned under its lease ``remote``; return the lease to use here."""
        lease = next(self._leases)
        self._runs[lease] = Run(session, remote)
        return lease

    def release(self, lease: int) -> bool:
        """Unpin a run after the loads that read it; return False when it was released before."""
        run = self._runs.pop(lease, None)
        if run is None:
            return False
        run.released = True
        self._unpin_if_unused(run)
        return True

    def begin_load(self, lease: int, slots: Int32Array) -> None:
        """Keep these slots of a run pinned until their load ends."""
        run = self._runs[lease]
        run.loading += len(slots)
        for slot in slots.tolist():
            self._loading[slot].append(run)

    def end_load(self, slots: Int32Array) -> Session | None:
        """End a load of these slots; return their session, None for no slots."""
        session = None
        ended = []
        for slot in slots.tolist():
            # Any of several runs that pin a slot may be counted down: the others still pin it for their loads.
            run = self._loading[slot].pop()
            session = run.session
            if not self._loading[slot]:
                del self._loading[slot]
            run.loading -= 1
            if not run.loading:
                ended.append(run)
        for run in ended:
            self._unpin_if_unused(run)
        return session

    def _unpin_if_unused(self, run: Run) -> None:
        if run.released and not run.loading:
            self._unpin(run.session, run.remote)


class RemoteFetches:
    """Requests for which the service reads storage, by the numbers it knows them by. Messages go in the background."""

    def __init__(self, sessions: SessionKeeper) -> None:
        self._sessions = sessions
        self._numbers = count(1)
        self._known: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._known)

    def number(self) -> int:
        """Return a number for a new request; 0 when the service has no storage."""
        session = self._sessions.session
        return next(self._numbers) if session is not None and session.storage else 0

    def begin(self, number: int, hashes: HashArray, start: int) -> None:
        """Have the service read the stored part of a request's path; its first ``start`` blocks are on the device."""
        session = self._sessions.session
        if session is not None and session.storage:
            self._known[number] = session
            self._sessions.outbox.add(session, Prefetch(number, start, hashes.tobytes()))

    def learn(self, session: Session, numbers: Sequence[int], states: Sequence[int]) -> None:
        """Note which of these requests the service keeps something for."""
        for number, state in zip(numbers, states, strict=False):
            if state != NOT_FETCHED:
                self._known[number] = session

    def end(self, number: int) -> None:
        """Tell the service that the request has ended."""
        session = self._known.pop(number, None)
        if session is not None:
            self._sessions.outbox.add(session, EndFetches([number]))
