"""What fdcache and the tests for GPUs call of CuPy, on the driver that stands in for a GPU's.

Its memory is the host's, its kernels are C++, its streams are threads. What a test does to arrays within ``with
stream:`` is done in the order of that stream; outside of it at once. ``STAND_IN_DELAYS`` has the microseconds that
every copy takes to be asked for and, on average, to be done.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import numpy as np

# As an annotation and a test of CuPy's own find them.
uint8, uint16, dtype = np.uint8, np.uint16, np.dtype

_TOTAL_BYTES = 1 << 36
_CYCLES_A_MICROSECOND = 1755


def _declare(name: str, *arguments: Any, result: Any = None) -> Any:
    function = getattr(_driver, name)
    function.argtypes, function.restype = arguments, result
    return function


_driver = ctypes.CDLL("libcuda.so.1")
_handle, _size, _unsigned = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
_visible = _declare("stand_in_visible", result=ctypes.c_int)
_gpu = _declare("stand_in_gpu", ctypes.c_int, result=ctypes.c_int)
_new_stream = _declare("stand_in_stream", ctypes.c_int, result=_handle)
_end_stream = _declare("stand_in_end_stream", _handle)
_synchronize = _declare("stand_in_synchronize", _handle)
_synchronize_all = _declare("stand_in_synchronize_all")
_copy = _declare("stand_in_copy", _handle, _handle, _size, _handle, _size, _size, _size)
_pause = _declare("stand_in_pause", _handle, _unsigned)
_trap = _declare("stand_in_trap", _handle)
_kernel = _declare("stand_in_kernel", ctypes.c_int, _unsigned, result=_handle)

_current = threading.local()

_declare("stand_in_delay", _unsigned, _unsigned)(*map(int, os.environ.get("STAND_IN_DELAYS", "0 0").split()))


class Device:
    """A GPU; the current one of its thread within it, or after ``use``."""

    def __init__(self, ordinal: int | None = None) -> None:
        self.id: int = getattr(_current, "device", 0) if ordinal is None else ordinal
        self._former: list[int] = []

    def use(self) -> None:
        """Be current from now on."""
        _current.device = self.id

    def __enter__(self) -> Self:
        self._former.append(Device().id)
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        _current.device = self._former.pop()

    def synchronize(self) -> None:
        """Until all streams have done what they have."""
        _synchronize_all()


class Memory:
    """Bytes of the current GPU. ``used`` counts those of all GPUs, ``made`` the allocations there ever were."""

    made = used = 0
    places: ClassVar[dict[int, tuple[int, int]]] = {}

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.empty(max(nbytes, 1), np.uint8)
        self.ptr = self.bytes.ctypes.data
        Memory.made += 1
        Memory.used += nbytes
        Memory.places[self.ptr] = self.ptr + nbytes, Device().id
        weakref.finalize(self.bytes, Memory._free, self.ptr, nbytes)

    @classmethod
    def _free(cls, address: int, nbytes: int) -> None:
        cls.used -= nbytes
        del cls.places[address]

    @classmethod
    def device_of(cls, address: int) -> int:
        """The GPU whose memory that is, -1 for none."""
        found = (gpu for start, (end, gpu) in list(cls.places.items()) if start <= address < end)
        return next(found, -1)


class _Pinned:
    def __init__(self, nbytes: int) -> None:
        self._bytes = np.empty(nbytes, np.uint8)
        self.ptr = self._bytes.ctypes.data


class _MemoryPointer:
    def __init__(self, memory: Memory, _offset: int) -> None:
        self.bytes, self.ptr = memory.bytes, memory.ptr

    def memset(self, value: int, nbytes: int) -> None:
        """Fill its beginning."""
        self.bytes[:nbytes] = value


class _Stream:
    """A stream of the driver's; the current one of its thread within it."""

    def __init__(self, *, non_blocking: bool = False, priority: int = 0) -> None:
        self.ptr: int = _new_stream(_gpu(Device().id))
        self._sources: list[Any] = []
        self._end = weakref.finalize(self, _end_stream, self.ptr)
        self._end.atexit = False  # what a stream still has when the process ends is not waited for

    def __enter__(self) -> Self:
        self._former, _current.stream = getattr(_current, "stream", None), self
        return self

    def __exit__(self, *_: object) -> None:
        _current.stream = self._former

    def synchronize(self) -> None:
        """Until all of it is done."""
        _synchronize(self.ptr)
        self._sources.clear()

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        """Overwrite one array with another of its shape."""
        rows = _rows(target)
        source = np.ascontiguousarray(source)
        self._sources.append(source)
        width = target.nbytes // rows
        pitch = target.strides[0] if rows > 1 else width
        _copy(self.ptr, target.ctypes.data, pitch, source.ctypes.data, width, width, rows)

    def read(self, source: np.ndarray) -> np.ndarray:
        """An array that will be a copy of another one."""
        made = _empty(source.shape, source.dtype)
        rows = _rows(source)
        width = source.nbytes // rows
        pitch = source.strides[0] if rows > 1 else width
        _copy(self.ptr, made.ctypes.data, width, source.ctypes.data, pitch, width, rows)
        return made


def _empty(shape: Any, dtype: Any) -> np.ndarray:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    made: np.ndarray = Memory(nbytes).bytes[:nbytes].view(dtype).reshape(shape)
    return made


def _rows(array: np.ndarray) -> int:
    """1 for memory in one piece, else the length of the first axis, whose elements each are one."""
    if array.flags.c_contiguous:
        return 1
    assert array[0].flags.c_contiguous, "no such distances between elements"
    return len(array)


class ndarray:  # noqa: N801
    """Memory of the GPU. It shows itself by ``__cuda_array_interface__`` alone."""

    def __init__(self, shape: Any, dtype: Any, memptr: _MemoryPointer) -> None:
        self._array: np.ndarray = memptr.bytes.view(dtype).reshape(shape)

    @classmethod
    def _view(cls, array: np.ndarray) -> ndarray:
        """Of memory that another one has."""
        made = cls.__new__(cls)
        made._array = array
        return made

    @classmethod
    def _of(cls, values: np.ndarray) -> ndarray:
        """With memory of its own."""
        made = cls._view(_empty(values.shape, values.dtype))
        made._array[...] = values
        return made

    @property
    def device(self) -> Device:
        return Device(Memory.device_of(self._array.ctypes.data))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        shown = self._array.__array_interface__
        return {"version": 3, **{key: shown[key] for key in ("data", "shape", "typestr", "strides")}}

    @property
    def dtype(self) -> Any:
        return self._array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def size(self) -> int:
        return self._array.size

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: Any) -> ndarray:
        return ndarray._view(self._array[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        value = value._array if isinstance(value, ndarray) else np.asarray(value, self._array.dtype)
        stream = getattr(_current, "stream", None)
        if stream is None:
            self._array[index] = value
        else:
            target = self._array[index]
            stream.copy(target, np.broadcast_to(value, target.shape))

    def copy(self) -> ndarray:
        """Another one with its elements."""
        stream = getattr(_current, "stream", None)
        return ndarray._of(self._array) if stream is None else ndarray._view(stream.read(self._array))

    def set(self, values: np.ndarray) -> None:
        """Fill it from the host."""
        self[...] = values

    @property
    def data(self) -> Any:
        """Where it is."""
        return SimpleNamespace(ptr=self._array.ctypes.data)

    def get(self) -> np.ndarray:
        """Its elements on the host."""
        stream = getattr(_current, "stream", None)
        if stream is not None:
            stream.synchronize()
        return self._array.copy()

    def view(self, dtype: Any) -> ndarray:
        """The same bytes as elements of another type."""
        return ndarray._view(self._array.view(dtype))

    def reshape(self, *shape: Any) -> ndarray:
        """The same elements."""
        return ndarray._view(self._array.reshape(*shape))

    def tolist(self) -> Any:
        """Its elements."""
        return self._array.tolist()

    def any(self) -> bool:
        """Whether one is not 0."""
        return bool(self._array.any())


ndarray.__name__ = ndarray.__qualname__ = "ndarray"


class _CudaError(RuntimeError):
    """What CuPy raises for errors of the runtime and the driver."""


class RawKernel:
    """A kernel of a test: one that spins, or one that ends the context."""

    def __init__(self, code: str, name: str) -> None:
        assert name in ("spin", "trap"), f"no such kernel: {code}"
        self._name = name

    def __call__(self, _grid: Any, _block: Any, arguments: Any) -> None:
        stream = _current.stream.ptr
        if self._name == "trap":
            _trap(stream)
        else:
            _pause(stream, arguments[0] // _CYCLES_A_MICROSECOND)


class RawModule:
    """The swap kernels."""

    def __init__(self, **_: Any) -> None:
        self._gpu = _gpu(Device().id)

    def get_function(self, name: str) -> Any:
        """One of them."""
        names = ("fdcache_copy_in", "fdcache_copy_out", "fdcache_sum", "fdcache_copy_words")
        return SimpleNamespace(kernel=SimpleNamespace(ptr=_kernel(self._gpu, names.index(name))))


def asarray(values: Any) -> ndarray:
    """Of the host's values."""
    return values if isinstance(values, ndarray) else ndarray._of(np.asarray(values))


def asnumpy(array: ndarray) -> np.ndarray:
    """Its elements on the host."""
    return array.get()


def ascontiguousarray(array: ndarray) -> ndarray:
    """With all its elements in one piece."""
    return ndarray._of(array._array)


def zeros(shape: Any, dtype: Any = np.float64) -> ndarray:
    """Nothing but zeros."""
    return ndarray._of(np.zeros(shape, dtype))


def arange(count: int, dtype: Any = None) -> ndarray:
    """0, 1, 2, ..."""
    return ndarray._of(np.arange(count, dtype=dtype))


def array_equal(one: ndarray, other: ndarray) -> bool:
    """Whether all elements are the same."""
    return np.array_equal(one._array, other._array)


def get_default_memory_pool() -> Any:
    """Of a pool that gives everything back."""
    return SimpleNamespace(free_all_blocks=lambda: None, used_bytes=lambda: Memory.used)


def _as_strided(flat: ndarray, shape: Any, strides: Any) -> ndarray:
    return ndarray._view(np.lib.stride_tricks.as_strided(flat._array, shape, strides))


lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=_as_strided))
cuda = SimpleNamespace(
    Device=Device,
    Memory=Memory,
    MemoryPointer=_MemoryPointer,
    Stream=_Stream,
    alloc_pinned_memory=_Pinned,
    memory=SimpleNamespace(OutOfMemoryError=type("OutOfMemoryError", (MemoryError,), {})),
    compiler=SimpleNamespace(CompileException=type("CompileException", (Exception,), {})),
    driver=SimpleNamespace(CUDADriverError=_CudaError),
    runtime=SimpleNamespace(
        CUDARuntimeError=_CudaError,
        getDevice=lambda: Device().id,
        getDeviceCount=_visible,
        driverGetVersion=lambda: 13000,
        getDeviceProperties=lambda _: {"name": b"stand-in", "multiProcessorCount": 132},
        deviceGetPCIBusId=lambda ordinal: f"ffff:ff:1f.{_gpu(ordinal)}",
        deviceSynchronize=_synchronize_all,
        memGetInfo=lambda: (_TOTAL_BYTES - Memory.used, _TOTAL_BYTES),
        pointerGetAttributes=lambda address: SimpleNamespace(
            device=Memory.device_of(address), devicePointer=address
        ),
    ),
)
