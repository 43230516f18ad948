"""Layout and settings from vLLM's configuration, read by attribute name, and what is refused."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from fdcache.errors import ConfigurationError
from fdcache.groups import CacheGroup, windows_of
from fdcache.layout import KVLayout
from fdcache.layout_planes import PlaneKind, PlaneSpec
from fdcache.settings import Candidate, Settings, Source, Sourced
from fdcache.settings.checks import suggest
from fdcache.settings.tree import KNOWN_NAMES, VARIABLES

logger = logging.getLogger(__name__)

_FILE = "kv_connector_extra_config"
_FAILURE_POLICY = "kv_load_failure_policy"
_FULL_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec")
_SLIDING_WINDOW = "SlidingWindowSpec"
_FOLDER = "FDCACHE_STORAGE_DIR"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.json")


def require_supported(vllm_config: Any, kv_cache_config: Any) -> tuple[int, ...]:
    """Return the windows of the layout. Raise an error that names what would not be right, and the remedy.

    Raises ``UnsupportedLayoutError`` for groups of layers that cannot be served, ``ConfigurationError`` for anything
    else.
    """
    groups = kv_cache_config.kv_cache_groups
    windows = windows_of([_group_of(group) for group in groups])
    for wrong, right in chain(_unsupported(vllm_config), _unsupported_groups(vllm_config, groups, windows)):
        raise ConfigurationError(f"FdcacheConnector: {wrong}; {right}")
    return windows


def _group_of(group: Any) -> CacheGroup:
    spec, window = group.kv_cache_spec, None
    kind = type(spec).__name__
    if kind in _FULL_ATTENTION:
        window = 0
    elif kind == _SLIDING_WINDOW:
        window = int(spec.sliding_window)
    return CacheGroup(kind, len(group.layer_names), int(spec.block_size), window)


def _unsupported_groups(
    vllm_config: Any, groups: Sequence[Any], windows: Sequence[int]
) -> Iterator[tuple[str, str]]:
    if not windows:
        return
    remedy = "set --disable-hybrid-kv-cache-manager"
    sizes = {int(group.kv_cache_spec.page_size_bytes) for group in groups}
    if len(sizes) > 1:
        yield f"the layers' groups have pages of {sorted(sizes)} bytes", remedy
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        yield "pipeline stages have different groups of layers", f"{remedy}, or pipeline_parallel_size to 1"
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.use_eagle():
        yield "a draft model shares the KV cache with layers of several groups or windows", remedy


def _unsupported(vllm_config: Any) -> Iterator[tuple[str, str]]:
    role = vllm_config.kv_transfer_config.kv_role
    if role != "kv_both":
        yield f"kv_role {role!r} would only load or only store", "set it to 'kv_both'"
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            yield f"{name}={getattr(parallel, name)} spreads the tokens of a block over ranks", "set it to 1"
    stages = parallel.pipeline_parallel_size
    layers = vllm_config.model_config.hf_text_config.num_hidden_layers
    if layers % stages:
        yield (
            f"{layers} layers do not divide into {stages} equal pipeline stages",
            "choose a pipeline_parallel_size that divides them",
        )


def layout_from_config(vllm_config: Any, kv_cache_config: Any, packed_by: object = None) -> KVLayout:
    """Return the layout of vLLM's pages: one plane of bytes for each layer of a rank, or of its largest group.

    vLLM's groups take their blocks from one pool, and lie over each other in the same memory.
    Its revision names everything that decides the bytes of a page: the weights, the dtypes, the packing, the ranks.
    ``packed_by``: what else decides how vLLM packs a page: the GPUs' capability, and its variable.
    Raises the errors of ``require_supported``.
    """
    windows = require_supported(vllm_config, kv_cache_config)
    largest = max(kv_cache_config.kv_cache_groups, key=lambda group: len(group.layer_names))
    spec = largest.kv_cache_spec
    return KVLayout.build(
        [PlaneSpec(PlaneKind.KEY, "uint8", (int(spec.page_size_bytes),))],
        model=str(vllm_config.model_config.model),
        revision=revision_of(vllm_config, packed_by),
        block_size=int(spec.block_size),
        num_layers=len(largest.layer_names),
        tp_size=int(vllm_config.parallel_config.world_size),
        windows=windows,
    )


def revision_of(vllm_config: Any, packed_by: object = None) -> str:
    """Return a digest of the weights and of what decides how vLLM computes and packs a page.

    Rotary embeddings of the kind "longrope" have other factors from a certain longest prompt on.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    load, speculative = vllm_config.load_config, vllm_config.speculative_config
    parts = {
        "vllm": version("vllm"),
        "revision": model.revision,
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "files": files_of(Path(str(model.model))),
        "config": getattr(model, "hf_config_path", None),
        "overrides": repr(getattr(model, "hf_overrides", None)),
        "quantization": (model.quantization, repr(getattr(model, "quantization_config", None))),
        "dtype": str(model.dtype),
        "cache_dtype": (str(cache.cache_dtype), getattr(cache, "kv_cache_dtype_skip_layers", None)),
        "inputs": repr(getattr(getattr(model, "multimodal_config", None), "mm_processor_kwargs", None)),
        "load_format": str(load.load_format),
        "seed": model.seed if str(load.load_format) == "dummy" else None,
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "backend": str(getattr(getattr(vllm_config, "attention_config", None), "backend", None)),
        "packing": (getattr(cache, "kv_cache_layout", None), str(packed_by)),
        "max_model_len": model.max_model_len if "longrope" in _rope_of(model.hf_text_config) else None,
        "draft": None if speculative is None else (speculative.method, str(speculative.model)),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _rope_of(text_config: Any) -> str:
    return "".join(str(getattr(text_config, name, "")) for name in ("rope_scaling", "rope_parameters"))


def files_of(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of each file of local weights, so that weights replaced in place are others."""
    if not folder.is_dir():
        return []
    found = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in found]


def load_settings(vllm_config: Any, layout: KVLayout) -> Settings:
    """Load the settings: ``kv_connector_extra_config`` first, then the environment.

    Blocks are copied to the host as soon as they are computed, unless ``FDCACHE_WRITE_POLICY`` says otherwise. Draft
    layers depend on the next token, so a match then looks one token ahead.

    Raises ``ConfigurationError`` for a name that is no setting, ``SettingsError`` for a wrong value.
    """
    speculative = vllm_config.speculative_config
    drafts = speculative is not None and bool(speculative.use_eagle())
    settings = Settings.load(
        arguments=extra_settings(vllm_config.kv_transfer_config.kv_connector_extra_config),
        defaults={
            "FDCACHE_BLOCK_SIZE": layout.block_size,
            "FDCACHE_RANKS": layout.tp_size,
            "FDCACHE_WRITE_POLICY": "write_through",
            "FDCACHE_LOOKAHEAD_TOKENS": int(drafts),
        },
    )
    if drafts and settings.cache.lookahead_tokens < 1:
        place = settings.place("FDCACHE_LOOKAHEAD_TOKENS")
        raise ConfigurationError(
            f"FDCACHE_LOOKAHEAD_TOKENS=0 ({place}): the KV of draft layers depends on the next token; set it to 1"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        for name, is_on in (
            ("FDCACHE_SERVER", settings.cache.server is not None),
            ("FDCACHE_STORAGE", settings.storage_tier.is_on),
        ):
            if is_on:
                raise ConfigurationError(
                    f"{name} ({settings.place(name)}): calculate_kv_scales makes other scales in each run, so that "
                    "no other engine can read its blocks; give the model KV scales, or unset the variable"
                )
    return _with_own_folder(settings, getattr(vllm_config.parallel_config, "data_parallel_index", 0))


def _with_own_folder(settings: Settings, engine: int) -> Settings:
    """Return the settings of one of several data parallel engines: the files of local storage have one owner."""
    if not engine or settings.storage_tier.connector != "local":
        return settings
    folder = settings.storage_tier.directory / f"engine-{engine}"
    place = f"{settings.place(_FOLDER)}, with data_parallel_index {engine}"
    return settings.with_derived({_FOLDER: (Candidate(Source.DERIVED, _FOLDER, place, folder), folder)})


def settings_in_force(settings: Settings) -> str:
    """Return the settings that differ from their defaults with their places, in one line, secrets masked.

    ``fdcache env show`` does not see ``kv_connector_extra_config``.
    """
    changed = (name for name in VARIABLES if settings.changed(name))
    return ", ".join(f"{name}={settings.render(name)} ({settings.place(name)})" for name in changed)


def extra_settings(extra: Mapping[str, object]) -> dict[str, Sourced]:
    """Return the values of ``kv_connector_extra_config`` by variable. Raises ``ConfigurationError`` for other names."""
    given = {name: value for name, value in extra.items() if name != _FAILURE_POLICY}
    for name in given:
        if name not in KNOWN_NAMES:
            near = suggest(name, KNOWN_NAMES)
            remedy = f"did you mean {near}?" if near else "`fdcache env show` lists the names"
            raise ConfigurationError(f"{_FILE}: {name} is no setting; {remedy}")
    return {name: Sourced(_FILE, value) for name, value in given.items()}


def choose_failure_policy(transfer_config: Any) -> None:
    """Let vLLM compute what cannot be loaded, where it would end the request with an error by default.

    vLLM does not tell its default, 'fail', from one that the user gave: ``kv_connector_extra_config`` does.
    Raises ``ConfigurationError`` for a policy that vLLM does not have.
    """
    policy = transfer_config.kv_connector_extra_config.get(_FAILURE_POLICY)
    if policy not in (None, "fail", "recompute"):
        raise ConfigurationError(f"{_FILE}: {_FAILURE_POLICY}={policy!r}; set it to 'recompute' or 'fail'")
    if policy is None and transfer_config.kv_load_failure_policy == "fail":
        logger.info(
            "kv_load_failure_policy is 'recompute': what cannot be loaded is computed, and no request fails for it. "
            "To let such requests fail, set kv_load_failure_policy to 'fail' in kv_connector_extra_config"
        )
    transfer_config.kv_load_failure_policy = policy or "recompute"
