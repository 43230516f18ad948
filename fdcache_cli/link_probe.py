"""Measurement of each way of copying on one GPU, and of its cost for other work on the same GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import numpy as np

from fdcache import _core
from fdcache.devices.base import PinnedMemory, PlaneBinding
from fdcache.devices.calibration import choose_calibration
from fdcache.devices.cuda import CudaDevice
from fdcache.devices.topology import Gpu, import_cupy
from fdcache.errors import DeviceError, HostMemoryError
from fdcache.layout import KVLayout
from fdcache.machine.calibration import KIB, MIB, Calibration, Measurement, Thresholds
from fdcache.metadata import CacheLevel, CacheSwapMetadata, SwapPurpose
from fdcache.settings.cache import CopySettings, SwapMethod

POOL_BYTES = 256 * MIB
_BATCH_BYTES = 128 * MIB
_PLANES = 64
_DIRECT_PLANES = tuple(size * KIB for size in (16, 32, 64, 128, 256, 512))
_STAGED_COLUMNS = tuple(size * KIB for size in (16, 32, 64, 128, 256, 512, 1024))
_KERNEL_CTAS = (1, 2, 4, 8, 16)
_SMALL_PLANE = 8 * KIB

Tell = Callable[[str], None]


class CopyDirection(Enum):
    """Direction of a copy; the values are those of ``Measurement.direction``."""

    TO_HOST = "device to host"
    TO_DEVICE = "host to device"


@dataclass(frozen=True)
class _Arena:
    """Records in one extent that the probe owns."""

    num_blocks: int
    fingerprint: bytes
    table: _core.RecordTable
    pinned: tuple[PinnedMemory, ...]
    epoch: int = 0


class LinkProbe:
    """A few seconds of copies between 256 MiB of host memory and as much GPU memory.

        calibration = LinkProbe(gpu).measure()

    Raises ``HostMemoryError`` or ``DeviceError`` when the memory is not available, or the GPU fails.
    """

    def __init__(self, gpu: Gpu, tell: Tell = lambda _: None) -> None:
        self._gpu = gpu
        self._tell = tell
        self._cupy = import_cupy()
        self._memory = _host_memory(gpu)
        self._pinned = self._device(SwapMethod.AUTO).pin_memory(
            self._memory.address, POOL_BYTES, self._memory
        )
        self._random = np.random.default_rng(0)

    def measure(self) -> Calibration:
        """Measure every method and return the calibration that follows."""
        cuda = self._cupy.cuda
        try:
            link = {direction: self._link(direction) for direction in CopyDirection}
            found = [*self._direct(), *self._staged(), *self._kernel()]
        except (cuda.memory.OutOfMemoryError, cuda.runtime.CUDARuntimeError, _core.CudaError) as error:
            raise DeviceError(
                f"the link of {self._gpu.name} ({self._gpu.uuid}) cannot be measured: {error}; measure while nothing "
                "else uses the GPU, or continue with safe defaults"
            ) from error
        return choose_calibration(
            self._gpu,
            found,
            link_to_device=link[CopyDirection.TO_DEVICE],
            link_to_host=link[CopyDirection.TO_HOST],
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _device(self, method: SwapMethod, ctas: int = 1) -> CudaDevice:
        settings = CopySettings(swap_method=method, swap_sm_budget=1024)
        plain = Calibration(to_device=Thresholds(0, 0), to_host=Thresholds(0, 0), kernel_ctas=ctas)
        return CudaDevice(self._gpu.uuid, settings=settings, calibration=plain)

    def _link(self, direction: CopyDirection) -> float:
        """Return the GB/s of large pinned copies."""
        self._tell(f"link, {direction.value}")
        cupy = self._cupy
        kinds = {CopyDirection.TO_DEVICE: 1, CopyDirection.TO_HOST: 2}
        with cupy.cuda.Device(self._gpu.ordinal):
            device = cupy.zeros(POOL_BYTES, cupy.uint8)
            stream = cupy.cuda.Stream(non_blocking=True)
            ends = (device.data.ptr, self._memory.address)
            target, source = ends if direction is CopyDirection.TO_DEVICE else ends[::-1]
            cupy.cuda.runtime.deviceSynchronize()
            seconds = []
            for _ in range(4):
                begin, end = cupy.cuda.Event(), cupy.cuda.Event()
                begin.record(stream)
                cupy.cuda.runtime.memcpyAsync(target, source, POOL_BYTES, kinds[direction], stream.ptr)
                end.record(stream)
                end.synchronize()
                seconds.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
        return float(POOL_BYTES / statistics.median(seconds[1:]) / 1e9)

    def _direct(self) -> Iterator[Measurement]:
        for size in _DIRECT_PLANES:
            self._tell(f"copy engines, planes of {size // KIB} KiB")
            beside = size == 64 * KIB
            yield from self._both_ways("direct", self._device(SwapMethod.DMA), size, size, beside=beside)

    def _staged(self) -> Iterator[Measurement]:
        device = self._device(SwapMethod.STAGED)
        for size in _STAGED_COLUMNS:
            self._tell(f"staging ring, columns of {size // KIB} KiB")
            plane = max(_SMALL_PLANE, size // _PLANES)
            yield from self._both_ways("staged", device, plane, size, beside=size == 256 * KIB)

    def _kernel(self) -> Iterator[Measurement]:
        for ctas in _KERNEL_CTAS:
            self._tell(f"kernel of {ctas} thread blocks")
            device = self._device(SwapMethod.KERNEL, ctas)
            found = self._both_ways("kernel", device, _SMALL_PLANE, _SMALL_PLANE, ctas=ctas, beside=ctas == 2)
            yield from found

    def _both_ways(
        self,
        method: str,
        device: CudaDevice,
        plane_bytes: int,
        piece_bytes: int,
        *,
        ctas: int = 0,
        beside: bool,
    ) -> Iterator[Measurement]:
        bench = _Bench(device, plane_bytes, self._pinned, self._memory)
        step = max(piece_bytes // plane_bytes, 1) if method == "staged" else _PLANES
        for direction in (CopyDirection.TO_HOST, CopyDirection.TO_DEVICE):
            rates = [bench.run(direction, step, self._random) for _ in range(3)]
            slowdown = self._slowdown(bench, direction, step) if beside else None
            yield Measurement(direction.value, method, piece_bytes, ctas, statistics.median(rates), slowdown)
        bench.close()

    def _slowdown(self, bench: _Bench, direction: CopyDirection, step: int) -> float | None:
        """Return the slowdown of matrix products by concurrent copies, as a fraction; None without cuBLAS."""
        cupy = self._cupy
        with cupy.cuda.Device(self._gpu.ordinal):
            stream = cupy.cuda.Stream(non_blocking=True)
            left, right = (
                cupy.random.random((4096, 4096), dtype=cupy.float32).astype("f2") for _ in range(2)
            )
            cupy.cuda.runtime.deviceSynchronize()

            def products() -> tuple[Any, Any]:
                begin, end = cupy.cuda.Event(), cupy.cuda.Event()
                with stream:
                    begin.record()
                    for _ in range(16):
                        cupy.matmul(left, right)
                    end.record()
                return begin, end

            try:
                for event in products():
                    event.synchronize()
            except ImportError:
                return None
            costs = []
            for _ in range(4):
                begin, end = products()
                end.synchronize()
                alone = cupy.cuda.get_elapsed_time(begin, end)
                copies = [bench.start(direction, step, self._random) for _ in range(3)]
                begin, end = products()
                end.synchronize()
                costs.append(cupy.cuda.get_elapsed_time(begin, end) / alone - 1)
                for copy in copies:
                    copy.done.wait()
                    copy.result()
        return float(statistics.median(costs[1:]))


def _host_memory(gpu: Gpu) -> _core.HostMemory:
    try:
        memory = _core.HostMemory(POOL_BYTES)
        if gpu.numa_node is not None:
            memory.prefer_node(gpu.numa_node)
        memory.populate(4)
    except MemoryError as error:
        raise HostMemoryError(
            f"the system refused {POOL_BYTES} bytes of host memory for the measurement; leave more free"
        ) from error
    return memory


class _Bench:
    """Copies of a layout of 64 equal planes in the probe's memory."""

    def __init__(
        self, device: CudaDevice, plane_bytes: int, pinned: PinnedMemory, memory: _core.HostMemory
    ) -> None:
        layout = KVLayout.uniform(
            model="probe", revision="1", num_layers=_PLANES // 2, block_size=1, kv_heads=1,
            head_dim=plane_bytes, dtype="uint8",
        )  # fmt: skip
        self._blocks = POOL_BYTES // layout.record_bytes
        self._batch = max(_BATCH_BYTES // layout.record_bytes, 1)
        self._payload = layout.payload_bytes
        self._device = device
        bindings = []
        for plane in layout.planes:
            tensor = device.allocate_plane(plane, self._blocks)
            bindings.append(PlaneBinding(plane, tensor.data.ptr, plane.device_stride, self._blocks, tensor))
        self._planes = device.bind_planes(bindings, layout.record_bytes)
        headers = _core.HostMemory(self._blocks * 128)
        table = _core.RecordTable(
            [memory.address],
            self._blocks,
            layout.record_bytes,
            [headers.address],
            self._blocks,
            (memory, headers),
        )
        self._arena = _Arena(self._blocks, layout.fingerprint, table, (pinned,))
        self._stream = device.create_stream()
        every = np.arange(self._blocks, dtype=np.int32)
        self._finish(self._enqueue(CopyDirection.TO_HOST, _PLANES, every, every))

    def run(self, direction: CopyDirection, step: int, random: np.random.Generator) -> float:
        """Return the GB/s of one batch of scattered blocks, in ranges of ``step`` planes."""
        return self._batch * self._payload / self._finish(self.start(direction, step, random)) / 1e9

    def start(self, direction: CopyDirection, step: int, random: np.random.Generator) -> Any:
        device, host = (random.permutation(self._blocks)[: self._batch].astype(np.int32) for _ in range(2))
        return self._enqueue(direction, step, device, host)

    def close(self) -> None:
        """Wait for the copies and release the ring."""
        self._stream.close()

    def _enqueue(self, direction: CopyDirection, step: int, device: Any, host: Any) -> Any:
        count = len(device)
        nothing = np.zeros((count, 32), np.uint8)
        to_host = direction is CopyDirection.TO_HOST
        generations = np.ones(count, np.uint32)
        swap = CacheSwapMetadata(
            purpose=SwapPurpose.EVICT if to_host else SwapPurpose.LOAD,
            src_type=CacheLevel.DEVICE if to_host else CacheLevel.HOST,
            dst_type=CacheLevel.HOST if to_host else CacheLevel.DEVICE,
            src_block_ids=device if to_host else host,
            dst_block_ids=host if to_host else device,
            src_generations=generations,
            dst_generations=generations,
            hash_values=nothing,
            parent_hashes=nothing,
        )
        copy = self._device.copy_blocks(self._planes, self._arena, swap)
        ranges = [(first, min(first + step, _PLANES)) for first in range(0, _PLANES, step)]
        copy.enqueue_groups(self._stream, ranges)
        return copy

    def _finish(self, copy: Any) -> float:
        copy.done.wait()
        result = copy.result()
        if result.error_message is not None:
            raise DeviceError(f"{self._device.name}: {result.error_message}")
        return float(result.seconds)
