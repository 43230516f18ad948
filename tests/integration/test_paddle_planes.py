"""Paddle tensors as device planes, allocated by Paddle or by fdcache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fdcache import CacheController, CopySettings, KVLayout
from fdcache.devices.cpu import CpuDevice
from tests.swaps import plan, uniform_layout

paddle = pytest.importorskip("paddle")
planes_in = pytest.importorskip("fdcache.integrations.paddle")

LAYOUTS = {
    **{dtype: uniform_layout(dtype=dtype) for dtype in ("float32", "float16", "bfloat16", "int8", "uint8")},
    "fp8": KVLayout.block_fp8(model="m", revision="r", num_layers=2, block_size=4, kv_heads=2, head_dim=8),
    "mla": KVLayout.mla(
        model="m", revision="r", num_layers=2, block_size=4, latent_dim=24, dtype="bfloat16", indexer_dim=8
    ),
    "draft": uniform_layout(num_draft_layers=1, draft_block_ratio=1.5),
}


def registered(controller: CacheController, num_blocks: int) -> list[Any]:
    tensors: list[Any] = planes_in.allocate_planes(controller.layout, num_blocks)
    controller.register_kv_cache(tensors)
    return tensors


def viewed(controller: CacheController, num_blocks: int) -> list[Any]:
    tensors: list[Any] = controller.initialize_kv_cache(num_blocks, framework="paddle")
    return tensors


def bytes_of(tensor: Any, block: int) -> bytes:
    data: bytes = tensor.view("uint8")[block].numpy().tobytes()
    return data


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("make", [registered, viewed])
def test_bytes_written_by_paddle_survive_eviction_and_load(
    layout: KVLayout, make: Callable[[CacheController, int], list[Any]]
) -> None:
    with CacheController(CopySettings(), layout, device=planes_in.current_device()) as controller:
        tensors = make(controller, 6)
        controller.initialize_host_cache(4)
        shapes = [[9 if layout.is_draft(plane.layer) else 6, *plane.shape] for plane in layout.planes]
        assert [(tensor.shape, str(tensor.dtype)) for tensor in tensors] == [
            (shape, f"paddle.{plane.dtype}") for shape, plane in zip(shapes, layout.planes, strict=True)
        ]
        for tensor in tensors:
            raw = tensor.view("uint8")
            raw[:] = paddle.randint(0, 256, raw.shape).astype("uint8")
        before = [bytes_of(tensor, 2) for tensor in tensors]
        controller.submit_swap_tasks(plan(1, evict=[(2, 3)])).wait_all()
        controller.submit_swap_tasks(plan(2, load=[(3, 5)])).wait_all()
        assert [bytes_of(tensor, 5) for tensor in tensors] == before


def test_the_current_device_is_paddles() -> None:
    assert isinstance(planes_in.current_device(), CpuDevice)
    assert planes_in.current_stream() is None


def test_no_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        planes_in.allocate_planes(uniform_layout(), 0)
