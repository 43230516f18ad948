"""Devices and their memory, which is the host's."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from typing import Any, Self

import numpy as np

from . import driver

current = threading.local()
"""The device and the stream of each thread."""


class Device:
    """A GPU; the current one of its thread within it, or after ``use``."""

    def __init__(self, ordinal: int | None = None) -> None:
        self.id: int = getattr(current, "device", 0) if ordinal is None else ordinal
        self._former: list[int] = []

    def use(self) -> None:
        """Be current from now on."""
        current.device = self.id

    def __enter__(self) -> Self:
        self._former.append(Device().id)
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        current.device = self._former.pop()

    def synchronize(self) -> None:
        """Until all streams have done what they have."""
        driver.synchronize_all()


class OutOfMemoryError(MemoryError):
    """The machine has not as much."""


def _allocate(nbytes: int, gpu: int) -> np.ndarray:
    made = np.empty(max(nbytes, 1), np.uint8)
    driver.know(made.ctypes.data, made.nbytes, gpu)
    weakref.finalize(made, driver.forget, made.ctypes.data).atexit = False
    return made


def _allocate_shared(nbytes: int, gpu: int) -> np.ndarray:
    """Memory that other processes can open. Its views keep its base alive, not the array."""
    descriptor = os.memfd_create("stand-in")
    os.ftruncate(descriptor, max(nbytes, 1))
    try:
        mapped = mmap.mmap(descriptor, max(nbytes, 1))
    except OSError as error:
        os.close(descriptor)
        raise OutOfMemoryError(str(error)) from error
    made = np.ndarray(len(mapped), np.uint8, mapped)
    driver.know(made.ctypes.data, made.nbytes, gpu)
    driver.share(made.ctypes.data, descriptor)
    weakref.finalize(mapped, _forget_shared, made.ctypes.data, descriptor).atexit = False
    return made


def _forget_shared(address: int, descriptor: int) -> None:
    driver.share(address, -1)
    driver.forget(address)
    os.close(descriptor)


class Memory:
    """Bytes of the current GPU. ``used`` counts those of all GPUs, ``made`` the allocations there ever were.

    Memory of a pool, which arrays are made of, cannot be opened by other processes.
    """

    made = used = 0

    def __init__(self, nbytes: int, *, pooled: bool = False) -> None:
        self.bytes = (_allocate if pooled else _allocate_shared)(nbytes, Device().id)
        self.ptr = self.bytes.ctypes.data
        Memory.made += 1
        Memory.used += nbytes
        weakref.finalize(self.bytes if pooled else self.bytes.base, Memory._free, nbytes)

    @classmethod
    def _free(cls, nbytes: int) -> None:
        cls.used -= nbytes


class Pinned:
    """Bytes of the host that every GPU reaches."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = _allocate(nbytes, -1)
        self.ptr = self._bytes.ctypes.data


class MemoryPointer:
    def __init__(self, memory: Memory, offset: int) -> None:
        self.bytes, self.ptr = memory.bytes[offset:], memory.ptr + offset

    def memset(self, value: int, nbytes: int) -> None:
        """Fill its beginning."""
        self.bytes[:nbytes] = value


def empty(shape: Any, dtype: Any) -> np.ndarray:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    made: np.ndarray = Memory(nbytes, pooled=True).bytes[:nbytes].view(dtype).reshape(shape)
    return made
