"""Paged attention for decodes as a Triton kernel that reads the cache once, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_FEWEST_ROWS = 16  # smallest matrix product


def attend_in_place(query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, positions: Tensor) -> Tensor:
    """Compute the same as ``attention.attend_gathered``; can be captured into a CUDA graph."""
    count, heads, dim = query.shape
    kv_heads, block_size = keys.shape[1:3]
    query = query.contiguous()
    out = torch.empty_like(query)
    _attend[count, kv_heads](
        query,
        keys,
        values,
        tables,
        positions,
        out,
        dim**-0.5,
        tables.stride(0),
        GROUP=heads // kv_heads,
        BLOCK=block_size,
        DIM=dim,
        ROWS=max(heads // kv_heads, _FEWEST_ROWS),
        num_warps=4,
        num_stages=3,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    tables,
    positions,
    out,
    scale,
    table_stride,
    GROUP: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    """Run one program per sequence and key head; its query heads are the rows, padded for a product."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    rows, tokens, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK), tl.arange(0, DIM)
    length = tl.load(positions + sequence) + 1
    place = ((sequence * tl.num_programs(1) + head) * GROUP + rows[:, None]) * DIM + dims[None, :]
    asked = tl.load(query + place, mask=rows[:, None] < GROUP, other=0.0)
    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    for i in range(0, tl.cdiv(length, BLOCK)):
        block = tl.load(tables + sequence * table_stride + i)
        at = (block * tl.num_programs(1) + head) * BLOCK * DIM + tokens[:, None] * DIM + dims[None, :]
        scores = tl.dot(asked, tl.trans(tl.load(keys + at))) * scale
        scores = tl.where((i * BLOCK + tokens)[None, :] < length, scores, -float("inf"))
        above = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - above[:, None])
        shrink = tl.exp(best - above)
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(values + at)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value)
        best = above
    tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=rows[:, None] < GROUP)
