"""Settings as plain values with secrets masked, for display and for the views of a service."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from fdcache.settings.loading import Settings
from fdcache.settings.sources import Candidate, Source
from fdcache.settings.tree import VARIABLES
from fdcache.settings.variable import Variable


@dataclass(frozen=True, slots=True)
class GivenValue:
    """One given value: its source, the name it was given under, the place, and its text for display."""

    source: Source
    name: str
    place: str
    text: str


@dataclass(frozen=True, slots=True)
class EffectiveValue:
    """One setting. ``value`` is as in JSON, ``text`` as written; both are None if nothing is set."""

    value: Any
    text: str | None
    changed: bool
    """True if the value differs from the described default."""
    valid: bool = True
    origins: tuple[GivenValue, ...] = ()
    """Every value given, the one in effect first; empty if none was given."""

    @property
    def source(self) -> Source:
        """The layer that gave the value; ``DEFAULT`` if none did."""
        return self.origins[0].source if self.origins else Source.DEFAULT


def effective_values(settings: Settings, rejected: Set[str] = frozenset()) -> dict[str, EffectiveValue]:
    """Return every setting by name; those ``rejected`` have no value."""
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


def _origin(variable: Variable, candidate: Candidate) -> GivenValue:
    place = candidate.place.encode(errors="backslashreplace").decode()  # a path may not be UTF-8
    return GivenValue(candidate.source, candidate.name, place, variable.show(candidate.value))
