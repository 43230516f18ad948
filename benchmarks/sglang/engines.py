"""The engines that are compared, and the models they serve."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

NONE, HICACHE, HICACHE_FILE, STORAGE, STORAGE_SERVED, LINKER, LINKER_SERVED, TIMED = (
    "none",
    "hicache",
    "hicache-file",
    "fdcache-storage",
    "fdcache-storage-served",
    "fdcache-linker",
    "fdcache-linker-served",
    "fdcache-linker-timed",
)
COMPARED = (NONE, LINKER, HICACHE, HICACHE_FILE, STORAGE)
SERVED = (STORAGE_SERVED, LINKER_SERVED)
ENGINES = (*COMPARED, *SERVED, TIMED)
GIB = 1 << 30


@dataclass(frozen=True)
class Shape:
    """A Llama-like model; ``prompt`` tokens are asked for, of which ``pool`` fit on the device."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    dtype: str = "bfloat16"
    page: int = 64
    prompt: int = 8192
    pool: int = 24576
    host_gib: int = 8
    conversations: int = 6
    turns: int = 4
    reply: int = 24

    def config(self) -> dict[str, Any]:
        """Return the contents of ``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
            "torch_dtype": self.dtype,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
        }


SHAPES = {
    "8b": Shape(4096, 14336, 32, 32, 8, 128, 128256),
    "small": Shape(2048, 5632, 8, 16, 4, 128, 32000, host_gib=3),
    "tiny": Shape(
        64,
        128,
        2,
        4,
        2,
        16,
        512,
        "float32",
        page=16,
        prompt=384,
        pool=1024,
        host_gib=1,
        conversations=3,
        turns=2,
        reply=8,
    ),
}


def shape_of(name: str, page: int) -> Shape:
    """Return a shape, with pages of ``page`` tokens unless that is 0."""
    shape = SHAPES[name]
    return replace(shape, page=page) if page else shape


def model_folder(name: str, folder: Path) -> Path:
    """Make a folder with the configuration of a shape, whose weights the engine makes by itself."""
    path = folder / f"model-{name}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPES[name].config()))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    return path


def arguments(engine: str, shape: Shape, model: Path, *, attention: str, server: str = "") -> dict[str, Any]:
    """Return the arguments of an engine: all have the same but for what is below the device.

    ``server``: the address of the service of those that are ``SERVED``.
    """
    on_cpu = attention == "torch_native"
    common: dict[str, Any] = {
        "model_path": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": shape.dtype,
        "random_seed": 0,
        "attention_backend": attention,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": on_cpu,
        "max_total_tokens": shape.pool,
        "context_length": 2 * shape.prompt,
        "page_size": shape.page,
        "chunked_prefill_size": 8192,
        "mem_fraction_static": 0.2 if on_cpu else 0.9,
        "enable_cache_report": True,
        "log_level": "warning",
        "max_running_requests": 16,
        "skip_server_warmup": True,
        **({"device": "cpu"} if on_cpu else {}),
    }
    return common | _below(engine, shape, server)


def _below(engine: str, shape: Shape, server: str) -> dict[str, Any]:
    memory = (
        {"FDCACHE_SERVER": server} if engine in SERVED else {"FDCACHE_HOST_MEMORY": f"{shape.host_gib}GiB"}
    )
    if engine == NONE:
        return {}
    if engine in (LINKER, LINKER_SERVED, TIMED):
        own = ("FdcacheLinker", "fdcache.integrations.sglang.linker")
        linker, module = own if engine != TIMED else ("TimedLinker", "benchmarks.sglang.timed")
        return {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": {
                "linker": linker,
                "linker_module_path": module,
                "linker_extra_config": memory,
            },
        }
    hicache: dict[str, Any] = {
        "enable_hierarchical_cache": True,
        "hicache_size": shape.host_gib,
        "hicache_mem_layout": "page_first",
        "hicache_io_backend": "kernel",
        "hicache_write_policy": "write_through",
    }
    if engine == HICACHE:
        return hicache
    hicache |= {"hicache_storage_prefetch_policy": "wait_complete"}
    if engine == HICACHE_FILE:
        return hicache | {"hicache_storage_backend": "file"}
    extra = {
        "backend_name": "fdcache",
        "module_path": "fdcache.integrations.sglang.storage",
        "class_name": "FdcacheStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
    }
    return hicache | {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra | memory),
    }
