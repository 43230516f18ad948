"""Devices and their memory, which is the host's."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any, ClassVar, Self

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


class Memory:
    """Bytes of the current GPU. ``used`` counts those of all GPUs, ``made`` the allocations there ever were."""

    made = used = 0
    _places: ClassVar[dict[int, tuple[int, int]]] = {}
    _freed: ClassVar[deque[int]] = deque()
    _lock = threading.Lock()

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.empty(max(nbytes, 1), np.uint8)
        self.ptr = self.bytes.ctypes.data
        Memory.made += 1
        Memory.used += nbytes
        with Memory._lock:
            Memory._forget_freed()
            Memory._places[self.ptr] = self.ptr + nbytes, Device().id
        weakref.finalize(self.bytes, Memory._free, self.ptr, nbytes)

    @classmethod
    def _free(cls, address: int, nbytes: int) -> None:
        cls.used -= nbytes
        cls._freed.append(address)  # this comes at any time, be it while the places are looked at

    @classmethod
    def _forget_freed(cls) -> None:
        while cls._freed:
            del cls._places[cls._freed.popleft()]

    @classmethod
    def device_of(cls, address: int) -> int:
        """The GPU whose memory that is, -1 for none."""
        with cls._lock:
            cls._forget_freed()
            found = (gpu for start, (end, gpu) in cls._places.items() if start <= address < end)
            return next(found, -1)


class Pinned:
    def __init__(self, nbytes: int) -> None:
        self._bytes = np.empty(nbytes, np.uint8)
        self.ptr = self._bytes.ctypes.data


class MemoryPointer:
    def __init__(self, memory: Memory, offset: int) -> None:
        self.bytes, self.ptr = memory.bytes[offset:], memory.ptr + offset

    def memset(self, value: int, nbytes: int) -> None:
        """Fill its beginning."""
        self.bytes[:nbytes] = value


def empty(shape: Any, dtype: Any) -> np.ndarray:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    made: np.ndarray = Memory(nbytes).bytes[:nbytes].view(dtype).reshape(shape)
    return made
