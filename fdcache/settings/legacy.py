"""Values as the old environment module gave them: old type, old spelling, old default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from typing import Any

from pydantic import SecretStr

from fdcache.settings.kinds import FLAG, INTEGERS
from fdcache.settings.problems import SettingsError
from fdcache.settings.reading import rejection
from fdcache.settings.sources import Candidate, Source
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
