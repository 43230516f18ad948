"""Tables and JSON on standard output: for people on a terminal, for programs elsewhere."""

import json
import sys
from collections.abc import Iterable, Sequence


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
