"""The settings in force as plain values, secrets masked: what a service tells of its own, and what is shown."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from fdcache.settings.loading import Settings
from fdcache.settings.sources import Candidate, Source
from fdcache.settings.tree import VARIABLES
from fdcache.settings.variable import Variable


@dataclass(frozen=True, slots=True)
class Origin:
    """One value that was given: the kind of source, the name, the place, and the value as text to show."""

    source: Source
    name: str
    place: str
    text: str


@dataclass(frozen=True, slots=True)
class EffectiveValue:
    """One setting. ``value`` is as in JSON, ``text`` as it is written; both are None where nothing is set."""

    value: Any
    text: str | None
    changed: bool
    """Whether it differs from the described default."""
    valid: bool = True
    origins: tuple[Origin, ...] = ()
    """Everything that was given, the winner first; empty where the default holds."""

    @property
    def source(self) -> Source:
        """Which kind of source the value came from."""
        return self.origins[0].source if self.origins else Source.DEFAULT


def effective_values(settings: Settings, rejected: Set[str] = frozenset()) -> dict[str, EffectiveValue]:
    """Every setting by name; of those that were ``rejected`` there is no value."""
    return {name: _one(settings, variable, name not in rejected) for name, variable in VARIABLES.items()}


def _one(settings: Settings, variable: Variable, valid: bool) -> EffectiveValue:
    value = settings.value(variable.name)
    return EffectiveValue(
        value=variable.to_json(value) if valid else None,
        text=variable.render(value) if valid else None,
        changed=settings.changed(variable.name),
        valid=valid,
        origins=tuple(_origin(variable, each) for each in settings.candidates(variable.name)),
    )


def _origin(variable: Variable, given: Candidate) -> Origin:
    place = given.place.encode(errors="backslashreplace").decode()  # a path may be no UTF-8
    return Origin(given.source, given.name, place, variable.show(given.value))
