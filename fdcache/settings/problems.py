"""What can be wrong with a configuration, said so that it can be mended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fdcache.errors import ConfigurationError


class Severity(StrEnum):
    """Whether a problem keeps anything from starting."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: which variables, where they were set, what is wrong, what would be right.

    No text in it holds a secret.
    """

    severity: Severity
    variables: tuple[str, ...]
    source: str
    wrong: str
    right: str

    def __str__(self) -> str:
        return f"{', '.join(self.variables)} ({self.source}): {self.wrong}; {self.right}"


class SettingsError(ConfigurationError, ValueError):
    """The configuration is wrong. ``problems`` lists every error at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def error(variables: tuple[str, ...], source: str, wrong: str, right: str) -> Problem:
    """Make an error."""
    return Problem(Severity.ERROR, variables, source, wrong, right)


def warning(variables: tuple[str, ...], source: str, wrong: str, right: str) -> Problem:
    """Make a warning."""
    return Problem(Severity.WARNING, variables, source, wrong, right)


def as_error(problem: Problem) -> Problem:
    """Take a warning for an error."""
    return replace(problem, severity=Severity.ERROR)
