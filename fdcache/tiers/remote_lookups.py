"""Look-ups of a service: which paths are worth asking for, one round trip for those, and what the answer says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fdcache.errors import ProtocolError, RefusedError, ServiceUnavailableError
from fdcache.metadata import HashArray
from fdcache.node.arrays import int32_from, uint8_from, uint32_from
from fdcache.node.connection import Connection
from fdcache.node.protocol import FETCHING, Answer, Match, Matched
from fdcache.tiers.codes import PENDING
from fdcache.tiers.host_tier import FETCHING_MATCH, NOTHING, HostMatch
from fdcache.tiers.remote_fetches import RemoteFetches, numbers_of
from fdcache.tiers.runs import PinnedRuns, within_limits
from fdcache.tiers.session import Session
from fdcache.tiers.session_keeper import SessionKeeper


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
        for i, ((hashes, start), lease, count) in enumerate(zip(paths, answer.leases, counts, strict=True)):
            first, end = end, end + count
            if states and states[i] == FETCHING:
                matches.append(FETCHING_MATCH)
                continue
            if start + count < len(hashes):
                self._count_in_flight(session, hashes[start + count])
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
