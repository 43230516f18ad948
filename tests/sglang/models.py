"""Small models of other kinds than ``tests.vllm.engine.make_model``, with random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
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


LATENTS = {
    **_COMMON,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "topk_method": "greedy",
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "deepseek_yarn",
        "rope_type": "deepseek_yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
}
"""Latent attention: a page has one plane in each layer. No layer has experts."""

STATES = {
    **_COMMON,
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention"] * 2,
    "conv_L_cache": 3,
    "conv_bias": False,
    "block_ff_dim": 128,
    "block_auto_adjust_ff_dim": False,
    "block_multiple_of": 1,
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "pad_token_id": 2,
    "tie_embedding": True,
}
"""Layers that keep a state, which SGLang has in its pool of Mamba states, and layers with full attention, in turn."""

_HIDDEN, _MLP, _VOCABULARY, _KV = 64, 128, 512, 32


def make_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write a model; return its folder."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=random) * 0.3 for name, shape in _shapes(config)}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    layer_of = {"cohere2": _window_layer, "deepseek_v2": _latent_layer, "lfm2": _state_layer}
    kind = config["model_type"]
    yield "model.embed_tokens.weight", (_VOCABULARY, _HIDDEN)
    yield ("model.embedding_norm.weight" if kind == "lfm2" else "model.norm.weight"), (_HIDDEN,)
    if kind == "deepseek_v2":
        yield "lm_head.weight", (_VOCABULARY, _HIDDEN)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in layer_of[kind](config, layer).items():
            yield f"model.layers.{layer}.{name}.weight", shape


def _mlp(place: str, gate: str, up: str, down: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{place}.{gate}": (_MLP, _HIDDEN),
        f"{place}.{up}": (_MLP, _HIDDEN),
        f"{place}.{down}": (_HIDDEN, _MLP),
    }


def _attention(out: str) -> dict[str, tuple[int, ...]]:
    return {
        "self_attn.q_proj": (_HIDDEN, _HIDDEN),
        "self_attn.k_proj": (_KV, _HIDDEN),
        "self_attn.v_proj": (_KV, _HIDDEN),
        f"self_attn.{out}": (_HIDDEN, _HIDDEN),
    }


def _window_layer(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    mlp = _mlp("mlp", "gate_proj", "up_proj", "down_proj")
    return {"input_layernorm": (_HIDDEN,), **_attention("o_proj"), **mlp}


def _latent_layer(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    plain, turned, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return {
        "input_layernorm": (_HIDDEN,),
        "post_attention_layernorm": (_HIDDEN,),
        "self_attn.q_proj": (heads * (plain + turned), _HIDDEN),
        "self_attn.kv_a_proj_with_mqa": (rank + turned, _HIDDEN),
        "self_attn.kv_a_layernorm": (rank,),
        "self_attn.kv_b_proj": (heads * (plain + value), rank),
        "self_attn.o_proj": (_HIDDEN, heads * value),
        **_mlp("mlp", "gate_proj", "up_proj", "down_proj"),
    }


def _state_layer(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    keeps_state = config["layer_types"][layer] == "conv"
    mixer: dict[str, tuple[int, ...]] = (
        {
            "conv.conv": (_HIDDEN, 1, config["conv_L_cache"]),
            "conv.in_proj": (3 * _HIDDEN, _HIDDEN),
            "conv.out_proj": (_HIDDEN, _HIDDEN),
        }
        if keeps_state
        else {
            **_attention("out_proj"),
            "self_attn.q_layernorm": (_HIDDEN // config["num_attention_heads"],),
            "self_attn.k_layernorm": (_HIDDEN // config["num_attention_heads"],),
        }
    )
    norms = {"operator_norm": (_HIDDEN,), "ffn_norm": (_HIDDEN,)}
    return {**norms, **mixer, **_mlp("feed_forward", "w1", "w3", "w2")}
