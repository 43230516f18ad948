"""The typed settings: one description of everything configurable."""

from fdcache.settings.problems import Problem, SettingsError, Severity
from fdcache.settings.settings import Settings, Survey, survey
from fdcache.settings.sources import Candidate, Given, Source
from fdcache.settings.tree import VARIABLES
from fdcache.settings.variable import Group, Variable

__all__ = [
    "VARIABLES",
    "Candidate",
    "Given",
    "Group",
    "Problem",
    "Settings",
    "SettingsError",
    "Severity",
    "Source",
    "Survey",
    "Variable",
    "survey",
]
