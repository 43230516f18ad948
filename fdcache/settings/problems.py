"""Problems of a configuration: the variables, where they are set, what is wrong, and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fdcache.errors import ConfigurationError
from fdcache.settings.kinds import printable


class Severity(StrEnum):
    """Severity of a problem. Only an error prevents a start."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"
    """Not an error for ``env check --strict`` either."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. No text in it contains a secret."""

    severity: Severity
    variables: tuple[str, ...]
    sources: tuple[str, ...]
    """Where each of the variables is set."""
    wrong: str
    right: str

    @property
    def source(self) -> str:
        """The places, each once."""
        return ", ".join(dict.fromkeys(self.sources))

    def __str__(self) -> str:
        if len(set(self.sources)) == 1:
            concerned = f"{', '.join(self.variables)} ({self.source})"
        else:
            pairs = zip(self.variables, self.sources, strict=True)
            concerned = ", ".join(f"{name} ({source})" for name, source in pairs)
        return printable(f"{concerned}: {self.wrong}; {self.right}")


class SettingsError(ConfigurationError, ValueError):
    """The configuration is wrong. ``problems`` has every error."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def error(variable: str, source: str, wrong: str, right: str) -> Problem:
    """Return an error about one variable."""
    return Problem(Severity.ERROR, (variable,), (source,), wrong, right)


def disagreement(sources: Mapping[str, str], wrong: str, right: str) -> Problem:
    """Return an error about several variables; ``sources`` maps each to where it is set."""
    return Problem(Severity.ERROR, tuple(sources), tuple(sources.values()), wrong, right)


def warning(variable: str, source: str, wrong: str, right: str) -> Problem:
    """Return a warning about one variable."""
    return Problem(Severity.WARNING, (variable,), (source,), wrong, right)


def note(variable: str, source: str, wrong: str, right: str) -> Problem:
    """Return a note about one variable."""
    return Problem(Severity.NOTE, (variable,), (source,), wrong, right)


def strictly(problem: Problem) -> Problem:
    """Return a warning as an error, and any other problem unchanged."""
    return replace(problem, severity=Severity.ERROR) if problem.severity is Severity.WARNING else problem
