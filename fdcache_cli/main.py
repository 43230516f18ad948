"""Entry point of the command line. It imports the rest once Ctrl-C and closed streams can do no harm."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fdcache_cli import errors, streams


def run() -> None:
    """Run the command line. Exit status: 0, 1 (failed), 2 (wrong usage), 78 (bad configuration) or 130 (Ctrl-C)."""
    streams.prepare()
    with _ends_at_once():
        command = _find_command(sys.argv[1:])
    errors.guard(command)


def _find_command(arguments: list[str]) -> Callable[[], object]:
    if arguments == ["--version"]:
        return _print_version
    from fdcache_cli.commands import find_command

    return find_command(arguments)


def _print_version() -> None:
    from fdcache import __version__

    sys.stdout.write(f"fdcache {__version__}\n")


@contextmanager
def _ends_at_once() -> Iterator[None]:
    """End the process at the first Ctrl-C: while modules are imported, an exception may be printed or swallowed."""
    former = signal.getsignal(signal.SIGINT)
    if former is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(errors.INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


if __name__ == "__main__":
    run()
