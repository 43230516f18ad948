"""Arrays. What is done to them within a stream is done in its order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from . import driver
from .memory import Device, MemoryPointer, current, empty


class ndarray:  # noqa: N801
    """Memory of the GPU. It shows itself by ``__cuda_array_interface__`` alone."""

    def __init__(self, shape: Any, dtype: Any, memptr: MemoryPointer) -> None:
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
        made = cls._view(empty(values.shape, values.dtype))
        made._array[...] = values
        return made

    @property
    def device(self) -> Device:
        return Device(driver.owner(self._array.ctypes.data))

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
        stream = getattr(current, "stream", None)
        if stream is None:
            self._array[index] = value
        else:
            target = self._array[index]
            stream.copy(target, np.broadcast_to(value, target.shape))

    def copy(self) -> ndarray:
        """Another one with its elements."""
        stream = getattr(current, "stream", None)
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
        stream = getattr(current, "stream", None)
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
        """True if an element is not 0."""
        return bool(self._array.any())


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
    """True if all elements are equal."""
    return np.array_equal(one._array, other._array)


def as_strided(flat: ndarray, shape: Any, strides: Any) -> ndarray:
    """Elements of a flat one, so many bytes apart."""
    return ndarray._view(np.lib.stride_tricks.as_strided(flat._array, shape, strides))
