"""Planes of a GPU that other processes of the machine read in place, and reads of theirs."""

from __future__ import annotations

import os
import uuid
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fdcache import _core
from fdcache.devices.base import (
    PlaneBinding,
)
from fdcache.devices.cuda_memory import BlockTable, CudaMemory
from fdcache.devices.cuda_planes import CudaPlanes
from fdcache.devices.cuda_streams import core_event
from fdcache.devices.topology import Gpu, find_gpu, import_cupy
from fdcache.errors import DeviceError, TransferError
from fdcache.layout import KVLayout
from fdcache.metadata import Int32Array, UInt64Array
from fdcache.tasks import Event

_PROCESS = uuid.uuid4().bytes
_PRIORITY = -5
_ROW_BYTES = 24
"""Bytes of a block in a block table."""

Grid = tuple[int, int]
"""Thread blocks of a kernel, and threads in each."""

REMOTE_GRID: Grid = (16, 512)
"""Of reads from another GPU: 0.93 of NVLink from few multiprocessors. Spread over all of them, as many threads keep the
kernels of a model waiting on each; larger thread blocks are slower, and keep the kernels waiting as much."""

STAGING_GRID: Grid = (16, 1024)
"""Of copies between planes and packed memory of a GPU, which keep up with the link to another."""

LOCAL_GRID: Grid = (528, 64)
"""Of reads within a GPU, whose memory is as fast as all multiprocessors."""

_MULTIPROCESSOR_THREADS = 2048


class PeerAllocation(msgspec.Struct, frozen=True, array_like=True):
    """Allocation of a peer. ``address`` is that in its process."""

    handle: bytes
    address: int
    nbytes: int


class DevicePlaneTable(msgspec.Struct, frozen=True, array_like=True):
    """Description of the planes of a GPU for a peer: for each its allocation, offset and stride."""

    machine: str
    process: bytes
    gpu: str
    num_blocks: int
    allocations: tuple[PeerAllocation, ...]
    planes: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class MappedGpuPlanes:
    """The planes of a peer in this process, mapped as long as ``owners`` exist. ``local``: on the same GPU."""

    addresses: list[int]
    strides: list[int]
    num_blocks: int
    owners: tuple[Any, ...]
    local: bool


class CudaRead:
    """Read in flight. It keeps the memory of the peer and the block table until ``end``."""

    def __init__(
        self,
        work: _core.CudaPlaneWork,
        planes: tuple[CudaPlanes, CudaPlanes],
        memory: CudaMemory,
        table: BlockTable,
    ) -> None:
        self._work = work
        self._memory = memory
        self._held: tuple[tuple[CudaPlanes, CudaPlanes], BlockTable] | None = (planes, table)
        self.done: Event = work.done

    def end(self) -> str | None:
        """Release what the read has used, once ``done`` is reached; return why it failed, None if it did not."""
        if self._held is not None:
            self._memory.give_table(self._held[1])
            self._held = None
        return self._work.error or None

    @property
    def seconds(self) -> float:
        """Seconds on the GPU, of a read that has ended."""
        return self._work.seconds


@dataclass(frozen=True, slots=True)
class _Copy:
    """Blocks ``places`` of one cache that go to ``slots`` of another."""

    source: CudaPlanes
    places: Int32Array
    target: CudaPlanes
    slots: Int32Array
    first_plane: int
    last_plane: int


class CudaPeerAccess:
    """Reads of one rank's planes on a GPU out of those of peers, and sums of its own blocks.

    ``budget``: multiprocessors that the threads of a read may fill. ``grid``: that of reads, by default as large as
    the link needs.
    """

    def __init__(
        self,
        gpu: Gpu,
        context: _core.CudaContext,
        copier: _core.CudaCopier,
        memory: CudaMemory,
        planes: CudaPlanes,
        *,
        budget: int,
        grid: Grid | None = None,
    ) -> None:
        self._gpu, self._context, self._copier, self._memory = gpu, context, copier, memory
        self._planes = planes
        self._parts: dict[Hashable, CudaPlanes] = {}
        self._threads = budget * _MULTIPROCESSOR_THREADS
        self._grid = grid
        cupy = import_cupy()
        with cupy.cuda.Device(gpu.ordinal):
            self._reads, self._packs, self._sums = (
                cupy.cuda.Stream(non_blocking=True, priority=_PRIORITY) for _ in range(3)
            )

    def describe(self) -> bytes:
        """Return what a peer needs to read the planes. Raises ``TransferError`` for memory that it cannot open."""
        allocations: list[PeerAllocation] = []
        planes = []
        for binding in self._planes.bindings:
            index = next(
                (
                    index
                    for index, each in enumerate(allocations)
                    if 0 <= binding.address - each.address < each.nbytes
                ),
                len(allocations),
            )
            if index == len(allocations):
                allocations.append(self._export(binding))
            planes.append((index, binding.address - allocations[index].address, binding.stride))
        return msgspec.msgpack.encode(
            DevicePlaneTable(
                _machine(),
                _process(),
                self._gpu.uuid,
                self._planes.num_blocks,
                tuple(allocations),
                tuple(planes),
            )
        )

    def open(self, described: bytes, layout: KVLayout) -> MappedGpuPlanes:
        """Map the planes of a peer with this layout. Raises ``TransferError`` naming what does not fit."""
        try:
            table = msgspec.msgpack.decode(described, type=DevicePlaneTable)
        except msgspec.DecodeError as error:
            raise TransferError(f"memory: the peer's description cannot be read: {error}") from error
        if table.machine != _machine():
            raise TransferError("memory: the peer's GPU is in another machine; ipc needs both on one node")
        _check(table, layout)
        try:
            bases, owners = self._map(table)
        except (_core.CudaError, DeviceError, ValueError) as error:
            raise TransferError(
                f"memory: the peer's planes on {table.gpu} cannot be opened from {self._gpu.uuid}: {error}; ipc needs "
                "GPUs with peer access (nvidia-smi topo -p2p r) and, in containers, --ipc=host"
            ) from error
        return MappedGpuPlanes(
            [bases[index] + offset for index, offset, _ in table.planes],
            [stride for _, _, stride in table.planes],
            table.num_blocks,
            owners,
            table.gpu == self._gpu.uuid,
        )

    def bind(self, mapped: MappedGpuPlanes, table: _core.PlaneTable) -> CudaPlanes:
        """Return planes of a peer, or pieces of them, for ``read``."""
        own = self._planes
        return CudaPlanes(
            table, own.num_planes, mapped.num_blocks, own.record_bytes, self._memory, local=mapped.local
        )

    def reserve(self, nbytes: int) -> Any:
        """Allocate memory for packed blocks, that other processes can open. Raises ``DeviceError``."""
        return self._memory.reserve(nbytes)

    def bind_packed(self, table: _core.PlaneTable, num_blocks: int) -> CudaPlanes:
        """Return blocks in packed memory as planes."""
        own = self._planes
        return CudaPlanes(table, own.num_planes, num_blocks, own.record_bytes, self._memory)

    @property
    def ordinal(self) -> int:
        """Number of the GPU in this process."""
        return self._gpu.ordinal

    def scope(self) -> AbstractContextManager[Any]:
        """Return a context in which the GPU is current."""
        device: AbstractContextManager[Any] = import_cupy().cuda.Device(self._gpu.ordinal)
        return device

    def part(self, key: Hashable, table: _core.PlaneTable) -> CudaPlanes:
        """Return pieces of the own planes; made once for each ``key``."""
        if key not in self._parts:
            own = self._planes
            self._parts[key] = CudaPlanes(
                table, own.num_planes, own.num_blocks, own.record_bytes, self._memory
            )
        return self._parts[key]

    def read(
        self,
        source: CudaPlanes,
        places: Int32Array,
        slots: Int32Array,
        first_plane: int,
        last_plane: int,
        after: Sequence[Event] = (),
        *,
        target: CudaPlanes | None = None,
    ) -> CudaRead:
        """Begin to read planes of the peer's blocks ``places`` into ``slots``, after these events.

        ``target``: pieces of the own planes, by default all of them.

        Raises ``IndexError`` for a block that does not exist, ``DeviceError`` if the GPU has no memory for it.
        """
        grid = LOCAL_GRID if source.local else REMOTE_GRID
        copy = _Copy(source, places, target or self._planes, slots, first_plane, last_plane)
        return self._start(self._reads, copy, grid, after)

    def pack(
        self,
        source: CudaPlanes,
        slots: Int32Array,
        packed: CudaPlanes,
        places: Int32Array,
        first_plane: int,
        last_plane: int,
    ) -> CudaRead:
        """Begin to copy planes of the own blocks ``slots`` to ``places`` of packed memory. Raises as ``read``."""
        copy = _Copy(source, slots, packed, places, first_plane, last_plane)
        return self._start(self._packs, copy, STAGING_GRID, ())

    def spread(
        self,
        packed: CudaPlanes,
        places: Int32Array,
        target: CudaPlanes,
        slots: Int32Array,
        first_plane: int,
        last_plane: int,
        after: Sequence[Event] = (),
    ) -> CudaRead:
        """Begin to copy ``places`` of packed memory into ``slots``, after these events. Raises as ``read``."""
        copy = _Copy(packed, places, target, slots, first_plane, last_plane)
        return self._start(self._reads, copy, STAGING_GRID, after)

    def _start(self, stream: Any, copy: _Copy, grid: Grid, after: Sequence[Event]) -> CudaRead:
        blocks, threads = self._grid or grid
        slots = copy.slots
        table = self._memory.take_table(len(slots) * _ROW_BYTES)
        try:
            work = _core.read_planes(
                self._copier,
                stream.ptr,
                copy.source.core,
                copy.places,
                copy.target.core,
                slots,
                copy.first_plane,
                copy.last_plane,
                table.host,
                table.device,
                table.nbytes,
                max(min(blocks, self._threads // threads), 1),
                threads,
                [core_event(event) for event in after],
            )
        except BaseException:
            self._memory.give_table(table)
            raise
        return CudaRead(work, (copy.source, copy.target), self._memory, table)

    def sums(
        self,
        slots: Int32Array,
        planes: CudaPlanes | None = None,
        first_plane: int = 0,
        last_plane: int | None = None,
    ) -> UInt64Array:
        """Return the sum of a range of each block's planes, as ``sum_planes`` of the CPU does. Raises ``DeviceError``.

        ``planes``: pieces of the own planes, by default all of them.
        """
        if not len(slots):
            return np.empty(0, np.uint64)
        table = self._memory.take_table(len(slots) * _ROW_BYTES)
        try:
            work = _core.sum_device_planes(
                self._copier,
                self._sums.ptr,
                (planes or self._planes).core,
                np.ascontiguousarray(slots),
                first_plane,
                self._planes.num_planes if last_plane is None else last_plane,
                table.host,
                table.device,
                table.nbytes,
            )
            work.done.wait(None)
            if self._context.lost is not None or work.error:
                raise DeviceError(f"blocks cannot be summed: {work.error or self._context.lost}")
            return _core.read_sums(table.host, len(slots))
        except _core.CudaError as error:
            raise DeviceError(f"blocks cannot be summed: {error}") from error
        finally:
            self._memory.give_table(table)

    @property
    def lost(self) -> str | None:
        """Reason why the GPU can no longer be used; None while it can."""
        return self._context.lost

    def _export(self, binding: PlaneBinding) -> PeerAllocation:
        try:
            return PeerAllocation(*_core.export_memory(self._context, binding.address))
        except _core.CudaError as error:
            plane = binding.plane
            raise TransferError(
                f"FDCACHE_TRANSFER=ipc: plane {plane.kind.value} of layer {plane.layer} is in memory that other "
                f"processes cannot open ({error}); allocate it with cudaMalloc: CacheController.initialize_kv_cache "
                "does, PyTorch without expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF, Paddle without "
                "FLAGS_use_virtual_memory_auto_growth, CuPy without MemoryAsyncPool"
            ) from error

    def _map(self, table: DevicePlaneTable) -> tuple[list[int], tuple[Any, ...]]:
        """Return the addresses of the allocations in this process, and what keeps them mapped."""
        if table.process != _process():
            mapped = [_core.CudaPeerMemory(self._context, each.handle) for each in table.allocations]
            return [each.address for each in mapped], tuple(mapped)
        if table.gpu != self._gpu.uuid:
            _core.enable_peer_access(self._context, _core.CudaContext(find_gpu(table.gpu).ordinal))
        return [each.address for each in table.allocations], ()


def _check(table: DevicePlaneTable, layout: KVLayout) -> None:
    """Raise ``TransferError`` unless every block of every plane lies within its allocation."""
    if len(table.planes) != layout.num_planes:
        raise TransferError(f"planes: the peer has {len(table.planes)}, the layout {layout.num_planes}")
    for plane, (index, offset, stride) in zip(layout.planes, table.planes, strict=True):
        last = table.num_blocks - 1
        fits = (
            0 <= index < len(table.allocations)
            and offset >= 0
            and stride >= plane.nbytes
            and last >= 0
            and offset + last * stride + plane.nbytes <= table.allocations[index].nbytes
        )
        if not fits:
            raise TransferError(
                f"plane {plane.kind.value} of layer {plane.layer} is not within the peer's allocation"
            )


def _process() -> bytes:
    return _PROCESS + os.getpid().to_bytes(4, "little")


def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
