"""Latent attention in plain torch, one path for prompts and replies: queries are absorbed into the latents."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backend import MLAAttentionImpl

from tests.vllm.attention import TorchBackend, TorchMetadata, TorchMetadataBuilder


@dataclass
class TorchMlaMetadata(TorchMetadata):
    """The part of a step's metadata that vLLM's layers of latent attention read."""

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    prefill: None = None
    decode: Any = None


class TorchMlaMetadataBuilder(TorchMetadataBuilder):
    """Makes metadata in which every token is one of a reply, so that all take the path of the cache."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TorchMlaMetadata:
        plain = super().build(common_prefix_len, common_attn_metadata, fast_build)
        count = common_attn_metadata.num_actual_tokens
        return TorchMlaMetadata(
            **vars(plain),
            num_actual_tokens=count,
            num_decodes=common_attn_metadata.num_reqs,
            num_decode_tokens=count,
            decode=SimpleNamespace(),
        )


class TorchMlaBackend(TorchBackend):
    """Latents packed in one page per block: (blocks, tokens, latent and rotary part)."""

    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA"

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type:
        return TorchMlaAttention

    @staticmethod
    def get_builder_cls() -> type:
        return TorchMlaMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, block_size, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (0, 1, 2, 3) if include_num_layers_dimension else (0, 1, 2)


class TorchMlaAttention(MLAAttentionImpl):  # type: ignore[misc]
    """Causal attention to latents, request by request, in float32."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *_: Any, **options: Any
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads
        self.kv_lora_rank = options["kv_lora_rank"]

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> None:
        if not kv_cache.numel():
            return
        slots = slot_mapping.flatten().long()
        given = slots >= 0
        rows = torch.cat((kv_c_normed, k_pe.flatten(1)), dim=-1)[: len(slots)][given]
        slots, block_size = slots[given], kv_cache.shape[1]
        kv_cache[slots // block_size, slots % block_size] = rows.to(kv_cache.dtype)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TorchMlaMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        out = query.new_zeros(*query.shape[:2], self.kv_lora_rank)
        block_size, bounds = kv_c_and_k_pe_cache.shape[1], attn_metadata.starts
        for row, length in enumerate(attn_metadata.lengths[: len(bounds) - 1]):
            begin, end = bounds[row], bounds[row + 1]
            if begin == end:
                continue
            table = attn_metadata.tables[row, : -(-length // block_size)].long()
            past = kv_c_and_k_pe_cache[table].flatten(0, 1)[:length].float()
            scores = query[begin:end].transpose(0, 1).float() @ past.T * self.scale
            rows, columns = scores.shape[-2:]
            unseen = torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows + 1)
            weights = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
            out[begin:end] = (weights @ past[:, : self.kv_lora_rank]).transpose(0, 1).to(out.dtype)
        return out, None
