"""The typed settings: one description of everything configurable.

from fdcache.settings import Settings

settings = Settings.load()

Each name imports its module when it is first used: a command that needs one group does not read all of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdcache.settings.loading import LoadResult, Settings, read_settings
    from fdcache.settings.problems import Problem, SettingsError, Severity
    from fdcache.settings.sources import Candidate, Source, Sourced
    from fdcache.settings.tree import VARIABLES
    from fdcache.settings.variable import Group, Variable

_HOMES = {
    "loading": ("LoadResult", "Settings", "read_settings"),
    "problems": ("Problem", "SettingsError", "Severity"),
    "sources": ("Candidate", "Source", "Sourced"),
    "tree": ("VARIABLES",),
    "variable": ("Group", "Variable"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "VARIABLES",
    "Candidate",
    "Group",
    "LoadResult",
    "Problem",
    "Settings",
    "SettingsError",
    "Severity",
    "Source",
    "Sourced",
    "Variable",
    "read_settings",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
