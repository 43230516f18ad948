"""Evict and load blocks of Paddle tensors on Paddle's current device: python -m tests.paddle_planes [NAME...].

It runs with the installed release of Paddle, in a process of its own, because two releases cannot share one.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from fdcache.controller.cache_controller import CacheController
from fdcache.errors import TensorError
from fdcache.integrations.paddle import allocate_planes, current_device, current_stream
from fdcache.layout import KVLayout
from fdcache.settings.cache import CopySettings
from tests.swaps import PATIENCE, plan, uniform_layout

BLOCKS = 32
LAYOUTS = {
    "float16": uniform_layout(dtype="float16", num_layers=8),
    "bfloat16": uniform_layout(dtype="bfloat16", num_layers=8),
    "fp8 as bytes": uniform_layout(dtype="float8_e4m3fn", num_layers=8),
    "draft layers": uniform_layout(dtype="float16", num_layers=7, num_draft_layers=1),
}
_ARRAYS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}


def random_bytes(layout: KVLayout) -> list[np.ndarray]:
    """Return random bytes for each plane, one row per block."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (BLOCKS, plane.nbytes), dtype=np.uint8) for plane in layout.planes]


def brought_by_the_engine(layout: KVLayout, data: Sequence[np.ndarray]) -> list[Any]:
    """Return tensors with these bytes; copying them to the device launches no kernel."""
    return [
        paddle.to_tensor(rows.view(_ARRAYS.get(plane.dtype, plane.dtype)).reshape(BLOCKS, *plane.shape))
        for plane, rows in zip(layout.planes, data, strict=True)
    ]


def write(tensor: Any, data: np.ndarray) -> None:
    """Overwrite the memory of a tensor in place."""
    if paddle.device.get_device() == "cpu":
        ctypes.memmove(tensor.data_ptr(), data.ctypes.data, data.nbytes)
    else:
        import cupy

        cupy.cuda.runtime.memcpy(tensor.data_ptr(), data.ctypes.data, data.nbytes, 1)


def content(tensors: Sequence[Any]) -> list[np.ndarray]:
    """Return the bytes of each tensor, one row per block."""
    return [np.ascontiguousarray(tensor.numpy()).view(np.uint8).reshape(BLOCKS, -1) for tensor in tensors]


def new_controller(layout: KVLayout) -> CacheController:
    settings = CopySettings(drain_timeout=PATIENCE, layer_timeout=PATIENCE)
    return CacheController(settings, layout, device=current_device(settings))


def evict_and_load(controller: CacheController, tensors: Sequence[Any]) -> None:
    """Evict the first half of the blocks and load it into the second in reverse, layer by layer on Paddle's stream."""
    layout, half = controller.layout, BLOCKS // 2
    controller.initialize_host_cache(half)
    before = content(tensors)
    out = plan(1, evict=[(slot, half - 1 - slot) for slot in range(half)])
    back = plan(2, load=[(slot, half + slot) for slot in range(half)])
    for each in (out, back):
        stream = current_stream()
        counter = controller.submit_swap_tasks(each, stream)
        for layer in range(layout.num_layers + layout.num_draft_layers):
            counter.wait_for_layer(layer, stream=stream)
        (report,) = controller.wait_reports(PATIENCE)
        assert not any(result.failed.size for result in report.results), report
    for was, now in zip(before, content(tensors), strict=True):
        assert np.array_equal(now[:half], was[:half])
        assert np.array_equal(now[half:], was[:half][::-1])
        assert not np.array_equal(now[half:], was[half:])


def check_registered(name: str) -> None:
    """Check eviction and load of tensors made by the engine."""
    layout = LAYOUTS[name]
    controller = new_controller(layout)
    tensors = brought_by_the_engine(layout, random_bytes(layout))
    controller.register_kv_cache(tensors)
    evict_and_load(controller, tensors)
    controller.shutdown()


def check_allocated(name: str) -> None:
    """Check that tensors allocated by fdcache are zero-filled, and their eviction and load."""
    layout = LAYOUTS[name]
    for by_controller in (True, False):
        controller = new_controller(layout)
        if by_controller:
            tensors = controller.initialize_kv_cache(BLOCKS, framework="paddle")
        else:
            tensors = allocate_planes(layout, BLOCKS)
            controller.register_kv_cache(tensors)
        for tensor, plane in zip(tensors, layout.planes, strict=True):
            assert tensor.shape == [BLOCKS, *plane.shape]
            assert tensor.dtype == getattr(paddle, plane.dtype)
        for tensor, rows in zip(tensors, random_bytes(layout), strict=True):
            assert not np.ascontiguousarray(tensor.numpy()).view(np.uint8).any()
            write(tensor, rows)
        evict_and_load(controller, tensors)
        controller.shutdown()


def check_missing_dtype(name: str) -> None:
    """Check that a dtype missing in the release is refused by name before memory is allocated."""
    controller = new_controller(LAYOUTS[name])
    try:
        controller.initialize_kv_cache(BLOCKS, framework="paddle")
    except TensorError as error:
        assert f"Paddle {paddle.version.full_version} has no {LAYOUTS[name].planes[0].dtype}" in str(error)
        assert "uint8" in str(error)
    else:
        raise AssertionError("a dtype that is missing was not refused")
    controller.shutdown()


def check(name: str) -> None:
    """Run all checks of one layout."""
    check_registered(name)
    if all(hasattr(paddle, plane.dtype) for plane in LAYOUTS[name].planes):
        check_allocated(name)
    else:
        check_missing_dtype(name)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or LAYOUTS:
        check(chosen)
        planes = len(LAYOUTS[chosen].planes)
        where = paddle.device.get_device()
        sys.stdout.write(
            f"Paddle {paddle.version.full_version} on {where}: {chosen}: {BLOCKS} blocks of {planes} planes\n"
        )
