"""Arrivals: which requests of a workload are there, at a time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from fdcache.replay.items import WorkItem


class Arrivals:
    """Requests in the order in which they arrive, read from the workload as they are needed.

    Without a speed they arrive as fast as they are taken, each after its former turn ended. With one, the
    workload's clock runs ``speed`` times as fast as the wall clock. Times are seconds since the start.
    """

    def __init__(self, items: Iterator[WorkItem], speed: float | None, window: int) -> None:
        self._items = items
        self._speed = speed
        self._window = window
        self._due: list[tuple[float, int, WorkItem]] = []
        self._waiting: dict[int, list[WorkItem]] = {}
        self._unended: set[int] = set()
        self._next: WorkItem | None = next(items, None)

    @property
    def exhausted(self) -> bool:
        """Whether every request has been taken."""
        return self._next is None and not self._due and not self._waiting

    def take(self, now: float) -> WorkItem | None:
        """The next request that is there at ``now``, if any."""
        self._read(now)
        if not self._due or self._due[0][0] > now:
            return None
        return heapq.heappop(self._due)[2]

    def ended(self, index: int, now: float) -> None:
        """Request ``index`` ended; what waits for it arrives after its think time."""
        self._unended.discard(index)
        for item in self._waiting.pop(index, ()):
            think = 0.0 if self._speed is None else item.think_ms / 1000 / self._speed
            self._arrive(item, now + think)

    def next_arrival(self) -> float | None:
        """When the next request arrives; None when that depends on a request that has not ended."""
        times = [self._due[0][0]] if self._due else []
        if self._next is not None:
            times.append(self._time_of(self._next))
        return min(times, default=None)

    def _read(self, now: float) -> None:
        while self._next is not None and self._wants_more(now):
            item, self._next = self._next, next(self._items, None)
            self._unended.add(item.index)
            if item.after in self._unended:
                self._waiting.setdefault(item.after, []).append(item)
            else:
                self._arrive(item, 0.0)

    def _wants_more(self, now: float) -> bool:
        if self._speed is None:
            return not self._due and len(self._waiting) < self._window
        return self._next is not None and self._time_of(self._next) <= now

    def _arrive(self, item: WorkItem, earliest: float) -> None:
        heapq.heappush(self._due, (max(earliest, self._time_of(item)), item.index, item))

    def _time_of(self, item: WorkItem) -> float:
        return 0.0 if self._speed is None else item.timestamp_ms / 1000 / self._speed
