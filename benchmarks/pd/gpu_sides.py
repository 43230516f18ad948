"""The process that has planes on one GPU, and this one, which reads them from another."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pd.gpu_handover import Instance
from benchmarks.pd.gpu_rdma import SourceEnd, beside
from benchmarks.swap.worker import GIB, make_layout
from fdcache.devices.base import PlaneBinding
from fdcache.devices.cuda import CudaDevice
from fdcache.devices.cuda_peers import CudaPeerAccess, Grid
from fdcache.devices.cuda_planes import CudaPlanes
from fdcache.machine.calibration import Calibration
from fdcache.transfer.connector import whole_planes

DEFAULT_TO_DEVICE = 4
_REPEATS = 5
_POOL = 2 * GIB
MOVED = GIB
_PIECES = 2048
_UNITS = 36
_WARM = 12


class Rank:
    """Planes of 64 to a block on one GPU, in one allocation."""

    def __init__(self, gpu: int, plane_kib: int) -> None:
        self.layout = make_layout(plane_kib)
        self.device = CudaDevice(gpu, calibration=Calibration())
        self.blocks = _POOL // self.layout.record_bytes
        self.memory = self.device._memory.allocate(_POOL)
        self.address: int = self.memory.data.ptr
        bindings = [
            PlaneBinding(
                plane, self.address + index * self.blocks * plane.nbytes, plane.nbytes, self.blocks, None
            )
            for index, plane in enumerate(self.layout.planes)
        ]
        self.planes = self.device.bind_planes(bindings, self.layout.record_bytes)
        self.access = self.device.peer_access(self.planes)

    def fill(self, seed: int) -> None:
        """Fill all planes with words that depend on their place."""
        import cupy

        with cupy.cuda.Device(self.device.gpu.ordinal) as device:
            words = self.memory.view(cupy.uint64)
            words[...] = cupy.arange(words.size, dtype=cupy.uint64) * np.uint64(2 * seed + 1)
            device.synchronize()

    def with_grid(self, grid: Grid) -> CudaPeerAccess:
        """Return reads with that grid."""
        device = self.device
        return CudaPeerAccess(
            device.gpu,
            device._context,
            device._copier,
            device._memory,
            self.planes,
            budget=device.gpu.multiprocessors,
            grid=grid,
        )


class Source:
    """The process of the other rank."""

    def __init__(self, gpu: int) -> None:
        command = [sys.executable, "-m", "benchmarks.pd.gpu_sides", str(gpu)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def ask(self, *words: object) -> str:
        """Send a command and return the answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise RuntimeError(f"the source process has ended at {words}")
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def serve(gpu: int) -> None:
    """Answer commands.

    ``planes KIB`` describes planes of that size, ``rdma DESCRIPTION`` joins a reader of them and ``stop -`` leaves it,
    ``unit NAME`` measures a unit of work; ``open DIRECTORY VERIFIES CONNECTOR``, ``compute SEED MICROSECONDS``,
    ``computed -`` and ``close -`` are those of a prefill instance.
    """
    rank: Rank | None = None
    packing: SourceEnd | None = None
    instance: Instance | None = None
    works: dict[str, Callable[[], None]] = {}
    computed = 0.0
    for line in sys.stdin:
        command, argument = line.strip().split(" ", 1)
        answer: object = "done"
        if command == "planes":
            rank = None
            rank = Rank(gpu, int(argument))
            rank.fill(1)
            answer = rank.access.describe().hex()
        elif command == "rdma":
            assert rank is not None
            packing = SourceEnd(rank, argument)
            answer = packing.description
        elif packing is not None and command == "stop":
            packing.close()
            packing = None
        elif command == "unit":
            works = works or neighbours(gpu)
            answer = unit_seconds(works[argument], gpu)
        elif command == "open":
            rank, (directory, verifies, connector) = None, argument.split()
            instance = Instance(
                "prefill", gpu, Path(directory), verifies=verifies == "1", connector=connector
            )
            answer = instance.address
        elif instance is not None and command == "compute":
            print(answer, flush=True)
            seed, layer_us = map(int, argument.split())
            computed = instance.prefill(seed, layer_us)
            instance.await_sends()
            continue
        elif instance is not None and command == "close":
            instance.close()
            instance = None
        elif command == "computed":
            answer = computed
        print(answer, flush=True)


def neighbours(gpu: int) -> dict[str, Callable[[], None]]:
    """Return the neighbours of ``benchmarks.swap`` on a GPU."""
    import torch

    from benchmarks.swap.peers import neighbours as made

    with torch.cuda.device(gpu):
        return made()


def unit_seconds(work: Callable[[], None], gpu: int) -> float:
    """Return the median seconds of a unit of work that runs without a pause."""
    import torch

    with torch.cuda.device(gpu):
        stream = torch.cuda.Stream()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_UNITS + 1)]
        with torch.cuda.stream(stream):
            marks[0].record()
            for mark in marks[1:]:
                work()
                mark.record()
        marks[-1].synchronize()
        return float(statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks[_WARM:]))) / 1e3


class Reader:
    """Reads of the rank on this GPU out of a source."""

    def __init__(self, source: Source, gpu: int, plane_kib: int) -> None:
        import cupy

        self._cupy = cupy
        self.rank = Rank(gpu, plane_kib)
        access, layout = self.rank.access, self.rank.layout
        mapped = access.open(bytes.fromhex(source.ask("planes", plane_kib)), layout)
        self.base = mapped.addresses[0]
        table = whole_planes(layout).table(mapped.addresses, mapped.strides, mapped.owners)
        self.source: CudaPlanes = access.bind(mapped, table)
        self._random = np.random.default_rng(plane_kib)
        with cupy.cuda.Device(gpu):
            self._stream = cupy.cuda.Stream(non_blocking=True)

    def sample(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Return random blocks of that many bytes in all."""
        count = max(nbytes // self.rank.layout.record_bytes, 1)
        return self._random.permutation(self.rank.blocks)[:count].astype(np.int32)

    def seconds(
        self, nbytes: int, access: CudaPeerAccess | None = None, planes: int | None = None
    ) -> tuple[float, float]:
        """Return the median seconds of a read, on the GPU and in all."""
        on_gpu, in_all = [], []
        last = self.rank.planes.num_planes if planes is None else planes
        for _ in range(_REPEATS + 1):
            places, slots = self.sample(nbytes), self.sample(nbytes)
            start = time.perf_counter()
            read = (access or self.rank.access).read(self.source, places, slots, 0, last)
            read.done.wait(None)
            in_all.append(time.perf_counter() - start)
            if (error := read.end()) is not None:
                raise RuntimeError(error)
            on_gpu.append(read.seconds)
        return statistics.median(on_gpu[1:]), statistics.median(in_all[1:])

    def rate(self, access: CudaPeerAccess | None = None) -> float:
        """Return the bytes per second of a read of scattered blocks."""
        moved = MOVED // self.rank.layout.record_bytes * self.rank.layout.payload_bytes
        return moved / self.seconds(MOVED, access)[0]

    def large(self) -> float:
        """Return the bytes per second of one copy of adjoining bytes."""
        return MOVED / self._timed(lambda: self._copy(self.rank.address, self.base, MOVED))

    def pieces(self) -> float:
        """Return the bytes per second of one copy for each plane of each block."""
        nbytes = self.rank.layout.planes[0].nbytes
        theirs, mine = (self._random.permutation(_POOL // nbytes)[:_PIECES] * nbytes for _ in range(2))

        def loop() -> None:
            for source, target in zip(theirs.tolist(), mine.tolist(), strict=True):
                self._copy(self.rank.address + target, self.base + source, nbytes)

        return _PIECES * nbytes / self._timed(loop)

    def sums(self) -> float:
        """Return the seconds of the check of one read."""
        slots, found = self.sample(MOVED), []
        for _ in range(_REPEATS + 1):
            start = time.perf_counter()
            self.rank.access.sums(slots)
            found.append(time.perf_counter() - start)
        return statistics.median(found[1:])

    def is_right(self) -> bool:
        """Read scattered blocks and compare every byte with the source's."""
        places, slots = self.sample(MOVED // 4), self.sample(MOVED // 4)
        read = self.rank.access.read(self.source, places, slots, 0, self.rank.planes.num_planes)
        read.done.wait(None)
        return read.end() is None and self.has(places, slots)

    def has(self, places: np.ndarray[Any, Any], slots: np.ndarray[Any, Any]) -> bool:
        """Compare every byte of blocks with those of the source."""
        cupy, last = self._cupy, self.rank.planes.num_planes
        nbytes = self.rank.layout.planes[0].nbytes
        with cupy.cuda.Device(self.rank.device.gpu.ordinal):
            words = self.rank.memory[: last * self.rank.blocks * nbytes].view(cupy.uint64)
            words = words.reshape(last, self.rank.blocks, nbytes // 8)
            within = cupy.arange(nbytes // 8, dtype=cupy.uint64)
            theirs = cupy.asarray(places.astype(np.uint64))[:, None]
            for plane in range(last):
                first = plane * self.rank.blocks * nbytes // 8
                expected = (np.uint64(first) + theirs * np.uint64(nbytes // 8) + within) * np.uint64(3)
                if not bool((words[plane][cupy.asarray(slots)] == expected).all()):
                    return False
        return True

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        self._cupy.cuda.runtime.memcpyAsync(target, source, nbytes, DEFAULT_TO_DEVICE, self._stream.ptr)

    def _timed(self, work: Callable[[], None]) -> float:
        cupy = self._cupy
        found = []
        with cupy.cuda.Device(self.rank.device.gpu.ordinal):
            for _ in range(_REPEATS + 1):
                begin, end = cupy.cuda.Event(), cupy.cuda.Event()
                begin.record(self._stream)
                work()
                end.record(self._stream)
                end.synchronize()
                found.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
        return float(statistics.median(found[1:]))

    @contextmanager
    def reading(self, access: CudaPeerAccess, moved: list[float]) -> Iterator[None]:
        """Read without a pause meanwhile, two reads at a time; append the bytes per second."""

        def run(end: threading.Event) -> None:
            places, slots = self.sample(MOVED // 4), self.sample(MOVED // 4)
            last = self.rank.planes.num_planes
            start, count = time.perf_counter(), 0
            waiting = [access.read(self.source, places, slots, 0, last) for _ in range(2)]
            while not end.is_set():
                waiting[0].done.wait(None)
                waiting.pop(0).end()
                waiting.append(access.read(self.source, places, slots, 0, last))
                count += 1
            took = time.perf_counter() - start
            for each in waiting:
                each.done.wait(None)
                each.end()
            moved.append(count * len(slots) * self.rank.layout.payload_bytes / took)

        with beside(run):
            yield


if __name__ == "__main__":  # the source, which :class:`Source` starts
    serve(int(sys.argv[1]))
