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
    "architectures": ["Cohere2ForCausalLM"],
    "model_type": "cohere2",
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "logit_scale": 1.0,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "pad_token_id": 2,
    "sliding_window": 48,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "is_hybrid_swa": True,
    "hybrid_layer_pattern": [1, 0, 1, 0],
}
"""Layers with a window of three pages, and layers with full attention, in turn; each kind has a pool of its own."""


def make_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write the configuration of a model; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
