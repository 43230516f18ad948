"""Time to first token with storage slowed down: all loaded, nothing loaded, or what is sooner.

Prompts that were stored come back one after the other, with a host tier that holds two of them, so that each has to be
read from storage again or computed. The three ways take turns within a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, permutations
from typing import Any, Protocol

from fdcache._core import CancelFlag
from fdcache.storage.connector import BatchResult, PlacedStorage, RecordBatch

Row = dict[str, Any]

PROMPTS = 5
"""Prompts of each length: more than host and device tier hold."""

WAYS = ("always", "never", "auto")


class ThrottledStorage:
    """A local storage whose reads take at least as long as at ``bytes_per_second``; None for its own speed."""

    def __init__(self, storage: PlacedStorage, bytes_per_second: float | None = None) -> None:
        self._storage = storage
        self.bytes_per_second = bytes_per_second
        self.name = storage.name
        self.register, self.unregister = storage.register, storage.unregister
        self.put, self.clear, self.erase = storage.put, storage.clear, storage.erase
        self.scan, self.stats, self.close = storage.scan, storage.stats, storage.close

    def get(self, batch: RecordBatch, timeout: float, cancel: CancelFlag | None = None) -> BatchResult:
        """Read blocks, and wait until the time is over that a slower storage would take."""
        start = time.monotonic()
        found = self._storage.get(batch, timeout, cancel)
        if self.bytes_per_second:
            time.sleep(max(start + found.moved_bytes / self.bytes_per_second - time.monotonic(), 0.0))
        return found


class Engine(Protocol):
    """An engine with a cache and throttled storage, which serves one prompt at a time."""

    @property
    def storage(self) -> ThrottledStorage:
        """The storage, which can be slowed down."""

    def first_token(self, text: Any, *, cached: bool) -> float:
        """Return the seconds from arrival to first token, with or without the cache; then wait for all copies."""

    def close(self) -> None:
        """Release everything."""


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of one length, and the engines that serve them: one that loads always, one that decides."""

    length: int
    texts: Sequence[Any]
    always: Engine
    auto: Engine

    def measure(self, bytes_per_second: float, rounds: int) -> Row:
        """Return the median milliseconds of each way. The first round only teaches the engines the speed."""
        for engine in (self.always, self.auto):
            engine.storage.bytes_per_second = bytes_per_second
        ways: dict[str, Callable[[Any], float]] = {
            "always": lambda text: self.always.first_token(text, cached=True),
            "never": lambda text: self.always.first_token(text, cached=False),
            "auto": lambda text: self.auto.first_token(text, cached=True),
        }
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        orders = cycle(permutations(WAYS))  # what runs before leaves its marks in the CPU's caches
        for turn in range(rounds + 1):
            for text in self.texts:
                for way in next(orders):
                    took = ways[way](text)
                    if turn:
                        seconds[way].append(took)
        found = {way: statistics.median(values) for way, values in seconds.items()}
        best = min(found["always"], found["never"])
        return {
            "prompt": self.length,
            "storage GB/s": round(bytes_per_second / 1e9, 4),
            **{f"{way} ms": round(1e3 * value, 2) for way, value in found.items()},
            "auto / best": round(found["auto"] / best, 3),
        }


def compare(
    make: Callable[[str, int], Engine],
    texts: Callable[[int], Sequence[Any]],
    *,
    lengths: Sequence[int],
    speeds: Callable[[int, float], Sequence[float]],
    rounds: int,
) -> list[Row]:
    """Return a row for each length and speed. ``make(mode, length)`` returns an engine.

    ``speeds`` returns the bytes a second of storage for a length whose computing takes these seconds.
    """
    rows = []
    for length in lengths:
        case = Case(length, texts(length), make("always", length), make("auto", length))
        for _ in range(2):
            for text in case.texts:
                case.always.first_token(text, cached=True)
                case.auto.first_token(text, cached=True)
        computing = statistics.median(case.always.first_token(text, cached=False) for text in case.texts)
        rows += [case.measure(speed, rounds) for speed in speeds(length, computing)]
        case.always.close()
        case.auto.close()
    return rows
