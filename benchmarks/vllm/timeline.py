"""Where the time between tokens goes: each step's wait for the device, its work there, and the way of its answer.

On the worker a step is written down once its answer has come: when it was submitted, when the device began and ended
it, and when the sampled tokens were in host memory. The interval between two answers is the time for which the device
had nothing to do, its work, and how much later than the answer before this one came after the work.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import percentiles
from benchmarks.vllm.timing import Event, Trace

KIND = "forwards"
SLOWEST = 8


class Forward(NamedTuple):
    """A step on the device; times are seconds of ``time.perf_counter``."""

    tokens: int
    requests: int
    submitted: float
    begun: float
    ended: float
    answered: float


class Forwards:
    """Writes down the steps of a worker while the driver wants events."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._base: tuple[Any, float] | None = None
        self._begun: tuple[int, int, float, Any] | None = None
        self._answered: deque[tuple[int, int, float, Any, Any, float]] = deque()

    def execute(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``execute_model``, its begin on the device marked."""

        @functools.wraps(function)
        def call(worker: Any, scheduled: Any, *rest: Any, **named: Any) -> Any:
            tokens = scheduled.total_num_scheduled_tokens
            wanted = self._trace.is_wanted and tokens > 0
            self._begun = None
            if wanted:
                self._start_clock()
                requests = len(scheduled.num_scheduled_tokens)
                self._begun = tokens, requests, time.perf_counter(), self._mark()
            return function(worker, scheduled, *rest, **named)

        return call

    def sample(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``sample_tokens``, its end on the device marked and its answer awaited."""

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            output = function(*arguments, **named)
            if self._begun is not None and (get := getattr(output, "get_output", None)) is not None:
                step, end = self._begun, self._mark()
                self._begun = None

                def answer() -> Any:
                    result = get()
                    self._answered.append((*step, end, time.perf_counter()))
                    self._write()
                    return result

                output.get_output = answer
            return output

        return call

    def _start_clock(self) -> None:
        if self._base is None:
            mark = self._mark()
            mark.synchronize()
            self._base = mark, time.perf_counter()

    def _write(self) -> None:
        assert self._base is not None
        mark, at = self._base
        while self._answered and self._answered[0][4].query():
            tokens, requests, submitted, begin, end, answered = self._answered.popleft()
            begun, ended = (at + mark.elapsed_time(one) / 1000 for one in (begin, end))
            self._trace.write(KIND, Forward(tokens, requests, submitted, begun, ended, answered))

    @staticmethod
    def _mark() -> Any:
        import torch

        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark


def install(trace: Trace) -> None:
    """Write down the steps of every worker of this process that has a GPU."""
    import torch

    if not torch.cuda.is_available():
        return
    from vllm.v1.worker.gpu_worker import Worker

    forwards = Forwards(trace)
    Worker.execute_model = forwards.execute(Worker.execute_model)
    Worker.sample_tokens = forwards.sample(Worker.sample_tokens)


def forwards(folder: Path) -> list[Forward]:
    """Return the steps of all processes in the order of their answers."""
    lines = [line for path in folder.glob(f"*.{KIND}") for line in path.read_text().splitlines()]
    return sorted((Forward(*json.loads(line)) for line in lines), key=lambda step: step.answered)


def loads(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Return the spans from a match that found something to the report that it has been loaded."""
    spans, begun = [], None
    for name, _, end in events:
        if name == "match":
            begun = end if begun is None else begun
        elif name == "report" and begun is not None:
            spans.append((begun, end))
            begun = None
    return spans


def intervals(
    steps: Sequence[Forward], spans: Sequence[tuple[float, float]], first: float, last: float, decoders: int
) -> list[dict[str, Any]]:
    """Return the intervals between answers that came in a time, with what happened in each, milliseconds."""
    found = []
    for before, step in itertools.pairwise(steps):
        if not first <= before.answered <= step.answered <= last:
            continue
        loading = any(begin < step.answered and before.answered < end for begin, end in spans)
        kind = "a prompt's step" if step.tokens > decoders else "beside a load" if loading else "quiet"
        seconds = {
            "interval": step.answered - before.answered,
            "idle": max(step.begun - before.ended, 0.0),
            "work": step.ended - max(step.begun, before.ended),
            "answer": step.answered - step.ended,
            "submitted": step.begun - step.submitted,
        }
        times = {name: round(value * 1000, 3) for name, value in seconds.items()}
        found.append(
            {"kind": kind, "tokens": step.tokens, "at": round((step.answered - first) * 1000, 2)} | times
        )
    return found


def timeline(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the intervals by kind, with percentiles of their parts, and the slowest of them."""
    kinds = dict.fromkeys(one["kind"] for one in found)
    return {
        "kinds": {
            kind: {
                name: percentiles([one[name] for one in found if one["kind"] == kind])
                for name in ("interval", "idle", "work", "answer", "submitted")
            }
            for kind in kinds
        },
        "slowest": sorted(found, key=lambda one: -one["interval"])[:SLOWEST],
    }
