"""Runs of blocks that a look-up pinned at the service."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from fdcache.errors import ProtocolError, RefusedError, ServiceUnavailableError
from fdcache.metadata import HashArray, Int32Array
from fdcache.service.client.channel import Session
from fdcache.service.client.session import SessionKeeper
from fdcache.service.wire.connection import Connection
from fdcache.service.wire.frames import int32_from, uint8_from, uint32_from
from fdcache.service.wire.protocol import (
    FETCHING,
    MAX_BLOCKS,
    MAX_PATHS,
    NOT_FETCHED,
    Answer,
    EndFetches,
    Match,
    Matched,
    Prefetch,
)
from fdcache.tiers.host import FETCHING_MATCH, NOTHING, HostMatch
from fdcache.tiers.pool import PENDING


@dataclass(slots=True)
class Run:
    """A pinned run: given back once it is released and no load reads it."""

    session: Session
    remote: int
    loading: int = 0
    released: bool = False


class PinnedRuns:
    """Runs by lease, and which of them each slot being loaded counts on. ``give_back`` unpins one."""

    def __init__(self, give_back: Callable[[Session, int], None]) -> None:
        self._give_back = give_back
        self._leases = count(1)
        self._runs: dict[int, Run] = {}
        self._loading: defaultdict[int, list[Run]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def slots_loading(self) -> int:
        """Slots that some load reads."""
        return len(self._loading)

    def add(self, session: Session, remote: int) -> int:
        """A run that the service pinned under its lease ``remote``; the lease it has here."""
        lease = next(self._leases)
        self._runs[lease] = Run(session, remote)
        return lease

    def release(self, lease: int) -> bool:
        """Unpin a run, after the loads that read it; False when that was done before."""
        run = self._runs.pop(lease, None)
        if run is None:
            return False
        run.released = True
        self._settle(run)
        return True

    def begin_load(self, lease: int, slots: Int32Array) -> None:
        """Copies out of these slots of a run begin."""
        run = self._runs[lease]
        run.loading += len(slots)
        for slot in slots.tolist():
            self._loading[slot].append(run)

    def end_load(self, slots: Int32Array) -> Session | None:
        """They end; the session they belong to, None for no slots."""
        session = None
        ended = []
        for slot in slots.tolist():
            # Of several runs that pin a slot any may be counted down: those left pin what is still loading.
            run = self._loading[slot].pop()
            session = run.session
            if not self._loading[slot]:
                del self._loading[slot]
            run.loading -= 1
            if not run.loading:
                ended.append(run)
        for run in ended:
            self._settle(run)
        return session

    def _settle(self, run: Run) -> None:
        if run.released and not run.loading:
            self._give_back(run.session, run.remote)


def within_limits(paths: Sequence[tuple[HashArray, int]]) -> list[tuple[HashArray, int]]:
    """As much of the paths as one message may ask for; the rest is not looked for."""
    room = MAX_BLOCKS
    cut = []
    for i, (hashes, start) in enumerate(paths):
        take = min(len(hashes), room) if i < MAX_PATHS else 0
        cut.append((hashes[:take], min(start, take)))
        room -= take
    return cut


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


class RemoteLookups:
    """Asks over ``line`` for what the table in shared memory shows, and pins it as ``runs``."""

    def __init__(
        self,
        line: Connection,
        keeper: SessionKeeper,
        runs: PinnedRuns,
        fetches: RemoteFetches,
        timeout: float,
    ) -> None:
        self._line = line
        self._keeper = keeper
        self._runs = runs
        self._fetches = fetches
        self._timeout = timeout

    def match(
        self, session: Session, paths: Sequence[tuple[HashArray, int]], fetches: Sequence[int]
    ) -> list[HostMatch]:
        """As ``HostTier.match_paths``. Without an answer in time nothing is found, and the session is over."""
        matches = [NOTHING] * len(paths)
        asked: list[tuple[HashArray, int]] = []
        numbers: list[int] = []
        places: list[int] = []
        for i, (hashes, start) in enumerate(paths):
            number = fetches[i] if fetches else 0
            end = len(hashes) if number else start + session.copies.run(hashes, start)
            if end < len(hashes):
                self._keeper.outbox.count_absent(hashes[end], len(hashes) - end, whole=end == start)
                self._count_in_flight(session, hashes[end])
            if end > start:
                asked.append((hashes[:end], start))
                numbers.append(number)
                places.append(i)
        if asked:
            for i, match in zip(places, self._ask(session, within_limits(asked), numbers), strict=True):
                matches[i] = match
        return matches

    def _ask(
        self, session: Session, paths: Sequence[tuple[HashArray, int]], fetches: Sequence[int]
    ) -> list[HostMatch]:
        body = Match(
            counts=np.array([len(hashes) for hashes, _ in paths], np.int32).tobytes(),
            starts=np.array([start for _, start in paths], np.int32).tobytes(),
            hashes=b"".join(hashes.tobytes() for hashes, _ in paths),
            fetches=numbers_of(fetches),
        )
        self._line.session = session.number
        try:
            answer, others = self._line.call(body, self._timeout)
            for late in others:
                self._give_back(session, late)
            if not isinstance(answer, Matched):
                raise ProtocolError(f"a look-up was answered by {type(answer).__name__}")
            return self._matches(session, paths, fetches, answer)
        except (ServiceUnavailableError, RefusedError, ProtocolError) as error:
            draining = isinstance(error, RefusedError) and error.code == "draining"
            self._keeper.lose(session, str(error), goodbye=draining)
            return [NOTHING] * len(paths)

    def _matches(
        self,
        session: Session,
        paths: Sequence[tuple[HashArray, int]],
        fetches: Sequence[int],
        answer: Matched,
    ) -> list[HostMatch]:
        counts = int32_from(answer.counts, "counts", len(paths)).tolist()
        slots = int32_from(answer.slots, "slots", sum(counts))
        generations = uint32_from(answer.generations, "generations", len(slots))
        unverified = uint8_from(answer.unverified, "unverified")
        states = list(answer.states)
        fetched = int32_from(answer.fetched, "fetched", 2 * len(states)).reshape(-1, 2).tolist()
        self._fetches.learn(session, fetches, states)
        matches, end = [], 0
        for i, ((hashes, start), lease, number) in enumerate(zip(paths, answer.leases, counts, strict=True)):
            first, end = end, end + number
            if states and states[i] == FETCHING:
                matches.append(FETCHING_MATCH)
                continue
            if start + number < len(hashes):
                self._count_in_flight(session, hashes[start + number])
            if not lease:
                matches.append(NOTHING)
                continue
            own = self._runs.add(session, lease)
            marks = unverified[first:end] if len(unverified) else None
            matches.append(
                HostMatch(
                    own,
                    slots[first:end],
                    generations[first:end],
                    unverified=marks,
                    fetched=range(*fetched[i]) if fetched else range(0),
                )
            )
        return matches

    def _count_in_flight(self, session: Session, block: HashArray) -> None:
        """Whether a look-up ended at a block that this engine is still copying."""
        if session.copies.contains(block[np.newaxis])[0] == PENDING:
            self._keeper.progress.in_flight_misses += 1

    def _give_back(self, session: Session, late: Answer) -> None:
        if isinstance(late, Matched):
            for lease in late.leases:
                self._keeper.outbox.release(session, lease)
