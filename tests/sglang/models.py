"""Small models of other kinds than ``tests.vllm.engine.make_model``: their weights are made by the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "attention_bias": False,
}

WINDOWS = {
    **_COMMON,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 48,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_dropout": 0.0,
    "pad_token_id": 2,
    "tie_word_embeddings": True,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}
"""Layers with a window of three pages, and layers with full attention, in turn."""


def make_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write the configuration of a model; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
