"""Tables, JSON and progress bars: for people on a terminal, for programs elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING


def on_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


def print_line(text: str = "") -> None:
    """Write one line."""
    sys.stdout.write(text + "\n")


def print_json(value: object) -> None:
    """Write one JSON value."""
    print_line(json.dumps(value, indent=2))


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write a table: drawn and wrapped on a terminal, aligned columns and nothing cut off elsewhere."""
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
