"""How pydantic-settings reads the layers: one source of its kind for each, which keeps what it met."""

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
from fdcache.settings import checks
from fdcache.settings.checks import cross_checks
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


class Values(dict[str, Any]):
    """Values by group. It does not show them: pydantic-settings logs what its sources give when it debugs."""

    def __repr__(self) -> str:
        return f"values of {', '.join(self) or 'no group'}"


class LayerSource(PydanticBaseSettingsSource):
    """Gives the values of one layer by group and field.

    A wrong value becomes a problem and the default stands in for it, so that every problem is found at once.
    """

    def __init__(self, settings_cls: type[BaseSettings], layer: Layer) -> None:
        super().__init__(settings_cls)
        self.__name__ = layer.source.value
        self.layer = layer
        self.candidates: dict[str, tuple[Candidate, ...]] = {}
        self.problems: list[Problem] = []
        self.rejected: set[str] = set()

    def __call__(self) -> dict[str, Any]:
        """Give the values of every group that has some."""
        groups = self.settings_cls.model_fields.items()
        given = [self.get_field_value(field, name) for name, field in groups]
        return Values({name: values for values, name, _ in given if values})

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[dict[str, Any], str, bool]:
        """Give the values of one group by field."""
        return dict(self._values(field_name)), field_name, False

    def _values(self, group: str) -> Iterator[tuple[str, Any]]:
        if group == "files" and self.layer.source not in (Source.ARGUMENT, Source.ENVIRONMENT):
            return  # where further files stand is not said in those files
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


class FileSource(LayerSource):
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
        """Open the layer, then give its values."""
        path = self.current_state.get(self._named_by.group, {}).get(self._named_by.field)
        if path is not None:
            self.layer = self._read(path, self.problems)
        return super().__call__()


def open_sources(
    settings_cls: type[BaseSettings],
    environ: Mapping[str, str] | None,
    arguments: Mapping[str, object],
    defaults: Mapping[str, object],
) -> tuple[LayerSource, ...]:
    """Give the sources in order of precedence, the strongest first."""
    return (
        LayerSource(settings_cls, explicit_layer(Source.ARGUMENT, arguments)),
        LayerSource(settings_cls, environment_layer(os.environ if environ is None else environ)),
        FileSource(settings_cls, Source.SECRETS, SECRETS_DIRECTORY, read_secrets),
        FileSource(settings_cls, Source.DOTENV, ENV_FILE, dotenv_layer),
        LayerSource(settings_cls, explicit_layer(Source.DEFAULT, defaults)),
    )


def read_secrets(directory: Path, problems: list[Problem]) -> Layer:
    """Read a folder whose files are named after variables."""
    return secrets_layer(directory, KNOWN_NAMES, problems)


def rejection(variable: Variable, candidate: Candidate) -> Problem:
    """Say why a value is wrong, without repeating it where it is a secret.

    The engine may know more choices for what it alone uses: an unknown one is a warning.
    """
    shown = "the value, which is not shown," if variable.secret else variable.show(candidate.value)
    wrong, right = f"{shown} is not {variable.kind.expects}", f"use {variable.kind.example}"
    if variable.choices:
        wrong = f"{shown} is not {variable.expects}"
        meant = checks.suggest(str(candidate.value), variable.choices)
        right = f"did you mean {meant}?" if meant else f"use {variable.expects}"
    elif (bound := variable.exceeds(candidate.value)) is not None:
        wrong, right = f"{shown} is {bound}", f"use {variable.expects}"
    if checks.is_link_address(candidate.value):
        right += "; it is a Kubernetes service link, which enableServiceLinks: false in the pod prevents"
    make = warning if variable.accepts(candidate.value) else error
    return make(candidate.name, candidate.place, wrong, right)


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
        of which None counts as not given, and a ``Sourced`` says which option gave it; ``defaults`` are a
        caller's own, in place of those described.

        What is wrong with variables that only the engine uses stops nothing here; ``warnings`` lists it.

        Raises:
            SettingsError: the configuration is wrong; its ``problems`` name every variable concerned.
        """
        found = read_settings(environ, arguments, defaults)
        if found.own_errors:
            raise SettingsError(found.own_errors)
        for deprecated in found.deprecations:
            warnings.warn(str(deprecated), FutureWarning, stacklevel=2)
        return found.settings


@dataclass(frozen=True, slots=True)
class LoadResult:
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


def read_settings(
    environ: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> LoadResult:
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
    checked = cross_checks(settings, memory_limits())
    crossed = tuple(problem for problem in checked if rejected.isdisjoint(problem.variables))
    problems += crossed
    problems += deprecations
    problems += checks.unknown_names((source.layer for source in sources), KNOWN_NAMES)
    problems.sort(key=lambda problem: list(Severity).index(problem.severity))
    settings._warnings = tuple(
        problem for problem in problems if problem.severity is not Severity.ERROR or _is_the_engines(problem)
    )
    return LoadResult(settings, tuple(problems), crossed, deprecations, rejected)


def _is_the_engines(problem: Problem) -> bool:
    """Return whether all variables concerned are used by the engine alone."""
    concerned = [_BY_NAME.get(name.removesuffix(FILE_SUFFIX)) for name in problem.variables]
    return all(variable is not None and variable.used_by is Actor.ENGINE for variable in concerned)


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
