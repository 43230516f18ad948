"""Memory of one GPU: planes, staging rings, block tables, and the engine's tensors."""

from __future__ import annotations

import resource
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from fdcache import _core
from fdcache.devices.base import TensorView
from fdcache.devices.frameworks import allocate_by_framework, as_tensor, exported
from fdcache.devices.topology import Gpu, import_cupy
from fdcache.errors import DeviceError, HostMemoryError, TensorError
from fdcache.layout_planes import Plane

_DLPACK_CUDA = 2

_MIN_TABLE = 4096
_SPARE_TABLES = 16
"""Bytes of the smallest block table, enough for 170 blocks, and how many are allocated at once."""


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Buffers for the block table of one batch: pinned on the host, and on the device."""

    host: int
    device: int
    nbytes: int
    owners: tuple[Any, Any]


class CudaMemory:
    """Allocations on one GPU, whatever device is current."""

    def __init__(self, gpu: Gpu, context: _core.CudaContext) -> None:
        self._gpu = gpu
        self._context = context
        self._cupy = import_cupy()
        self._tables: dict[int, list[BlockTable]] = defaultdict(list)
        self._lock = threading.Lock()
        self._add_tables(_MIN_TABLE)

    def allocate(self, nbytes: int) -> Any:
        """Allocate zero-filled memory as a one-dimensional CuPy array; it is zeroed when this returns.

        The allocation uses no memory pool: releasing the array returns the memory to the GPU.
        """
        cupy = self._cupy
        memory = self.reserve(nbytes)
        with cupy.cuda.Device(self._gpu.ordinal) as device:
            memory.memset(0, nbytes)
            device.synchronize()
            return cupy.ndarray((nbytes,), dtype=cupy.uint8, memptr=memory)

    def reserve(self, nbytes: int) -> Any:
        """Allocate memory, not zeroed and outside of any pool, as a CuPy memory pointer."""
        cupy = self._cupy
        with cupy.cuda.Device(self._gpu.ordinal):
            try:
                return cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)
            except (cupy.cuda.memory.OutOfMemoryError, cupy.cuda.runtime.CUDARuntimeError) as error:
                raise DeviceError(f"{self._gpu.name} could not allocate {nbytes} bytes: {error}") from error

    def allocate_plane(self, plane: Plane, num_blocks: int, framework: str | None) -> Any:
        """Return a zero-filled tensor of ``framework``, CuPy by default."""
        if (tensor := allocate_by_framework(framework, plane, num_blocks, self._gpu.ordinal)) is not None:
            return tensor
        memory = self.allocate(num_blocks * plane.device_stride)
        with self._cupy.cuda.Device(self._gpu.ordinal):
            return as_tensor(memory, plane, num_blocks, framework or "cupy")

    def take_table(self, nbytes: int) -> BlockTable:
        """Take a block table of at least ``nbytes`` bytes. Raises ``DeviceError``."""
        size = max(1 << max(nbytes - 1, 0).bit_length(), _MIN_TABLE)
        with self._lock:
            if not self._tables[size]:
                self._add_tables(size)
            return self._tables[size].pop()

    def _add_tables(self, size: int) -> None:
        # Several at a time, because the driver may block an allocation until running work has completed.
        nbytes = max(size, _MIN_TABLE * _SPARE_TABLES)
        cupy = self._cupy
        with cupy.cuda.Device(self._gpu.ordinal):
            try:
                pinned = cupy.cuda.alloc_pinned_memory(nbytes)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                raise DeviceError(
                    f"{nbytes} bytes of pinned memory for block tables could not be allocated: {error}"
                ) from error
        device = self.reserve(nbytes)
        for at in range(0, nbytes, size):
            self._tables[size].append(BlockTable(pinned.ptr + at, device.ptr + at, size, (pinned, device)))

    def give_table(self, table: BlockTable) -> None:
        """Return the table of a batch that has ended."""
        with self._lock:
            self._tables[table.nbytes].append(table)

    def pin(self, address: int, nbytes: int, owner: object) -> _core.CudaRegistration:
        """Pin host memory. Raises ``HostMemoryError`` with the remedy."""
        try:
            return _core.CudaRegistration(self._context, address, nbytes, owner)
        except _core.CudaError as error:
            raise HostMemoryError(
                f"{nbytes} bytes of host memory could not be pinned: {error}; {_memlock_remedy(nbytes)}"
            ) from error

    def inspect(self, tensor: Any) -> TensorView:
        """Return address and shape of a tensor, through DLPack or ``__cuda_array_interface__``."""
        view = _through_dlpack(tensor) or _through_array_interface(tensor)
        if view is None:
            raise TensorError(
                f"a {type(tensor).__name__} supports neither DLPack nor __cuda_array_interface__; pass its bytes, "
                "such as tensor.view(torch.uint8)"
            )
        # Under another current GPU without peer access, the device pointer would be null.
        with self._cupy.cuda.Device(self._gpu.ordinal):
            attributes = self._cupy.cuda.runtime.pointerGetAttributes(view.address)
        if attributes.device != self._gpu.ordinal or attributes.devicePointer != view.address:
            raise TensorError(
                f"the tensor is not in the memory of {self._gpu.uuid} (visible device {self._gpu.ordinal})"
            )
        return view


def _memlock_remedy(nbytes: int) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY:
        return (
            f"this process may lock {limit} bytes: raise the limit (ulimit -l unlimited, LimitMEMLOCK=infinity, "
            "docker run --ulimit memlock=-1)"
        )
    return "ask for fewer host blocks, or leave more memory free"


def _through_dlpack(tensor: Any) -> TensorView | None:
    try:
        held = _core.Tensor(exported(tensor))
    except (TypeError, BufferError, RuntimeError):
        return None
    if held.device_type != _DLPACK_CUDA:
        raise TensorError(f"the tensor is on DLPack device type {held.device_type}, not in GPU memory")
    return TensorView(held.address, held.shape, held.strides, held.itemsize, held)


def _through_array_interface(tensor: Any) -> TensorView | None:
    try:
        interface = tensor.__cuda_array_interface__
    except (AttributeError, TypeError):  # torch raises TypeError for dtypes that the interface lacks
        return None
    address, read_only = interface["data"]
    if read_only:
        raise TensorError("the tensor is read-only")
    shape = tuple(interface["shape"])
    itemsize = np.dtype(interface["typestr"]).itemsize
    strides = interface.get("strides")
    if strides is None:
        strides = tuple(itemsize * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    return TensorView(address, shape, tuple(strides), itemsize, tensor)
