"""``Settings.load()``: read every source through pydantic-settings and collect everything that is wrong.

pydantic-settings asks the sources in turn, merges their values by group and field and builds the validated model.
Each source is one layer of ``fdcache.settings.sources``; it records its values and problems on the way.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from fdcache.machine.memory import memory_limits
from fdcache.settings.checks import cross_checks, is_link_address, suggest, unknown_names
from fdcache.settings.extensions import extensions
from fdcache.settings.problems import Problem, SettingsError, Severity, error, warning
from fdcache.settings.sources import (
    ENV_FILE,
    FILE_SUFFIX,
    SECRETS_DIRECTORY,
    Candidate,
    Layer,
    Source,
    candidates,
    dotenv_layer,
    environment_layer,
    explicit_layer,
    secrets_layer,
)
from fdcache.settings.tree import GROUPS, KNOWN_NAMES, SOURCES, VARIABLES, SettingsTree
from fdcache.settings.variable import Actor, Variable

_BY_NAME = {name: each for each in VARIABLES.values() for name in (each.name, *each.aliases)}


class Settings(SettingsTree):
    """Everything configurable.

        settings = Settings.load(arguments={"FDCACHE_HOST_MEMORY": "8GiB"})
        settings.cache.host_memory               # 8589934592
        settings.source("FDCACHE_HOST_MEMORY")   # Source.ARGUMENT

    ``Settings()`` has the defaults and reads nothing.
    """

    @staticmethod
    def load(
        *,
        environ: Mapping[str, str] | None = None,
        arguments: Mapping[str, object] | None = None,
        defaults: Mapping[str, object] | None = None,
    ) -> Settings:
        """Read every source: arguments > environment > secrets directory > dotenv file > defaults.

        Wrong values of variables that only the engine uses are ``warnings`` of the result, not errors.

        Args:
            environ: used in place of the process environment.
            arguments: explicit values by variable name. None counts as not given; a ``Sourced`` value names the
                option that gave it.
            defaults: a caller's own, in place of those described.

        Raises:
            SettingsError: the configuration is wrong; its ``problems`` name every variable concerned.
        """
        result = read_settings(environ, arguments, defaults)
        if result.own_errors:
            raise SettingsError(result.own_errors)
        for deprecated in result.deprecations:
            warnings.warn(str(deprecated), FutureWarning, stacklevel=2)
        return result.settings


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Settings and every problem with them. Where a value is wrong, ``settings`` has the default."""

    settings: Settings
    problems: tuple[Problem, ...]
    conflicts: tuple[Problem, ...]
    """Those of the problems that concern several values, or a value and the machine."""
    deprecations: tuple[Problem, ...]
    rejected: frozenset[str]
    """Names of the variables whose value is wrong."""

    @property
    def errors(self) -> tuple[Problem, ...]:
        """Problems that prevent a start, the engine's included."""
        return tuple(problem for problem in self.problems if problem.severity is Severity.ERROR)

    @property
    def own_errors(self) -> tuple[Problem, ...]:
        """Errors without those of variables that only the engine uses."""
        return tuple(problem for problem in self.errors if not _concerns_only_the_engine(problem))

    @property
    def value_errors(self) -> tuple[Problem, ...]:
        """Those of ``own_errors`` that leave a value unknown."""
        return tuple(problem for problem in self.own_errors if problem not in self.conflicts)

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """Problems with the severity of a warning."""
        return tuple(problem for problem in self.problems if problem.severity is Severity.WARNING)


def read_settings(
    environ: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> LoadResult:
    """Read every source and check everything, without raising for wrong values. Arguments as of ``Settings.load``."""
    sources = _open_sources(environ, _only_known(arguments or {}), _only_known(defaults or {}))
    passed: dict[str, Any] = {SOURCES: sources}
    settings = Settings(**passed)
    given = {
        name: tuple(candidate for source in sources for candidate in source.candidates.get(name, ()))
        for name in VARIABLES
    }
    problems = [problem for source in sources for problem in source.problems]
    rejected = frozenset(name for source in sources for name in source.rejected)
    settings = _with_derived(settings.with_candidates(given), problems)
    conflicts = tuple(
        problem
        for problem in cross_checks(settings, memory_limits())
        if rejected.isdisjoint(problem.variables)
    )
    deprecations = tuple(_deprecations(given))
    problems += conflicts
    problems += deprecations
    problems += unknown_names((source.layer for source in sources), KNOWN_NAMES)
    problems.sort(key=lambda problem: list(Severity).index(problem.severity))
    tolerated = tuple(
        problem
        for problem in problems
        if problem.severity is not Severity.ERROR or _concerns_only_the_engine(problem)
    )
    settings = settings.with_warnings(tolerated)
    return LoadResult(settings, tuple(problems), conflicts, deprecations, rejected)


def rejection(variable: Variable, candidate: Candidate) -> Problem:
    """Return the problem of a wrong value; the text of a secret is not in it.

    An unknown choice is a warning if only the engine uses the variable, since it may know more choices.
    """
    shown = "the value, which is not shown," if variable.secret else variable.show(candidate.value)
    wrong, right = f"{shown} is not {variable.kind.expects}", f"use {variable.kind.example}"
    if variable.choices:
        wrong = f"{shown} is not {variable.expects}"
        meant = suggest(str(candidate.value), variable.choices)
        right = f"did you mean {meant}?" if meant else f"use {variable.expects}"
    elif (bound := variable.exceeds(candidate.value)) is not None:
        wrong, right = f"{shown} is {bound}", f"use {variable.expects}"
    if is_link_address(candidate.value):
        right += "; it is a Kubernetes service link, which enableServiceLinks: false in the pod prevents"
    make = warning if variable.accepts(candidate.value) else error
    return make(candidate.name, candidate.place, wrong, right)


def _concerns_only_the_engine(problem: Problem) -> bool:
    concerned = [_BY_NAME.get(name.removesuffix(FILE_SUFFIX)) for name in problem.variables]
    return all(variable is not None and variable.used_by is Actor.ENGINE for variable in concerned)


def _only_known(values: Mapping[str, object]) -> Mapping[str, object]:
    unknown = sorted(set(values) - set(VARIABLES))
    if unknown:
        raise TypeError(f"no such variable: {', '.join(unknown)}")
    return values


def _deprecations(given: Mapping[str, tuple[Candidate, ...]]) -> Iterator[Problem]:
    for name, values in given.items():
        for candidate in values:
            if candidate.name != name:
                yield warning(candidate.name, candidate.place, "the name is deprecated", f"use {name}")


# --- sources for pydantic-settings --------------------------------------------------------------------------


class _Values(dict[str, Any]):
    """Values by group, without a repr of them: pydantic-settings logs what its sources return at debug level."""

    def __repr__(self) -> str:
        return f"values of {', '.join(self) or 'no group'}"


class _LayerSource(PydanticBaseSettingsSource):
    """Values of one layer by group and field.

    A wrong value becomes a problem and the default takes its place, so that every problem is found at once.
    """

    def __init__(self, settings_cls: type[BaseSettings], layer: Layer) -> None:
        super().__init__(settings_cls)
        self.__name__ = layer.source.value
        self.layer = layer
        self.candidates: dict[str, tuple[Candidate, ...]] = {}
        self.problems: list[Problem] = []
        self.rejected: set[str] = set()

    def __call__(self) -> dict[str, Any]:
        """Return the values of every group that has some."""
        fields = self.settings_cls.model_fields.items()
        found = [self.get_field_value(field, name) for name, field in fields]
        return _Values({name: values for values, name, _ in found if values})

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[dict[str, Any], str, bool]:
        """Return the values of one group by field."""
        return dict(self._values(field_name)), field_name, False

    def _values(self, group: str) -> Iterator[tuple[str, Any]]:
        if group == "files" and self.layer.source not in (Source.ARGUMENT, Source.ENVIRONMENT):
            return  # a file does not name further files
        stronger = self.current_state.get(group, {})
        for variable in GROUPS[group]:
            found = tuple(candidates(variable, [self.layer], self.problems))
            self.candidates[variable.name] = found
            if found and variable.field not in stronger:
                yield variable.field, self._check(variable, found[0])

    def _check(self, variable: Variable, candidate: Candidate) -> Any:
        try:
            value = variable.parse(candidate.value)
        except ValidationError:
            self.rejected.add(variable.name)
            self.problems.append(rejection(variable, candidate))
            return variable.default
        if not variable.knows(value):
            self.problems.append(rejection(variable, candidate))
        return value


class _FileSource(_LayerSource):
    """A layer in files that a variable of the stronger sources names."""

    def __init__(
        self,
        settings_cls: type[BaseSettings],
        source: Source,
        named_by: str,
        read: Callable[[Path, list[Problem]], Layer],
    ) -> None:
        super().__init__(settings_cls, Layer(source, {}))
        self._named_by, self._read = VARIABLES[named_by], read

    def __call__(self) -> dict[str, Any]:
        """Read the files, then return their values."""
        path = self.current_state.get(self._named_by.group, {}).get(self._named_by.field)
        if path is not None:
            self.layer = self._read(path, self.problems)
        return super().__call__()


def _open_sources(
    environ: Mapping[str, str] | None, arguments: Mapping[str, object], defaults: Mapping[str, object]
) -> tuple[_LayerSource, ...]:
    """Return the sources in order of precedence, the strongest first."""
    return (
        _LayerSource(Settings, explicit_layer(Source.ARGUMENT, arguments)),
        _LayerSource(Settings, environment_layer(os.environ if environ is None else environ)),
        _FileSource(Settings, Source.SECRETS, SECRETS_DIRECTORY, read_secrets),
        _FileSource(Settings, Source.DOTENV, ENV_FILE, dotenv_layer),
        _LayerSource(Settings, explicit_layer(Source.DEFAULT, defaults)),
    )


def read_secrets(directory: Path, problems: list[Problem]) -> Layer:
    """Read a folder whose files are named after variables."""
    return secrets_layer(directory, KNOWN_NAMES, problems)


# --- values derived from other variables --------------------------------------------------------------------


def _with_derived(settings: Settings, problems: list[Problem]) -> Settings:
    """Add the values that follow from another variable; one that cannot be taken over is a problem."""
    derived: dict[str, tuple[Candidate, Any]] = {}
    following = [each for extension in extensions() for each in extension.derive(settings)]
    for name, candidate in following:
        try:
            derived[name] = candidate, VARIABLES[name].parse(candidate.value)
        except ValidationError:
            problems.append(_unusable(settings, name, candidate))
    return settings.with_derived(derived)


def _unusable(settings: SettingsTree, name: str, candidate: Candidate) -> Problem:
    variable = VARIABLES[name]
    value, present = VARIABLES[candidate.name].render(candidate.value), settings.render(name)
    bound = variable.exceeds(candidate.value) or f"not {variable.kind.expects}"
    return warning(
        candidate.name,
        settings.place(candidate.name),
        f"{name} is derived from it and cannot be {value}, which is {bound}; it stays {present}",
        f"set {name} itself to {variable.expects}",
    )
