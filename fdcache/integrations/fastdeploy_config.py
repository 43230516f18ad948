"""What fdcache reads of FastDeploy's configuration, by attribute name; FastDeploy itself is not imported."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from fdcache.errors import ConfigurationError
from fdcache.integrations.fastdeploy_variables import keeps_latents
from fdcache.layout import KVLayout, PlaneKind, PlaneSpec
from fdcache.settings import Settings, SettingsError, Source, Sourced
from fdcache.settings.cache import CacheSettings, StorageTierSettings, TransferSettings
from fdcache.settings.problems import error
from fdcache.tiers.host import host_block_bytes

_BLOCK_FP8, _INT4 = "block_wise_fp8", "int4_zp"
_BLOCKS, _MEMORY = "FDCACHE_DEVICE_BLOCKS", "FDCACHE_DEVICE_MEMORY"
_OTHER_WAYS = {_BLOCKS: (_MEMORY,), "FDCACHE_HOST_MEMORY": ("FDCACHE_SERVER",)}
"""What else decides the sizes of the tiers."""

logger = logging.getLogger(__name__)


def layout_from_config(config: Any) -> KVLayout:
    """The layout that FastDeploy's attention backends make for this configuration.

    Keys and values of shape [kv_heads, block_size, head_dim] in the model's dtype, bytes for a quantised cache (two
    elements a byte for ``int4_zp``), with scales in the model's dtype for ``block_wise_fp8``; one latent per token for
    models with a ``kv_lora_rank``, or as ``FD_ATTENTION_BACKEND`` says; one draft layer for the speculative method
    ``mtp``. A backend that differs needs its own layout. Each dtype and each quantisation has keys of its own. Raises
    ``ConfigurationError`` naming the attribute that is missing, or the backend.
    """
    model, cache = _get(config, "model_config"), _get(config, "cache_config")
    ranks = int(_get(config, "parallel_config.tensor_parallel_size"))
    speculative = getattr(config, "speculative_config", None)
    drafts = getattr(speculative, "method", None) == "mtp"
    quantised = quantisation(config)
    computed = str(_get(model, "dtype"))
    dtype = computed if quantised is None else "uint8"
    block_size = int(_get(cache, "block_size"))
    heads = max(int(_get(model, "num_key_value_heads")) // ranks, 1)
    latent = int(getattr(model, "kv_lora_rank", 0) or 0)
    if keeps_latents(latent):
        specs = [
            PlaneSpec(PlaneKind.KEY, dtype, (1, block_size, latent + int(_get(model, "qk_rope_head_dim"))))
        ]
    else:
        head_dim = int(_get(model, "head_dim"))
        shape = (heads, block_size, head_dim // 2 if quantised == _INT4 else head_dim)
        specs = [PlaneSpec(kind, dtype, shape) for kind in (PlaneKind.KEY, PlaneKind.VALUE)]
        if quantised == _BLOCK_FP8:
            kinds = (PlaneKind.KEY_SCALE, PlaneKind.VALUE_SCALE)
            specs += [PlaneSpec(kind, computed, (heads, block_size)) for kind in kinds]
    return KVLayout.build(
        specs,
        model=str(_get(model, "model")),
        revision=f"{getattr(model, 'revision', None) or 'unnamed'}:{quantised or dtype}:{computed}",
        block_size=block_size,
        num_layers=int(_get(model, "num_hidden_layers")),
        num_draft_layers=int(drafts),
        tp_size=ranks,
        draft_block_ratio=float(getattr(speculative, "num_gpu_block_expand_ratio", 1.0) or 1.0)
        if drafts
        else 1.0,
    )


def quantisation(config: Any) -> str | None:
    """Return the ``kv_cache_quant_type`` of the configuration, or None.

    The workers have parsed it into ``quant_config``; the engine's process has it only as the model's configuration or
    the command line gave it. Raises ``ConfigurationError`` where the two differ.
    """
    parsed = getattr(getattr(config, "quant_config", None), "kv_cache_quant_type", None)
    model = _get(config, "model_config")
    for name in ("quantization_config", "quantization"):
        given = getattr(model, name, None)
        named = given.get("kv_cache_quant_type") if isinstance(given, dict) else None
        if named is None:
            continue
        if parsed is not None and parsed != named:
            raise ConfigurationError(
                f"quant_config has kv_cache_quant_type {parsed!r}, model_config.{name} {named!r}; let them agree"
            )
        return str(named)
    return None if parsed is None else str(parsed)


def load_settings(
    config: Any,
    layout: KVLayout,
    *,
    cache: CacheSettings | None = None,
    storage: StorageTierSettings | None = None,
    transfer: TransferSettings | None = None,
) -> Settings:
    """Read the settings: groups that are given, above the environment, above FastDeploy's cache configuration.

    A variable that is set in place of an attribute of the configuration is named in the log. Draft layers are fed the
    next token, so a match leaves out the block at its end. ``write_through`` stays what it was: a backup of each block
    when it is computed. A match waits for no other request's copy unless ``FDCACHE_DEFER_TIMEOUT`` says so.

    Raises ``SettingsError`` for a value that is wrong, ``ConfigurationError`` naming an attribute that is missing.
    """
    theirs = {} if cache is not None else _cache_config(config, layout)
    lookahead = 1 if layout.num_draft_layers else 0
    own = {
        "FDCACHE_BLOCK_SIZE": layout.block_size,
        "FDCACHE_LOOKAHEAD_TOKENS": lookahead,
        "FDCACHE_DEFER_TIMEOUT": 0.0,
    }
    settings = Settings.load(defaults={**own, **theirs})
    if settings.cache.lookahead_tokens < lookahead:
        name = "FDCACHE_LOOKAHEAD_TOKENS"
        wrong = f"the KV of draft layers depends on {lookahead} token more than its own"
        raise SettingsError([error(name, settings.place(name), wrong, f"set it to {lookahead}, or unset it")])
    for name, attribute in theirs.items():
        for ours in (name, *_OTHER_WAYS.get(name, ())):
            if settings.source(ours) is not Source.DEFAULT:
                value, place = settings.render(ours), settings.place(ours)
                logger.info("%s=%s (%s) is in force instead of %s", ours, value, place, attribute.place)
    groups: dict[str, Any] = {"cache": cache, "storage_tier": storage, "transfer": transfer}
    if cache is not None:
        groups["deployment"] = settings.deployment.model_copy(update={"device_memory": None})
        settings = settings.without_sources("cache")
    return settings.model_copy(update={name: group for name, group in groups.items() if group is not None})


def settings_from_config(config: Any, layout: KVLayout) -> CacheSettings:
    """Return the cache's settings: those of the environment, and FastDeploy's cache configuration for the others."""
    return load_settings(config, layout).cache_for(layout, partial(device_bytes, layout.tp_size))


def device_blocks(settings: Settings, layout: KVLayout, engine_blocks: int) -> int:
    """Return the blocks of the device tier: those the environment asks for, else those the engine has room for."""
    if all(settings.source(name) is Source.DEFAULT for name in (_BLOCKS, _MEMORY)):
        return engine_blocks
    return settings.cache_for(layout, partial(device_bytes, layout.tp_size)).device_blocks


def device_bytes(ranks: int) -> int:
    """Return the memory of one rank's device, as Paddle says."""
    from fdcache.integrations.paddle import device_bytes

    return device_bytes(ranks)


def _cache_config(config: Any, layout: KVLayout) -> dict[str, Sourced]:
    """Return what FastDeploy's cache configuration says as values of our variables."""
    cache = _get(config, "cache_config")
    host_blocks = int(getattr(cache, "num_cpu_blocks", None) or 0)
    threshold = int(getattr(cache, "write_through_threshold", None) or 2)
    values = {
        _BLOCKS: ("total_block_num", int(_get(cache, "total_block_num"))),
        "FDCACHE_HOST_MEMORY": ("num_cpu_blocks", host_blocks * host_block_bytes(layout)),
        "FDCACHE_PREFIX_CACHING": ("enable_prefix_caching", bool(_get(cache, "enable_prefix_caching"))),
        "FDCACHE_WRITE_POLICY": ("write_policy", getattr(cache, "write_policy", None) or "write_through"),
        "FDCACHE_WRITE_THROUGH_THRESHOLD": ("write_through_threshold", threshold),
    }
    return {name: Sourced(f"cache_config.{attribute}", value) for name, (attribute, value) in values.items()}


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
