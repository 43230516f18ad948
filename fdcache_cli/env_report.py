"""What ``fdcache env show`` says of a setting, as a row, as a record and in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import typer

from fdcache.settings import VARIABLES, Candidate, Settings, Survey, Variable
from fdcache.settings.names import suggest
from fdcache.settings.tree import GROUPS
from fdcache.settings.variable import User


def choose(
    settings: Settings,
    names: Sequence[str],
    *,
    group: str | None,
    changed: bool,
    used: bool,
    everything: bool,
) -> list[Variable]:
    """Select variables by the options of ``show``.

    Raises:
        typer.BadParameter: a name or the group does not exist.
    """
    renamed = {alias: variable.name for variable in VARIABLES.values() for alias in variable.aliases}
    names = [renamed.get(name, name) for name in names]
    for name in names:
        if name not in VARIABLES:
            raise typer.BadParameter(f"there is no setting {name}{_hint(name, VARIABLES)}")
    if group is not None and group not in GROUPS:
        raise typer.BadParameter(f"there is no group {group}{_hint(group, GROUPS)}: {', '.join(GROUPS)}")
    chosen = [VARIABLES[name] for name in names] or list(VARIABLES.values())
    if not (names or group or changed or used or everything):
        return [v for v in chosen if v.used_by is User.FDCACHE or settings.changed(v.name)]
    return [
        variable
        for variable in chosen
        if (group is None or variable.group == group)
        and (not changed or settings.changed(variable.name))
        and (not used or variable.used_by is User.FDCACHE)
    ]


def _hint(name: str, known: Any) -> str:
    meant = suggest(name, known)
    return f"; did you mean {meant}?" if meant else ""


class Report:
    """Renders settings that were found; secrets are masked unless ``reveal`` is set."""

    HEADER: ClassVar = ("NAME", "VALUE", "SOURCE", "DEFAULT", "CHANGED")

    def __init__(self, found: Survey, reveal: bool) -> None:
        self._settings = found.settings
        self._rejected = found.rejected
        self._reveal = reveal

    def row(self, variable: Variable) -> tuple[str, ...]:
        """Give the cells under ``HEADER``."""
        name = variable.name
        changed = "yes" if self._settings.changed(name) else "no"
        default = variable.render(variable.default)
        return (name, self._value(variable), self._source(name), _or_dash(default), changed)

    def record(self, variable: Variable) -> dict[str, Any]:
        """Give what JSON has of one setting."""
        name = variable.name
        candidates = self._settings.candidates(name)
        return {
            "name": name,
            "value": None if name in self._rejected else variable.to_json(self._settings.value(name)),
            "source": self._settings.source(name).value,
            "default": variable.to_json(variable.default),
            "type": variable.type,
            "group": variable.group,
            "description": variable.meaning,
            "unit": variable.unit,
            "range": variable.range or None,
            "choices": list(variable.choices) or None,
            "changed": self._settings.changed(name),
            "valid": name not in self._rejected,
            "secret": variable.secret,
            "used_by": variable.used_by.value,
            "since": variable.since,
            "takes_effect": variable.effect.value,
            "given_as": candidates[0].name if candidates else None,
            "place": candidates[0].place if candidates else None,
            "deprecated_names": list(variable.aliases),
        }

    def story(self, variable: Variable) -> Iterator[str]:
        """Tell everything of one setting, with every candidate, line by line."""
        name = variable.name
        yield name
        yield f"  {variable.meaning}"
        facts = {
            "value": self._value(variable),
            "default": _or_dash(variable.render(variable.default)),
            "type": variable.type,
            "unit": variable.unit,
            "range": variable.range,
            "choices": ", ".join(variable.choices),
            "secret": "yes" if variable.secret else "",
            "group": variable.group,
            "used by": variable.used_by.value,
            "since": variable.since,
            "takes effect": variable.effect.value,
            "old names": ", ".join(variable.aliases),
        }
        yield from (f"  {fact + ':':14}{text}" for fact, text in facts.items() if text)
        yield "  candidates, the first one wins:"
        for candidate in self._settings.candidates(name):
            yield f"    {self._candidate(variable, candidate)}"
        yield f"    {'default':13}{_or_dash(variable.render(variable.default))}"

    def _source(self, name: str) -> str:
        candidates = self._settings.candidates(name)
        if not candidates:
            return "default"
        winner = candidates[0]
        return winner.source.value if winner.name == name else f"{winner.source.value} ({winner.name})"

    def _value(self, variable: Variable) -> str:
        if variable.name in self._rejected:
            return "(not valid)"
        value = self._settings.value(variable.name)
        if self._reveal and variable.secret and value:
            keys = value if isinstance(value, tuple) else (value,)
            return ",".join(key.get_secret_value() for key in keys)
        return _or_dash(variable.render(value))

    def _candidate(self, variable: Variable, candidate: Candidate) -> str:
        shown = variable.show(candidate.value)
        return f"{candidate.source.value:13}{shown} as {candidate.name} in {candidate.place}"


def _or_dash(text: str | None) -> str:
    return "-" if text is None else text or "''"
