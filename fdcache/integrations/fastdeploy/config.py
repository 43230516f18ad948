"""Layout and settings from FastDeploy's configuration and variables, read by attribute name."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from fdcache.errors import ConfigurationError
from fdcache.integrations.fastdeploy.model_variables import AttentionBackend, AttentionSettings
from fdcache.integrations.fastdeploy.serving_variables import EngineCacheSettings
from fdcache.layout import KVLayout
from fdcache.layout_planes import PlaneKind, PlaneSpec
from fdcache.settings import Settings, SettingsError, Source, Sourced, read_settings
from fdcache.settings.cache import CacheSettings, CopySettings, StorageTierSettings
from fdcache.settings.problems import error
from fdcache.tiers.host import host_block_bytes

_BACKEND, _MANAGER = "FD_ATTENTION_BACKEND", "ENABLE_V1_KVCACHE_MANAGER"
_BLOCK_FP8, _INT4 = "block_wise_fp8", "int4_zp"
_SCALED = 128
"""FP8 values of a latent that share a scale."""
_BLOCKS, _MEMORY = "FDCACHE_DEVICE_BLOCKS", "FDCACHE_DEVICE_MEMORY"
_ALTERNATIVES = {_BLOCKS: (_MEMORY,), "FDCACHE_HOST_MEMORY": ("FDCACHE_SERVER",)}
"""Variables that decide a tier's size in place of another."""

MIXED = "mixed"
"""FastDeploy's role of an instance that both prefills and decodes."""

_STORAGES = {
    "file": "FDCACHE_STORAGE=local and FDCACHE_STORAGE_DIR",
    "mooncake": "FDCACHE_STORAGE=mooncake",
    "attention_store": "FDCACHE_STORAGE=attnstore",
}
"""What stands for FastDeploy's storage backends."""

logger = logging.getLogger(__name__)


def layout_from_config(config: Any) -> KVLayout:
    """Return the layout of the caches that FastDeploy's attention backends make for this configuration.

    - Keys and values have shape [kv_heads, block_size, head_dim] in the model's dtype.
    - A quantised cache has bytes instead (``int4_zp`` packs two elements per byte), and ``block_wise_fp8`` adds scales
      in the model's dtype.
    - Models with a ``kv_lora_rank`` keep one latent per token, unless ``FD_ATTENTION_BACKEND`` says otherwise. With
      DSA_ATTN it is quantised with its scales, and each token has a key of the indexer.
    - The speculative method ``mtp`` adds one draft layer.

    Each dtype and each quantisation gets block keys of its own. A backend that makes other shapes needs a layout of
    its own. Raises ``ConfigurationError`` naming a missing attribute, or the backend.
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
    backend = latents_of(latent)
    if backend is AttentionBackend.DSA_ATTN:
        specs = _indexed_planes(model, block_size)
    elif backend is AttentionBackend.MLA_ATTN:
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


def _indexed_planes(model: Any, block_size: int) -> list[PlaneSpec]:
    """Return the planes of DSA_ATTN: bytes of FP8 values, a float32 scale for each 128, and the rotary part in BF16.

    The indexer's keys are such values with their scales.
    """
    latent, index = int(_get(model, "kv_lora_rank")), int(_get(model, "index_head_dim"))
    rotary = 2 * int(_get(model, "qk_rope_head_dim"))
    return [
        PlaneSpec(PlaneKind.KEY, "uint8", (1, block_size, latent + latent // _SCALED * 4 + rotary)),
        PlaneSpec(PlaneKind.INDEXER, "uint8", (block_size, index + index // _SCALED * 4)),
    ]


def quantisation(config: Any) -> str | None:
    """Return the ``kv_cache_quant_type`` of the configuration, or None.

    Workers have it in ``quant_config``; the engine's process has it only as the model's configuration or the command
    line gave it. Raises ``ConfigurationError`` if the two differ.
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


def latents_of(latent_size: int) -> AttentionBackend | None:
    """Return the attention backend that keeps one latent per token, None for one that keeps keys and values.

    ``FD_ATTENTION_BACKEND`` decides if it is set, otherwise the model does: its latents have ``latent_size`` elements,
    0 for none. Raises ``ConfigurationError`` for a backend that does not suit the model.
    """
    settings = read_settings().settings
    backend, place = settings.group(AttentionSettings).backend, settings.place(_BACKEND)
    if settings.source(_BACKEND) is Source.DEFAULT:
        return AttentionBackend.MLA_ATTN if latent_size else None
    if backend not in (AttentionBackend.MLA_ATTN, AttentionBackend.DSA_ATTN):
        return None
    if not latent_size:
        raise ConfigurationError(
            f"{_BACKEND}={backend} ({place}): the model has no kv_lora_rank to keep latents of; unset {_BACKEND}"
        )
    return backend


def load_settings(
    config: Any,
    layout: KVLayout,
    *,
    cache: CacheSettings | None = None,
    storage: StorageTierSettings | None = None,
    transfer: CopySettings | None = None,
) -> Settings:
    """Load the settings. The given groups take precedence, then the environment, then FastDeploy's cache configuration.

    The log names each variable that overrides an attribute of the configuration. Draft layers depend on the next
    token, so a match then looks one token ahead. A match does not wait for another request's copy.

    Raises ``SettingsError`` for an invalid value, ``ConfigurationError`` naming a missing attribute, and for an option
    of FastDeploy's for which fdcache has none.
    """
    require_supported(config)
    theirs = {} if cache is not None else _cache_config(config, layout)
    lookahead = 1 if layout.num_draft_layers else 0
    own = {
        "FDCACHE_BLOCK_SIZE": layout.block_size,
        "FDCACHE_LOOKAHEAD_TOKENS": lookahead,
        "FDCACHE_TRANSFER_ROLE": role_of(config),
    }
    settings = Settings.load(defaults={**own, **theirs})
    if (role := role_of(config)) != MIXED and not settings.peers.is_on:
        raise ConfigurationError(
            f"splitwise_role={role!r}, but FDCACHE_TRANSFER is none: set FDCACHE_TRANSFER=ipc or rdma on both "
            f"instances, or start with --splitwise-role {MIXED}"
        )
    if settings.cache.lookahead_tokens < lookahead:
        name = "FDCACHE_LOOKAHEAD_TOKENS"
        wrong = f"the KV of draft layers depends on {lookahead} token more than its own"
        raise SettingsError([error(name, settings.place(name), wrong, f"set it to {lookahead}, or unset it")])
    for name, attribute in theirs.items():
        for ours in (name, *_ALTERNATIVES.get(name, ())):
            if settings.source(ours) is not Source.DEFAULT:
                value, place = settings.render(ours), settings.place(ours)
                logger.info("%s=%s (%s) is in force instead of %s", ours, value, place, attribute.place)
    groups: dict[str, Any] = {"cache": cache, "storage_tier": storage, "transfer": transfer}
    if cache is None:
        groups["cache"] = settings.cache.model_copy(update={"defer_timeout": 0.0})
    else:
        groups["deployment"] = settings.deployment.model_copy(update={"device_memory": None})
        settings = settings.without_sources("cache")
    return settings.model_copy(update={name: group for name, group in groups.items() if group is not None})


def require_supported(config: Any) -> None:
    """Raise ``ConfigurationError`` for options of FastDeploy's that would have no effect, with what to set instead."""
    backend = getattr(getattr(config, "cache_config", None), "kvcache_storage_backend", None)
    if backend:
        ours = _STORAGES.get(str(backend), "FDCACHE_STORAGE")
        raise ConfigurationError(
            f"kvcache_storage_backend={backend!r}: FastDeploy's storage is not used with fdcache, which has its own; "
            f"set {ours}, and leave out --kvcache-storage-backend"
        )


def role_of(config: Any) -> str:
    """Return the ``splitwise_role`` of the configuration."""
    return str(getattr(getattr(config, "scheduler_config", None), "splitwise_role", None) or MIXED)


def settings_from_config(config: Any, layout: KVLayout) -> CacheSettings:
    """Return the cache's settings: the environment, and FastDeploy's cache configuration for what it does not set."""
    return load_settings(config, layout).cache_for(layout, partial(device_bytes, layout.tp_size))


def device_blocks(settings: Settings, layout: KVLayout, engine_blocks: int) -> int:
    """Return the number of device blocks: the environment's, or ``engine_blocks`` if it sets none."""
    if all(settings.source(name) is Source.DEFAULT for name in (_BLOCKS, _MEMORY)):
        return engine_blocks
    return settings.cache_for(layout, partial(device_bytes, layout.tp_size)).device_blocks


def device_bytes(ranks: int) -> int:
    """Return the memory of one rank's device in bytes, as Paddle reports it."""
    from fdcache.integrations.paddle import device_bytes

    return device_bytes(ranks)


def warn_of_old_manager(settings: Settings) -> None:
    """Log a warning if FastDeploy is configured to use its old cache manager instead of this one."""
    if not settings.group(EngineCacheSettings).v1_manager:
        logger.warning(
            "%s=0 (%s): FastDeploy uses its old cache manager, not this one, and write_through alone; set %s=1",
            _MANAGER,
            settings.place(_MANAGER),
            _MANAGER,
        )


def _cache_config(config: Any, layout: KVLayout) -> dict[str, Sourced]:
    """Return FastDeploy's cache configuration as values of fdcache's variables."""
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
    """Return an attribute by its dotted path. Raises ``ConfigurationError`` naming the path if it is missing."""
    value = config
    for name in path.split("."):
        value = getattr(value, name, None)
        if value is None:
            raise ConfigurationError(
                f"the configuration has no {path}; set it, or give the adapter a layout and settings of your own"
            )
    return value
