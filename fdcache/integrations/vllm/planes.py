"""vLLM's tensors as planes of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fdcache.errors import ConfigurationError
from fdcache.integrations.vllm.pages import memories, pages_of


def planes_of(kv_cache_config: Any, tensors: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the planes as bytes, shape (blocks, bytes): of vLLM's tensors, of which a state has several.

    Raises ``ConfigurationError`` unless a layer's block is one run of bytes.
    """
    num_blocks, pages = kv_cache_config.num_blocks, pages_of(kv_cache_config)
    if pages is None:
        shared = memories(kv_cache_config)
        return [page_tensor(_parts(tensors[layers[0]]), nbytes, num_blocks) for layers, nbytes in shared]
    raw, base = None, 0
    for tensor in kv_cache_config.kv_cache_tensors:
        for number, name in enumerate(tensor.layers):
            first, *others = _parts(tensors[name])
            begin = tensor.offset + number * tensor.layer_stride
            if not others:
                require_run(first, min(tensor.layer_stride, tensor.block_stride), num_blocks)
            if raw is None:
                raw, base = _bytes_of(first), first.storage_offset() * first.element_size() - begin
    assert raw is not None
    return [
        torch.as_strided(raw, (num_blocks, page.nbytes), (page.stride, 1), base + page.offset)
        for page in pages
    ]


def _parts(tensors: Any) -> Sequence[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def require_run(tensor: torch.Tensor, page_bytes: int, num_blocks: int) -> None:
    """Raise ``ConfigurationError`` unless a tensor has this many blocks, each one run of at most ``page_bytes``."""
    size, rows = tensor.element_size(), max(tensor.shape[0] // max(num_blocks, 1), 1)
    shape = (rows, *tensor.shape[1:])
    extent = 1 + sum((n - 1) * step for n, step in zip(shape, tensor.stride(), strict=True))
    if tensor.shape[0] != rows * num_blocks or extent * size > page_bytes:
        raise ConfigurationError(
            f"FdcacheConnector: a cache of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
            f"{num_blocks} pages of {page_bytes} bytes; choose another attention backend, such as FLASH_ATTN, or set "
            "VLLM_KV_CACHE_LAYOUT to LBNHC"
        )


def page_tensor(parts: Sequence[torch.Tensor], page_bytes: int, num_blocks: int) -> torch.Tensor:
    """Return a layer's pages as bytes, shape (blocks, page bytes), with the stride between blocks that vLLM gave them.

    The parts of a state follow each other in its pages. Raises ``ConfigurationError`` unless each block is one
    contiguous page.
    """
    tensor, *others = parts
    if not others:
        require_run(tensor, page_bytes, num_blocks)
    size, rows = tensor.element_size(), tensor.shape[0] // num_blocks
    stride = rows * tensor.stride(0) * size
    return torch.as_strided(
        _bytes_of(tensor), (num_blocks, page_bytes), (stride, 1), tensor.storage_offset() * size
    )
