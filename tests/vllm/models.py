"""Small models of many families with random weights, made by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {"num_hidden_layers": 3}),
    "Qwen3": ("qwen3", {"num_hidden_layers": 3}),
    "Gemma 2": (
        "gemma2",
        {
            "num_hidden_layers": 4,
            "sliding_window": 40,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma 3": (
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "sliding_window": 40,
            "query_pre_attn_scalar": 16,
            "layer_types": [_SLIDING] * 5 + [_FULL],
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_hidden_layers": 4,
            "sliding_window": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": [_SLIDING, _FULL] * 2,
        },
    ),
    "Nemotron-H": (
        "nemotron_h",
        {
            "hybrid_override_pattern": "MM*-",
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 24,
            "n_groups": 1,
            "conv_kernel": 4,
            "chunk_size": 16,
        },
    ),
    "DeepSeek V3": (
        "deepseek_v3",
        {
            "num_hidden_layers": 3,
            "first_k_dense_replace": 3,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 48,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "head_dim": 16,
            "n_routed_experts": 8,
        },
    ),
}
"""The name of each family's configuration, and what it has beside the common fields."""


def make_family(family: str, folder: Path, seed: int = 0) -> Path:
    """Write a model of a family, with weights large enough that each block of a prompt changes the answer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fields = FAMILIES[family]
    config = AutoConfig.for_model(kind, **(_COMMON | fields))
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.3)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    return folder
