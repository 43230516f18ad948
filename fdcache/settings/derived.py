"""Values that follow from another variable where nothing sets them: an old name's, or that of a mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from fdcache.settings.problems import Problem, warning
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
            yield name, _from(settings, engine_name)
    if settings.value(MODE) and (settings.source(GRID) is Source.DEFAULT or not settings.value(GRID)):
        yield GRID, _from(settings, SPLIT, f", with {MODE} in {settings.place(MODE)}")


def _from(settings: SettingsTree, name: str, condition: str = "") -> Candidate:
    """The place names the other variable, for that is the one to change."""
    place = f"{name} in {settings.place(name)}{condition}"
    return Candidate(Source.DERIVED, name, place, settings.value(name))


def with_derived(settings: Any, problems: list[Problem]) -> Any:
    """Give the settings with what follows from another variable; a value that cannot be taken over is a problem."""
    groups: dict[str, dict[str, Any]] = {}
    found = dict(settings._candidates)
    for name, candidate in derive(settings):
        variable = VARIABLES[name]
        try:
            value = variable.parse(candidate.value)
        except ValidationError:
            problems.append(_unusable(settings, name, candidate))
            continue
        groups.setdefault(variable.group, {})[variable.field] = value
        found[name] = (candidate, *found.get(name, ()))
    changed = {group: getattr(settings, group).model_copy(update=fields) for group, fields in groups.items()}
    result = settings.model_copy(update=changed)
    result._candidates = found
    return result


def _unusable(settings: SettingsTree, name: str, candidate: Candidate) -> Problem:
    variable = VARIABLES[name]
    value, kept = VARIABLES[candidate.name].render(candidate.value), settings.render(name)
    bound = variable.exceeds(candidate.value) or f"not {variable.kind.expects}"
    return warning(
        candidate.name,
        settings.place(candidate.name),
        f"{name} follows it and cannot be {value}, which is {bound}; it stays {kept}",
        f"set {name} itself to {variable.expects}",
    )
