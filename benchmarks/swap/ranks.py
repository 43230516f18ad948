"""Both links at once: two ranks, a process and a GPU each, that keep the same latents once in one host arena.

What is loaded every rank loads whole, over its own link; of what is stored each copies its share. Beside it, what one
rank does alone, and large pinned copies on one link and on both.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from benchmarks.harness import Table
from benchmarks.swap.peers import D2H, H2D, Peers
from benchmarks.swap.worker import GIB, Pick, SwapWorker, make_layout
from fdcache.devices.topology import visible_gpus

_RANKS = 2
_LATENT_KIB = 72
_PLAN_BYTES = GIB // 4
_PLANS = 8
_ROUNDS = 5
_COPIES = 2
_WAYS = {"load": H2D, "evict": D2H}
_PATIENCE = 120.0


@dataclass(frozen=True)
class Span:
    """Bytes that one rank has moved, and when, by a clock that all processes of a host share."""

    nbytes: int
    start: float
    end: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / (self.end - self.start)


def both_links(_: Peers) -> Table:
    """Measure two ranks; a GPU alone has no second link."""
    if len(visible_gpus()) < _RANKS:
        return []
    context = multiprocessing.get_context("spawn")
    name, pipes = uuid4().hex, [context.Pipe() for _ in range(_RANKS)]
    processes = [
        context.Process(target=_serve, args=(rank, name, pipe[1]), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    ends = [pipe[0] for pipe in pipes]
    try:
        for end in ends:
            _answer(end)
        return [
            _row(ends, way, what)
            for way in _WAYS
            for what in ("large copies", "a plan at a time", "plans in a queue")
        ]
    finally:
        for end, process in zip(ends, processes, strict=True):
            end.send(None)
            process.join(30)


def _row(ends: list[Any], way: str, what: str) -> dict[str, str]:
    alone: list[list[float]] = [[] for _ in ends]
    beside: list[list[float]] = [[] for _ in ends]
    sums = []
    for _ in range(_ROUNDS):
        for rank, end in enumerate(ends):
            (span,) = _measured([end], way, what)
            alone[rank].append(span.rate)
        spans = _measured(ends, way, what)
        for rank, span in enumerate(spans):
            beside[rank].append(span.rate)
        seconds = max(span.end for span in spans) - min(span.start for span in spans)
        sums.append(sum(span.nbytes for span in spans) / seconds)
    row = {"way": "H2D" if way == "load" else "D2H", "what": what}
    for rank in range(len(ends)):
        row[f"rank {rank} alone, GB/s"] = f"{_median(alone[rank]) / 1e9:.1f}"
    for rank in range(len(ends)):
        row[f"rank {rank} beside the other"] = f"{_median(beside[rank]) / 1e9:.1f}"
    row["both"] = f"{_median(sums) / 1e9:.1f} ({min(sums) / 1e9:.1f} to {max(sums) / 1e9:.1f})"
    row["of one alone"] = f"{_median(sums) / _median(alone[0]):.2f}"
    return row


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _measured(ends: list[Any], way: str, what: str) -> list[Span]:
    """Let these ranks begin at the same moment, as soon as all are ready."""
    for end in ends:
        end.send((way, what))
    for end in ends:
        _answer(end)
    start = time.monotonic() + 0.02
    for end in ends:
        end.send(start)
    return [_answer(end) for end in ends]


def _answer(end: Any) -> Any:
    if not end.poll(_PATIENCE):
        raise TimeoutError("a rank does not answer")
    return end.recv()


class RankLink:
    """One rank: its worker, and a large copy over the same link."""

    def __init__(self, worker: SwapWorker, copy: Callable[[int], None]) -> None:
        self._worker, self._copy = worker, copy

    def prepare(self, way: str, what: str) -> Callable[[], int]:
        """Return the work, which returns the bytes that it has moved over this rank's link."""
        if what == "large copies":
            return lambda: self._copies(_WAYS[way])
        worker = self._worker
        count = _PLAN_BYTES // worker.layout.record_bytes
        slots = worker.scattered(_PLANS * count * worker.layout.record_bytes)
        plans = [
            worker.plan(**{way: Pick(slots.device[at : at + count], slots.host[at : at + count])})
            for at in range(0, _PLANS * count, count)
        ]
        moved = len(slots.host) * worker.layout.payload_bytes
        shares = 1 if way == "load" else worker.layout.replicas
        return lambda: self._run(plans, moved // shares, at_once=what == "plans in a queue")

    def _copies(self, kind: int) -> int:
        for _ in range(_COPIES):
            self._copy(kind)
        return _COPIES * GIB

    def _run(self, plans: list[Any], nbytes: int, *, at_once: bool) -> int:
        worker = self._worker
        for plan in plans:
            worker.controller.submit_swap_tasks(plan, worker.stream)
            if not at_once:
                worker.finish()
        left = len(plans) if at_once else 0
        while left:
            left -= len(worker.reports())
        return nbytes


def _serve(rank: int, name: str, end: Any) -> None:
    """Do what the other end asks for, each at the moment that it names."""
    import cupy

    gpu = visible_gpus()[rank]
    layout = replace(make_layout(_LATENT_KIB), tp_size=_RANKS, replicas=_RANKS)
    with cupy.cuda.Device(gpu.ordinal):
        worker = SwapWorker(layout, gpu=gpu.uuid, rank=rank, shared=name)
        link = RankLink(worker, Peers().copy_large)
        end.send("ready")
        serve(link, end)
        worker.close()


def serve(link: RankLink, end: Any) -> None:
    """Measure until None comes."""
    while (asked := end.recv()) is not None:
        work = link.prepare(*asked)
        end.send("ready")
        start = end.recv()
        while time.monotonic() < start:
            pass
        begun = time.monotonic()
        nbytes = work()
        end.send(Span(nbytes, begun, time.monotonic()))
