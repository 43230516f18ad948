"""What copies cost the computation beside it: matrix products, memory traffic, a chain of small kernels.

The neighbour works without a pause, and copies run in the middle: what it did during them is compared with what it
did before and after in the same stretch. A GPU that just idled runs faster for some ten milliseconds than one at
work, by more than copies cost; so a stretch with copies cannot be compared with another one without.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.swap_worker import GIB, SwapWorker

PLANS = 6
REPEATS = 5
_UNITS = 34
_LEAD = 6
"""Units before the copies; the first are left out of account."""
_WARM = 2


@dataclass(frozen=True)
class Cost:
    """The fraction by which work takes longer, and the bytes a second that were copied beside it."""

    slowdown: float
    rate: float


def neighbours() -> dict[str, Callable[[], None]]:
    """Each enqueues some 8 ms of work on the current torch stream."""
    import torch

    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    source, target = (torch.randn(GIB // 4, device="cuda") for _ in range(2))
    weights = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(8)]
    state = torch.randn(4096, 16, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    for weight in weights:
        torch.mm(weight, state)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        value = state
        for step in range(256):
            value = torch.nn.functional.silu(torch.mm(weights[step % 8], value))

    def products() -> None:
        for _step in range(6):
            torch.mm(left, right, out=product)

    def traffic() -> None:
        for _step in range(16):
            target.copy_(source)

    def chain() -> None:
        for _step in range(2):
            graph.replay()

    return {"8192^3 bf16 products": products, "memory copies": traffic, "decode-like chain": chain}


def cost(worker: SwapWorker, way: str, work: Callable[[], None]) -> Cost:
    """What full-rate copies in runs cost ``work``, the median of a few stretches."""
    found = [_one_stretch(worker, way, work) for _ in range(REPEATS)]
    return Cost(
        statistics.median(each.slowdown for each in found), statistics.median(each.rate for each in found)
    )


def _one_stretch(worker: SwapWorker, way: str, work: Callable[[], None]) -> Cost:
    import torch

    stream, clock = torch.cuda.Stream(), torch.cuda.Stream()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_UNITS + 1)]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    plans = [worker.plan(**{way: worker.in_runs(GIB)}) for _ in range(PLANS)]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
    marks[_LEAD].synchronize()
    begin.record(clock)
    for plan in plans:
        worker.controller.submit_swap_tasks(plan, worker.stream)
    left = len(plans)
    while left:
        left -= len(worker.controller.wait_reports(60.0))
    end.record(clock)
    torch.cuda.synchronize()
    at = [marks[0].elapsed_time(mark) for mark in marks]
    first, last = marks[0].elapsed_time(begin), marks[0].elapsed_time(end)
    units = list(itertools.pairwise(at))
    during = [stop - start for start, stop in units if first <= start and stop <= last]
    apart = [
        [stop - start for start, stop in units[_WARM:] if stop <= first],
        [stop - start for start, stop in units if start >= last],
    ]
    alone = statistics.fmean(statistics.fmean(each) for each in apart if each)
    copied = len(plans) * GIB // worker.layout.record_bytes * worker.layout.payload_bytes
    return Cost(statistics.fmean(during) / alone - 1, copied / (last - first) * 1e3)
