"""Runs of blocks that a look-up pinned at the service."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from fdcache.metadata import HashArray, Int32Array
from fdcache.node.protocol import MAX_BLOCKS, MAX_PATHS
from fdcache.tiers.session import Session


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
