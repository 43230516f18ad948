"""Attention of one new token per sequence over the paged cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""``(query, keys, values, tables, positions)``: query (sequences, heads, dim), planes (blocks, kv_heads, block_size,
dim), tables (sequences, blocks) and positions (sequences,) of int64; the output is shaped as the query."""


def attention_for(device: str) -> Attention:
    """Return the attention for decodes: a kernel that reads blocks in place on a GPU, plain torch elsewhere."""
    if device == "cuda":
        from benchmarks.ttft.paged_kernel import attend_in_place

        return attend_in_place
    return attend_gathered


def attend_gathered(query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, positions: Tensor) -> Tensor:
    """Gather each sequence's blocks, then attend."""
    count, _, dim = query.shape
    kv_heads, block_size = keys.shape[1:3]
    context = [
        plane[tables].transpose(1, 2).reshape(count, kv_heads, -1, dim).float() for plane in (keys, values)
    ]
    visible = torch.arange(tables.shape[1] * block_size, device=query.device) <= positions[:, None]
    mask = torch.where(visible, 0.0, -torch.inf)[:, None, None]
    grouped = query.reshape(count, kv_heads, -1, dim).float() * dim**-0.5
    scores = grouped @ context[0].transpose(-1, -2) + mask
    return (scores.softmax(-1) @ context[1]).reshape(query.shape).to(query.dtype)
