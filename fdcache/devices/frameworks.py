"""One plane's memory as a tensor of the framework that computes with it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from fdcache.errors import TensorError
from fdcache.layout import Plane
from fdcache.planes import DTYPE_BYTES

_ARRAY_DTYPES = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""What stands for dtypes that NumPy and CuPy do not have."""


def as_tensor(memory: Any, plane: Plane, num_blocks: int, framework: str) -> Any:
    """``memory``, a one-dimensional uint8 array, as a tensor of shape (num_blocks, *plane.shape).

    Blocks are ``plane.device_stride`` bytes apart; the tensor keeps the memory alive. NumPy and CuPy get
    bfloat16 as uint16 and fp8 as uint8. Raises ``TensorError`` for an unknown or missing framework, for one that
    cannot have this memory, and for a stride that is not a multiple of the element.
    """
    if framework not in FRAMEWORKS:
        raise TensorError(f"framework {framework!r} is unknown; use one of {', '.join(FRAMEWORKS)}")
    here, elsewhere = ("a CPU", "cupy") if isinstance(memory, np.ndarray) else ("a GPU", "numpy")
    if framework == elsewhere:
        usable = ", ".join(each for each in FRAMEWORKS if each != elsewhere)
        raise TensorError(
            f"framework {framework!r} has no tensors in the memory of {here}; use one of {usable}"
        )
    if plane.device_stride % DTYPE_BYTES[plane.dtype]:
        raise TensorError(
            f"plane {plane.kind.value} of layer {plane.layer}: device_stride {plane.device_stride} is "
            f"not a multiple of the {DTYPE_BYTES[plane.dtype]} bytes of {plane.dtype}"
        )
    try:
        module = importlib.import_module(framework)
    except ImportError as error:
        raise TensorError(f"framework {framework!r} is not installed: {error}") from error
    return FRAMEWORKS[framework](module, memory, plane, num_blocks)


def _strides(plane: Plane) -> list[int]:
    """Elements from one index to the next, for each axis."""
    strides = [1]
    for size in reversed(plane.shape[1:]):
        strides.insert(0, strides[0] * size)
    return [plane.device_stride // DTYPE_BYTES[plane.dtype], *strides]


def _array(module: ModuleType, memory: Any, plane: Plane, num_blocks: int) -> Any:
    dtype = module.dtype(_ARRAY_DTYPES.get(plane.dtype, plane.dtype))
    strides = [step * dtype.itemsize for step in _strides(plane)]
    flat = memory.view(dtype)
    return module.lib.stride_tricks.as_strided(flat, (num_blocks, *plane.shape), strides)


def _torch(module: ModuleType, memory: Any, plane: Plane, num_blocks: int) -> Any:
    flat = module.from_dlpack(memory).view(getattr(module, plane.dtype))
    return flat.as_strided((num_blocks, *plane.shape), _strides(plane))


def _paddle(module: ModuleType, memory: Any, plane: Plane, num_blocks: int) -> Any:
    flat = module.utils.dlpack.from_dlpack(memory).view(plane.dtype)
    if plane.device_stride == plane.nbytes:
        return flat.reshape([num_blocks, *plane.shape])
    return module.as_strided(flat, [num_blocks, *plane.shape], _strides(plane))


FRAMEWORKS: dict[str, Callable[[ModuleType, Any, Plane, int], Any]] = {
    "numpy": _array,
    "cupy": _array,
    "torch": _torch,
    "paddle": _paddle,
}
"""How each framework takes memory over; the keys are what ``framework=`` may be."""
