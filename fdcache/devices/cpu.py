"""CPU device: planes in ordinary memory, streams run by C++ threads.

Unlike a CUDA stream, a stream that waits for an event not recorded yet waits until it is recorded or set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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
from fdcache.devices.frameworks import allocate_by_framework, as_tensor, exported
from fdcache.errors import TensorError
from fdcache.layout_planes import Plane
from fdcache.machine.memory import memory_limits
from fdcache.metadata import CacheSwapMetadata, TransferResult
from fdcache.settings.cache import CopySettings, Verify
from fdcache.tasks import CpuEvent, Event, make_result

_DLPACK_CPU = 1
_HUGE_PAGE = 2 << 20


def memory_bytes(ranks: int = 1) -> int:
    """Return the memory of each of ``ranks`` ranks that share this machine, or its control group."""
    found = memory_limits()
    return min(size for size in (found.machine, found.cgroup) if size is not None) // ranks


class CpuStream:
    """Stream run by ``threads`` threads that share the blocks of a copy."""

    def __init__(self, threads: int, *, background: bool = False) -> None:
        self.core = _core.CopyStream(threads, background)

    def wait_event(self, event: Event) -> None:
        """Make later operations wait for the event, which may be recorded later."""
        self.core.wait(_cpu_event(event).core)

    def retire(self) -> None:
        """Release the memory that finished copies kept alive."""
        self.core.retire()

    def close(self) -> None:
        """Join the threads; queued copies are abandoned and their events are reached."""
        self.core.close()


@dataclass(frozen=True, slots=True)
class _HostMemory:
    device_address: int
    owner: object


class CpuPlanes:
    """Planes of a layout in ordinary memory."""

    def __init__(self, bindings: Sequence[PlaneBinding]) -> None:
        self.num_planes = len(bindings)
        self.num_blocks = min(binding.num_blocks for binding in bindings)
        self.table = _core.PlaneTable(
            [binding.address for binding in bindings],
            [binding.stride for binding in bindings],
            [binding.plane.nbytes for binding in bindings],
            [binding.plane.offset for binding in bindings],
            [binding.owner for binding in bindings],
        )


class CpuBlockCopy:
    """Batch of block copies on the CPU."""

    def __init__(self, core: _core.BlockCopy, swap: CacheSwapMetadata) -> None:
        self._core = core
        self._swap = swap
        self.done = CpuEvent(core.done)

    @property
    def started(self) -> bool:
        """True once a block is being copied."""
        return self._core.started

    @property
    def is_certain(self) -> bool:
        """False: the CPU looks at records when it copies them."""
        return False

    def enqueue(self, stream: Stream, first_plane: int, last_plane: int) -> None:
        """Copy a range of planes on the stream."""
        _cpu_stream(stream).core.copy(self._core, first_plane, last_plane)

    def enqueue_groups(self, stream: Stream, ranges: Sequence[tuple[int, int]]) -> list[Event]:
        """Enqueue ranges of planes in order; return an event recorded after each."""
        events = _cpu_stream(stream).core.copy_groups(self._core, ranges)
        return [CpuEvent(event) for event in events]

    def cancel(self) -> bool:
        """Cancel the batch if none of it has begun."""
        return self._core.cancel()

    def result(self, start: int = 0, stop: int | None = None) -> TransferResult:
        """Return the result of positions ``start`` to ``stop``, once ``done`` is reached."""
        return make_result(self._swap, self._core.finish(), start, stop)


class CpuDevice:
    """Ordinary memory as a device.

        device = CpuDevice(copy_threads=4)

    ``copy_threads`` threads serve each stream; a background stream has one. ``verify``: compare every load with its
    record's checksum after the copy.
    """

    numa_node = None
    lost = None
    has_compute_streams = False

    def __init__(self, *, copy_threads: int = 1, verify: bool = False) -> None:
        self._copy_threads = copy_threads
        self._verify = verify

    @staticmethod
    def of(settings: CopySettings) -> CpuDevice:
        """Return the device that these settings describe."""
        return CpuDevice(copy_threads=settings.copy_threads, verify=settings.verify is Verify.ALL)

    def as_stream(self, stream: Any) -> CpuStream:
        """Return the stream. Raises ``TypeError`` for a stream of another device."""
        return _cpu_stream(stream)

    def min_group_bytes(self, num_blocks: int, record_bytes: int) -> int:
        """Return 0: groups of any size cost a CPU the same."""
        return 0

    def create_stream(self, *, background: bool = False) -> CpuStream:
        """Create a stream; a background stream has one thread of low priority."""
        return CpuStream(1 if background else self._copy_threads, background=background)

    def create_event(self) -> CpuEvent:
        """Create an event that is not recorded yet."""
        return CpuEvent()

    def wait_any(self, events: Sequence[Event], timeout: float | None = None) -> bool:
        """Wait until one of the events is reached; return False at the timeout."""
        return wait_any_cpu_event(events, timeout)

    def allocate_plane(self, plane: Plane, num_blocks: int, framework: str | None = None) -> Any:
        """Return a zero-filled tensor of ``framework``, NumPy by default."""
        if (tensor := allocate_by_framework(framework, plane, num_blocks, None)) is not None:
            return tensor
        memory = _zeros(num_blocks * plane.device_stride)
        return as_tensor(memory, plane, num_blocks, framework or "numpy")

    def pin_memory(self, address: int, nbytes: int, owner: object) -> PinnedMemory:
        """Return the memory as it is: the CPU reaches all memory."""
        return _HostMemory(address, owner)

    def inspect_tensor(self, tensor: Any) -> TensorView:
        """Return address and shape of a tensor, through DLPack."""
        try:
            held = _core.Tensor(exported(tensor))
        except TypeError as error:
            raise TensorError(
                f"a {type(tensor).__name__} is not a writable tensor that supports DLPack"
            ) from error
        if held.device_type != _DLPACK_CPU:
            raise TensorError(
                f"the tensor is on DLPack device type {held.device_type}, not in CPU memory; "
                "use the device that holds it"
            )
        return TensorView(held.address, held.shape, held.strides, held.itemsize, held)

    def bind_planes(self, bindings: Sequence[PlaneBinding], record_bytes: int) -> CpuPlanes:
        """Bind the planes of a layout, in its order."""
        return CpuPlanes(bindings)

    def copy_blocks(self, planes: DevicePlanes, arena: ArenaRecords, swap: CacheSwapMetadata) -> PlannedCopy:
        """Prepare a batch of copies. Raises ``PlanError`` naming the pair that cannot be copied."""
        if not isinstance(planes, CpuPlanes):
            raise TypeError(f"expected planes of the CPU device, got {type(planes).__name__}")
        core = _core.copy_blocks(
            swap,
            swap.to_host,
            planes.table,
            planes.num_blocks,
            arena.table,
            arena.fingerprint,
            self._verify,
        )
        if core is None:
            refuse_swap(swap, device_blocks=planes.num_blocks, host_blocks=arena.num_blocks)
        return CpuBlockCopy(core, swap)

    def plan_launcher(self, planes: DevicePlanes, arena: ArenaRecords, ways: LaunchWays) -> None:
        """Return None: every plan takes ``copy_blocks``."""


def _cpu_stream(stream: Stream) -> CpuStream:
    if not isinstance(stream, CpuStream):
        raise TypeError(f"expected a stream of the CPU device, got {type(stream).__name__}")
    return stream


def wait_any_cpu_event(events: Sequence[Event], timeout: float | None = None) -> bool:
    """Wait until one of the events, all of them ``CpuEvent``, is reached; return False at the timeout."""
    return _core.wait_any([_cpu_event(event).core for event in events], timeout)


def _cpu_event(event: Event) -> CpuEvent:
    if not isinstance(event, CpuEvent):
        raise TypeError(f"expected an event of the CPU device, got {type(event).__name__}")
    return event


def _zeros(nbytes: int) -> np.ndarray:
    """Return memory that begins with a huge page, if it is large enough for one: NumPy asks the system for those."""
    if nbytes < _HUGE_PAGE:
        return np.zeros(nbytes, dtype=np.uint8)
    memory = np.zeros(nbytes + _HUGE_PAGE, dtype=np.uint8)
    start = -memory.ctypes.data % _HUGE_PAGE
    return memory[start : start + nbytes]
