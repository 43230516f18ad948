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
from typing import Any, Self

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
_new_stream = _declare("stand_in_stream", result=_handle)
_end_stream = _declare("stand_in_end_stream", _handle)
_synchronize = _declare("stand_in_synchronize", _handle)
_synchronize_all = _declare("stand_in_synchronize_all")
_copy = _declare("stand_in_copy", _handle, _handle, _size, _handle, _size, _size, _size)
_pause = _declare("stand_in_pause", _handle, _unsigned)
_trap = _declare("stand_in_trap", _handle)
_kernel = _declare("stand_in_kernel", _unsigned, result=_handle)

_current = threading.local()

_declare("stand_in_delay", _unsigned, _unsigned)(*map(int, os.environ.get("STAND_IN_DELAYS", "0 0").split()))


class _Stream:
    """A stream of the driver's; the current one of its thread within it."""

    def __init__(self, *, non_blocking: bool = False, priority: int = 0) -> None:
        self.ptr: int = _new_stream()
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
        made = np.empty(source.shape, source.dtype)
        rows = _rows(source)
        width = source.nbytes // rows
        pitch = source.strides[0] if rows > 1 else width
        _copy(self.ptr, made.ctypes.data, width, source.ctypes.data, pitch, width, rows)
        return made


def _rows(array: np.ndarray) -> int:
    """1 for memory in one piece, else the length of the first axis, whose elements each are one."""
    if array.flags.c_contiguous:
        return 1
    assert array[0].flags.c_contiguous, "no such distances between elements"
    return len(array)


class ndarray:  # noqa: N801
    """Memory of the GPU. It shows itself by ``__cuda_array_interface__`` alone."""

    def __init__(self, shape: Any, dtype: Any = np.uint8, memptr: Any = None) -> None:
        self._array: np.ndarray = np.empty(shape, dtype) if memptr is None else memptr.bytes.view(dtype)
        self.device = Device(0)

    @classmethod
    def _of(cls, array: np.ndarray) -> ndarray:
        made = cls.__new__(cls)
        made._array, made.device = array, Device(0)
        return made

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
        return ndarray._of(self._array[index])

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
        return ndarray._of(self._array.copy() if stream is None else stream.read(self._array))

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
        return ndarray._of(self._array.view(dtype))

    def reshape(self, *shape: Any) -> ndarray:
        """The same elements."""
        return ndarray._of(self._array.reshape(*shape))

    def tolist(self) -> Any:
        """Its elements."""
        return self._array.tolist()

    def any(self) -> bool:
        """Whether one is not 0."""
        return bool(self._array.any())


ndarray.__name__ = ndarray.__qualname__ = "ndarray"


class Device:
    """The one GPU."""

    def __init__(self, ordinal: int) -> None:
        self.id = ordinal

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        """Until all streams have done what they have."""
        _synchronize_all()


class Memory:
    """Bytes of the GPU, or pinned ones of the host. ``made`` counts allocations, ``used`` the bytes there are."""

    made = used = 0

    def __init__(self, nbytes: int) -> None:
        Memory.made += 1
        Memory.used += nbytes
        self.bytes = np.empty(nbytes, np.uint8)
        self.ptr = self.bytes.ctypes.data
        weakref.finalize(self.bytes, Memory._free, nbytes)

    @classmethod
    def _free(cls, nbytes: int) -> None:
        cls.used -= nbytes


class _MemoryPointer:
    def __init__(self, memory: Memory, _offset: int) -> None:
        self.bytes, self.ptr = memory.bytes, memory.ptr

    def memset(self, value: int, nbytes: int) -> None:
        """Fill its beginning."""
        self.bytes[:nbytes] = value


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
        pass

    def get_function(self, name: str) -> Any:
        """One of them."""
        names = ("fdcache_copy_in", "fdcache_copy_out", "fdcache_sum", "fdcache_copy_words")
        return SimpleNamespace(kernel=SimpleNamespace(ptr=_kernel(names.index(name))))


def asarray(values: Any) -> ndarray:
    """Of the host's values."""
    return values if isinstance(values, ndarray) else ndarray._of(np.array(values))


def asnumpy(array: ndarray) -> np.ndarray:
    """Its elements on the host."""
    return array.get()


def ascontiguousarray(array: ndarray) -> ndarray:
    """With all its elements in one piece."""
    return ndarray._of(np.ascontiguousarray(array._array))


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
    return ndarray._of(np.lib.stride_tricks.as_strided(flat._array, shape, strides))


lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=_as_strided))
cuda = SimpleNamespace(
    Device=Device,
    Memory=Memory,
    MemoryPointer=_MemoryPointer,
    Stream=_Stream,
    alloc_pinned_memory=Memory,
    memory=SimpleNamespace(OutOfMemoryError=type("OutOfMemoryError", (MemoryError,), {})),
    compiler=SimpleNamespace(CompileException=type("CompileException", (Exception,), {})),
    driver=SimpleNamespace(CUDADriverError=_CudaError),
    runtime=SimpleNamespace(
        CUDARuntimeError=_CudaError,
        getDevice=lambda: 0,
        getDeviceCount=lambda: 1,
        driverGetVersion=lambda: 13000,
        getDeviceProperties=lambda _: {"name": b"stand-in", "multiProcessorCount": 132},
        deviceGetPCIBusId=lambda _: "ffff:ff:1f.0",
        deviceSynchronize=_synchronize_all,
        memGetInfo=lambda: (_TOTAL_BYTES - Memory.used, _TOTAL_BYTES),
        pointerGetAttributes=lambda address: SimpleNamespace(device=0, devicePointer=address),
    ),
)
