"""``Settings``: read all sources at once and find everything that is wrong with them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fdcache.settings import names
from fdcache.settings.checks import cross_checks
from fdcache.settings.machine import memory
from fdcache.settings.problems import Problem, SettingsError, Severity, warning
from fdcache.settings.reading import open_sources
from fdcache.settings.sources import Candidate
from fdcache.settings.tree import KNOWN_NAMES, SOURCES, VARIABLES, SettingsTree


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

        Raises:
            SettingsError: the configuration is wrong; its ``problems`` name every variable concerned.
        """
        found = survey(environ, arguments, defaults)
        if found.errors:
            raise SettingsError(found.errors)
        for deprecated in found.deprecations:
            warnings.warn(str(deprecated), FutureWarning, stacklevel=2)
        return found.settings


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found. Where a value was wrong, ``settings`` holds the default in its place."""

    settings: Settings
    problems: tuple[Problem, ...]
    deprecations: tuple[Problem, ...]
    rejected: frozenset[str]

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems that keep anything from starting."""
        return tuple(problem for problem in self.problems if problem.severity is Severity.ERROR)

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
    settings = _on_the_grid(Settings(**passed))
    found = {
        name: tuple(candidate for source in sources for candidate in source.candidates.get(name, ()))
        for name in VARIABLES
    }
    deprecations = tuple(_deprecations(found))
    settings._candidates = found
    settings._warnings = (
        *deprecations,
        *names.unknown_names((source.layer for source in sources), KNOWN_NAMES),
    )
    rejected = frozenset(name for source in sources for name in source.rejected)
    problems = [problem for source in sources for problem in source.problems]
    crossed = cross_checks(settings, memory())
    problems += [problem for problem in crossed if rejected.isdisjoint(problem.variables)]
    return Survey(settings, (*problems, *settings.warnings), deprecations, rejected)


def _on_the_grid(settings: Settings) -> Settings:
    """In deterministic mode the reuse grid is the engine's, unless one was given."""
    if settings.cache.reuse_grid or not settings.attention.deterministic:
        return settings
    cache = settings.cache.model_copy(update={"reuse_grid": settings.attention.split_kv_size})
    return settings.model_copy(update={"cache": cache})


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
