"""Loads that vLLM is told of before they have ended: the step that uses them waits for them on the device.

A load that is enqueued, and whose records were checked, can only fail with the device. So vLLM may plan a step with its
request while it is copied, if no other request computes meanwhile. ``EarlyLoads`` says so in the scheduler, and
``LoadClock`` in a worker how long a load still takes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from fdcache.manager import LoadOutcome
from fdcache.metadata import SwapPurpose, TransferReport

IDLE_SECONDS = 0.03
"""A load is told once it ends within this time: until then the next request that arrives may be computed first."""

_LEAST_BYTES = 4 << 20
"""Smaller loads say nothing of the link's speed."""

_WEIGHT = 0.25
"""Of the latest measurement."""


class EarlyLoads:
    """In the scheduler: the loads that vLLM may be told of before their end, and those that it was told of.

    While nothing is computed a step that waits for a load holds up no other request.
    """

    def __init__(self) -> None:
        self._idle_steps = 0
        self._waiting: dict[str, None] = {}
        self._open: dict[str, int] = {}  # loads of requests that have not ended on all ranks, by number
        self._told: set[str] = set()
        self._received: list[str] = []

    @property
    def are_told(self) -> bool:
        """True while a load goes on of which the ranks have told."""
        return bool(self._told)

    def begins(self, request_id: str, number: int) -> None:
        """Record that a request waits for this load."""
        self._waiting[request_id] = None
        self._open[request_id] = number

    def received(self, request_ids: Iterable[str]) -> None:
        """Record requests whose blocks have come on all ranks, or are sure to: the next step waits for the rest."""
        for request_id in request_ids:
            if request_id in self._waiting:
                del self._waiting[request_id]
                self._received.append(request_id)
                if request_id in self._open:
                    self._told.add(request_id)

    def is_open(self, request_id: str) -> bool:
        """Return True while a load of a request has not ended on all ranks, whatever was told."""
        return request_id in self._open

    def ended(self, outcome: LoadOutcome) -> None:
        """Record the end of a load on all ranks."""
        if self._open.get(outcome.request_id) == outcome.load:
            del self._open[outcome.request_id]
            self._told.discard(outcome.request_id)

    def step(self, num_tokens: int) -> tuple[list[str], float]:
        """Return the requests whose loads a step of this many tokens relies on, and how early ranks may tell of others.

        That is the seconds within which a load has to end that is told with this step; 0 for none.
        """
        self._idle_steps = 0 if num_tokens else self._idle_steps + 1
        received, self._received = self._received, []
        return received, IDLE_SECONDS if self._waiting and self._idle_steps > 1 else 0.0


def fills_blocks_first(kv_cache_config: Any) -> bool:
    """Return True if vLLM fills blocks before a step can be made to wait for what is being loaded into them."""
    has_groups = len(kv_cache_config.kv_cache_groups) > 1
    return has_groups or bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))


class LoadClock:
    """In a worker: how long loads in flight still take. They are copied one after the other."""

    def __init__(self, block_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._block_bytes = block_bytes
        self._clock = clock
        self._seconds_per_byte: float | None = None
        self._in_flight: dict[int, tuple[float, int]] = {}
        self._free_since = 0.0

    def began(self, number: int, num_blocks: int) -> None:
        """Record a load that was submitted."""
        self._in_flight[number] = self._clock(), num_blocks * self._block_bytes

    def ended(self, report: TransferReport) -> None:
        """Record the end of a load, and its speed."""
        if self._in_flight.pop(report.plan_id, None) is None:
            return
        self._free_since = self._clock()
        for result in report.results:
            is_load = result.purpose is SwapPurpose.LOAD
            if is_load and result.copied_bytes >= _LEAST_BYTES and result.seconds > 0:
                spent = result.seconds / result.copied_bytes
                known = self._seconds_per_byte
                self._seconds_per_byte = spent if known is None else _mean(known, spent)

    def seconds_left(self, number: int) -> float:
        """Return how long a load in flight still takes, infinity while no speed is known."""
        if self._seconds_per_byte is None:
            return math.inf
        end = self._free_since
        for each, (begun, nbytes) in self._in_flight.items():
            end = max(end, begun) + nbytes * self._seconds_per_byte
            if each == number:
                break
        return max(end - self._clock(), 0.0)


def _mean(known: float, latest: float) -> float:
    return known + _WEIGHT * (latest - known)
