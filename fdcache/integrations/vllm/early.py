"""Loads that vLLM is told of before they have ended: the step that uses them waits for them on the device.

A load that is enqueued, and whose records were checked, can only fail with the device. So vLLM may plan a step with its
request while it is copied. ``StepPace`` says in the scheduler how soon a load has to end so that no step is held up,
``LoadClock`` in a worker how long a load still takes, and ``LayerHooks`` makes the layers of a step wait.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fdcache.controller.layers import LayerDoneCounter
from fdcache.metadata import SwapPurpose, TransferReport

IDLE_SECONDS = 0.03
"""A load that ends within this time is told while nothing is computed: about the time until its step has begun."""

_LEAST_BYTES = 4 << 20
"""Smaller loads say nothing of the link's speed."""

_STEPS = 8

_WEIGHT = 0.25
"""Of the latest measurement."""


class StepPace:
    """In the scheduler: how soon the step after those in flight begins, by the shortest of the latest steps.

    A step that waits for a load holds up every request in it, and one with a long prompt says nothing of the next.
    ``steps_ahead``: how many steps end before one begins that is planned with what this step tells.
    """

    def __init__(self, steps_ahead: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps_ahead = steps_ahead
        self._clock = clock
        self._last: float | None = None
        self._latest: deque[float] = deque(maxlen=_STEPS)

    def step(self, num_tokens: int) -> None:
        """Record a step that computes this many tokens."""
        if not num_tokens:
            self._last = None
            return
        now = self._clock()
        if self._last is not None:
            self._latest.append(now - self._last)
        self._last = now

    @property
    def seconds_left(self) -> float:
        """Seconds within which a load has to end that is told with this step; 0 while the pace is not known."""
        if self._last is None:
            return IDLE_SECONDS
        return (self._steps_ahead - 0.5) * min(self._latest, default=0.0)


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


class LayerHooks:
    """In a worker: the loads that the layers of the step in progress wait for, each layer before its attention.

    ``layers``: the number of each of vLLM's layers. A step waits for whole loads before it begins, until an earlier one
    has called the hooks of all layers.
    """

    def __init__(self, layers: Mapping[str, int], current_stream: Callable[[], Any]) -> None:
        self._layers = dict(layers)
        self._current_stream = current_stream
        self._layers_ask = False
        self._asked: set[str] = set()
        self.is_trusted = False
        """True once the layers are known to ask."""
        self._loads: Sequence[LayerDoneCounter] = ()

    def begin(self, loads: Sequence[LayerDoneCounter], *, layers_ask: bool) -> None:
        """Begin a step that waits for loads. ``layers_ask``: it is to call ``layer`` for every layer."""
        self._wait_whole()  # for loads of a step without a forward pass
        self._layers_ask, self._asked = layers_ask, set()
        self._loads = loads
        if not (layers_ask and self.is_trusted):
            self._wait_whole()

    def layer(self, name: str) -> None:
        """Make the compute stream wait for a layer of the loads."""
        if self._loads:
            if (number := self._layers.get(name)) is not None:
                for load in self._loads:
                    load.wait_for_layer(number, stream=self._current_stream())
        elif self.is_trusted or not self._layers_ask:
            return
        self._asked.add(name)

    def end(self) -> bool:
        """End the forward pass; return False if a layer did not wait for a load."""
        if not self._layers_ask:
            return True
        is_whole, is_sound = self._layers.keys() <= self._asked, True
        if self._loads:
            self.is_trusted = is_sound = is_whole
            self._wait_whole()
        elif is_whole and self._layers:
            self.is_trusted = True
        self._layers_ask = False
        return is_sound

    def _wait_whole(self) -> None:
        loads, self._loads = self._loads, ()
        for load in loads:
            load.wait_all(stream=self._current_stream())


def _mean(known: float, latest: float) -> float:
    return known + _WEIGHT * (latest - known)
