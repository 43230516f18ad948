"""The typed settings: one description of everything configurable.

from fdcache.settings import Settings

settings = Settings.load()
"""

from fdcache.settings.loading import LoadResult, Settings, read_settings
from fdcache.settings.problems import Problem, SettingsError, Severity
from fdcache.settings.sources import Candidate, Source, Sourced
from fdcache.settings.tree import VARIABLES
from fdcache.settings.variable import Group, Variable

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
