"""Configurations and requests with the attributes that FastDeploy's have."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from fdcache.integrations.fastdeploy import CacheManager
from fdcache.metadata import StorageTask, SwapPurpose, TransferPlan, TransferReport, TransferResult

BLOCK = 4


def fd_config(
    *,
    model: str = "tiny",
    dtype: str | None = "bfloat16",
    quantised: str | None = None,
    latent: int = 0,
    method: str | None = None,
    ratio: float = 1.0,
    ranks: int = 1,
    **cache: Any,
) -> Any:
    defaults = {
        "total_block_num": 32,
        "num_cpu_blocks": 16,
        "block_size": BLOCK,
        "enable_prefix_caching": True,
        "write_policy": "write_through",
        "write_through_threshold": 2,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model,
            dtype=dtype,
            num_hidden_layers=3,
            num_key_value_heads=4,
            head_dim=8,
            kv_lora_rank=latent,
            qk_rope_head_dim=8,
        ),
        cache_config=SimpleNamespace(**(defaults | cache)),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        quant_config=SimpleNamespace(kv_cache_quant_type=quantised),
        speculative_config=SimpleNamespace(method=method, num_gpu_block_expand_ratio=ratio),
    )


def fd_request(
    name: str,
    length: int = 0,
    *,
    prompt: Sequence[int] | None = None,
    images: Sequence[tuple[int, int, str]] = (),
) -> Any:
    positions = [SimpleNamespace(offset=offset, length=size) for offset, size, _ in images]
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=list(range(length)) if prompt is None else list(prompt),
        output_token_ids=[],
        multimodal_inputs={"mm_positions": positions, "mm_hashes": [each[2] for each in images]},
    )


def report_of(plan: TransferPlan | StorageTask, failed: Sequence[int] = ()) -> TransferReport:
    """Return rank 0's report of a plan with failed loads at these positions."""
    return TransferReport(
        plan_id=plan.plan_id,
        rank=0,
        results=tuple(
            TransferResult(
                purpose=swap.purpose,
                failed=np.array(failed if swap.purpose is SwapPurpose.LOAD else [], np.int32),
                checksums=np.empty(0, np.uint64),
                copied_bytes=0,
                seconds=0.0,
            )
            for swap in plan.swaps()
        ),
    )


def make(*, clock: Callable[[], float] = time.monotonic, **cache: Any) -> CacheManager:
    return CacheManager(fd_config(**cache), clock=clock)


def run(manager: CacheManager, request: Any, outputs: int = 1) -> list[int]:
    """Run a request from match to its first tokens; return its block table."""
    manager.match_prefix(request)
    matched: list[int] = request._match_result.device_block_ids
    tokens = len(request.prompt_token_ids) + outputs
    blocks = matched + manager.allocate_device_blocks(request, -(-tokens // BLOCK) - len(matched))
    settle(manager)
    request.output_token_ids.extend(range(1000, 1000 + outputs))
    manager.check_and_add_pending_backup()
    return blocks


def settle(manager: CacheManager) -> list[TransferPlan]:
    plans = manager.issue_pending_backup_to_batch_request()
    manager.apply([report_of(plan) for plan in plans])
    return plans


def evicted(
    *, device_blocks: int, others: int, clock: Callable[[], float] = time.monotonic
) -> tuple[CacheManager, Any]:
    """Return a manager and an ended request of four blocks, some of which another request evicted to the host."""
    manager = make(total_block_num=device_blocks, num_cpu_blocks=16, clock=clock)
    first = fd_request("a", 4 * BLOCK)
    for request in (first, fd_request("b", prompt=[9] * (others * BLOCK))):
        run(manager, request)
        manager.request_finish(request)
        settle(manager)
    return manager, first
