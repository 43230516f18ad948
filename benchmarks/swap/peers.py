"""What copies of a worker are compared with: large copies, other engines' ways, and work beside them."""

from __future__ import annotations

import ctypes
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.swap.worker import GIB, SwapWorker

H2D, D2H = 1, 2


@dataclass(frozen=True)
class Link:
    """Bytes per second of large pinned copies."""

    to_device: float
    to_host: float
    both: float


def timed(work: Callable[[], None], streams: list[Any], repeats: int = 3) -> float:
    """Return the seconds on the GPU from the start of the first of ``streams`` to the end of all."""
    import cupy

    seconds = []
    for _ in range(repeats + 1):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        cupy.cuda.runtime.deviceSynchronize()
        begin.record(streams[0])
        for stream in streams[1:]:
            stream.wait_event(begin)
        work()
        for stream in streams[1:]:
            joined = cupy.cuda.Event(disable_timing=True)
            joined.record(stream)
            streams[0].wait_event(joined)
        end.record(streams[0])
        end.synchronize()
        seconds.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return float(statistics.median(seconds[1:]))


class Peers:
    """Reference copies: large pinned ones, and the two ways that other engines use; 1 GiB per direction."""

    def __init__(self) -> None:
        import cupy

        self._runtime = cupy.cuda.runtime
        self._pinned = [cupy.cuda.alloc_pinned_memory(GIB) for _ in range(2)]
        self._device = [cupy.zeros(GIB, cupy.uint8) for _ in range(2)]
        for memory in self._pinned:
            np.frombuffer(memory, np.uint64, GIB // 8)[:] = np.arange(GIB // 8, dtype=np.uint64)
        self._host = [memory.ptr for memory in self._pinned]
        self._memory = [array.data.ptr for array in self._device]
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        self._random = np.random.default_rng(1)
        self._batch = _batched_copy()

    def link(self) -> Link:
        """Measure one large copy each way, and both at once."""
        return Link(self.alone(H2D), self.alone(D2H), self.pair())

    def alone(self, kind: int) -> float:
        """Return the bytes per second of a large copy one way."""
        return GIB / timed(lambda: self._large(kind, 0), self._streams[:1])

    def pair(self) -> float:
        """Return the bytes per second of two large copies, one each way, at once."""

        def both() -> None:
            self._large(H2D, 0)
            self._large(D2H, 1)

        return 2 * GIB / timed(both, self._streams)

    def copy_large(self, kind: int) -> None:
        """Copy 1 GiB one way, and wait for its end."""
        self._large(kind, 0)
        self._streams[0].synchronize()

    def _large(self, kind: int, index: int) -> None:
        ends = self._host[index], self._memory[index]
        source, target = ends if kind == H2D else ends[::-1]
        self._runtime.memcpyAsync(target, source, GIB, kind, self._streams[index].ptr)

    def _pieces(self, nbytes: int, kind: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        count = min(GIB // nbytes, 8192)
        host, memory = (
            base + self._random.permutation(GIB // nbytes)[:count].astype(np.uint64) * np.uint64(nbytes)
            for base in (np.uint64(self._host[0]), np.uint64(self._memory[0]))
        )
        return (host, memory) if kind == H2D else (memory, host)

    def copy_loop(self, nbytes: int, kind: int) -> float:
        """Return the bytes per second of one cudaMemcpyAsync per plane."""
        sources, targets = (each.tolist() for each in self._pieces(nbytes, kind))

        def loop() -> None:
            for source, target in zip(sources, targets, strict=True):
                self._runtime.memcpyAsync(target, source, nbytes, kind, self._streams[0].ptr)

        return len(sources) * nbytes / timed(loop, self._streams[:1], repeats=2)

    def copy_batch(self, nbytes: int, kind: int) -> float | None:
        """Return the bytes per second of one cudaMemcpyBatchAsync of all planes; None if the driver lacks it."""
        if self._batch is None:
            return None
        sources, targets = self._pieces(nbytes, kind)
        sizes = np.full(len(sources), nbytes, np.uint64)
        # access order: stream; source and target as (kind, id): 1 is a device, 2 the host; no flags
        places = (2, 0, 1, 0) if kind == H2D else (1, 0, 2, 0)
        attributes = np.array([1, *places, 0], np.int32)
        first = np.zeros(1, np.uint64)
        call = self._batch

        def batch() -> None:
            arrays = [each.ctypes.data for each in (targets, sources, sizes)]
            result = call(
                *arrays, len(sources), attributes.ctypes.data, first.ctypes.data, 1, self._streams[0].ptr
            )
            if result:
                raise RuntimeError(f"cuMemcpyBatchAsync: {result}")

        return len(sources) * nbytes / timed(batch, self._streams[:1], repeats=2)


def _batched_copy() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_void_p()
    library.cuGetProcAddress_v2(b"cuMemcpyBatchAsync", ctypes.byref(pointer), 13000, ctypes.c_uint64(0), None)
    if not pointer.value:
        return None
    address, size = ctypes.c_void_p, ctypes.c_size_t
    kind = ctypes.CFUNCTYPE(ctypes.c_int, address, address, address, size, address, address, size, address)
    return kind(pointer.value)


PLANS = 6
REPEATS = 5
_UNITS = 34
_LEAD = 6
"""Units before the copies; the first ones are not counted."""
_WARM = 2


@dataclass(frozen=True)
class Cost:
    """Fraction by which work takes longer, and bytes per second copied meanwhile."""

    slowdown: float
    rate: float


def neighbours() -> dict[str, Callable[[], None]]:
    """Return functions that each enqueue about 8 ms of work on the current torch stream."""
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
    """Measure the slowdown of ``work`` by full-rate copies in runs; the median of a few stretches.

    ``work`` runs without a pause and the copies run in the middle of a stretch. The work during the copies is compared
    with the work before and after them in the same stretch, because a GPU that was just idle runs faster for about
    10 ms than a busy one, by more than copies cost.
    """
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
