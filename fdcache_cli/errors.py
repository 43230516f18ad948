"""Exit statuses of commands, and the errors that they print."""

from __future__ import annotations

import os
import sys
import warnings

from fdcache.errors import ConfigurationError, FdcacheError

TYPE_CHECKING = False  # typing, pathlib and contextlib would take a third of the time of `fdcache --help`
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import NoReturn, TextIO

    from fdcache.settings import Problem

FAILED = 1
USAGE = 2
BAD_CONFIGURATION = 78  # EX_CONFIG of sysexits.h
INTERRUPTED = 130
_OWN = ("fdcache", "fdcache_cli")


class OutputError(FdcacheError):
    """Standard output cannot be written."""


def guard(command: Callable[[], object]) -> NoReturn:
    """Run ``command`` and exit with its status. Errors raised on purpose are printed without a traceback."""
    warnings.formatwarning = _format_warning
    status = _status_of(command)
    sys.exit(_status_of(sys.stdout.flush) or status)


def _status_of(command: Callable[[], object]) -> int:
    try:
        command()
    except FdcacheError as error:
        print_error(str(error))
        if isinstance(error, OutputError):
            _discard(1)
        if isinstance(error, ConfigurationError):
            return BAD_CONFIGURATION
    except BrokenPipeError:
        _discard(1)
    except FileNotFoundError as error:
        if error.filename is not None or _has_working_directory():
            raise
        print_error("the working directory was removed; change to one that exists")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in _OWN:
            raise
        print_error(
            f"{error.name} is not installed, which fdcache requires; install fdcache with its dependencies "
            "(pip install without --no-deps)"
        )
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    else:
        return 0
    return FAILED


def _has_working_directory() -> bool:
    try:
        os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        return False
    return True


def _discard(stream: int) -> None:
    """Discard what a standard stream still buffers, which cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def _format_warning(message: Warning | str, *_: object, **__: object) -> str:
    return f"warning: {message}\n"


def fail(message: str, status: int) -> NoReturn:
    """Print each line of ``message`` on standard error and exit with ``status``."""
    print_error(message)
    sys.exit(status)


def print_error(message: str) -> None:
    """Print each line of ``message`` on standard error, unless that is closed or full."""
    try:
        for line in message.splitlines():
            sys.stderr.write(f"error: {line}\n")
        sys.stderr.flush()
    except OSError:  # the exit status remains
        _discard(2)


def print_problems(problems: Iterable[Problem], stream: TextIO) -> None:
    """Print problems of the settings, a line each."""
    for problem in problems:
        stream.write(f"{problem.severity}: {problem}\n")
