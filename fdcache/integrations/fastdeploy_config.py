"""What fdcache reads of FastDeploy's configuration, by attribute name; FastDeploy itself is not imported."""

from __future__ import annotations

from typing import Any

from fdcache import envs
from fdcache.errors import ConfigurationError
from fdcache.integrations.fastdeploy_variables import keeps_latents
from fdcache.layout import KVLayout, PlaneSpec
from fdcache.metadata import SLOT_HEADER_BYTES
from fdcache.planes import PlaneKind
from fdcache.settings.cache import CacheSettings, WritePolicy

_BLOCK_FP8 = "block_wise_fp8"


def layout_from_config(config: Any) -> KVLayout:
    """The layout that FastDeploy's attention backends make for this configuration.

    Keys and values of shape [kv_heads, block_size, head_dim] in the model's dtype, bytes for a quantised cache, with
    scales for ``block_wise_fp8``; one latent per token for models with a ``kv_lora_rank``, or as
    ``FD_ATTENTION_BACKEND`` says; one draft layer for the speculative method ``mtp``. A backend that differs needs its
    own layout. Raises ``ConfigurationError`` naming the attribute that is missing, or the backend.
    """
    model, cache = _get(config, "model_config"), _get(config, "cache_config")
    ranks = int(_get(config, "parallel_config.tensor_parallel_size"))
    speculative = getattr(config, "speculative_config", None)
    drafts = getattr(speculative, "method", None) == "mtp"
    quantised = getattr(getattr(config, "quant_config", None), "kv_cache_quant_type", None)
    dtype = str(_get(model, "dtype")) if quantised is None else "uint8"
    block_size = int(_get(cache, "block_size"))
    heads = max(int(_get(model, "num_key_value_heads")) // ranks, 1)
    latent = int(getattr(model, "kv_lora_rank", 0) or 0)
    if keeps_latents(latent):
        specs = [
            PlaneSpec(PlaneKind.KEY, dtype, (1, block_size, latent + int(_get(model, "qk_rope_head_dim"))))
        ]
    else:
        shape = (heads, block_size, int(_get(model, "head_dim")))
        specs = [PlaneSpec(kind, dtype, shape) for kind in (PlaneKind.KEY, PlaneKind.VALUE)]
        if quantised == _BLOCK_FP8:
            kinds = (PlaneKind.KEY_SCALE, PlaneKind.VALUE_SCALE)
            specs += [PlaneSpec(kind, "float32", (heads, block_size)) for kind in kinds]
    return KVLayout.build(
        specs,
        model=str(_get(model, "model")),
        revision=f"{getattr(model, 'revision', None) or 'unnamed'}:{quantised or dtype}",
        block_size=block_size,
        num_layers=int(_get(model, "num_hidden_layers")),
        num_draft_layers=int(drafts),
        tp_size=ranks,
        draft_block_ratio=float(getattr(speculative, "num_gpu_block_expand_ratio", 1.0) or 1.0)
        if drafts
        else 1.0,
    )


def settings_from_config(config: Any, layout: KVLayout) -> CacheSettings:
    """The settings that FastDeploy's cache configuration stands for.

    A match never waits for another request's copy, which the old scheduler would not understand. Draft layers are
    fed the next token, so a match leaves out the block at its end. ``write_through`` stays what it was: a backup of
    each block when it is computed. With ``FD_DETERMINISTIC_MODE`` reuse is cut to ``FD_DETERMINISTIC_SPLIT_KV_SIZE``.
    """
    cache = _get(config, "cache_config")
    policy = getattr(cache, "write_policy", None) or WritePolicy.WRITE_THROUGH.value
    if policy not in [each.value for each in WritePolicy]:
        known = ", ".join(WritePolicy)
        raise ConfigurationError(f"cache_config.write_policy: {policy!r} is unknown; use one of {known}")
    return CacheSettings(
        device_blocks=int(_get(cache, "total_block_num")),
        host_memory=num_host_blocks(config) * (layout.record_bytes + SLOT_HEADER_BYTES),
        enable_prefix_caching=bool(_get(cache, "enable_prefix_caching")),
        write_policy=WritePolicy(policy),
        write_through_threshold=int(getattr(cache, "write_through_threshold", None) or 2),
        reuse_grid=envs.FD_DETERMINISTIC_SPLIT_KV_SIZE if envs.FD_DETERMINISTIC_MODE else 0,
        lookahead_tokens=1 if layout.num_draft_layers else 0,
        defer_timeout=0.0,
    )


def num_host_blocks(config: Any) -> int:
    """``cache_config.num_cpu_blocks``, 0 when it is not set."""
    return int(getattr(_get(config, "cache_config"), "num_cpu_blocks", None) or 0)


def _get(config: Any, path: str) -> Any:
    """An attribute of the configuration, or of a part of it. Raises ``ConfigurationError`` naming it."""
    value = config
    for name in path.split("."):
        value = getattr(value, name, None)
        if value is None:
            raise ConfigurationError(
                f"the configuration has no {path}; set it, or give the adapter a layout and settings of your own"
            )
    return value
