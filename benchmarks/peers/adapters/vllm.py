"""vLLM's ``KVCacheManager`` with one group of full attention, as its scheduler calls it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from benchmarks.peers.adapters.base import Adapter, OutOfBlocksError, Pool, Tokens


class VllmAdapter(Adapter):
    """``allocate`` and ``commit`` are the two halves of ``allocate_slots``, which vLLM separates for transfers."""

    def __init__(self, pool: Pool, hash_name: str) -> None:
        hash_function = get_hash_fn_by_name(hash_name)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(pool.block_size, hash_function)
        attention = FullAttentionSpec(
            block_size=pool.block_size, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
        )
        config = KVCacheConfig(
            num_blocks=pool.blocks + 1,  # one is vLLM's null block
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer.0"], attention)],
        )
        self._manager = KVCacheManager(
            config,
            max_model_len=pool.max_tokens,
            scheduler_block_size=pool.block_size,
            hash_block_size=pool.block_size,
            enable_caching=True,
        )
        self._sampling = SamplingParams(max_tokens=1)
        self._matched: dict[str, tuple[Any, int]] = {}
        self._tables: dict[str, list[int]] = {}

    def make_request(self, number: int, prompt: Tokens) -> Any:
        request = Request(str(number), prompt.tolist(), self._sampling, None, block_hasher=None)
        request._block_hasher = self._hasher
        return request

    def make_output(self, tokens: Tokens) -> list[int]:
        return tokens.tolist()

    def hash(self, request: Any) -> None:
        request.update_block_hashes()

    def match(self, request: Any) -> int:
        blocks, tokens, _ = self._manager.get_computed_blocks(request)
        self._matched[request.request_id] = blocks, tokens
        return int(tokens)

    def allocate(self, request: Any) -> None:
        blocks, cached = self._matched.pop(request.request_id)
        missing = request.num_prompt_tokens - cached
        if self._manager.allocate_slots(request, missing, cached, blocks, delay_cache_blocks=True) is None:
            raise OutOfBlocksError(f"request {request.request_id}")
        self._tables[request.request_id] = self._manager.get_block_ids(request.request_id)[0]

    def commit(self, request: Any) -> None:
        self._manager.cache_blocks(request, request.num_prompt_tokens)
        request.num_computed_tokens = request.num_prompt_tokens

    def decode(self, request: Any, output: list[int]) -> None:
        request.append_output_token_ids(output)
        taken = self._manager.allocate_slots(request, len(output))
        if taken is None:
            raise OutOfBlocksError(f"request {request.request_id}")
        self._tables[request.request_id].extend(taken.get_block_ids()[0])
        request.num_computed_tokens += len(output)

    def decode_step(self, requests: Sequence[Any], step: list[list[int]]) -> None:
        for request, output in zip(requests, step, strict=True):
            self.decode(request, output)

    def free(self, request: Any) -> None:
        del self._tables[request.request_id]
        self._manager.free(request)


def make(pool: Pool, hash_name: str) -> VllmAdapter:
    """Return an adapter; ``hash_name`` is a value of vLLM's ``--prefix-caching-hash-algo``."""
    logging.disable(logging.WARNING)
    return VllmAdapter(pool, hash_name)
