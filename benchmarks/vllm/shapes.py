"""Models by the shape of their KV cache, the loads that are run on them, and the folders that vLLM reads them from."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.vllm import weights

BLOCK = 16
"""Tokens of a block: vLLM's default."""
LONGEST = 131_072
"""Most tokens of a request that the models take."""


@dataclass(frozen=True)
class States:
    """The layers of a hybrid model that keep a state of ``nbytes``, and what ``config.json`` says of them."""

    layers: int
    nbytes: int
    config: dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A Llama-like model. ``device_blocks`` is what the engine gets, ``longest`` the most tokens of a request.

    With ``latent`` it is a DeepSeek-like one, whose ranks all hold latents of that width, and whose queries have
    ``latent_queries`` if they are compressed. With ``states`` ``layers`` are those that attend.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    dtype: str = "bfloat16"
    device_blocks: int = 8192
    batch_tokens: int = 8192
    longest: int = 16384
    latent: int = 0
    latent_queries: int | None = None
    states: States | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of a block in one layer: keys and values, or latents and their rotary part."""
        return self.block * self._token_bytes

    @property
    def block(self) -> int:
        """Tokens of a block: where layers keep states, as many as these need, as vLLM has it."""
        return BLOCK * -(-self.states.nbytes // (BLOCK * self._token_bytes)) if self.states else BLOCK

    @property
    def _token_bytes(self) -> int:
        numbers = self.latent + self.rotary if self.latent else self.kv_heads * self.head_dim * 2
        return numbers * self.item_bytes

    def loaded_bytes(self, tokens: int) -> int:
        """Return the bytes that a prefix of so many tokens has: its pages, and the states at its end."""
        return self.token_bytes * tokens + (self.states.layers * self.page_bytes if self.states else 0)

    @property
    def options(self) -> dict[str, Any]:
        """Return what vLLM is told of the layers and the weights."""
        load = {"load_format": "auto" if self.has_random_weights else "dummy"}
        if self.latent_queries or self.states:
            load = {"load_format": weights.FORMAT}
        return load | ({"mamba_cache_mode": "align"} if self.states else {"block_size": BLOCK})

    @property
    def rotary(self) -> int:
        """Width of the rotary part beside latents."""
        return self.head_dim // 2

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers."""
        return self.layers * self._token_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of the engine's KV cache on the device."""
        return self.device_blocks * self.layers * self.page_bytes

    @property
    def has_random_weights(self) -> bool:
        """True for shapes that tokens are compared with, False for those with the engine's dummy weights."""
        return "random" in self.name

    @property
    def item_bytes(self) -> int:
        """Bytes of a number."""
        return 4 if self.dtype == "float32" else 2

    def config(self) -> dict[str, Any]:
        """Return the contents of ``config.json``."""
        of_states = self.states.config if self.states else {}
        return self._common() | (self._latents() if self.latent else {"head_dim": self.head_dim}) | of_states

    def _latents(self) -> dict[str, Any]:
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_key_value_heads": self.heads,
            "kv_lora_rank": self.latent,
            "q_lora_rank": self.latent_queries,
            "qk_nope_head_dim": self.head_dim,
            "qk_rope_head_dim": self.rotary,
            "v_head_dim": self.head_dim,
            "head_dim": self.rotary,
            "first_k_dense_replace": self.layers,  # no experts
            "n_routed_experts": 8,
        }

    def _common(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": LONGEST,
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "torch_dtype": self.dtype,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
        }


def _mamba2(heads: int, head_dim: int, state: int, groups: int, pattern: str, item_bytes: int) -> States:
    """Return the states of Nemotron-H: M is a Mamba layer, * attends, - has neither."""
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "ssm_state_size": state,
        "n_groups": groups,
        "conv_kernel": 4,
        "chunk_size": 128,
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": 1e-5,
        "mamba_ssm_cache_dtype": "float32",
    }
    convolved = 3 * (heads * head_dim + 2 * groups * state) * item_bytes
    return States(pattern.count("M"), convolved + heads * head_dim * state * 4, config)


_NEMOTRON = _mamba2(128, 64, 128, 8, "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 2)
_TINY = _mamba2(8, 16, 16, 1, "MM*-", 4)

SHAPES = {
    shape.name: shape
    for shape in (
        Shape("8b", 32, 4096, 14336, 32, 8, 128, 128256),
        Shape("70b-tp8", 80, 8192, 3584, 8, 1, 128, 16032),
        Shape("random", 8, 2048, 5632, 16, 8, 128, 16384, device_blocks=2048),
        Shape("tiny", 3, 64, 128, 4, 2, 16, 512, "float32", 160, 256, 1024),
        Shape("tiny-random", 3, 64, 128, 4, 2, 16, 512, "float32", 160, 256, 1024),
        Shape("mla", 61, 2048, 5632, 16, 1, 128, 16384, latent=512),
        Shape("mla-random", 8, 2048, 5632, 16, 1, 128, 16384, device_blocks=2048, latent=512),
        Shape(
            "deepseek-v3",
            61,
            7168,
            18432,
            128,
            1,
            128,
            129280,
            device_blocks=4096,
            latent=512,
            latent_queries=1536,
        ),
        Shape("nemotron-h-8b", 4, 4096, 21504, 32, 8, 128, 131072, device_blocks=400, states=_NEMOTRON),
        Shape("tiny-hybrid", 1, 64, 128, 4, 2, 16, 512, "float32", 60, 48, 1024, states=_TINY),
        Shape("tiny-mla-random", 3, 64, 128, 4, 1, 16, 512, "float32", 160, 256, 1024, latent=48),
    )
}
"""64 KiB pages; 8 KiB pages, one rank of eight of a 70B model; random weights; two for a CPU; the latents and layers of
DeepSeek V3; and latents with random weights, on either. DeepSeek V3 itself, with layers as wide as the experts that a
token has; Nemotron-H 8B, and a small one."""


@dataclass(frozen=True)
class Load:
    """How much is asked of an engine. Lengths are tokens."""

    conversations: int
    turns: int
    first_turn: int
    later_turn: int
    reply: int
    in_flight: int
    unique: int
    unique_length: int
    single: int
    single_length: int
    single_rounds: int
    beside_prompts: int
    beside_length: int
    decoders: int
    decoder_prompt: int
    decoder_reply: int
    restart: int
    settle_s: float


LOADS = {
    "full": Load(48, 4, 6000, 1000, 64, 8, 64, 4000, 8, 8192, 3, 24, 8192, 8, 1000, 600, 12, 1.0),
    "half": Load(48, 4, 6000, 1000, 64, 8, 40, 4000, 6, 8192, 2, 18, 8192, 8, 1000, 250, 6, 0.5),
    "short": Load(24, 4, 6000, 1000, 64, 8, 16, 4000, 5, 8192, 2, 18, 8192, 8, 1000, 250, 5, 0.5),
    "brief": Load(12, 3, 6000, 1000, 32, 3, 16, 4000, 5, 8192, 2, 18, 8192, 8, 1000, 200, 5, 0.5),
    "small": Load(8, 3, 290, 48, 8, 2, 6, 200, 3, 509, 2, 8, 317, 2, 40, 150, 3, 0.3),
}
"""By name: ``full`` on a GPU; ``half``, the same conversations and half of the rest; ``short``, half of these
conversations; ``brief``, less of everything; and ``small`` for the tiny shapes on a CPU."""


def model_folder(shape: Shape, home: Path) -> Path:
    """Return the folder of a model; its weights are the engine's dummies, or those of ``write_random_weights``.

    Files that are right are left as they are: to a connector, a file written anew is another model.
    """
    folder = home / "models" / shape.name
    folder.mkdir(parents=True, exist_ok=True)
    generation = {"bos_token_id": 1, "eos_token_id": 2}
    for name, values in (("config.json", shape.config()), ("generation_config.json", generation)):
        path, text = folder / name, json.dumps(values, indent=1)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return folder


def write_random_weights(shape: Shape, folder: Path) -> None:
    """Write normal random weights, scaled so that every layer passes on numbers of about the size it was given.

    An engine's own dummy weights are so small that a wrong block of KV hardly changes a token. Queries and outputs of
    attention are three times larger, so that single keys matter.
    """
    path = folder / "model.safetensors"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _write_random_weights(shape, path)


def _write_random_weights(shape: Shape, path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, shape.dtype)

    def normal(rows: int, columns: int) -> Any:
        values = torch.randn(rows, columns, generator=generator) / columns**0.5
        return values.to(dtype)

    ones = torch.ones(shape.hidden, dtype=dtype)
    tensors = {
        "model.embed_tokens.weight": normal(shape.vocabulary, shape.hidden) * shape.hidden**0.5,
        "lm_head.weight": normal(shape.vocabulary, shape.hidden),
        "model.norm.weight": ones.clone(),
    }
    queries = shape.heads * shape.head_dim
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": ones.clone(),
            f"{name}.post_attention_layernorm.weight": ones.clone(),
            **_attended(shape, f"{name}.self_attn", normal),
            f"{name}.self_attn.o_proj.weight": 3 * normal(shape.hidden, queries),
            f"{name}.mlp.gate_proj.weight": normal(shape.intermediate, shape.hidden),
            f"{name}.mlp.up_proj.weight": normal(shape.intermediate, shape.hidden),
            f"{name}.mlp.down_proj.weight": normal(shape.hidden, shape.intermediate),
        }
    draft = path.with_suffix(".draft")
    save_file(tensors, draft, metadata={"format": "pt"})
    draft.rename(path)


def _attended(shape: Shape, name: str, normal: Callable[[int, int], Any]) -> dict[str, Any]:
    """Return the weights of queries, keys and values of a layer."""
    import torch

    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if not shape.latent:
        return {
            f"{name}.q_proj.weight": 3 * normal(queries, shape.hidden),
            f"{name}.k_proj.weight": normal(keys, shape.hidden),
            f"{name}.v_proj.weight": normal(keys, shape.hidden),
        }
    return {
        f"{name}.q_proj.weight": 3 * normal(queries + shape.heads * shape.rotary, shape.hidden),
        f"{name}.kv_a_proj_with_mqa.weight": normal(shape.latent + shape.rotary, shape.hidden),
        f"{name}.kv_a_layernorm.weight": torch.ones(shape.latent, dtype=getattr(torch, shape.dtype)),
        f"{name}.kv_b_proj.weight": normal(2 * queries, shape.latent),
    }
