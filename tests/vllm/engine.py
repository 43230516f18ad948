"""vLLM engines in this process: a small model with random weights, on the CPU."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BLOCK_SIZE = 16
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "fdcache_test_platform,fdcache",
}


def install_plugin(folder: Path) -> None:
    """Write the entry point of the test platform into ``folder``, and let this process and its children find it."""
    info = folder / "fdcache_test_platform-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fdcache_test_platform\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.platform_plugins]\nfdcache_test_platform = tests.vllm.plugin:register\n"
    )
    root = str(Path(__file__).parent.parent.parent)
    for path in (str(folder), root):
        if path not in sys.path:
            sys.path.insert(0, path)
    os.environ["PYTHONPATH"] = os.pathsep.join((str(folder), root, os.environ.get("PYTHONPATH", "")))
    runner = os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    interpreted = (
        {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if runner == "1" else {}
    )  # the second runner's kernels
    for name, value in {**ENVIRONMENT, **interpreted}.items():
        os.environ.setdefault(name, value)


def make_model(folder: Path, seed: int = 0, num_layers: int = 3, **config: Any) -> Path:
    """Write a small Llama with random weights, large enough that each block of the prompt changes the answer.

    ``config``: more of its configuration.
    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    save_file(
        {name: torch.randn(shape, generator=random) * 0.3 for name, shape in _shapes(num_layers)},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(_MODEL | {"num_hidden_layers": num_layers} | config))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    return folder


def make_tokenizer(folder: Path, size: int = 512) -> Path:
    """Write a tokenizer of single numbers into a model's folder."""
    from tokenizers import Tokenizer, models

    words = {str(token): token for token in range(size)}
    Tokenizer(models.WordLevel(words, unk_token="0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def make_adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter of the model with random weights, large enough to change the answers."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    rank, tensors = 8, {}
    for layer in range(3):
        for name, width in (("q_proj", 64), ("v_proj", 32)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(rank, 64, generator=random)
            tensors[f"{place}.lora_B.weight"] = torch.randn(width, rank, generator=random)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"]}
        )
    )
    return folder


def connector_config(connector: str | None = "fdcache.integrations.vllm", **extra: object) -> dict[str, Any]:
    """Return ``kv_transfer_config`` for fdcache's connector, with settings as its extra configuration.

    What is cached is loaded, however fast this machine computes the small model.
    """
    return {
        "kv_connector": "FdcacheConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": connector,
        "kv_connector_extra_config": {"FDCACHE_LOAD_OR_RECOMPUTE": "always", **extra},
    }


def _shapes(num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, vocabulary = 64, 128, 512
    yield "model.embed_tokens.weight", (vocabulary, width)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (vocabulary, width)
    for layer in range(num_layers):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (width,)
        yield f"{name}.post_attention_layernorm.weight", (width,)
        yield f"{name}.self_attn.q_proj.weight", (width, width)
        yield f"{name}.self_attn.k_proj.weight", (width // 2, width)
        yield f"{name}.self_attn.v_proj.weight", (width // 2, width)
        yield f"{name}.self_attn.o_proj.weight", (width, width)
        yield f"{name}.mlp.gate_proj.weight", (inner, width)
        yield f"{name}.mlp.up_proj.weight", (inner, width)
        yield f"{name}.mlp.down_proj.weight", (width, inner)


@contextmanager
def running_engine(model: Path, transfer: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    """Run an engine; end it, and vLLM's process groups, afterwards."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        model=str(model),
        **{
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": 90 if '"layer_types"' in (model / "config.json").read_text() else 40,
            "max_model_len": 512,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": 1 << 28,
            "kv_transfer_config": transfer,
            "disable_log_stats": False,
            "compilation_config": {"custom_ops": ["none"]},
            "seed": 0,
            **options,
        },
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def generate(
    llm: Any, prompts: Sequence[Sequence[int]], num_tokens: int = 8, *, lora: Any = None, **options: Any
) -> list[list[int]]:
    """Return the tokens that the engine answers each prompt with, all with the same adapter."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    parameters = SamplingParams(
        temperature=0, max_tokens=num_tokens, detokenize=False, ignore_eos=True, **options
    )
    given = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    outputs = llm.generate(given, parameters, use_tqdm=False, lora_request=lora)
    return [list(output.outputs[0].token_ids) for output in outputs]


def scheduler_of(llm: Any) -> Any:
    """Return the scheduler of an engine that runs in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler
