"""Paddle tensors as device planes. This module is the only one of the package that imports Paddle."""

from __future__ import annotations

import zlib  # noqa: F401  (first, since Paddle before 3.0 replaces the functions of a zlib that is loaded later)
from typing import Any, Never

import paddle

from fdcache.controller.device_planes import plane_blocks
from fdcache.devices.base import Device
from fdcache.devices.cpu import CpuDevice, memory_bytes
from fdcache.devices.frameworks import zeros_in_paddle
from fdcache.errors import TensorError, UnsupportedCallError
from fdcache.layout import KVLayout
from fdcache.layout_planes import Plane
from fdcache.settings.cache import CopySettings


def current_device(settings: CopySettings | None = None) -> Device:
    """Return the device of Paddle's current place: CPU memory, or the GPU chosen with ``paddle.set_device``.

    ``settings`` are the controller's transfer settings; they decide how the device copies and verifies.
    """
    settings = settings or CopySettings()
    kind, _, ordinal = paddle.device.get_device().partition(":")
    if kind == "cpu":
        return CpuDevice.of(settings)
    if kind == "gpu":
        from fdcache.devices.cuda import CudaDevice

        return CudaDevice(int(ordinal or 0), settings=settings)
    raise TensorError(
        f"Paddle's device is {kind}; fdcache supports cpu and gpu, so choose one with paddle.set_device"
    )


def device_bytes(ranks: int = 1) -> int:
    """Return the memory of one rank's device in bytes: the current GPU's, or a rank's share of this machine's.

    ``FDCACHE_DEVICE_MEMORY`` may be a share of it.
    """
    kind, _, ordinal = paddle.device.get_device().partition(":")
    if kind == "gpu":
        return int(paddle.device.cuda.get_device_properties(int(ordinal or 0)).total_memory)
    return memory_bytes(ranks)


def current_stream() -> Any | None:
    """Return the stream that Paddle computes on, for ``CacheController.submit_swap_tasks``; None on a CPU."""
    if paddle.device.get_device().startswith("gpu"):
        return paddle.device.current_stream()
    return None


def allocate_planes(layout: KVLayout, num_blocks: int) -> list[paddle.Tensor]:
    """Allocate zero-filled tensors for ``CacheController.register_kv_cache``, one per plane of the layout.

    Shapes are (blocks, *plane.shape) on Paddle's current device; a draft layer has ``layout.draft_blocks(num_blocks)``
    blocks. Paddle owns the memory. To let fdcache own it, and release it in ``sleep``, use
    ``CacheController.initialize_kv_cache(num_blocks, framework="paddle")`` instead.
    """
    if num_blocks < 1:
        raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
    return [_zeros(plane, plane_blocks(layout, plane, num_blocks)) for plane in layout.planes]


def _zeros(plane: Plane, num_blocks: int) -> paddle.Tensor:
    if not hasattr(paddle.Tensor, "__dlpack__"):
        kind, _, ordinal = paddle.device.get_device().partition(":")
        place = paddle.CUDAPlace(int(ordinal or 0)) if kind == "gpu" else paddle.CPUPlace()
        tensor: paddle.Tensor = zeros_in_paddle(paddle, plane, num_blocks, place)
        return tensor
    # Paddle can fill bytes but not fp8.
    dtype: Any = getattr(paddle, plane.dtype)
    shape = [num_blocks, *plane.shape]
    if plane.dtype.startswith("float8"):
        return paddle.zeros(shape, dtype="uint8").view(dtype)
    return paddle.zeros(shape, dtype=dtype)


def _refuse_ipc(*_: object, **__: object) -> Never:
    raise UnsupportedCallError(
        "KV planes are not shared with another process: the worker that owns the GPU copies its blocks itself; "
        "register the tensors with CacheController.register_kv_cache in that process, and share host memory between "
        "processes with `fdcache serve`"
    )


set_data_ipc = share_external_data = unset_data_ipc = _refuse_ipc
"""Calls of FastDeploy's former transfer process, which mapped planes over CUDA IPC. Raise ``UnsupportedCallError``."""
