"""Keys and values of all layers in paged planes: written by slot, read by block table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor

from fdcache import KVLayout, PlaneKind

_FP8: Any = getattr(paddle, "float8_e4m3fn", None)  # Paddle before 3.0 has none, and allocates no such planes
_FP8_LIMIT = 448.0


class PagedKV:
    """The planes of a layout as Paddle tensors, the only KV that attention reads.

    ``planes`` has one tensor of shape (blocks, *plane.shape) per plane of the layout; fdcache copies their blocks.
    Floating-point planes hold [heads, block_size, dim]. An fp8 plane is read and written as bytes, because Paddle has
    no index operations for that dtype, and comes with one float32 scale per head and token.
    """

    def __init__(self, layout: KVLayout, planes: Sequence[Tensor]) -> None:
        self._block_size = layout.block_size
        self._planes = {
            (plane.layer, plane.kind): tensor.view("uint8") if plane.dtype.startswith("float8") else tensor
            for plane, tensor in zip(layout.planes, planes, strict=True)
        }

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor | None) -> None:
        """Store tokens: ``slots`` (tokens,) is block * block_size + offset, ``key`` is (tokens, heads, dim)."""
        self._write(layer, PlaneKind.KEY, PlaneKind.KEY_SCALE, slots, key)
        if value is not None:
            self._write(layer, PlaneKind.VALUE, PlaneKind.VALUE_SCALE, slots, value)

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return keys and values of the tokens in ``blocks``, in that order: (heads, tokens, dim) as float32."""
        key = self._read(layer, PlaneKind.KEY, PlaneKind.KEY_SCALE, blocks)
        has_value = (layer, PlaneKind.VALUE) in self._planes
        return key, self._read(layer, PlaneKind.VALUE, PlaneKind.VALUE_SCALE, blocks) if has_value else None

    def _write(self, layer: int, kind: PlaneKind, scale_kind: PlaneKind, slots: Tensor, rows: Tensor) -> None:
        plane = self._planes[layer, kind]
        block, offset = slots.unsqueeze(1) // self._block_size, slots.unsqueeze(1) % self._block_size
        index = (block, paddle.arange(rows.shape[1]).unsqueeze(0), offset)
        scales = self._planes.get((layer, scale_kind))
        if scales is None:
            paddle.index_put_(plane, index, rows.astype(plane.dtype))
            return
        scale = rows.abs().max(axis=-1).clip(min=1e-12) / _FP8_LIMIT
        paddle.index_put_(scales, index, scale)
        quantised = (rows / scale.unsqueeze(-1)).astype(_FP8).view("uint8")
        paddle.index_put_(plane, index, quantised)

    def _read(self, layer: int, kind: PlaneKind, scale_kind: PlaneKind, blocks: Tensor) -> Tensor:
        rows = paddle.gather(self._planes[layer, kind], blocks)
        scales = self._planes.get((layer, scale_kind))
        if scales is None:
            rows = rows.astype("float32")
        else:
            rows = rows.view(_FP8).astype("float32")
            rows = rows * paddle.gather(scales, blocks).unsqueeze(-1)
        count, heads, block_size, dim = rows.shape
        return rows.transpose([1, 0, 2, 3]).reshape([heads, count * block_size, dim])
