"""Tensors of NumPy and Paddle over a plane's memory; unknown and missing frameworks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fdcache.devices.cpu import CpuDevice
from fdcache.devices.frameworks import as_tensor
from fdcache.errors import TensorError
from tests.property.test_round_trips import LAYOUTS
from tests.swaps import Worker, plan


@pytest.mark.parametrize("gap", [0, 8])
def test_numpy_tensors_have_shape_and_stride_of_the_plane(gap: int) -> None:
    plane = LAYOUTS["fp8"].planes[2]
    spread = replace(plane, device_stride=plane.nbytes + gap)
    tensor = CpuDevice().allocate_plane(spread, 5, "numpy")
    assert tensor.shape == (5, *plane.shape) and tensor.dtype == np.float32
    assert tensor.strides[0] == plane.nbytes + gap and not tensor.any()


def test_paddle_tensors_are_copied() -> None:
    paddle = pytest.importorskip("paddle")
    layout = LAYOUTS["half words"]
    with Worker(layout) as worker:
        controller = worker.controller
        controller.sleep()
        tensors = controller.initialize_kv_cache(4, framework="paddle")
        assert [list(tensor.shape) for tensor in tensors] == [[4, *plane.shape] for plane in layout.planes]
        assert {tensor.dtype for tensor in tensors} == {paddle.float16}
        for tensor in tensors:
            tensor[0] = 3.0
        worker.run(plan(1, evict=[(0, 0)]))
        worker.run(plan(2, load=[(0, 2)]))
        for tensor in tensors:
            assert (tensor[2] == 3.0).all() and not (tensor[1] == 3.0).any()


def test_unknown_and_missing_frameworks_are_refused() -> None:
    plane = LAYOUTS["uniform"].planes[0]
    with pytest.raises(TensorError, match="use one of numpy, cupy, torch, paddle"):
        CpuDevice().allocate_plane(plane, 2, "jax")
    with pytest.raises(
        TensorError, match="'cupy' has no tensors in the memory of a CPU; use one of numpy, torch"
    ):
        CpuDevice().allocate_plane(plane, 2, "cupy")
    with pytest.raises(
        TensorError, match="'numpy' has no tensors in the memory of a GPU; use one of cupy, torch"
    ):
        as_tensor(object(), plane, 2, "numpy")
    with pytest.raises(TensorError, match="device_stride"):
        CpuDevice().allocate_plane(replace(plane, device_stride=plane.nbytes + 1), 2, "numpy")
