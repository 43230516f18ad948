"""What can be wrong with a configuration, said so that it can be mended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fdcache.errors import ConfigurationError


class Severity(StrEnum):
    """Whether a problem keeps anything from starting."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"
    """Worth knowing, and no reason for ``env check --strict`` to fail."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: which variables, where each was set, what is wrong, what would be right.

    No text in it holds a secret.
    """

    severity: Severity
    variables: tuple[str, ...]
    sources: tuple[str, ...]
    """Where each of the variables was set."""
    wrong: str
    right: str

    @property
    def source(self) -> str:
        """Where they were set, each place once."""
        return ", ".join(dict.fromkeys(self.sources))

    def __str__(self) -> str:
        if len(set(self.sources)) == 1:
            concerned = f"{', '.join(self.variables)} ({self.source})"
        else:
            pairs = zip(self.variables, self.sources, strict=True)
            concerned = ", ".join(f"{name} ({source})" for name, source in pairs)
        return f"{concerned}: {self.wrong}; {self.right}"


class SettingsError(ConfigurationError, ValueError):
    """The configuration is wrong. ``problems`` lists every error at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def error(variable: str, source: str, wrong: str, right: str) -> Problem:
    """Make an error about one variable."""
    return Problem(Severity.ERROR, (variable,), (source,), wrong, right)


def disagreement(sources: Mapping[str, str], wrong: str, right: str) -> Problem:
    """Make an error about several variables, given with where each was set."""
    return Problem(Severity.ERROR, tuple(sources), tuple(sources.values()), wrong, right)


def warning(variable: str, source: str, wrong: str, right: str) -> Problem:
    """Make a warning about one variable."""
    return Problem(Severity.WARNING, (variable,), (source,), wrong, right)


def note(variable: str, source: str, wrong: str, right: str) -> Problem:
    """Make a note about one variable."""
    return Problem(Severity.NOTE, (variable,), (source,), wrong, right)


def strictly(problem: Problem) -> Problem:
    """Take a warning for an error, and leave a note what it is."""
    return replace(problem, severity=Severity.ERROR) if problem.severity is Severity.WARNING else problem
