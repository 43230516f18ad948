"""Streams, and what a test puts on them."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from . import driver
from .memory import Device, current, empty

_CYCLES_A_MICROSECOND = 1755
_LEAST_PAUSE = 500_000
"""Microseconds that a kernel spins at least: what has to happen meanwhile happens on a busy machine."""


class Stream:
    """A stream of the driver's; the current one of its thread within it."""

    def __init__(self, *, non_blocking: bool = False, priority: int = 0) -> None:
        self.ptr: int = driver.new_stream(driver.gpu(Device().id))
        self._in_use: list[np.ndarray] = []  # as memory of a pool, it outlives what the stream still does
        self._former: list[Stream | None] = []
        self._end = weakref.finalize(self, driver.end_stream, self.ptr)
        self._end.atexit = False  # what a stream still has when the process ends is not waited for

    def __enter__(self) -> Self:
        self._former.append(getattr(current, "stream", None))
        current.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        current.stream = self._former.pop()

    def synchronize(self) -> None:
        """Until all of it is done."""
        driver.synchronize(self.ptr)
        self._in_use.clear()

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        """Overwrite one array with another of its shape."""
        rows = rows_of(target)
        source = np.ascontiguousarray(source)
        self._in_use += target, source
        width = target.nbytes // rows
        pitch = target.strides[0] if rows > 1 else width
        driver.copy(self.ptr, target.ctypes.data, pitch, source.ctypes.data, width, width, rows)

    def read(self, source: np.ndarray) -> np.ndarray:
        """An array that will be a copy of another one."""
        made = empty(source.shape, source.dtype)
        self._in_use += made, source
        rows = rows_of(source)
        width = source.nbytes // rows
        pitch = source.strides[0] if rows > 1 else width
        driver.copy(self.ptr, made.ctypes.data, width, source.ctypes.data, pitch, width, rows)
        return made


def rows_of(array: np.ndarray) -> int:
    """1 for memory in one piece, else the length of the first axis, whose elements each are one."""
    if array.flags.c_contiguous:
        return 1
    assert array[0].flags.c_contiguous, "no such distances between elements"
    return len(array)


class RawKernel:
    """A kernel of a test: one that spins, or one that ends the context."""

    def __init__(self, code: str, name: str) -> None:
        assert name in ("spin", "trap"), f"no such kernel: {code}"
        self._name = name

    def compile(self) -> None:
        """It is there already."""

    def __call__(self, _grid: Any, _block: Any, arguments: Any) -> None:
        stream = current.stream.ptr
        if self._name == "trap":
            driver.trap(stream)
        else:
            driver.pause(stream, max(arguments[0] // _CYCLES_A_MICROSECOND, _LEAST_PAUSE))


class RawModule:
    """The swap kernels."""

    def __init__(self, **_: Any) -> None:
        self._gpu = driver.gpu(Device().id)

    def get_function(self, name: str) -> Any:
        """One of them."""
        names = (
            "fdcache_copy_in",
            "fdcache_copy_out",
            "fdcache_sum",
            "fdcache_copy_words",
            "fdcache_read_peer",
        )
        return SimpleNamespace(kernel=SimpleNamespace(ptr=driver.kernel(self._gpu, names.index(name))))
