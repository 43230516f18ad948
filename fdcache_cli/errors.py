"""Exit statuses of commands, and the errors that they print."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NoReturn, TextIO

from fdcache.errors import ConfigurationError, FdcacheError

if TYPE_CHECKING:
    from fdcache.settings import Problem

FAILED = 1
USAGE = 2
BAD_CONFIGURATION = 78  # EX_CONFIG of sysexits.h
INTERRUPTED = 130


def guard(command: Callable[[], object]) -> None:
    """Run ``command``; print an error that fdcache raised on purpose without a traceback, and exit."""
    warnings.formatwarning = _format_warning
    try:
        command()
    except ConfigurationError as error:
        fail(str(error), BAD_CONFIGURATION)
    except FdcacheError as error:
        fail(str(error), FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _format_warning(message: Warning | str, *_: object, **__: object) -> str:
    return f"warning: {message}\n"


def fail(message: str, status: int) -> NoReturn:
    """Print each line of ``message`` on standard error and exit with ``status``."""
    for line in message.splitlines():
        sys.stderr.write(f"error: {line}\n")
    sys.exit(status)


def print_problems(problems: Iterable[Problem], stream: TextIO) -> None:
    """Print problems of the settings, a line each."""
    for problem in problems:
        stream.write(f"{problem.severity}: {problem}\n")
