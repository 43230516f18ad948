"""FastDeploy's variables: their groups, the settings of fdcache that follow from them, and what conflicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fdcache.integrations.fastdeploy.log_variables import LoggingSettings, TracingSettings, UsageSettings
from fdcache.integrations.fastdeploy.model_variables import (
    AttentionSettings,
    HardwareSettings,
    KernelSettings,
    ModelSettings,
    MoeSettings,
    SamplingSettings,
)
from fdcache.integrations.fastdeploy.serving_variables import (
    DisaggregationSettings,
    EngineCacheSettings,
    SchedulingSettings,
    ServiceSettings,
    StorageSettings,
)
from fdcache.settings.extensions import Extension, GivenSettings
from fdcache.settings.problems import Problem
from fdcache.settings.sources import Candidate, Source

FALLBACKS: Mapping[str, str] = {
    "FDCACHE_STORAGE_DIR": "FILE_BACKEND_STORAGE_DIR",
    "FDCACHE_DRAIN_TIMEOUT": "FD_CACHE_PROC_EXIT_TIMEOUT",
    "FDCACHE_SWAP_DRAIN_TIMEOUT": "FD_CACHE_PROC_EXIT_TIMEOUT",
}
"""Variables that take their value from a variable of FastDeploy, if only that is set."""

GRID, MODE, SPLIT = "FDCACHE_REUSE_GRID", "FD_DETERMINISTIC_MODE", "FD_DETERMINISTIC_SPLIT_KV_SIZE"


# --- values that follow -------------------------------------------------------------------------------------


def _derive(settings: GivenSettings) -> Iterator[tuple[str, Candidate]]:
    for name, theirs in FALLBACKS.items():
        if settings.source(name) is Source.DEFAULT and settings.source(theirs) is not Source.DEFAULT:
            yield name, _derived_from(settings, theirs)
    if settings.value(MODE) and (settings.source(GRID) is Source.DEFAULT or not settings.value(GRID)):
        yield GRID, _derived_from(settings, SPLIT, f", with {MODE} in {settings.place(MODE)}")


def _derived_from(settings: GivenSettings, name: str, condition: str = "") -> Candidate:
    """Return the value of variable ``name``. The place names that variable, since it is the one to change."""
    place = f"{name} in {settings.place(name)}{condition}"
    return Candidate(Source.DERIVED, name, place, settings.value(name))


# --- conflicts ----------------------------------------------------------------------------------------------


def _check(settings: GivenSettings) -> Iterator[Problem]:
    yield from _deterministic_grid(settings)
    yield from _recovery(settings)
    yield from _ranks(settings)


def _deterministic_grid(settings: GivenSettings) -> Iterator[Problem]:
    attention, block = settings.group(AttentionSettings), settings.deployment.block_size
    split = attention.split_kv_size
    if not attention.deterministic:
        return
    grid = max(settings.cache.reuse_grid, block)
    if grid % split and not split % block:
        yield settings.conflict(
            (GRID, SPLIT),
            f"in deterministic mode prefixes reused up to a multiple of {grid} tokens may end off the grid of {split}",
            "unset FDCACHE_REUSE_GRID, or make it a multiple of FD_DETERMINISTIC_SPLIT_KV_SIZE",
        )
    if split % block and block % split:
        yield settings.conflict(
            (SPLIT, "FDCACHE_BLOCK_SIZE"),
            f"in deterministic mode {split} must divide the block size {block} or be divided by it",
            "make both powers of two, such as 16 and 64",
        )


def _recovery(settings: GivenSettings) -> Iterator[Problem]:
    scheduling = settings.group(SchedulingSettings)
    if scheduling.v1 and scheduling.disabled_recover:
        yield settings.conflict(
            ("FD_DISABLED_RECOVER", "ENABLE_V1_KVCACHE_SCHEDULER"),
            "the v1 scheduler must recompute requests when the cache is full",
            "set FD_DISABLED_RECOVER=0, or ENABLE_V1_KVCACHE_SCHEDULER=0",
        )


def _ranks(settings: GivenSettings) -> Iterator[Problem]:
    devices, ranks = settings.group(HardwareSettings).visible_devices, settings.deployment.ranks
    if devices and devices != ("-1",) and ranks > len(devices):
        yield settings.conflict(
            ("FDCACHE_RANKS", "CUDA_VISIBLE_DEVICES"),
            f"{ranks} ranks need a device each, and {len(devices)} are visible",
            f"set FDCACHE_RANKS={len(devices)} or make more devices visible",
        )


EXTENSION = Extension(
    {
        "logging": LoggingSettings,
        "tracing": TracingSettings,
        "usage": UsageSettings,
        "model": ModelSettings,
        "sampling": SamplingSettings,
        "attention": AttentionSettings,
        "moe": MoeSettings,
        "kernels": KernelSettings,
        "scheduling": SchedulingSettings,
        "engine_cache": EngineCacheSettings,
        "storage": StorageSettings,
        "disaggregation": DisaggregationSettings,
        "service": ServiceSettings,
        "hardware": HardwareSettings,
    },
    derive=_derive,
    check=_check,
)
