"""``Settings``: read all sources at once and find everything that is wrong with them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fdcache.machine.runtime import memory
from fdcache.settings import names
from fdcache.settings.checks import cross_checks
from fdcache.settings.derived import with_derived
from fdcache.settings.problems import Problem, SettingsError, Severity, warning
from fdcache.settings.reading import open_sources
from fdcache.settings.sources import FILE_SUFFIX, Candidate
from fdcache.settings.tree import KNOWN_NAMES, SOURCES, VARIABLES, SettingsTree
from fdcache.settings.variable import User

_BY_NAME = {name: each for each in VARIABLES.values() for name in (each.name, *each.aliases)}


class Settings(SettingsTree):
    """Everything configurable. ``Settings()`` is the defaults, ``Settings.load()`` what is in force."""

    @staticmethod
    def load(
        *,
        environ: Mapping[str, str] | None = None,
        arguments: Mapping[str, object] | None = None,
        defaults: Mapping[str, object] | None = None,
    ) -> Settings:
        """Read every source: arguments > environment > secrets directory > dotenv file > defaults.

        ``environ`` stands for the process environment; ``arguments`` maps variable names to explicit values,
        of which None counts as not given, and a ``Given`` says which option gave it; ``defaults`` are a
        caller's own, in place of those described.

        What is wrong with variables that only the engine uses stops nothing here; ``warnings`` lists it.

        Raises:
            SettingsError: the configuration is wrong; its ``problems`` name every variable concerned.
        """
        found = survey(environ, arguments, defaults)
        if found.own_errors:
            raise SettingsError(found.own_errors)
        for deprecated in found.deprecations:
            warnings.warn(str(deprecated), FutureWarning, stacklevel=2)
        return found.settings


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found. Where a value was wrong, ``settings`` holds the default in its place."""

    settings: Settings
    problems: tuple[Problem, ...]
    crossed: tuple[Problem, ...]
    """Those of the problems that are of several values together, or of a value and the machine."""
    deprecations: tuple[Problem, ...]
    rejected: frozenset[str]

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems that keep anything from starting, the engine too."""
        return tuple(problem for problem in self.problems if problem.severity is Severity.ERROR)

    @property
    def own_errors(self) -> tuple[Problem, ...]:
        """The errors but for those about variables that only the engine uses."""
        return tuple(problem for problem in self.errors if not _is_the_engines(problem))

    @property
    def value_errors(self) -> tuple[Problem, ...]:
        """Those of ``own_errors`` that leave a value unknown."""
        return tuple(problem for problem in self.own_errors if problem not in self.crossed)

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """The other problems."""
        return tuple(problem for problem in self.problems if problem.severity is Severity.WARNING)


def survey(
    environ: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Survey:
    """Read every source and check everything; wrong values become problems, never exceptions."""
    sources = open_sources(Settings, environ, _known(arguments or {}), _known(defaults or {}))
    passed: dict[str, Any] = {SOURCES: sources}
    settings = Settings(**passed)
    found = {
        name: tuple(candidate for source in sources for candidate in source.candidates.get(name, ()))
        for name in VARIABLES
    }
    deprecations = tuple(_deprecations(found))
    settings._candidates = found
    rejected = frozenset(name for source in sources for name in source.rejected)
    problems = [problem for source in sources for problem in source.problems]
    settings = with_derived(settings, problems)
    checked = cross_checks(settings, memory())
    crossed = tuple(problem for problem in checked if rejected.isdisjoint(problem.variables))
    problems += crossed
    problems += deprecations
    problems += names.unknown_names((source.layer for source in sources), KNOWN_NAMES)
    problems.sort(key=lambda problem: list(Severity).index(problem.severity))
    settings._warnings = tuple(
        problem for problem in problems if problem.severity is not Severity.ERROR or _is_the_engines(problem)
    )
    return Survey(settings, tuple(problems), crossed, deprecations, rejected)


def _is_the_engines(problem: Problem) -> bool:
    """Return whether all variables concerned are used by the engine alone."""
    concerned = [_BY_NAME.get(name.removesuffix(FILE_SUFFIX)) for name in problem.variables]
    return all(variable is not None and variable.used_by is User.ENGINE for variable in concerned)


def _known(values: Mapping[str, object]) -> Mapping[str, object]:
    unknown = sorted(set(values) - set(VARIABLES))
    if unknown:
        raise TypeError(f"no such variable: {', '.join(unknown)}")
    return values


def _deprecations(found: Mapping[str, tuple[Candidate, ...]]) -> list[Problem]:
    return [
        warning(candidate.name, candidate.place, "the name is deprecated", f"use {name}")
        for name, there in found.items()
        for candidate in there
        if candidate.name != name
    ]
