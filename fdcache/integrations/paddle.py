"""Paddle tensors as device planes. This module is the only one of the package that imports Paddle."""

from __future__ import annotations

from typing import Any

import paddle

from fdcache.controller.cache_controller import CacheController
from fdcache.controller.device_planes import plane_blocks
from fdcache.layout import KVLayout, Plane


def allocate_planes(layout: KVLayout, num_blocks: int) -> list[paddle.Tensor]:
    """Zero-filled tensors for ``CacheController.register_kv_cache``: one for each of ``layout.planes``.

    Shapes are (blocks, *plane.shape), on Paddle's current device; a draft layer has ``layout.draft_blocks(num_blocks)``
    blocks. Paddle keeps the memory, so its kernels use the tensors like any others.
    """
    if num_blocks < 1:
        raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
    return [_zeros(plane, plane_blocks(layout, plane, num_blocks)) for plane in layout.planes]


def view_planes(controller: CacheController, num_blocks: int) -> list[paddle.Tensor]:
    """Let the controller allocate its device planes and view them, without a copy, as Paddle tensors.

    The other way round from ``allocate_planes``: fdcache keeps the memory, ``sleep`` gives it back. Views are valid
    until ``sleep``, ``free_cache`` or ``shutdown``. NumPy has neither bfloat16 nor fp8, so on the CPU planes of these
    dtypes come as their bytes and are viewed as what they are.
    """
    arrays = controller.initialize_kv_cache(num_blocks)
    planes = controller.layout.planes
    return [_view(array, plane) for array, plane in zip(arrays, planes, strict=True)]


def _zeros(plane: Plane, num_blocks: int) -> paddle.Tensor:
    """Paddle cannot fill fp8, but bytes."""
    dtype: Any = getattr(paddle, plane.dtype)
    shape = [num_blocks, *plane.shape]
    if plane.dtype.startswith("float8"):
        return paddle.zeros(shape, dtype="uint8").view(dtype)
    return paddle.zeros(shape, dtype=dtype)


def _view(array: Any, plane: Plane) -> paddle.Tensor:
    tensor = paddle.from_dlpack(array)
    dtype: Any = getattr(paddle, plane.dtype)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
