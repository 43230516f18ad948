"""Reads that a service does for this engine's requests: which of them a request waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from fdcache.manager.keyed import OffloadRequest
from fdcache.tiers.statistics import ReadTotals
from fdcache.tiers.waiting_fetches import ReadJudge


class Choices(Protocol):
    """Decisions and observations of an engine."""

    def reads_for(self, request: OffloadRequest) -> ReadJudge | None:
        """Return the judge of a request's reads; None if it waits for all of them."""

    def asked(self, request_id: str) -> None:
        """Record that a request is to be matched."""

    def observe_read(self, num_blocks: int, seconds: float, *, has_ended: bool) -> None:
        """Record how long a read took, or how long it has taken so far."""

    def observe_others(self, reads: ReadTotals) -> None:
        """Record how long reads took that no request of this engine waited for, unless that is known better."""


class Wait(Enum):
    """What to do about a read that a request would have to wait for."""

    WAIT = auto()
    LEAVE = auto()
    """Go on without it; it still fills the host tier."""
    DROP = auto()
    """Go on without it; it is taken back."""


@dataclass(slots=True)
class _Read:
    """Blocks ``first`` to ``stop`` that have been read since ``began``; ``arrived`` of the path came at ``since``."""

    first: int
    stop: int
    arrived: int
    began: float
    since: float


class ServiceReads:
    """Decides on the reads of a service as ``RequestReads`` does on those of this process.

    The service tells with each look-up how far a read has come. How fast its storage is for this engine is learnt from
    the reads that were waited for, their queue included, and from those that were late. Without any, as when nothing is
    worth reading, it is learnt from all reads of the service, of which ``totals`` tells.
    """

    def __init__(
        self, choices: Choices, clock: Callable[[], float], totals: Callable[[], ReadTotals | None]
    ) -> None:
        self._choices = choices
        self._clock = clock
        self._totals = totals
        self._before: ReadTotals | None = None
        self._reads: dict[str, _Read] = {}

    def learn(self) -> None:
        """Record the reads of the service since the last call."""
        now, before = self._totals(), self._before
        self._before = now
        if now is not None and before is not None and now.reads > before.reads:
            self._choices.observe_others(now.since(before))

    def first(self, request: OffloadRequest) -> int:
        """Return the first block of a request's path that has been read for it, 0 if that is not known."""
        read = self._reads.get(request.request_id)
        return 0 if read is None else read.first

    def judge(self, request: OffloadRequest, on_device: int, arrived: int, stop: int) -> Wait:
        """Decide on a request that has ``on_device`` blocks: ``arrived`` of its path have come, ``stop`` are to."""
        read = self._reads.get(request.request_id)
        if stop <= arrived or (read is None and stop <= on_device):  # not known yet
            return Wait.WAIT
        now, judge = self._clock(), self._choices.reads_for(request)
        if read is None:
            self._reads[request.request_id] = _Read(arrived, stop, arrived, now, now)
            wait = Wait.WAIT if judge is None else _begun(judge, on_device, arrived, stop)
            self._choices.asked(request.request_id)
        else:
            if arrived > read.arrived:
                read.arrived, read.since = arrived, now
            read.stop, wait = max(read.stop, stop), Wait.WAIT
            if judge is not None:
                judge.on_device = on_device
                if not judge.is_worth_waiting(arrived, [stop], 0, read.since):
                    wait = Wait.LEAVE
        if wait is not Wait.WAIT:
            del self._reads[request.request_id]
        return wait

    def found(self, request: OffloadRequest, arrived: int) -> None:
        """Record that the service has looked the request up: it waits no longer. ``arrived`` of its path have come.

        Others may not, as they were waited for too long or could not be read.
        """
        read = self._reads.pop(request.request_id, None)
        if read is not None:
            blocks, seconds = read.stop - read.first, self._clock() - read.began
            self._choices.observe_read(blocks, seconds, has_ended=arrived >= read.stop)

    def forget(self, request: OffloadRequest) -> None:
        """Forget a request that has ended."""
        self._reads.pop(request.request_id, None)


def _begun(judge: ReadJudge, on_device: int, arrived: int, stop: int) -> Wait:
    """Decide on a read that has begun: it is taken back if it is not worth it, unless its speed is worth knowing."""
    worth, waits = judge.worth_reading(on_device, arrived, stop, 0)
    if worth <= arrived:
        return Wait.DROP
    return Wait.WAIT if waits else Wait.LEAVE
