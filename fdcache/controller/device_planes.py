"""The KV tensors of an engine as planes of a layout: allocated by fdcache or registered by the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fdcache.devices.base import Device, DevicePlanes, PlaneBinding, TensorView
from fdcache.errors import CacheNotReadyError, TensorError
from fdcache.layout import KVLayout
from fdcache.layout_planes import Plane

if TYPE_CHECKING:
    from fdcache.devices.shared_planes import SharedPlanes


class DeviceMemory:
    """The device planes of one rank; None before ``allocate`` or ``register`` and after ``free``."""

    def __init__(self, device: Device, layout: KVLayout) -> None:
        self.planes: DevicePlanes | None = None
        self.bindings: list[PlaneBinding] = []
        self._device = device
        self._layout = layout
        self._allocated: tuple[int, str | None, Path | None] | None = None
        self._shared: SharedPlanes | None = None

    def allocate(self, num_blocks: int, framework: str | None, shared: Path | None) -> list[Any]:
        """Allocate zero-filled planes, on the CPU in a folder for shared memory if there is one; return tensors."""
        self._check_none()
        if shared is None or self._device.has_compute_streams:
            tensors = allocate_planes(self._device, self._layout, num_blocks, framework)
        else:
            from fdcache.devices.shared_planes import SharedPlanes

            self._shared = SharedPlanes(self._layout, num_blocks, shared)
            tensors = self._shared.tensors(framework or "numpy")
        self.register(tensors)
        self._allocated = (num_blocks, framework, shared)
        return tensors

    def register(self, tensors: Sequence[Any]) -> None:
        """Use the engine's tensors. Raises ``TensorError`` naming the plane that does not fit."""
        self._check_none()
        self.bindings = bind_tensors(self._device, self._layout, tensors)
        self.planes = self._device.bind_planes(self.bindings, self._layout.record_bytes)

    def allocate_again(self) -> list[Any]:
        """Allocate the planes that ``free`` freed again. Raises ``CacheNotReadyError`` for the engine's own."""
        if self._allocated is None:
            raise CacheNotReadyError("the planes were registered by the engine; call register_kv_cache")
        return self.allocate(*self._allocated)

    def free(self) -> None:
        """Release the planes."""
        self.planes = None
        self.bindings = []
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()

    def forget(self) -> None:
        """Release the planes for good: ``allocate_again`` will not allocate them."""
        self.free()
        self._allocated = None

    def _check_none(self) -> None:
        if self.planes is not None:
            raise CacheNotReadyError("the device planes exist already; call free_cache or sleep first")


def plane_blocks(layout: KVLayout, plane: Plane, num_blocks: int) -> int:
    """Return the number of blocks in a plane's tensor if a main layer has ``num_blocks``."""
    return layout.draft_blocks(num_blocks) if plane.layer >= layout.num_layers else num_blocks


def allocate_planes(
    device: Device, layout: KVLayout, num_blocks: int, framework: str | None = None
) -> list[Any]:
    """Return a zero-filled tensor of ``framework`` for each plane, in the layout's order."""
    if num_blocks < 1:
        raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
    return [
        device.allocate_plane(plane, plane_blocks(layout, plane, num_blocks), framework)
        for plane in layout.planes
    ]


def bind_tensors(device: Device, layout: KVLayout, tensors: Sequence[Any]) -> list[PlaneBinding]:
    """Return one binding for each plane. Raises ``TensorError`` naming the plane whose tensor does not fit."""
    if len(tensors) != len(layout.planes):
        raise TensorError(f"{len(tensors)} tensors for the {len(layout.planes)} planes of the layout")
    views = [_inspect(device, plane, tensor) for plane, tensor in zip(layout.planes, tensors, strict=True)]
    num_blocks = views[0].shape[0] if views[0].shape else 0
    bindings = [
        _bind(plane, view, plane_blocks(layout, plane, num_blocks))
        for plane, view in zip(layout.planes, views, strict=True)
    ]
    _check_apart(bindings)
    return bindings


def _name(plane: Plane) -> str:
    return f"tensor of plane {plane.kind.value} of layer {plane.layer}"


def _inspect(device: Device, plane: Plane, tensor: Any) -> TensorView:
    try:
        return device.inspect_tensor(tensor)
    except TensorError as error:
        raise TensorError(f"{_name(plane)}: {error}") from error


def _bind(plane: Plane, view: TensorView, num_blocks: int) -> PlaneBinding:
    where = _name(plane)
    if not view.shape or num_blocks < 1 or view.shape[0] != num_blocks:
        raise TensorError(f"{where}: shape {view.shape} must begin with {max(num_blocks, 1)} blocks")
    block_bytes = math.prod(view.shape[1:]) * view.itemsize
    if block_bytes != plane.nbytes:
        raise TensorError(f"{where}: a block has {block_bytes} bytes, the layout says {plane.nbytes}")
    raw_bytes = view.itemsize == 1 and len(view.shape) == 2
    if view.shape[1:] != plane.shape and not raw_bytes:
        raise TensorError(
            f"{where}: a block has shape {view.shape[1:]}, the layout says {plane.shape}; "
            f"pass that shape, or bytes of shape ({num_blocks}, {plane.nbytes})"
        )
    if not _is_contiguous(view):
        raise TensorError(f"{where}: strides {view.strides} leave gaps or transpose axes within a block")
    stride = view.strides[0] if num_blocks > 1 else plane.nbytes
    if stride < plane.nbytes:
        raise TensorError(f"{where}: blocks {stride} bytes apart overlap; a block has {plane.nbytes} bytes")
    return PlaneBinding(plane, view.address, stride, num_blocks, view.owner)


def _check_apart(bindings: Sequence[PlaneBinding]) -> None:
    ordered = sorted(bindings, key=lambda each: each.address)
    for position, first in enumerate(ordered):
        end = first.address + (first.num_blocks - 1) * first.stride + first.plane.nbytes
        for other in ordered[position + 1 :]:
            if other.address >= end:
                break
            if _overlap(first, other):
                raise TensorError(
                    f"{_name(first.plane)} and {_name(other.plane)} share memory; give each plane its own tensor"
                )


def _overlap(first: PlaneBinding, other: PlaneBinding) -> bool:
    """Return True if a block of one overlaps a block of the other, which starts within the span of the first."""
    # With equal strides all blocks overlap if the first one does.
    blocks = 1 if first.stride == other.stride else other.num_blocks
    starts = other.address - first.address + np.arange(blocks, dtype=np.int64) * other.stride
    index = np.minimum(starts // first.stride, first.num_blocks - 1)
    inside = starts - index * first.stride
    reaches_next = (index + 1 < first.num_blocks) & (inside + other.plane.nbytes > first.stride)
    return bool(((inside < first.plane.nbytes) | reaches_next).any())


def _is_contiguous(view: TensorView) -> bool:
    """Return True if a block is one run of bytes in row-major order; an axis of size 1 may have any stride."""
    inner = [
        (size, stride) for size, stride in zip(view.shape[1:], view.strides[1:], strict=True) if size > 1
    ]
    if inner and inner[-1][1] != view.itemsize:
        return False
    return all(stride == size_in * stride_in for (_, stride), (size_in, stride_in) in pairwise(inner))
