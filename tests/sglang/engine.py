"""SGLang engines: a small model with random weights on the CPU, with HiCache, and FdcacheStorage below it."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

PAGE = 16
PATIENCE = 120.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_RUST_BUILD_MODE": "never",
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",  # the other core fails with the torch of the environment
    "SGLANG_USE_CPU_ENGINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Answer(NamedTuple):
    """What an engine answers: tokens with their log probabilities, and how many tokens came from where."""

    tokens: list[int]
    logprobs: list[float]
    cached: dict[str, int]

    def equals(self, other: Answer) -> bool:
        """Return True for the same tokens with the same log probabilities.

        Those of a prompt that is computed in other parts differ in the last bits of 32.
        """
        differences = (abs(one - two) for one, two in zip(self.logprobs, other.logprobs, strict=True))
        return self.tokens == other.tokens and max(differences) < 1e-5


def storage_options(**settings: object) -> dict[str, Any]:
    """Return the options of an engine with FdcacheStorage; ``settings`` go into its JSON."""
    extra = {
        "backend_name": "fdcache",
        "module_path": "fdcache.integrations.sglang.storage",
        "class_name": "FdcacheStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "prefetch_threshold": PAGE,
        **settings,
    }
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_mem_layout": "page_first",
        "hicache_io_backend": "kernel",
        "hicache_write_policy": "write_through",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }


def linker_options(
    linker: str = "FdcacheLinker", module: str = "fdcache.integrations.sglang.linker", **settings: object
) -> dict[str, Any]:
    """Return the options of an engine with FdcacheLinker; ``settings`` go into its configuration."""
    config = {"linker": linker, "linker_module_path": module, "linker_extra_config": settings}
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": config,
    }


def leave_out_models(*needed: str) -> None:
    """Let SGLang import the modules of these models alone: all of them take longer than the rest of a start."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    names = {path.stem for path in (Path(spec.origin).parent / "srt/models").iterdir()}
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(names - {*needed, "registry", "utils"}))


@contextmanager
def running_engine(model: Path, **options: Any) -> Iterator[Any]:
    """Run an engine with few device pages; end it afterwards."""
    leave_out_models("llama", "deepseek_v2", "commandr", "lfm2")
    from sglang.srt.entrypoints.engine import Engine

    _forget_metrics()
    engine = Engine(
        **{
            "model_path": str(model),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "skip_server_warmup": True,
            "random_seed": 0,
            "page_size": PAGE,
            "max_total_tokens": 64 * PAGE,
            "context_length": 1024,
            "chunked_prefill_size": 512,
            "max_running_requests": 4,
            "mem_fraction_static": 0.2,
            "enable_cache_report": True,
            "log_level": os.environ.get("TEST_SGLANG_LOG", "warning"),
            **options,
        }
    )
    try:
        yield engine
    finally:
        engine.shutdown()


def _forget_metrics() -> None:
    """Let an engine of this process register its metrics anew: SGLang expects to be the only one."""
    from prometheus_client import REGISTRY

    for collector, names in list(REGISTRY._collector_to_names.items()):
        if any(name.startswith("sglang:") for name in names):
            REGISTRY.unregister(collector)


def ask(engine: Any, prompt: Sequence[int], num_tokens: int = 4, **options: Any) -> Answer:
    """Return the answer to a prompt."""
    (result,) = engine.generate(
        input_ids=[list(prompt)],
        sampling_params={"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=-1,
        **options,
    )
    meta = result["meta_info"]
    cached = {name: n for name, n in (meta.get("cached_tokens_details") or {}).items() if isinstance(n, int)}
    logprobs = [float(each[0]) for each in meta["output_token_logprobs"]]
    return Answer(list(result["output_ids"]), logprobs, cached)


def flush(engine: Any) -> None:
    """Empty SGLang's device and host pools."""
    deadline = time.monotonic() + PATIENCE
    while not engine.flush_cache().success:
        assert time.monotonic() < deadline, "the cache is never flushed"
        time.sleep(0.05)


def asked_until(
    engine: Any, prompt: Sequence[int], is_so: Callable[[Answer], bool], **options: Any
) -> Answer:
    """Flush and ask until an answer is as expected: pages are stored and shown in the background."""
    deadline = time.monotonic() + PATIENCE
    while True:
        flush(engine)
        answer = ask(engine, prompt, **options)
        if is_so(answer):
            return answer
        assert time.monotonic() < deadline, f"never as expected: {answer}"
        time.sleep(0.1)
