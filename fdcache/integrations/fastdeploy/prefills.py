"""Times of FastDeploy's prefills, from what its scheduler plans and its token processor receives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fdcache.manager.requests import Request

Chunk = tuple[Request, int, int]
"""A request and the tokens of it that one step computes: the first, and the one after the last."""

_MOST_STEPS = 64
"""Steps of prefills without a pause after which a new measurement begins."""


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """Seconds that ``steps`` steps took for ``chunks``; ``waited``: their layers waited for loads."""

    chunks: list[Chunk]
    seconds: float
    steps: int
    waited: bool


@dataclass(slots=True)
class _Period:
    """Steps with prefills in a row. ``unfinished``: requests whose first token has not come."""

    start: float
    chunks: list[Chunk] = field(default_factory=list)
    unfinished: set[str] = field(default_factory=set)
    steps: int = 0
    waited: bool = False


class PrefillTimes:
    """Measures prefills from their scheduling to their tokens. It is not thread-safe.

    FastDeploy tells no step's end but by its tokens, and schedules a step while the one before runs. So steps with
    prefills are measured together until every request among them has its first token. If tokens of other requests come
    while there is one such step, these are of the step before, and the time begins with them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._period: _Period | None = None

    def scheduled(self, chunks: Iterable[Chunk]) -> None:
        """Record the prefills of a step. A request that ``is_loading`` waits for its load."""
        chunks = list(chunks)
        if not chunks:
            return
        if self._period is None or self._period.steps == _MOST_STEPS:
            self._period = _Period(self._clock())
        period = self._period
        period.steps += 1
        period.chunks += chunks
        period.unfinished.update(request.request_id for request, _, _ in chunks)
        period.waited |= any(request.is_loading for request, _, _ in chunks)

    def sampled(self, names: Iterable[str]) -> PrefillTime | None:
        """Record whose tokens have come; return the time of the prefills if these were the last of them."""
        period = self._period
        if period is None:
            return None
        names = set(names)
        if names and period.steps == 1 and names.isdisjoint(period.unfinished):
            period.start = self._clock()
        period.unfinished -= names
        if period.unfinished:
            return None
        self._period = None
        return PrefillTime(period.chunks, self._clock() - period.start, period.steps, period.waited)

    def ended(self, name: str) -> None:
        """Drop the measurement if a request has ended or is preempted before its first token."""
        if self._period is not None and name in self._period.unfinished:
            self._period = None
