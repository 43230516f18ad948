"""What a load costs the computation beside it: matrix products, memory traffic, a chain of small kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.swap_worker import GIB, SwapWorker

LOADS = 4


def neighbours() -> dict[str, Callable[[Any], None]]:
    """Each enqueues some 30-40 ms of work on a torch stream."""
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

    def products(_: Any) -> None:
        for _step in range(24):
            torch.mm(left, right, out=product)

    def traffic(_: Any) -> None:
        for _step in range(64):
            target.copy_(source)

    def chain(_: Any) -> None:
        for _step in range(8):
            graph.replay()

    return {"8192^3 bf16 products": products, "memory copies": traffic, "decode-like chain": chain}


def slowdown(worker: SwapWorker, way: str, work: Callable[[Any], None], *, runs: bool) -> tuple[float, bool]:
    """The fraction by which ``work`` takes longer beside full-rate copies; whether they outlasted it."""
    import torch

    stream = torch.cuda.Stream()

    def once() -> tuple[Any, Any]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            begin.record()
            work(stream)
            end.record()
        return begin, end

    once()
    torch.cuda.synchronize()
    costs, outlasted = [], True
    for _ in range(5):
        begin, end = once()
        torch.cuda.synchronize()
        alone = begin.elapsed_time(end)
        plans = [
            worker.plan(**{way: (worker.in_runs if runs else worker.scattered)(GIB)}) for _ in range(LOADS)
        ]
        for plan in plans:
            counter = worker.controller.submit_swap_tasks(plan)
        begin, end = once()
        end.synchronize()
        outlasted = outlasted and not counter.is_all_done()
        costs.append(begin.elapsed_time(end) / alone - 1)
        left = len(plans)
        while left:
            left -= len(worker.controller.wait_reports(60.0))
    return statistics.median(costs), outlasted
