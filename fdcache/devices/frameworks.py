"""Tensors of NumPy, CuPy, torch and Paddle over the memory of a plane."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from fdcache.errors import TensorError
from fdcache.layout_planes import DTYPE_BYTES, Plane

_ARRAY_DTYPES = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""Substitutes for dtypes that NumPy and CuPy do not have."""


def as_tensor(memory: Any, plane: Plane, num_blocks: int, framework: str) -> Any:
    """Return ``memory``, a one-dimensional uint8 array, as a tensor of shape (num_blocks, *plane.shape).

    Blocks are ``plane.device_stride`` bytes apart; the tensor keeps the memory alive. NumPy and CuPy represent
    bfloat16 as uint16 and fp8 as uint8. Raises ``TensorError`` for an unknown or missing framework, for one that
    cannot use this memory, and for a stride that is not a multiple of the element size.
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
    return FRAMEWORKS[framework](_module(framework), memory, plane, num_blocks)


def allocate_by_framework(
    framework: str | None, plane: Plane, num_blocks: int, gpu: int | None
) -> Any | None:
    """Return a zero-filled tensor in the framework's own memory if it cannot use fdcache's, else None.

    Paddle before 3.0 copies memory that it receives through DLPack. ``gpu`` is the ordinal of the visible GPU, None
    for the CPU. Nothing is launched on the GPU. Raises ``TensorError`` for a dtype that this release lacks.
    """
    if framework != "paddle":
        return None
    paddle = _module(framework)
    if hasattr(paddle.Tensor, "__dlpack__"):
        return None
    return zeros_in_paddle(
        paddle, plane, num_blocks, paddle.CPUPlace() if gpu is None else paddle.CUDAPlace(gpu)
    )


def zeros_in_paddle(paddle: ModuleType, plane: Plane, num_blocks: int, place: Any) -> Any:
    """Return a zero-filled Paddle tensor of shape (num_blocks, *plane.shape), blocks ``plane.device_stride`` apart.

    The zeros are copied from the host, because releases whose kernels do not run on a GPU can still copy there.
    """
    dtype = _array_dtype(plane)
    if not hasattr(paddle, plane.dtype):
        raise TensorError(
            f"Paddle {paddle.__version__} has no {plane.dtype}; register uint8 tensors of the same shape, or install "
            "Paddle 3.0 or newer"
        )
    if plane.device_stride == plane.nbytes:
        tensor = paddle.to_tensor(np.zeros((num_blocks, *plane.shape), dtype), place=place)
        return tensor if dtype.itemsize > 1 else tensor.view(getattr(paddle, plane.dtype))
    flat = paddle.to_tensor(np.zeros(num_blocks * plane.device_stride // dtype.itemsize, dtype), place=place)
    return paddle.as_strided(flat, [num_blocks, *plane.shape], _strides(plane))


def exported(tensor: Any) -> Any:
    """Return an object for DLPack: the tensor, or its capsule for the tensors of Paddle before 3.0."""
    if not hasattr(tensor, "__dlpack__") and type(tensor).__module__.partition(".")[0] == "paddle":
        return sys.modules["paddle"].utils.dlpack.to_dlpack(tensor)
    return tensor


def _module(framework: str) -> ModuleType:
    importlib.import_module(
        "zlib"
    )  # first, since Paddle before 3.0 replaces the functions of one that is loaded later
    try:
        return importlib.import_module(framework)
    except ImportError as error:
        raise TensorError(f"framework {framework!r} is not installed: {error}") from error


def _array_dtype(plane: Plane) -> np.dtype[Any]:
    return np.dtype(_ARRAY_DTYPES.get(plane.dtype, plane.dtype))


def _strides(plane: Plane) -> list[int]:
    """Return the stride of each axis, in elements."""
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
"""Functions that wrap memory, by the name of the framework."""
