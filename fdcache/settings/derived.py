"""Values that follow from another variable where nothing sets them: an old name's, or that of a mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fdcache.settings.sources import Candidate, Source
from fdcache.settings.tree import VARIABLES, SettingsTree

FOLLOWS: Mapping[str, str] = {
    "FDCACHE_STORAGE_DIR": "FILE_BACKEND_STORAGE_DIR",
    "FDCACHE_DRAIN_TIMEOUT": "FD_CACHE_PROC_EXIT_TIMEOUT",
    "FDCACHE_SWAP_DRAIN_TIMEOUT": "FD_CACHE_PROC_EXIT_TIMEOUT",
}
"""Variables whose value is that of a variable of the engine, where only the latter is set."""

GRID, MODE, SPLIT = "FDCACHE_REUSE_GRID", "FD_DETERMINISTIC_MODE", "FD_DETERMINISTIC_SPLIT_KV_SIZE"


def derive(settings: SettingsTree) -> Iterator[tuple[str, Candidate]]:
    """Give each variable that follows another one now, with its value and where that comes from."""
    for name, engine_name in FOLLOWS.items():
        if settings.source(name) is Source.DEFAULT and settings.source(engine_name) is not Source.DEFAULT:
            yield name, _from(settings, engine_name, settings.place(engine_name))
    if settings.value(MODE) and not settings.value(GRID):
        yield GRID, _from(settings, SPLIT, f"{settings.place(SPLIT)}, with {MODE} in {settings.place(MODE)}")


def _from(settings: SettingsTree, name: str, place: str) -> Candidate:
    return Candidate(Source.DERIVED, name, place, settings.value(name))


def with_values(settings: Any, values: Mapping[str, Any]) -> Any:
    """Give the settings with some variables changed."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        variable = VARIABLES[name]
        groups.setdefault(variable.group, {})[variable.field] = variable.parse(value)
    changed = {group: getattr(settings, group).model_copy(update=fields) for group, fields in groups.items()}
    return settings.model_copy(update=changed)
