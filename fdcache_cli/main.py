"""Entry point of the command line. It imports the rest once Ctrl-C can do no harm."""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # importing typing takes time in which Ctrl-C prints a traceback
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

_BEFORE_A_COMMAND = {f"fdcache_cli.{name}" for name in ("app", "commands", "errors", "main")}
_ONLY_LOOKS = {"--check", "--help", "-h"}
_INTERRUPTED = 130


def run() -> None:
    """Run the command line. Exit status: 0, 1 (failed), 2 (wrong usage), 78 (bad configuration) or 130 (Ctrl-C)."""
    former = _on_interrupt(_interrupt)
    try:
        if sys.argv[1:2] == ["serve"] and not _ONLY_LOOKS & set(sys.argv):
            from fdcache.service.server import listening

            listening.begin(os.environ)
        from fdcache_cli import errors, streams

        streams.prepare()
        errors.guard(_print_version if sys.argv[1:] == ["--version"] else _run_command)
    finally:
        _on_interrupt(former)


def _run_command() -> None:
    from fdcache_cli.commands import find_command

    find_command(sys.argv[1:])()


def _print_version() -> None:
    from fdcache import __version__

    sys.stdout.write(f"fdcache {__version__}\n")


def _on_interrupt(handler: Any) -> Any:
    """Set the handler of Ctrl-C and return the former one. One that the caller set, such as to ignore it, stays."""
    former = signal.getsignal(signal.SIGINT)
    if former in (signal.default_int_handler, _interrupt):
        signal.signal(signal.SIGINT, handler)
    return former


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise ``KeyboardInterrupt`` in a command's own code, and elsewhere end the process, which holds nothing yet.

    While modules are imported and options are read, an exception may be printed, wrapped or swallowed.
    """
    has_begun, caller = False, frame
    while caller is not None:
        if caller.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(_INTERRUPTED)
        module = caller.f_globals.get("__name__", "")
        has_begun |= module.startswith("fdcache_cli.") and module not in _BEFORE_A_COMMAND
        caller = caller.f_back
    if not has_begun:
        os._exit(_INTERRUPTED)
    signal.default_int_handler(number, frame)


if __name__ == "__main__":
    run()
