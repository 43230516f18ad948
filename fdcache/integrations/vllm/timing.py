"""Times of vLLM's steps with prefills: what the scheduler plans, and the seconds that the workers measure."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fdcache.manager import OffloadManager, Request

Chunk = tuple[Request, int, int]
"""A request and the tokens of it that one step computes: the first, and the one after the last."""

_MOST_IN_FLIGHT = 64


class StepTimes:
    """In the scheduler: chunks of the steps that the workers time, by number.

    A step's seconds are those of the slowest rank.
    """

    def __init__(self, manager: OffloadManager) -> None:
        self._manager = manager
        self._steps: OrderedDict[int, list[Chunk]] = OrderedDict()
        self._numbers = 0

    def begin(self, chunks: Iterable[Chunk]) -> int:
        """Return the number under which workers are to time a step; 0 for one without prefills."""
        found = [(request, start, min(stop, request.num_tokens)) for request, start, stop in chunks]
        found = [chunk for chunk in found if chunk[1] < chunk[2]]
        if not any(stop - start > 1 or start < request.num_prompt_tokens for request, start, stop in found):
            return 0
        self._numbers += 1
        self._steps[self._numbers] = found
        if len(self._steps) > _MOST_IN_FLIGHT:  # steps that never ran
            self._steps.popitem(last=False)
        return self._numbers

    def ended(self, seconds: Mapping[int, float]) -> None:
        """Measure from the workers' times how fast the engine computes."""
        for number, spent in seconds.items():
            if (chunks := self._steps.pop(number, None)) is not None:
                self._manager.observe_prefill(chunks, spent)


class StepTimer:
    """In a worker: seconds from the start of a step's forward pass to its end. Waits for nothing."""

    def __init__(self) -> None:
        self.number = 0
        """Of the step that has begun and not ended; 0 for one that is not timed."""
        self._start: Any = None
        self.running: deque[tuple[int, Any, Any]] = deque()
        """The steps whose times have not been taken: the number, the start and the end of each."""

    def begin(self, number: int, *, on_gpu: bool) -> None:
        """Take the time before the work of a step is submitted."""
        self.number, self._start = number, _moment(on_gpu)

    def end(self, *, on_gpu: bool) -> None:
        """End the step that has begun, once its work is submitted."""
        self.running.append((self.number, self._start, _moment(on_gpu)))
        self.number = 0

    def take(self) -> dict[int, float]:
        """Return the seconds of the steps that have ended since the last call, by number."""
        found: dict[int, float] = {}
        while self.running:
            number, start, end = self.running[0]
            if isinstance(end, torch.cuda.Event):
                if not end.query():
                    break
                found[number] = start.elapsed_time(end) / 1e3
            else:
                found[number] = end - start
            self.running.popleft()
        return found


def _moment(on_gpu: bool) -> Any:
    """Return the time, on a GPU as an event of the compute stream."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
