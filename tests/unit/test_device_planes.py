"""Engine tensors registered as planes: any framework, any distance between blocks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdcache.controller.cache_controller import CacheController
from fdcache.errors import CacheNotReadyError, TensorError
from fdcache.layout import KVLayout
from fdcache.settings.cache import CopySettings
from tests.swaps import plan, uniform_layout

BLOCKS = 6


def raw_bytes(size: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def round_trip(layout: KVLayout, tensors: list[Any], block: Callable[[Any, int], bytes]) -> None:
    """Block 1 goes to the host and comes back as block 4; ``block`` reads a block's bytes."""
    with CacheController(CopySettings(), layout) as controller:
        controller.register_kv_cache(tensors)
        controller.initialize_host_cache(2)
        before = [[block(tensor, slot) for slot in range(BLOCKS)] for tensor in tensors]
        assert all(any(blocks[1]) and blocks[1] != blocks[4] for blocks in before)
        controller.submit_swap_tasks(plan(1, evict=[(1, 0)])).wait_all()
        controller.submit_swap_tasks(plan(2, load=[(0, 4)])).wait_all()
        after = [[block(tensor, slot) for slot in range(BLOCKS)] for tensor in tensors]
    for old, new in zip(before, after, strict=True):
        assert new == [*old[:4], old[1], *old[5:]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16", "float32", "int8"])
def test_paddle_tensors(dtype: str) -> None:
    paddle = pytest.importorskip("paddle")
    layout = uniform_layout(dtype=dtype)
    shape = (BLOCKS, *layout.planes[0].shape)
    tensors = []
    for i in range(len(layout.planes)):
        values = np.random.default_rng(i).uniform(-1, 1, shape).astype(np.float32)
        values = np.rint(100 * values) if dtype == "int8" else values
        tensors.append(paddle.to_tensor(values, place=paddle.CPUPlace()).astype(dtype))

    def block(tensor: Any, slot: int) -> bytes:
        return bytes(tensor[slot].astype("float32").numpy().tobytes())

    round_trip(layout, tensors, block)


def test_paddle_views_into_one_tensor() -> None:
    """Keys and values of a block side by side: blocks of a plane are farther apart than their bytes."""
    paddle = pytest.importorskip("paddle")
    layout = uniform_layout(num_layers=1, dtype="float32")
    values = np.random.default_rng(0).uniform(-1, 1, (BLOCKS, 2, *layout.planes[0].shape)).astype(np.float32)
    both = paddle.to_tensor(values, place=paddle.CPUPlace())
    whole = np.from_dlpack(both)
    views = [whole[:, 0], whole[:, 1]]
    assert views[0].strides[0] == 2 * layout.planes[0].nbytes
    round_trip(layout, views, lambda tensor, slot: np.ascontiguousarray(tensor[slot]).tobytes())


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    layout = uniform_layout(dtype="bfloat16")
    shape = (BLOCKS, *layout.planes[0].shape)
    tensors = [torch.randn(shape).to(torch.bfloat16) for _ in layout.planes]
    round_trip(layout, tensors, lambda tensor, slot: tensor[slot].view(torch.uint8).numpy().tobytes())


def test_numpy_bytes_with_gaps_between_blocks() -> None:
    layout = uniform_layout(dtype="float8_e4m3fn")
    size = layout.planes[0].nbytes
    tensors = [raw_bytes(BLOCKS * (size + 24), i).reshape(BLOCKS, -1)[:, :size] for i in range(8)]
    round_trip(layout, tensors, lambda tensor, slot: tensor[slot].tobytes())


def test_blocks_may_be_farther_apart_than_32_bits_count(tmp_path: Path) -> None:
    layout = uniform_layout(num_layers=1)
    gib, size = 1 << 30, layout.planes[0].nbytes
    memory = np.memmap(tmp_path / "sparse", np.uint8, mode="w+", shape=(6 * gib,))  # a few pages of it exist
    whole = np.asarray(memory)
    tensors = [
        np.lib.stride_tricks.as_strided(whole[at:], shape=(BLOCKS, size), strides=(gib, 1))
        for at in (0, 4096)
    ]
    for seed, tensor in enumerate(tensors):
        for slot in range(BLOCKS):
            tensor[slot] = raw_bytes(size, 10 * seed + slot)
    before = [tensor.copy() for tensor in tensors]
    with CacheController(CopySettings(), layout) as controller:
        controller.register_kv_cache(tensors)
        controller.initialize_host_cache(2)
        controller.submit_swap_tasks(plan(1, evict=[(5, 1)])).wait_all()
        controller.submit_swap_tasks(plan(2, load=[(1, 4)])).wait_all()
    for tensor, old in zip(tensors, before, strict=True):
        assert tensor.tolist() == [*old[:4].tolist(), old[5].tolist(), old[5].tolist()]


def test_draft_planes_may_have_more_blocks() -> None:
    layout = uniform_layout(num_draft_layers=1, draft_block_ratio=2.0, dtype="float16")
    with CacheController(CopySettings(), layout) as controller:
        tensors = controller.initialize_kv_cache(3)
        assert [len(tensor) for tensor in tensors] == [3] * 8 + [6] * 2
    with CacheController(CopySettings(), layout) as controller:
        controller.register_kv_cache(tensors)
    with CacheController(CopySettings(), layout) as controller:
        tensors[-1] = tensors[-1][:3]
        with pytest.raises(TensorError, match=r"value of layer 4: shape .* must begin with 6 blocks"):
            controller.register_kv_cache(tensors)


def test_initialized_planes_are_zero_and_have_the_layouts_shape() -> None:
    layout = uniform_layout(dtype="bfloat16")
    with CacheController(CopySettings(), layout) as controller:
        tensors = controller.initialize_kv_cache(5)
    assert [tensor.shape for tensor in tensors] == [(5, 1, 4, 8)] * 8
    assert {tensor.itemsize for tensor in tensors} == {2}
    assert not any(tensor.any() for tensor in tensors)


class TestRefused:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda good: good[:, :, :2], "a block has 32 bytes, the layout says 64"),
            (lambda good: good.reshape(BLOCKS, 4, 1, 8), r"a block has shape \(4, 1, 8\)"),
            (lambda good: good[1:], "must begin with 6 blocks"),
            (
                lambda good: np.zeros((BLOCKS, 1, 8, 4), np.uint16).transpose(0, 1, 3, 2),
                "leave gaps or transpose axes",
            ),
            (lambda good: np.zeros((BLOCKS, 1, 4, 16), np.uint16)[..., ::2], "leave gaps or transpose axes"),
            (lambda good: np.broadcast_to(good[:1], good.shape), "not a writable tensor"),
            (lambda good: good[::-1], "overlap"),
            (lambda good: "planes", "a str is not a writable tensor"),
        ],
    )
    def test_names_the_plane(self, make: Callable[[Any], Any], message: str) -> None:
        layout = uniform_layout()
        tensors: list[Any] = [np.zeros((BLOCKS, 1, 4, 8), np.uint16) for _ in layout.planes]
        tensors[3] = make(tensors[3])
        with CacheController(CopySettings(), layout) as controller:
            with pytest.raises(TensorError, match=message) as caught:
                controller.register_kv_cache(tensors)
            assert "value of layer 1" in str(caught.value)

    def test_one_tensor_for_two_planes(self) -> None:
        tensor = np.zeros((BLOCKS, 1, 4, 8), np.uint16)
        with (
            CacheController(CopySettings(), uniform_layout()) as controller,
            pytest.raises(TensorError, match="share memory"),
        ):
            controller.register_kv_cache([tensor] * 8)

    @given(data=st.data())
    def test_planes_that_share_a_byte(self, data: st.DataObject) -> None:
        """Both lie in one buffer, at any place and distance; the oracle marks bytes."""
        layout = uniform_layout(num_layers=1, block_size=1, head_dim=4, dtype="uint8")
        memory, marks = np.zeros(256, np.uint8), np.zeros(256, np.uint8)
        size = layout.planes[0].nbytes
        tensors = []
        for _ in layout.planes:
            stride = data.draw(st.sampled_from([size, size + 1, 2 * size, 3 * size, 20]))
            start = data.draw(st.integers(0, 60))
            shape, strides = (BLOCKS, size), (stride, 1)
            tensors.append(np.lib.stride_tricks.as_strided(memory[start:], shape=shape, strides=strides))
            np.lib.stride_tricks.as_strided(marks[start:], shape=shape, strides=strides)[:] += 1
        with CacheController(CopySettings(), layout) as controller:
            if marks.max() > 1:
                with pytest.raises(TensorError, match=r"of layer 0 share memory"):
                    controller.register_kv_cache(tensors)
            else:
                controller.register_kv_cache(tensors)

    def test_another_number_of_tensors(self) -> None:
        with (
            CacheController(CopySettings(), uniform_layout()) as controller,
            pytest.raises(TensorError, match="1 tensors for the 8 planes"),
        ):
            controller.register_kv_cache([np.zeros(1)])


def test_registered_tensors_live_until_the_cache_is_freed() -> None:
    class Array(np.ndarray):
        """An array that can be watched."""

    layout = uniform_layout()
    tensors = [np.zeros((BLOCKS, 1, 4, 8), np.uint16).view(Array) for _ in layout.planes]
    watched = [weakref.ref(tensor) for tensor in tensors]
    with CacheController(CopySettings(), layout) as controller:
        controller.register_kv_cache(tensors)
        controller.initialize_host_cache(2)
        del tensors
        gc.collect()
        assert all(each() is not None for each in watched)
        controller.submit_swap_tasks(plan(1, evict=[(1, 0)])).wait_all()
        controller.sleep()
        gc.collect()
        assert all(each() is None for each in watched)
        with pytest.raises(CacheNotReadyError, match="register_kv_cache"):
            controller.wakeup()
