"""Configurations and requests with the attributes that FastDeploy's have."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

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
    """Rank 0's report of a plan; the loads at these positions failed."""
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
