"""What the commands that speak to a service share: its address, and tables of what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from fdcache.client.tool import Client
from fdcache.settings.parsing import format_size

Json = Annotated[bool, typer.Option("--json", help="Write JSON.")]
ServerOption = Annotated[
    str | None,
    typer.Option("--server", metavar="ADDRESS", help="Default: FDCACHE_SERVER, else the default socket."),
]
Rows = list[dict[str, Any]]


def connect(server: str | None) -> Client:
    """A line to the service that was named, or is configured, or stands at the default address."""
    from fdcache.node.address import load_settings

    address = load_settings({"FDCACHE_SERVER": server}).cache.server
    assert address is not None, "there is a default"
    return Client(address)


def size(value: Any) -> str:
    """Bytes in words."""
    return format_size(int(value))


def seconds(value: Any) -> str:
    """A duration in words."""
    value = float(value)
    if value < 120:
        return f"{value:.1f}s"
    return f"{value / 60:.0f}m" if value < 7200 else f"{value / 3600:.1f}h"


Columns = Sequence[tuple[str, str, Callable[[Any], str]]]


def table(rows: Iterable[Mapping[str, Any]], columns: Columns) -> tuple[list[str], list[list[str]]]:
    """Header and cells; ``columns`` are (title, key, how a value is written)."""
    cells = [[write(row[key]) if key in row else "" for _, key, write in columns] for row in rows]
    return [title for title, _, _ in columns], cells
