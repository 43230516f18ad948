"""A view of a service that is shown once, or anew every second until Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from fdcache.errors import ServiceUnavailableError
from fdcache_cli import output

_SECONDS = 1.0
_CLEAR = "\x1b[2J\x1b[H"


def show_live(show: Callable[[], None], watch: bool) -> None:
    """Call ``show``; with ``watch`` again and again, on a terminal each time on an empty screen.

    A service that is away meanwhile is waited for. Ctrl-C is how a watch ends.
    """
    show()
    sys.stdout.flush()
    try:
        while watch:
            time.sleep(_SECONDS)
            if output.on_terminal():
                output.print_line(_CLEAR)
            try:
                show()
            except ServiceUnavailableError as error:
                output.print_line(f"waiting: {error}")
            sys.stdout.flush()
    except KeyboardInterrupt:
        output.print_line()
