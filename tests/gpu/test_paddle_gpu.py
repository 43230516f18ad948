"""Paddle tensors in GPU memory, on Paddle's own stream, with the installed release."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("paddle")

import paddle

from tests.paddle_planes import LAYOUTS, check

pytestmark = pytest.mark.skipif(
    not paddle.device.is_compiled_with_cuda(), reason="the Paddle that is installed has no CUDA"
)


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    before = paddle.device.get_device()
    paddle.device.set_device("gpu:0")
    yield
    paddle.device.set_device(before)


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_are_the_same_after_eviction_and_load(name: str) -> None:
    check(name)
