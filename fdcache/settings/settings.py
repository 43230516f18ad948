"""``Settings``: read all sources at once and find everything that is wrong with them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from fdcache.settings import names
from fdcache.settings.checks import cross_checks
from fdcache.settings.machine import memory
from fdcache.settings.problems import Problem, SettingsError, Severity, error, warning
from fdcache.settings.sources import (
    ENV_FILE,
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
from fdcache.settings.tree import VARIABLES, SettingsTree
from fdcache.settings.variable import Variable

_FILE_VARIABLES = (ENV_FILE, SECRETS_DIRECTORY)


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
        of which None counts as not given; ``defaults`` are a caller's own, in place of those described.

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
    problems: list[Problem] = []
    layers = find_layers(os.environ if environ is None else environ, arguments or {}, problems)
    layers.append(explicit_layer(Source.DEFAULT, _known(defaults or {})))
    found = {
        name: tuple(candidates(variable, layers_of(name, layers), problems))
        for name, variable in VARIABLES.items()
    }
    settings, rejected = _build(found, problems)
    deprecations = tuple(_deprecations(found))
    settings._candidates = found
    settings._warnings = (*deprecations, *names.unknown_names(layers, VARIABLES.values()))
    crossed = cross_checks(settings, memory())
    problems += [problem for problem in crossed if rejected.isdisjoint(problem.variables)]
    return Survey(settings, (*problems, *settings.warnings), deprecations, frozenset(rejected))


def _known(values: Mapping[str, object]) -> Mapping[str, object]:
    unknown = sorted(set(values) - set(VARIABLES))
    if unknown:
        raise TypeError(f"no such variable: {', '.join(unknown)}")
    return values


def find_layers(
    environ: Mapping[str, str], arguments: Mapping[str, object], problems: list[Problem]
) -> list[Layer]:
    """Open every source there is, the strongest first."""
    layers = [explicit_layer(Source.ARGUMENT, _known(arguments)), environment_layer(environ)]
    chosen = {}
    for name in _FILE_VARIABLES:
        winner = next(candidates(VARIABLES[name], layers, []), None)
        if winner is not None and VARIABLES[name].accepts(winner.value):
            chosen[name] = VARIABLES[name].parse(winner.value)
    if SECRETS_DIRECTORY in chosen:
        known = {spelled for variable in VARIABLES.values() for spelled in (variable.name, *variable.aliases)}
        layers.append(secrets_layer(chosen[SECRETS_DIRECTORY], known, problems))
    if ENV_FILE in chosen:
        layers.append(dotenv_layer(chosen[ENV_FILE], problems))
    return layers


def layers_of(name: str, layers: list[Layer]) -> list[Layer]:
    """Give the layers that a variable is read from; where further files stand is not said in those files."""
    return layers[:2] if name in _FILE_VARIABLES else layers


def _build(found: Mapping[str, tuple[Candidate, ...]], problems: list[Problem]) -> tuple[Settings, set[str]]:
    given: dict[str, dict[str, object]] = {}
    rejected = set()
    for name, there in found.items():
        variable = VARIABLES[name]
        if not there:
            continue
        if variable.accepts(there[0].value):
            given.setdefault(variable.group, {})[variable.field] = there[0].value
        else:
            rejected.add(name)
            problems.append(rejection(variable, there[0]))
    return Settings.model_validate(given), rejected


def rejection(variable: Variable, candidate: Candidate) -> Problem:
    """Say why a value is wrong, without repeating it where it is a secret."""
    shown = "the value, which is not shown," if variable.secret else variable.show(candidate.value)
    right = f"use {variable.kind.example}"
    if variable.choices:
        meant = names.suggest(str(candidate.value), variable.choices)
        right = f"did you mean {meant}?" if meant else f"use {variable.expects}"
    if names.is_link_address(candidate.value):
        right += "; it is a Kubernetes service link, which enableServiceLinks: false in the pod prevents"
    return error((candidate.name,), candidate.place, f"{shown} is not {variable.expects}", right)


def _deprecations(found: Mapping[str, tuple[Candidate, ...]]) -> list[Problem]:
    return [
        warning((candidate.name,), candidate.place, "the name is deprecated", f"use {name}")
        for name, there in found.items()
        for candidate in there
        if candidate.name != name
    ]
