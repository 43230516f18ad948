"""Paddle tensors as device planes. This module is the only one of the package that imports Paddle."""

from __future__ import annotations

import paddle

from fdcache.controller.cache_controller import CacheController
from fdcache.controller.device_planes import plane_blocks
from fdcache.layout import KVLayout


def allocate_planes(layout: KVLayout, num_blocks: int) -> list[paddle.Tensor]:
    """Zero-filled tensors for ``CacheController.register_kv_cache``: one for each of ``layout.planes``.

    Shapes are (blocks, *plane.shape), on Paddle's current device; a draft layer has ``layout.draft_blocks(num_blocks)``
    blocks. Paddle keeps the memory, so its kernels use the tensors like any others.
    """
    if num_blocks < 1:
        raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
    return [
        paddle.zeros([plane_blocks(layout, plane, num_blocks), *plane.shape], dtype="uint8").view(plane.dtype)
        if plane.dtype.startswith("float8")
        else paddle.zeros([plane_blocks(layout, plane, num_blocks), *plane.shape], dtype=plane.dtype)
        for plane in layout.planes
    ]


def view_planes(controller: CacheController, num_blocks: int) -> list[paddle.Tensor]:
    """Let the controller allocate its device planes and view them, without a copy, as Paddle tensors.

    The other way round from ``allocate_planes``: fdcache keeps the memory, ``sleep`` gives it back. Views are valid
    until ``sleep``, ``free_cache`` or ``shutdown``. NumPy has neither bfloat16 nor fp8, so on the CPU planes of these
    dtypes come as their bytes and are viewed as what they are.
    """
    arrays = controller.initialize_kv_cache(num_blocks)
    planes = controller.layout.planes
    return [_view(array, plane.dtype) for array, plane in zip(arrays, planes, strict=True)]


def _view(array: object, dtype: str) -> paddle.Tensor:
    tensor = paddle.from_dlpack(array)
    return tensor if str(tensor.dtype).endswith(dtype) else tensor.view(dtype)
