"""What the copies are compared with: large pinned copies, and the two ways that other engines use."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.swap_worker import GIB

H2D, D2H = 1, 2


@dataclass(frozen=True)
class Link:
    """Bytes a second of large pinned copies."""

    to_device: float
    to_host: float
    both: float


def timed(work: Callable[[], None], streams: list[Any], repeats: int = 3) -> float:
    """Seconds on the GPU from the first of ``streams`` to all of them."""
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
    """Pinned and device memory of 1 GiB a direction."""

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
        """One large copy each way, and both at once."""
        return Link(self.alone(H2D), self.alone(D2H), self.pair())

    def alone(self, kind: int) -> float:
        """Bytes a second of a large copy one way."""
        return GIB / timed(lambda: self._large(kind, 0), self._streams[:1])

    def pair(self) -> float:
        """Bytes a second of a large copy each way at once."""

        def both() -> None:
            self._large(H2D, 0)
            self._large(D2H, 1)

        return 2 * GIB / timed(both, self._streams)

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
        """Bytes a second of one cudaMemcpyAsync a plane."""
        sources, targets = (each.tolist() for each in self._pieces(nbytes, kind))

        def loop() -> None:
            for source, target in zip(sources, targets, strict=True):
                self._runtime.memcpyAsync(target, source, nbytes, kind, self._streams[0].ptr)

        return len(sources) * nbytes / timed(loop, self._streams[:1], repeats=2)

    def copy_batch(self, nbytes: int, kind: int) -> float | None:
        """Bytes a second of one cudaMemcpyBatchAsync of all planes; None where the driver has none."""
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
