"""Configurations like vLLM's, as plain data."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any


class FullAttentionSpec(SimpleNamespace):
    """A group of layers that attend to all tokens."""


class SlidingWindowSpec(SimpleNamespace):
    """A group of layers that attend to the last tokens."""


class MLAAttentionSpec(SimpleNamespace):
    """A group of layers with latents."""


class MambaSpec(SimpleNamespace):
    """A group of layers with a state."""


def vllm_config(extra: dict[str, object] | None = None, **changed: Any) -> Any:
    """A configuration like vLLM's; ``changed`` replaces attributes by ``section__attribute``."""
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            model="m",
            revision=None,
            hf_config=SimpleNamespace(),
            hf_text_config=SimpleNamespace(num_hidden_layers=4),
            max_model_len=4096,
            hf_overrides={},
            quantization=None,
            dtype="bfloat16",
            seed=0,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            calculate_kv_scales=False,
            kv_cache_layout=None,
            enable_prefix_caching=True,
            block_size=16,
            user_specified_block_size=True,
        ),
        parallel_config=SimpleNamespace(
            world_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_index=0,
        ),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
        attention_config=SimpleNamespace(backend=None),
        kv_transfer_config=SimpleNamespace(
            kv_connector="FdcacheConnector",
            kv_role="kv_both",
            kv_load_failure_policy="fail",
            kv_connector_extra_config=extra or {},
        ),
    )
    for name, value in changed.items():
        section, attribute = name.split("__")
        setattr(getattr(made, section), attribute, value)
    return made


def kv_config(*kinds: type) -> Any:
    """KV cache groups of four layers in all, by default one."""
    kinds = kinds or (FullAttentionSpec,)
    groups = [
        SimpleNamespace(
            layer_names=[f"{i}.{j}" for j in range(4 // len(kinds))],
            kv_cache_spec=kind(page_size_bytes=65536, block_size=16, sliding_window=128),
        )
        for i, kind in enumerate(kinds)
    ]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=10)


def placed(given: Any) -> Any:
    """Tell where the layers of a configuration lie, as vLLM does: those of each group over those of the others."""
    given.kv_cache_tensors = [
        SimpleNamespace(layers=group.layer_names, offset=0, layer_stride=655360, block_stride=65536)
        for group in given.kv_cache_groups
    ]
    return given


def sharing(given: Any) -> Any:
    """Tell which layers share tensors, as versions of vLLM before 0.33 do: one of each group, while it has any."""
    blocks, page = given.num_blocks, given.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    names = itertools.zip_longest(*(group.layer_names for group in given.kv_cache_groups))
    given.kv_cache_tensors = [
        SimpleNamespace(size=blocks * page, shared_by=[name for name in each if name]) for each in names
    ]
    return given
