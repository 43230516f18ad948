"""Addresses of tensors in GPU memory, read without touching a GPU or the memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fdcache.devices.cuda_memory import _through_array_interface, _through_dlpack
from fdcache.errors import TensorError


class Exposed:
    """An array as a framework without DLPack shows its own: by ``__cuda_array_interface__``."""

    def __init__(self, array: Any, **changes: Any) -> None:
        shown = array.__array_interface__
        wanted = ("data", "shape", "typestr", "strides")
        self.__cuda_array_interface__ = {"version": 3, **{key: shown[key] for key in wanted}} | changes


class Withheld:
    """As a torch tensor of a dtype that the interface lacks."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise TypeError("no such dtype")


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "V2", "V1"])
def test_the_array_interface_gives_address_shape_and_byte_strides(dtype: str) -> None:
    whole = np.zeros((6, 3, 4, 8), dtype)
    for array in (whole, whole[:, 1], whole[2:], whole.transpose(0, 2, 1, 3)):
        view = _through_array_interface(Exposed(array))
        assert view is not None
        assert (view.address, view.shape, view.strides, view.itemsize) == (
            array.ctypes.data,
            array.shape,
            array.strides,
            whole.itemsize,
        )


def test_without_strides_a_tensor_is_contiguous() -> None:
    array = np.zeros((6, 4, 8), np.float32)
    shown = Exposed(array)
    assert shown.__cuda_array_interface__["strides"] is None
    absent = Exposed(array)
    del absent.__cuda_array_interface__["strides"]
    for tensor in (shown, absent):
        view = _through_array_interface(tensor)
        assert view is not None and view.strides == (128, 32, 4)


def test_the_view_keeps_the_tensor_alive() -> None:
    tensor = Exposed(np.zeros(4, np.uint8))
    view = _through_array_interface(tensor)
    assert view is not None and view.owner is tensor


def test_read_only_tensors_are_refused() -> None:
    array = np.zeros(4, np.uint8)
    with pytest.raises(TensorError, match="read-only"):
        _through_array_interface(Exposed(array, data=(array.ctypes.data, True)))


@pytest.mark.parametrize("tensor", ["text", Withheld()])
def test_an_object_without_the_interface_is_no_tensor(tensor: object) -> None:
    assert _through_array_interface(tensor) is None


def test_dlpack_tensors_in_host_memory_are_refused() -> None:
    with pytest.raises(TensorError, match="DLPack device type 1, not in GPU memory"):
        _through_dlpack(np.zeros(4))
    assert _through_dlpack("text") is None
