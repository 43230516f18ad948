"""What SGLang's configuration says: settings, the identity of the pages, and what is refused by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fdcache.errors import ConfigurationError
from fdcache.hashing import SGLANG
from fdcache.integrations.sglang.pages import HostPages
from fdcache.integrations.weights import digest_of
from fdcache.layout import KVLayout
from fdcache.layout_planes import PlaneSpec
from fdcache.settings import Candidate, Settings, SettingsError, Source, Sourced
from fdcache.settings.cache import LoadOrRecompute, PrefetchPolicy, WritePolicy
from fdcache.settings.checks import REMOVED, suggest
from fdcache.settings.tree import KNOWN_NAMES

SERVED = ("0.5.23",)
"""The versions of SGLang whose storage interface this is; the tests run each of them."""

FILE = "hicache_storage_backend_extra_config"
_OF_SGLANG = {"backend_name", "module_path", "class_name", "interface_v1", "allocator"}
_HOST_MEMORY, _SERVER, _FOLDER = "FDCACHE_HOST_MEMORY", "FDCACHE_SERVER", "FDCACHE_STORAGE_DIR"
_DECIDED = {
    "FDCACHE_RANKS": 1,
    "FDCACHE_WRITE_POLICY": WritePolicy.WRITE_THROUGH,
    "FDCACHE_LOAD_OR_RECOMPUTE": LoadOrRecompute.ALWAYS,
    "FDCACHE_LOOKAHEAD_TOKENS": 0,
}
"""SGLang has decided what is stored and loaded, and how long its requests wait."""

STORAGE_METHODS = (
    "get",
    "batch_get",
    "set",
    "batch_set",
    "exists",
    "register_mem_pool_host",
    "register_mem_host_pool_v2",
    "on_host_pools_registered",
    "batch_exists",
    "batch_exists_v2",
    "batch_get_v1",
    "batch_get_v2",
    "batch_set_v1",
    "batch_set_v2",
    "get_stats",
    "clear",
)
LINKER_METHODS = (
    "lookup",
    "load",
    "start_layer_wise_loading",
    "finish_layer_wise_loading",
    "cancel_queued_load",
    "offload",
    "num_completed_offloads",
    "pop_completed_offload",
    "reset",
    "close",
    "record_offload_ready",
)
_WHOLE_POOLS = ("kv", "indexer", "draft", "draft_indexer")
"""Pools that have a page for each page of the prompt."""

_IDENTITY = (
    "model_path",
    "revision",
    "weight_version",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "quantization_param_path",
    "load_format",
    "model_loader_extra_config",
    "json_model_override_args",
    "model_impl",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
)
"""Arguments of SGLang that decide the bytes of a page, or what its key stands for."""


def require_version(base: type, methods: Sequence[str], door: str) -> None:
    """Raise ``ConfigurationError`` unless this is a version of SGLang whose interface is known.

    ``base``: the class of SGLang that ``door`` derives from, of which it implements or calls ``methods``.
    """
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        installed = "of unknown version"
    missing = [name for name in methods if not hasattr(base, name)]
    more = sorted(getattr(base, "__abstractmethods__", frozenset()) - {*methods})
    if installed not in SERVED or missing or more:
        lacks = [f"no {', '.join(missing)}"] * bool(missing) + [f"also {', '.join(more)}"] * bool(more)
        what = f", whose {base.__name__} has {' and '.join(lacks)}" if lacks else ""
        raise ConfigurationError(
            f"{door}: SGLang {installed}{what}; served are {', '.join(SERVED)}: install one of them, or an "
            "fdcache that serves this one"
        )


def require_options(config: Any, server_args: Any) -> None:
    """Raise ``ConfigurationError`` for options of SGLang with which pages would not be right, or not be stored."""
    for wrong, right in _refused(config, server_args):
        raise ConfigurationError(f"FdcacheStorage: {wrong}; {right}")


def _refused(config: Any, server_args: Any) -> Iterator[tuple[str, str]]:
    extra = config.extra_config or {}
    if not extra.get("interface_v1"):
        yield (
            "interface_v1 is off, so that every page would be copied twice",
            f'set "interface_v1": 1 in {FILE}',
        )
    if _passes_prefix_keys(getattr(server_args, FILE, None)) is False:
        yield PREFIX_KEYS
    if int(getattr(config, "dcp_size", 1)) > 1:
        yield "decode context parallelism shards its pages", "unset --dcp-size"
    if getattr(config, "should_split_heads", False):
        yield "tp_lcm_size splits pages by heads", f"leave tp_lcm_size out of {FILE}"


PREFIX_KEYS = (
    "hicache_storage_pass_prefix_keys is off, so that a page's place in its prompt is not known",
    f'set "hicache_storage_pass_prefix_keys": true in {FILE}',
)


def _passes_prefix_keys(text: Any) -> bool | None:
    """Return what the arguments of the start say; None for a file, and for a backend that was attached later."""
    if not isinstance(text, str) or text.startswith("@"):
        return None
    try:
        return bool(json.loads(text).get("hicache_storage_pass_prefix_keys", False))
    except (ValueError, AttributeError):
        return None


def require_pools(names: Mapping[str, Any], config: Any) -> None:
    """Raise ``ConfigurationError`` for pools that cannot be stored: without them the output would be wrong."""
    for name in names:
        if name not in _WHOLE_POOLS:
            raise ConfigurationError(
                f"FdcacheStorage: the pool {name} of this model is not stored, and its keys and values are of no use "
                "without it; serve this model without --hicache-storage-backend"
            )
        if name.startswith("draft") and config.is_mla_model and config.tp_size > 1:
            raise ConfigurationError(
                f"FdcacheStorage: SGLang stores the pool {name} of rank 0 alone; serve this model without drafts, or "
                "without --hicache-storage-backend"
            )


@dataclass(frozen=True)
class Rank:
    """One rank of an engine, with the fields of SGLang's ``HiCacheStorageConfig`` that say which pages it has."""

    model_name: str
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    dp_rank: int
    is_mla_model: bool
    extra_config: Mapping[str, Any]


@dataclass(frozen=True)
class Door:
    """One of the two classes that SGLang loads: its name, where its settings are, and what it needs of them."""

    name: str
    file: str
    names_of_sglang: frozenset[str]
    prefetch_policy: PrefetchPolicy
    defaults: Mapping[str, Any]


STORAGE = Door(
    "FdcacheStorage",
    FILE,
    frozenset(_OF_SGLANG),
    PrefetchPolicy.WAIT_COMPLETE,
    {"FDCACHE_VERIFY": "all", "FDCACHE_PLAN_TIMEOUT": 5.0},
)
LINKER = Door(
    "FdcacheLinker",
    "linker_extra_config",
    frozenset(),
    PrefetchPolicy.BEST_EFFORT,
    {"FDCACHE_VERIFY": "storage", "FDCACHE_PLAN_TIMEOUT": 5.0},
)


def load_settings(config: Any, page_size: int, door: Door = STORAGE) -> Settings:
    """Return the settings of one rank: the FDCACHE_ names of the JSON first, then the environment.

    Raises ``ConfigurationError`` for a name that is no setting, a wrong value, and for pages that no rank could find.
    """
    given = _given(config.extra_config or {}, door)
    try:
        settings = Settings.load(arguments=given, defaults=dict(door.defaults))
    except SettingsError as error:
        raise ConfigurationError(f"{door.name}: {error}") from error
    _require_memory(settings, config, door)
    theirs = {**_DECIDED, "FDCACHE_PREFETCH_POLICY": door.prefetch_policy, "FDCACHE_BLOCK_SIZE": page_size}
    return _with_own_folder(_with(settings, theirs, "SGLang decides"), config)


def _with(settings: Settings, values: Mapping[str, Any], place: str) -> Settings:
    return settings.with_derived(
        {name: (Candidate(Source.DERIVED, name, place, value), value) for name, value in values.items()}
    )


def _given(extra: Mapping[str, Any], door: Door) -> dict[str, Sourced]:
    given = {name: value for name, value in extra.items() if name not in door.names_of_sglang}
    for name in given:
        if name not in KNOWN_NAMES:
            near = suggest(name, KNOWN_NAMES)
            remedy = f"did you mean {near}?" if near else "`fdcache env show` lists the names"
            raise ConfigurationError(f"{door.file}: {name} is no setting; {REMOVED.get(name, remedy)}")
    return {name: Sourced(door.file, value) for name, value in given.items()}


def _require_memory(settings: Settings, config: Any, door: Door) -> None:
    if settings.cache.server is not None:
        if settings.storage_tier.is_on:
            raise ConfigurationError(
                f"FDCACHE_STORAGE ({settings.place('FDCACHE_STORAGE')}): with {_SERVER} the storage belongs to the "
                f"service; set it for `fdcache serve` and unset it here, or unset {_SERVER}"
            )
        return
    if not settings.cache.host_memory:
        raise ConfigurationError(
            f"{door.name}: {_HOST_MEMORY} and {_SERVER} are not set: there is nothing to store pages in; set "
            f"{_SERVER} to the address of `fdcache serve`, or {_HOST_MEMORY}, such as 8GiB, for each rank"
        )
    if config.is_mla_model and config.tp_size > 1 and door is STORAGE:
        raise ConfigurationError(
            f"FdcacheStorage: SGLang stores the pages of latent attention on rank 0 alone, for all {config.tp_size} "
            f"ranks: they need the same memory; set {_SERVER} to the address of `fdcache serve`"
        )


def settings_of_pool(settings: Settings, name: str, page_size: int, share: float) -> Settings:
    """Return settings for one of several pools: its part of the memory and of the disk, and a folder of its own."""
    if share == 1:
        return settings
    values: dict[str, Any] = {"FDCACHE_BLOCK_SIZE": page_size}
    if settings.cache.server is None:
        values[_HOST_MEMORY] = int(settings.cache.host_memory * share)
        if settings.storage_tier.connector == "local":
            values[_FOLDER] = settings.storage_tier.directory / name
            values["FDCACHE_STORAGE_SIZE"] = int(settings.storage_tier.size * share)
    return _with(settings, values, f"the pool {name}")


def _with_own_folder(settings: Settings, config: Any) -> Settings:
    """Return settings with a folder for this rank: the files of local storage have one owner."""
    ranks = {"dp": config.dp_rank, "pp": config.pp_rank, "cp": config.attn_cp_rank, "tp": config.tp_rank}
    if settings.storage_tier.connector != "local" or not any(ranks.values()):
        return settings
    folder = settings.storage_tier.directory / "-".join(f"{name}{rank}" for name, rank in ranks.items())
    return _with(settings, {_FOLDER: folder}, f"{settings.place(_FOLDER)}, of this rank")


def layout_of(pages: HostPages, name: str, config: Any, server_args: Any, settings: Settings) -> KVLayout:
    """Return the layout of a host pool's pages on one rank."""
    what = {
        "pool": name,
        "pool_dtype": str(getattr(pages.pool, "dtype", None)),
        "pool_layout": str(pages.pool.layout),
        "pool_format": getattr(pages.pool, "storage_format_tag", None),
        "pages": [pages.page_size, [list(spec.shape) for spec in pages.specs], pages.num_layers],
    }
    specs = [pages.specs] * pages.num_layers
    return layout_with(specs, pages.page_size, what, config, server_args, settings)


def layout_with(
    specs: Sequence[Sequence[PlaneSpec]],
    page_size: int,
    what: Mapping[str, Any],
    config: Any,
    server_args: Any,
    settings: Settings,
) -> KVLayout:
    """Return the layout of a pool's pages on one rank; ``what`` describes the pool.

    SGLang's keys are of tokens, adapter and salt. The layout adds what they lack: weights, dtypes, the order of bytes
    in a page, and which layers and heads this rank has. Ranks of latent attention have the same pages.
    """
    weights = settings.deployment.weights
    parts: dict[str, Any] = {each: _plain(getattr(server_args, each, None)) for each in _IDENTITY}
    if weights is not None:
        parts |= {"model_path": weights, "revision": None, "weight_version": None, "load_format": None}
    else:
        parts["weights"] = digest_of(Path(str(parts["model_path"])))
        parts["draft"] = digest_of(Path(str(parts["speculative_draft_model_path"])))
        if parts["weights"] is not None:
            parts["model_path"] = None
    if parts["load_format"] == "dummy":
        parts["seed"] = getattr(server_args, "random_seed", None)
    parts |= what
    parts |= {
        "pipeline": [config.pp_rank, config.pp_size],
        "context": [config.attn_cp_rank, config.attn_cp_size],
        "tensor": None if config.is_mla_model else [config.tp_rank, config.tp_size],
        "keys": "sglang sha256 1",
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]
    model = weights or str(getattr(server_args, "served_model_name", None) or config.model_name or "model")
    return KVLayout.of_layers(specs, model=model, revision=SGLANG + digest, block_size=page_size)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
