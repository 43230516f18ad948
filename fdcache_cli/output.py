"""Output of commands: tables and JSON on standard output, progress bars on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import TaskID

Advance = Callable[[str, int, int], None]
"""Reports the name of a task, how much of it is done, and how much there is; from any thread."""


def on_terminal() -> bool:
    """Return True if standard output is a terminal."""
    return sys.stdout.isatty()


def print_line(text: str = "") -> None:
    """Print to what standard output is now, which tests replace."""
    sys.stdout.write(text + "\n")


def print_json(value: object) -> None:
    """Print for programs: one value, indented."""
    print_line(json.dumps(value, indent=2))


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table: drawn and wrapped on a terminal; elsewhere aligned columns with nothing cut off."""
    from fdcache.settings.kinds import printable  # which loads pydantic

    table = [header, *([printable(cell) for cell in row] for row in rows)]
    if on_terminal():
        _draw(header, table[1:])
        return
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    for row in table:
        print_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _draw(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


@contextmanager
def progress_bars() -> Iterator[Advance | None]:
    """Yield a function that draws a bar for each task while it runs; None when standard error is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import Progress

    # The command's own output stays on standard output, so that it can be piped.
    bars = Progress(console=console, transient=True, redirect_stdout=sys.stdout.isatty())
    tasks: dict[str, TaskID] = {}
    lock = Lock()

    def advance(name: str, done: int, total: int) -> None:
        with lock:
            if name not in tasks and done >= total:
                return  # over before it could be seen
            if not tasks:
                bars.start()
            if name not in tasks:
                tasks[name] = bars.add_task(name, completed=done, total=total)
                bars.refresh()
            bars.update(tasks[name], completed=done, total=total)
            if done >= total:
                bars.remove_task(tasks.pop(name))
            if not tasks:
                bars.stop()

    try:
        yield advance
    finally:
        with lock:
            bars.stop()
