"""What the commands that speak to a service share: its address, and tables of what it says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from fdcache.errors import ServiceUnavailableError
from fdcache.service.client.connection import Client
from fdcache.service.wire.protocol import to_number
from fdcache.settings import Severity
from fdcache_cli.errors import print_problems
from fdcache_cli.running_service import is_served

Json = Annotated[bool, typer.Option("--json", help="Write JSON.")]
ServerOption = Annotated[
    str | None,
    typer.Option("--server", metavar="ADDRESS", help="Default: FDCACHE_SERVER, else the default socket."),
]
WatchOption = Annotated[bool, typer.Option("--watch", help="Show it anew every second, until Ctrl-C.")]
PlotOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw a picture instead (needs fdcache[plot]).")
]
NamespaceOption = Annotated[str | None, typer.Option(help="The beginning of a layout's name.")]
Rows = list[dict[str, Any]]
FOUND_IN = ("device", "host", "storage")
"""Tiers in which tokens of a prompt are found."""
_LONGEST_FIGURE = 32


def connect(server: str | None) -> Client:
    """A line to the service that was named, or is configured, or stands at the default address.

    Wrong settings that do not concern the address are only told of. Raises ``ServiceUnavailableError`` where no process
    listens that this user may speak to.
    """
    from fdcache.service.wire.address import find_address, socket_path

    address, others = find_address({"FDCACHE_SERVER": server})
    print_problems((replace(each, severity=Severity.WARNING) for each in others), sys.stderr)
    if not is_served(address):
        raise ServiceUnavailableError(
            f"{address}: nobody serves this user there: {socket_path(address)} does not exist, is another user's, or "
            "was left by a service that was killed; start `fdcache serve`, or say with --server or FDCACHE_SERVER "
            "where it is"
        )
    return Client(address)


def moment(when: float) -> str:
    """A time of day, with the date where that is another day."""
    then, now = datetime.fromtimestamp(when), datetime.now()
    return then.strftime("%H:%M:%S" if then.date() == now.date() else "%Y-%m-%d %H:%M:%S")


def figure(value: Any) -> str:
    """What a client says of itself, which may be anything: numbers and short texts; of other things, that they are."""
    if isinstance(value, bool | int | float | str):
        text = str(value)
        return text if len(text) <= _LONGEST_FIGURE else f"{text[: _LONGEST_FIGURE - 3]}..."
    return "-" if value is None else "?"


def found_shares(figures: Mapping[str, Any]) -> dict[str, float]:
    """The shares of its prompts' tokens that a client says it found, by tier; empty where that cannot be."""
    counters = figures.get("counters") or {}
    asked = to_number(counters.get("lookup_tokens"))
    hits = {tier: to_number(counters.get(f"{tier}_hit_tokens")) for tier in FOUND_IN}
    if asked <= 0 or min(hits.values()) < 0 or sum(hits.values()) > asked:
        return {}
    return {tier: tokens / asked for tier, tokens in hits.items()}


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
