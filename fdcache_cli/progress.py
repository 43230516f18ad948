"""Progress bars on standard error, for people; nothing where that is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import TaskID

Advance = Callable[[str, int, int], None]
"""Takes what is being done, how much of it is, and how much there is; from any thread."""


@contextmanager
def progress_bars() -> Iterator[Advance | None]:
    """A bar for each thing that is told of, there while it is under way. None without a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import Progress

    # Output of the command itself goes where it always goes, so that it can be piped.
    bars = Progress(console=console, transient=True, redirect_stdout=sys.stdout.isatty())
    tasks: dict[str, TaskID] = {}
    lock = Lock()

    def advance(what: str, done: int, total: int) -> None:
        with lock:
            if what not in tasks and done >= total:
                return  # over before anybody could see it
            if not tasks:
                bars.start()
            if what not in tasks:
                tasks[what] = bars.add_task(what, completed=done, total=total)
                bars.refresh()
            bars.update(tasks[what], completed=done, total=total)
            if done >= total:
                bars.remove_task(tasks.pop(what))
            if not tasks:
                bars.stop()

    try:
        yield advance
    finally:
        with lock:
            bars.stop()
