"""SGLang's copies between its device pool and its host pool, for pools that both lie in the memory of a CPU.

The kernels are built for GPUs alone. These do the same to the same bytes; names, arguments and layouts are theirs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensor = Any


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copy tokens between tensors of one layer each."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copy all layers of pages to the host; ``dst_ptrs``: keys and values, or one, by page and layer."""
    layers = len(src_ptrs) // len(dst_ptrs)
    pages = dst_indices[::page_size] // page_size
    for kind, dst in enumerate(dst_ptrs):
        for layer in range(layers):
            rows = src_ptrs[kind * layers + layer][src_indices]
            dst[pages, layer] = rows.reshape(len(pages), page_size, *rows.shape[1:])


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer of pages to the device."""
    pages = src_indices[::page_size] // page_size
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[pages, layer_id].reshape(-1, *dst.shape[1:])


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    """Copy all layers of tokens to the host; the layers are a table of addresses, ``dst_k`` is by token and layer."""
    for layers, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(
            layers, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
        )


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    """Copy all layers of tokens of latent attention to the host."""
    src_rows, dst_rows = src_indices.numpy(), dst_indices.numpy()
    for layer, address in enumerate(src_layers.tolist()):
        rows = _rows(address, item_size, item_size, src_rows)
        _rows(dst.data_ptr() + layer * item_size, dst_layout_dim, item_size, dst_rows)[dst_rows] = rows[
            src_rows
        ]


def transfer_kv_per_layer_pf_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    """Copy one layer of tokens to the device."""
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla_pf_lf(
            src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim
        )


def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    """Copy one layer of tokens of latent attention to the device."""
    src_rows, dst_rows = src_indices.numpy(), dst_indices.numpy()
    rows = _rows(src.data_ptr() + layer_id * item_size, src_layout_dim, item_size, src_rows)
    _rows(dst.data_ptr(), item_size, item_size, dst_rows)[dst_rows] = rows[src_rows]


def _rows(address: int, stride: int, nbytes: int, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the bytes of rows in memory, up to the last one that is named."""
    count = int(indices.max(initial=-1)) + 1
    if not count:
        return np.empty((0, nbytes), np.uint8)
    memory = memoryview((ctypes.c_uint8 * ((count - 1) * stride + nbytes)).from_address(address))
    raw = np.frombuffer(memory, np.uint8)
    return np.lib.stride_tricks.as_strided(raw, (count, nbytes), (stride, 1))
