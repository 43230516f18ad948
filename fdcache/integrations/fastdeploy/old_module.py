"""Attributes of ``fdcache.envs``: every variable of the old environment module, in its old type and spelling.

Reads follow the environment at the price of a few look-ups. This is not pydantic-settings' work: it reads a whole
model at once, from which nothing here could follow ``os.environ`` or return an old type.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import SecretStr

from fdcache.settings.checks import suggest
from fdcache.settings.kinds import FLAG, HOME_PATH, INTEGERS
from fdcache.settings.loading import read_secrets, rejection
from fdcache.settings.problems import Problem, SettingsError, Severity
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
)
from fdcache.settings.tree import VARIABLES
from fdcache.settings.variable import OldType, Variable

OLD_VARIABLES: Mapping[str, Variable] = {
    name: variable for name, variable in VARIABLES.items() if variable.old is not None
}


# --- values in the old type ---------------------------------------------------------------------------------


def old_value(variable: Variable, candidate: Candidate) -> Any:
    """Return the old module's value for a text.

    Raises:
        SettingsError: the text is not valid. It is a ``ValueError``, as the old module raised.
    """
    if not variable.accepts(candidate.value):
        raise SettingsError([rejection(variable, candidate)])
    value = variable.parse(candidate.value)
    match variable.old:
        case OldType.INT:
            return int(value)
        case OldType.BOOL:
            return bool(value)
        case OldType.FLOAT:
            return float(value)
        case OldType.LIST:
            return _plain(value)
        case _:
            return _old_text(variable, value, str(candidate.value))


def _plain(items: list[Any] | tuple[Any, ...]) -> list[Any]:
    return [item.get_secret_value() if isinstance(item, SecretStr) else item for item in items]


def _old_text(variable: Variable, value: Any, text: str) -> str:
    if variable.kind is FLAG:
        return text if text in variable.old_flag else variable.old_flag[value]
    if variable.kind is INTEGERS and not text.startswith("["):
        return variable.kind.render(value)
    return text


def old_default(variable: Variable) -> Any:
    """Return the old module's value for a variable that is not set."""
    if variable.old_default is not ...:
        return variable.old_default
    if variable.default is None:
        return None
    if variable.old is OldType.LIST:
        return list(variable.default)
    text = variable.render(variable.default) or ""
    return old_value(variable, Candidate(Source.DEFAULT, variable.name, "default", text))


def to_text(variable: Variable, value: object) -> str:
    """Write an assigned value as the text of its variable: a bool as 1 or 0, a list with commas.

    Raises:
        SettingsError: the variable does not accept the value.
    """
    if isinstance(value, bool):
        text = str(int(value))
    elif isinstance(value, Enum):
        text = str(value.value)
    elif isinstance(value, list | tuple):
        text = ",".join(str(item) for item in _plain(value))
    elif isinstance(value, str | int | float | os.PathLike):
        text = str(value)
    else:
        text = ""
    is_text = bool(text) or value in ("", [], ())
    given = value if isinstance(value, list | tuple) else text
    if not is_text or (text and not variable.accepts(given)) or "\0" in text:
        candidate = Candidate(Source.ARGUMENT, variable.name, "assignment", value)
        raise SettingsError([rejection(variable, candidate)])
    return text


# --- reads --------------------------------------------------------------------------------------------------


def _spellings(variable: Variable) -> tuple[str, ...]:
    """Return the environment names that can set a variable, its own first."""
    names = (variable.name, *variable.aliases)
    return tuple(spelling for name in names for spelling in (name, name + FILE_SUFFIX))


def _texts(variable: Variable) -> dict[str, str]:
    return {name: os.environ[name] for name in _spellings(variable) if name in os.environ}


@lru_cache(maxsize=1)
def _file_layers(env_file: str | None, secrets: str | None) -> tuple[tuple[Layer, ...], tuple[Problem, ...]]:
    """Read the files once: their values take effect at the start."""
    problems: list[Problem] = []
    layers = []
    if secrets:
        layers.append(read_secrets(Path(secrets), problems))
    if env_file:
        layers.append(dotenv_layer(Path(env_file), problems))
    return tuple(layers), tuple(problems)


def _look_up(variable: Variable) -> Any:
    """Find a variable's value in every source but the arguments, in the old type.

    Raises:
        SettingsError: the value is not valid, or a source cannot be read.
    """
    layers, found = _file_layers(os.environ.get(ENV_FILE), os.environ.get(SECRETS_DIRECTORY))
    problems = list(found)
    winner = next(candidates(variable, (environment_layer(_texts(variable)), *layers), problems), None)
    errors = [problem for problem in problems if problem.severity is Severity.ERROR]
    if errors:
        raise SettingsError(errors)
    if winner is None:
        return old_default(variable)
    if winner.name != variable.name:
        warnings.warn(f"{winner.name} is deprecated; use {variable.name}", FutureWarning, stacklevel=3)
    return old_value(variable, winner)


def _reader(variable: Variable) -> Callable[[object], Any]:
    """Return the function that reads one variable.

    It caches the last value and its text. ``os.environ`` encodes and decodes at every access, so the text is looked
    up in the mapping of bytes below it, where the interpreter has one.
    """
    environ = os.environ
    raw: Mapping[Any, Any] = getattr(environ, "_data", environ)
    encode: Callable[[str], Any] = str if raw is environ else environ.encodekey
    get, env_file, secrets = raw.get, encode(ENV_FILE), encode(SECRETS_DIRECTORY)
    # A variable has at most one deprecated name. Without one its own name is looked up twice.
    key, key_file, alias, alias_file = (encode(name) for name in (_spellings(variable) * 2)[:4])
    finish = _finish(variable)
    known: Any = object()
    value: Any = None
    from_files: tuple[Any, Any] = (known, None)

    def read(_: object) -> Any:
        nonlocal known, value
        if (
            key_file in raw
            or alias_file in raw
            or env_file in raw
            or secrets in raw
            or os.environ is not environ
        ):
            return finish(read_elsewhere()) if finish else read_elsewhere()
        text = get(key) or get(alias)
        if text != known:
            value, known = _look_up(variable), text
        return finish(value) if finish else value

    def read_elsewhere() -> Any:
        nonlocal from_files
        if key_file in raw or alias_file in raw or os.environ is not environ:
            return _look_up(variable)
        now = (get(key), get(alias), get(env_file), get(secrets))
        if now != from_files[0]:
            from_files = (now, _look_up(variable))
        return from_files[1]

    return read


def _finish(variable: Variable) -> Callable[[Any], Any] | None:
    """Return what a read does to the cached value, if anything."""
    if variable.kind is HOME_PATH:
        return _home_expander()
    return _copy_list if variable.old is OldType.LIST else None


def _home_expander() -> Callable[[str], str]:
    """Return a function that expands ``~`` and caches the result while ``HOME`` stays the same."""
    known: tuple[str, str | None] | None = None
    expanded = ""

    def expand(text: str) -> str:
        nonlocal known, expanded
        now = (text, os.environ.get("HOME"))
        if now != known:
            known, expanded = now, os.path.expanduser(text)  # noqa: PTH111
        return expanded

    return expand


def _copy_list(value: list[str] | None) -> list[str] | None:
    return None if value is None else value.copy()


# --- assignment ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A variable's texts in the environment under all its names; assigning it restores them."""

    texts: Mapping[str, str] = field(repr=False)


def _writer(variable: Variable) -> Callable[[object, Any], None]:
    """Return the function that validates and writes one variable to the environment; None removes it."""
    remove = _remover(variable)

    def write(module: object, value: Any) -> None:
        if isinstance(value, SavedValue):
            texts = value.texts
        else:
            texts = {} if value is None else {variable.name: to_text(variable, value)}
        remove(module)
        os.environ.update(texts)

    return write


def _remover(variable: Variable) -> Callable[[object], None]:
    """Return the function that removes one variable from the environment, under all its names."""

    def remove(module: object) -> None:
        for name in _spellings(variable):
            os.environ.pop(name, None)

    return remove


class VariablesModule(ModuleType):
    """A module whose attributes are the variables of the old environment module."""

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """Show the variables that are set as plain attributes.

        ``unittest.mock.patch`` looks here to decide between restoring and deleting an attribute.
        """
        shown = dict(vars(ModuleType)["__dict__"].__get__(self))
        for name, variable in OLD_VARIABLES.items():
            if texts := _texts(variable):
                shown[name] = SavedValue(texts)
        return shown

    def __dir__(self) -> list[str]:
        return sorted(OLD_VARIABLES)

    def __getattr__(self, name: str) -> Any:
        raise _unknown(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in OLD_VARIABLES and not name.startswith("__"):
            raise _unknown(self, name)
        super().__setattr__(name, value)

    def get_unique_name(self, name: str) -> str:
        """Return ``name`` with the suffix ``SHM_UUID``, which differs between deployments, if it is set."""
        suffix = os.environ.get("SHM_UUID")
        return f"{name}_{suffix}" if suffix else name


def _unknown(module: ModuleType, name: str) -> AttributeError:
    meant = suggest(name, OLD_VARIABLES)
    hint = f"; did you mean {meant}?" if meant else ""
    return AttributeError(f"module {module.__name__!r} has no attribute {name!r}{hint}", name=name, obj=None)


for _variable in OLD_VARIABLES.values():
    _accessors = (_reader(_variable), _writer(_variable), _remover(_variable))
    setattr(VariablesModule, _variable.name, property(*_accessors, _variable.meaning))
