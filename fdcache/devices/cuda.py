"""CUDA device: one GPU of this process, block copies on it, and the kernels that they use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from fdcache import _core
from fdcache.devices.base import (
    ArenaRecords,
    DevicePlanes,
    LaunchWays,
    PinnedMemory,
    PlaneBinding,
    PlannedCopy,
    Stream,
    TensorView,
    refuse_swap,
)
from fdcache.devices.calibration import make_policy, min_group_bytes
from fdcache.devices.cuda_memory import BlockTable, CudaMemory
from fdcache.devices.cuda_peers import CudaPeerAccess
from fdcache.devices.cuda_planes import CudaPlanes
from fdcache.devices.cuda_streams import (
    CudaStream,
    ExternalStream,
    core_event,
    cuda_stream,
    handle_of,
)
from fdcache.devices.topology import find_gpu, import_cupy
from fdcache.errors import DeviceError, DeviceLostError, KernelError, StreamError
from fdcache.layout_planes import Plane
from fdcache.machine.calibration import Calibration, load_calibration
from fdcache.metadata import CacheSwapMetadata, SwapPurpose, TransferReport, TransferResult
from fdcache.settings.cache import CopySettings, Verify
from fdcache.tasks import NO_POSITIONS, Event, Outcome, TransferStatus, make_result

_KERNELS = ("fdcache_copy_in", "fdcache_copy_out", "fdcache_sum", "fdcache_copy_words", "fdcache_read_peer")


class CudaDevice:
    """One GPU, given by its UUID or by its ordinal among the GPUs visible to this process.

        device = CudaDevice("GPU-1f2a", settings=CopySettings())

    Every call uses this GPU, no matter which device is current; controllers of several threads may share it. Without
    a calibration of this GPU, driver and topology (``fdcache init``) copies use safe defaults. Raises ``DeviceError``
    when there is no such GPU, and ``KernelError`` when its kernels do not compile.
    """

    has_compute_streams = True

    def __init__(
        self,
        device: str | int | None = None,
        *,
        settings: CopySettings | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.gpu = find_gpu(device)
        self.settings = settings or CopySettings()
        self.calibration = calibration or load_calibration(self.gpu, self.settings.calibration_dir)
        chosen = self.calibration or Calibration()
        try:
            self._context = _core.CudaContext(self.gpu.ordinal)
            batched = _core.has_batched_copies()
        except _core.CudaError as error:
            raise DeviceError(f"{self.gpu.name} ({self.gpu.uuid}) cannot be used: {error}") from error
        self._kernels = load_kernels(self.gpu.ordinal)
        self._chosen = chosen
        self._policy = make_policy(self.settings, chosen, batched=batched)
        self._copier = _core.CudaCopier(
            self._context, self._kernels.handles, self._policy, self._kernels.module
        )
        self._verify = self.settings.verify is Verify.ALL
        self._memory = CudaMemory(self.gpu, self._context)
        self._last_stream: tuple[Any, ExternalStream] | None = None
        self._extents: WeakKeyDictionary[ArenaRecords, tuple[int, _core.CudaExtents]] = WeakKeyDictionary()

    @property
    def name(self) -> str:
        """Name and UUID of the GPU."""
        return f"{self.gpu.name} ({self.gpu.uuid})"

    @property
    def numa_node(self) -> int | None:
        """NUMA node of the GPU's PCI device."""
        return self.gpu.numa_node

    @property
    def lost(self) -> str | None:
        """Reason why this process can no longer use the GPU; None while it can."""
        return self._context.lost

    def min_group_bytes(self, num_blocks: int, record_bytes: int) -> int:
        """Return the least bytes of a group of layers; see ``calibration.min_group_bytes``."""
        return min_group_bytes(
            self.settings, self._chosen, num_blocks, record_bytes, batched=self._policy.batched
        )

    def as_stream(self, stream: Any) -> Stream:
        """Return a stream of fdcache, CuPy, torch or Paddle, one with ``__cuda_stream__``, or of a handle (int)."""
        last = self._last_stream  # an engine computes on one stream
        if last is not None and last[0] is stream and self.lost is None:
            return last[1]
        if isinstance(stream, CudaStream | ExternalStream):
            return stream
        handle = handle_of(stream)
        try:
            is_own = self._context.is_stream_of(handle)
        except _core.CudaError as error:
            raise self._error(error) from error
        if not is_own:
            raise StreamError(f"the stream is not one of {self.name}: create it while that GPU is current")
        external = ExternalStream(handle, stream)
        self._last_stream = stream, external
        return external

    def create_stream(self, *, background: bool = False) -> CudaStream:
        """Create a stream with its own staging ring; a background stream has the lowest priority."""
        return CudaStream(self.gpu, self._context, self._memory, background=background)

    def create_event(self) -> _core.CudaEvent:
        """Create an event that is not recorded yet."""
        try:
            return _core.CudaEvent(self._context)
        except _core.CudaError as error:
            raise self._error(error) from error

    def wait_any(self, events: Sequence[Event], timeout: float | None = None) -> bool:
        """Wait until one of the events is reached; return False at the timeout."""
        return _core.wait_cuda_events([core_event(event) for event in events], timeout)

    def allocate_plane(self, plane: Plane, num_blocks: int, framework: str | None = None) -> Any:
        """Return a zero-filled tensor of ``framework``, CuPy by default."""
        return self._memory.allocate_plane(plane, num_blocks, framework)

    def pin_memory(self, address: int, nbytes: int, owner: object) -> PinnedMemory:
        """Pin host memory for all GPUs of this process."""
        return self._memory.pin(address, nbytes, owner)

    def inspect_tensor(self, tensor: Any) -> TensorView:
        """Return address and shape of a tensor, through DLPack or ``__cuda_array_interface__``."""
        return self._memory.inspect(tensor)

    def bind_planes(self, bindings: Sequence[PlaneBinding], record_bytes: int) -> CudaPlanes:
        """Bind the planes of a layout, in its order."""
        return CudaPlanes.of(bindings, record_bytes, self._memory)

    def peer_access(self, planes: DevicePlanes) -> CudaPeerAccess:
        """Return reads of these planes out of those of peers."""
        if not isinstance(planes, CudaPlanes):
            raise TypeError(f"expected planes of the CUDA device, got {type(planes).__name__}")
        budget = self.settings.swap_sm_budget
        return CudaPeerAccess(self.gpu, self._context, self._copier, self._memory, planes, budget=budget)

    def copy_blocks(self, planes: DevicePlanes, arena: ArenaRecords, swap: CacheSwapMetadata) -> PlannedCopy:
        """Prepare a batch of copies.

        Raises ``PlanError`` naming the pair that cannot be copied, ``DeviceLostError`` when the GPU has failed, and
        ``DeviceError`` when it accepts no more work.
        """
        if not isinstance(planes, CudaPlanes):
            raise TypeError(f"expected planes of the CUDA device, got {type(planes).__name__}")
        if self.lost is not None:
            raise self._error(None)
        try:
            core = self._copier.prepare(
                swap,
                swap.to_host,
                planes.core,
                arena.table,
                self._extents_of(arena),
                arena.fingerprint,
                self._verify,
            )
        except _core.CudaError as error:
            raise self._error(error) from error
        if core is None:
            refuse_swap(swap, device_blocks=planes.num_blocks, host_blocks=arena.num_blocks)
        return CudaBlockCopy(core, swap, self._memory)

    def plan_launcher(
        self, planes: DevicePlanes, arena: ArenaRecords, ways: LaunchWays
    ) -> _core.PlanLauncher:
        """Return the native submission of plans between these planes and this arena."""
        if not isinstance(planes, CudaPlanes):
            raise TypeError(f"expected planes of the CUDA device, got {type(planes).__name__}")
        return _core.PlanLauncher(
            copier=self._copier,
            planes=planes.core,
            records=arena.table,
            extents=self._extents_of(arena),
            fingerprint=arena.fingerprint,
            verify=self._verify,
            loads=cuda_stream(ways.loads),
            backups=cuda_stream(ways.backups),
            window=ways.window,
            ranges_of=ways.ranges_of,
            as_stream=self.as_stream,
            stream_type=ExternalStream,
            take_table=self._memory.take_table,
            record_types=(TransferReport, TransferResult, TransferStatus, make_result, NO_POSITIONS),
            purposes=(SwapPurpose.LOAD, SwapPurpose.BACKUP),
            arena=ways.session,
            name=self.name,
            rank=ways.rank,
            num_layers=ways.num_layers,
        )

    def _error(self, error: _core.CudaError | None) -> DeviceError:
        if (reason := self.lost) is not None:
            return DeviceLostError(f"{self.name} has failed ({reason}); restart this process")
        return DeviceError(f"{self.name}: {error}")

    def _extents_of(self, arena: ArenaRecords) -> _core.CudaExtents:
        epoch, extents = self._extents.get(arena, (None, None))
        if extents is None or epoch != arena.epoch:
            extents = _core.CudaExtents([extent.device_address for extent in arena.pinned])
            self._extents[arena] = arena.epoch, extents
        return extents


class CudaBlockCopy:
    """Batch of block copies on a GPU."""

    def __init__(self, core: _core.CudaSwap, swap: CacheSwapMetadata, memory: CudaMemory) -> None:
        self._core = core
        self._swap = swap
        self._memory = memory
        self._table: BlockTable | None = None
        self._outcome: Outcome | None = None
        self.done: Event = core.done

    @property
    def started(self) -> bool:
        """True once the batch is enqueued."""
        return self._core.started

    @property
    def is_certain(self) -> bool:
        """True once the batch can only fail with the GPU."""
        return self._core.is_certain

    def enqueue(self, stream: Stream, first_plane: int, last_plane: int) -> None:
        """Copy a range of planes on the stream."""
        self.enqueue_groups(stream, [(first_plane, last_plane)])

    def enqueue_groups(self, stream: Stream, ranges: Sequence[tuple[int, int]]) -> Sequence[Event]:
        """Enqueue ranges of planes in order; return an event recorded after each.

        The stream's thread may enqueue and record after this call returns. Waiting for an event, on the host or in
        another stream, includes waiting for that.
        """
        own = cuda_stream(stream)
        try:
            if self._table is None:
                self._table = self._memory.take_table(self._core.table_bytes)
                self._core.set_table(self._table.host, self._table.device)
            return own.enqueue(self._core, self, ranges)
        except (DeviceError, _core.CudaError) as error:
            own.refuse(self._core, self, str(error))
            return [self.done] * len(ranges)

    def cancel(self) -> bool:
        """Return False: work that is enqueued on a GPU cannot be cancelled."""
        return False

    def result(self, start: int = 0, stop: int | None = None) -> TransferResult:
        """Return the result of positions ``start`` to ``stop``; the first call stamps the arrived records ready."""
        if self._outcome is None:
            self._outcome = self._core.finish()
            if self._table is not None:
                self._memory.give_table(self._table)
        return make_result(self._swap, self._outcome, start, stop)


@dataclass(frozen=True, slots=True)
class Kernels:
    """Handles of copy_in, copy_out, sum, copy_words and read_peer; ``module`` keeps them loaded."""

    handles: tuple[int, ...]
    module: Any


def load_kernels(ordinal: int, source: str | None = None) -> Kernels:
    """Compile the swap kernels for the GPU with this ordinal; CuPy caches the result on disk.

    ``source`` defaults to fdcache's own. Raises ``KernelError`` with the remedy, ``DeviceError`` without CuPy.
    """
    cupy = import_cupy()
    code = _core.swap_source() if source is None else source
    try:
        with cupy.cuda.Device(ordinal):
            module = cupy.RawModule(code=code, options=("-std=c++17",), backend="nvrtc")
            handles = tuple(module.get_function(name).kernel.ptr for name in _KERNELS)
    except (cupy.cuda.compiler.CompileException, ImportError, OSError, RuntimeError) as error:
        why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise KernelError(
            f"the swap kernels do not compile for GPU {ordinal}: {why}; {_remedy(cupy, error)}"
        ) from error
    return Kernels(handles, module)


def _remedy(cupy: Any, error: Exception) -> str:
    package = "nvidia-cuda-nvrtc-cu12 (-cu13 beside cupy-cuda13x)"
    if isinstance(error, cupy.cuda.compiler.CompileException):
        return f"use an NVRTC that supports this GPU: pip install --upgrade {package}"
    if isinstance(error, OSError):
        return "set CUPY_CACHE_DIR to a folder that this user can write to"
    if isinstance(error, (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError)):
        return "update the GPU driver, or use an NVRTC that is not newer than it"
    return f"install NVRTC: pip install {package}, or the CUDA toolkit"
