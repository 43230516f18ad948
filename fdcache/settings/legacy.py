"""Values as the old environment module gave them: old type, old spelling, old default."""

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
from fdcache.settings.problems import Problem, SettingsError
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


def old_value(variable: Variable, candidate: Candidate) -> Any:
    """Give what the old module gave for a valid text.

    Raises:
        SettingsError: the text is not valid; it is a ValueError, as it was.
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
            return [item.get_secret_value() if isinstance(item, SecretStr) else item for item in value]
        case _:
            return _old_text(variable, value, str(candidate.value))


def _old_text(variable: Variable, value: Any, text: str) -> str:
    if variable.kind is FLAG:
        return text if text in variable.old_flag else variable.old_flag[value]
    if variable.kind is INTEGERS and not text.startswith("["):
        return variable.kind.render(value)
    return text


def old_default(variable: Variable) -> Any:
    """Give what the old module gave for a variable that is not set."""
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
        SettingsError: the variable does not take the value.
    """
    if isinstance(value, bool):
        text = str(int(value))
    elif isinstance(value, Enum):
        text = str(value.value)
    elif isinstance(value, list | tuple):
        plain = [item.get_secret_value() if isinstance(item, SecretStr) else item for item in value]
        text = ",".join(str(item) for item in plain)
    elif isinstance(value, str | int | float | os.PathLike):
        text = str(value)
    else:
        text = ""
    valid = bool(text) or value in ("", [], ())
    given = value if isinstance(value, list | tuple) else text
    if not valid or (text and not variable.accepts(given)) or "\0" in text:
        raise SettingsError(
            [rejection(variable, Candidate(Source.ARGUMENT, variable.name, "assignment", value))]
        )
    return text


@dataclass(frozen=True, slots=True)
class SavedValue:
    """What the environment held for a variable under all its names; assigning it puts exactly that back."""

    texts: Mapping[str, str] = field(repr=False)


def spellings(variable: Variable) -> tuple[str, ...]:
    """Give the environment names that can set a variable, its own first."""
    names = (variable.name, *variable.aliases)
    return tuple(spelled for name in names for spelled in (name, name + FILE_SUFFIX))


@lru_cache(maxsize=1)
def _file_layers(env_file: str | None, secrets: str | None) -> tuple[tuple[Layer, ...], tuple[Problem, ...]]:
    """Read the files once: what stands in them takes effect at the start."""
    problems: list[Problem] = []
    layers = []
    if secrets:
        layers.append(read_secrets(Path(secrets), problems))
    if env_file:
        layers.append(dotenv_layer(Path(env_file), problems))
    return tuple(layers), tuple(problems)


def look_up(variable: Variable) -> Any:
    """Find a variable's value in every source but the arguments, in the old type.

    Raises:
        SettingsError: the value is not valid, or a source cannot be read.
    """
    here = {name: os.environ[name] for name in spellings(variable) if name in os.environ}
    layers, found = _file_layers(os.environ.get(ENV_FILE), os.environ.get(SECRETS_DIRECTORY))
    problems = list(found)
    winner = next(candidates(variable, (environment_layer(here), *layers), problems), None)
    if problems:
        raise SettingsError(problems)
    if winner is None:
        return old_default(variable)
    if winner.name != variable.name:
        warnings.warn(f"{winner.name} is deprecated; use {variable.name}", FutureWarning, stacklevel=3)
    return old_value(variable, winner)


def reader(variable: Variable) -> Callable[[object], Any]:
    """Make the function that reads one variable.

    It keeps the last value and the text that it stands for. ``os.environ`` encodes and decodes at every
    access, so the text is looked up in the mapping of bytes below it, where the interpreter has one.
    """
    environ = os.environ
    raw: Mapping[Any, Any] = getattr(environ, "_data", environ)
    encode: Callable[[str], Any] = str if raw is environ else environ.encodekey
    get, env_file, secrets = raw.get, encode(ENV_FILE), encode(SECRETS_DIRECTORY)
    # There is one deprecated name at most; a variable without one stands in for it itself.
    key, key_file, alias, alias_file = (encode(name) for name in (spellings(variable) * 2)[:4])
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
            value, known = look_up(variable), text
        return finish(value) if finish else value

    def read_elsewhere() -> Any:
        nonlocal from_files
        if key_file in raw or alias_file in raw or os.environ is not environ:
            return look_up(variable)
        now = (get(key), get(alias), get(env_file), get(secrets))
        if now != from_files[0]:
            from_files = (now, look_up(variable))
        return from_files[1]

    return read


def _finish(variable: Variable) -> Callable[[Any], Any] | None:
    if variable.kind is HOME_PATH:
        return _home_expander()
    return _copy_list if variable.old is OldType.LIST else None


def _home_expander() -> Callable[[str], str]:
    """Make a function that expands ``~`` and remembers the last answer for as long as ``HOME`` stays."""
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


def writer(variable: Variable) -> Callable[[object, Any], None]:
    """Make the function that assigns one variable: validated, into the environment; None removes it."""
    remove = remover(variable)

    def write(module: object, value: Any) -> None:
        if isinstance(value, SavedValue):
            remove(module)
            os.environ.update(value.texts)
            return
        text = None if value is None else to_text(variable, value)
        remove(module)
        if text is not None:
            os.environ[variable.name] = text

    return write


def remover(variable: Variable) -> Callable[[object], None]:
    """Make the function that removes one variable from the environment, under whatever name it is set."""

    def remove(module: object) -> None:
        for name in spellings(variable):
            os.environ.pop(name, None)

    return remove


class VariablesModule(ModuleType):
    """A module whose attributes are the variables of the old environment module."""

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """Show the variables that are set as if they were plain attributes.

        ``unittest.mock.patch`` looks here for whether to put a value back or to delete it when it ends.
        """
        shown = dict(vars(ModuleType)["__dict__"].__get__(self))
        for name, variable in OLD_VARIABLES.items():
            texts = {spelled: os.environ[spelled] for spelled in spellings(variable) if spelled in os.environ}
            if texts:
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
        """Give a shared-memory name of its own to each deployment that sets ``SHM_UUID``."""
        suffix = os.environ.get("SHM_UUID")
        return f"{name}_{suffix}" if suffix else name


def _unknown(module: ModuleType, name: str) -> AttributeError:
    meant = suggest(name, OLD_VARIABLES)
    hint = f"; did you mean {meant}?" if meant else ""
    return AttributeError(f"module {module.__name__!r} has no attribute {name!r}{hint}", name=name, obj=None)


for _variable in OLD_VARIABLES.values():
    setattr(
        VariablesModule,
        _variable.name,
        property(reader(_variable), writer(_variable), remover(_variable), _variable.meaning),
    )
