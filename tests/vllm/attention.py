"""Paged attention in plain torch, with the cache shape that vLLM's GPU backends have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    MultipleOf,
)


@dataclass
class TorchMetadata:
    """The part of a step's metadata that attention needs."""

    starts: list[int]
    lengths: list[int]
    tables: torch.Tensor
    slots: torch.Tensor


class TorchMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes ``TorchMetadata`` of a step."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TorchMetadata:
        common = common_attn_metadata
        return TorchMetadata(
            starts=common.query_start_loc.tolist(),
            lengths=common.seq_lens.tolist(),
            tables=common.block_table_tensor,
            slots=common.slot_mapping[: common.num_actual_tokens],
        )


class TorchBackend(AttentionBackend):  # type: ignore[misc]
    """Keys and values packed in one page per block: (blocks, heads, tokens, 2 x dim), tokens first in memory."""

    forward_includes_kv_cache_update = True
    supported_dtypes = (torch.float32, torch.bfloat16, torch.float16)

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type:
        return TorchAttention

    @staticmethod
    def get_builder_cls() -> type:
        return TorchMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(*_: Any) -> list[Any]:
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)

    @staticmethod
    def use_cascade_attention(*_: Any, **__: Any) -> bool:
        return False


class TorchAttention(AttentionImpl):  # type: ignore[misc]
    """Causal attention, request by request, in float32, to all tokens or to the last ones."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any = None,
        sliding_window: int | None = None,
        *_: Any,
        **__: Any,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads
        self.window = sliding_window

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TorchMetadata | None,
        output: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output.zero_()
        pages = kv_cache.transpose(1, 2)
        block_size = pages.shape[1]
        slots = attn_metadata.slots.long()
        new = torch.cat((key, value), dim=-1)[: len(slots)]
        pages[slots // block_size, slots % block_size] = new.to(pages.dtype)
        bounds = attn_metadata.starts
        for row, length in enumerate(attn_metadata.lengths[: len(bounds) - 1]):
            begin, end = bounds[row], bounds[row + 1]
            if begin < end:
                table = attn_metadata.tables[row, : -(-length // block_size)].long()
                past = pages[table].flatten(0, 1)[:length].float()
                output[begin:end] = self._attend(query[begin:end].float(), past).reshape(
                    output[begin:end].shape
                )
        return output

    def _attend(self, query: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        """Return the attention of the last ``len(query)`` tokens of ``past``, shape (tokens, heads, dim)."""
        keys, values = past.split(self.head_size, dim=-1)
        group = self.num_heads // self.num_kv_heads
        keys = keys.repeat_interleave(group, dim=1).permute(1, 2, 0)
        values = values.repeat_interleave(group, dim=1).transpose(0, 1)
        query = query.view(len(query), self.num_heads, self.head_size).transpose(0, 1)
        scores = query @ keys * self.scale
        rows, columns = scores.shape[-2:]
        unseen = torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows + 1)
        if self.window is not None:
            unseen |= torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows - self.window)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
        return (weights @ values).transpose(0, 1)
