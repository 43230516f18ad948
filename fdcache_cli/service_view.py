"""Shared by the commands that ask a service: connection, live views, and tables of records."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import msgspec

from fdcache.errors import ProtocolError, ServiceUnavailableError
from fdcache.service.client.connection import Client
from fdcache.service.wire.records import Unit, fields, shown
from fdcache.service.wire.storage_views import StorageView
from fdcache.service.wire.views import TiersView
from fdcache.settings import Severity
from fdcache.settings.kinds import readable_size
from fdcache_cli import output
from fdcache_cli.errors import print_problems
from fdcache_cli.running_service import is_served

_REFRESH_SECONDS = 1.0
_CLEAR = "\x1b[2J\x1b[H"
_LONGEST_VALUE = 32
_HASH_DIGITS = 16

Answer = TypeVar("Answer")


def connect(server: str | None) -> Client:
    """Return a client of the service at ``server``, the configured one, or the one at the default address.

    Settings that do not concern the address are only warned about. Raises ``ServiceUnavailableError`` if no process of
    this user listens there.
    """
    from fdcache.service.wire.address import find_address, socket_path

    address, others = find_address({"FDCACHE_SERVER": server})
    print_problems((replace(each, severity=Severity.WARNING) for each in others), sys.stderr)
    if not is_served(address):
        raise ServiceUnavailableError(
            f"{address} is not reachable: {socket_path(address)} does not exist, belongs to another user, or was left "
            "by a killed service; is `fdcache serve` running? Name another address with --server or FDCACHE_SERVER"
            + _kept_memory(address)
        )
    return Client(address)


def _kept_memory(address: str) -> str:
    """Return what a stopped service at this address keeps for its next start, for an error message."""
    from fdcache.service.server.arena import arena_name
    from fdcache.service.server.arenas import find_arenas
    from fdcache.service.wire.address import socket_path
    from fdcache.settings.loading import read_settings

    folder = read_settings(arguments={}).settings.server.arena_dir
    name = arena_name(socket_path(address))
    kept = [each for each in find_arenas(folder) if each.name == name and not each.alive]
    return "".join(f"\nits host tier is kept in {folder}, {each.size}: {each.remedy}" for each in kept)


def ask(client: Client, kind: type[Answer], what: str, **arguments: Any) -> tuple[Answer, Any]:
    """Return the answer to a view as a record, and as the service sent it.

    Raises ``ProtocolError`` for the answer of a service of another version that this command cannot read.
    """
    answer = client.ask(what, **arguments)
    try:
        return msgspec.convert(answer, kind), answer
    except msgspec.ValidationError as error:
        raise ProtocolError(
            f"{client.address}: the answer to {what!r} cannot be read ({error}); use the fdcache command of the "
            "service's version"
        ) from error


def show_live(show: Callable[[], None], watch: bool) -> None:
    """Call ``show`` once, or with ``watch`` every second until Ctrl-C, on a terminal on a cleared screen.

    A watch waits for a service that is away.
    """
    show()
    sys.stdout.flush()
    try:
        while watch:
            time.sleep(_REFRESH_SECONDS)
            if output.on_terminal():
                output.print_line(_CLEAR)
            try:
                show()
            except ServiceUnavailableError as error:
                output.print_line(f"waiting: {error}")
            sys.stdout.flush()
    except KeyboardInterrupt:
        output.print_line()


# --- tables ------------------------------------------------------------------------------------------------


def table(
    rows: Iterable[msgspec.Struct], kind: type[msgspec.Struct], **more: Callable[[Any], str]
) -> tuple[list[str], list[list[str]]]:
    """Return header and cells of records of one kind: a column for each field that has a title, nested ones too.

    A record's own fields come first, such as its namespace; then the inherited ones, then those of inline records.
    ``more`` adds computed columns by title; ``_`` in it stands for a space.
    """
    columns = _columns(kind)
    cells = [
        [
            *(write(_value(row, path), unit) for _, path, unit in columns),
            *(each(row) for each in more.values()),
        ]
        for row in rows
    ]
    return [*(title for title, _, _ in columns), *(title.replace("_", " ") for title in more)], cells


def _columns(kind: type[msgspec.Struct], path: tuple[str, ...] = ()) -> list[tuple[str, Sequence[str], Unit]]:
    found: list[tuple[str, Sequence[str], Unit]] = []
    hints, own = get_type_hints(kind), inspect.get_annotations(kind)
    for field in sorted(fields(kind), key=lambda field: (field.inline, field.name not in own)):
        here = (*path, field.name)
        if field.column is not None:
            found.append((field.column, here, field.unit))
        if field.inline:
            hint = hints[field.name]
            record = next(each for each in (hint, *get_args(hint)) if hasattr(each, "__struct_fields__"))
            found += _columns(record, here)
    return found


def _value(row: Any, path: Sequence[str]) -> Any:
    for name in path:
        row = getattr(row, name, msgspec.UNSET)
    return row


def write(value: Any, unit: Unit = Unit.PLAIN) -> str:
    """Return a value as a table shows it; empty if it is absent."""
    if value is None or value is msgspec.UNSET:
        return ""
    return _WRITERS[unit](value)


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else reported(value)


def reported(value: Any) -> str:
    """Return what a client reported about itself, which may be anything: numbers and short texts, else ``?``."""
    if isinstance(value, bool | int | float | str):
        text = str(value)
        return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
    return "-" if value is None else "?"


def moment(when: float) -> str:
    """Return a time of day, with the date unless it is today."""
    then, now = datetime.fromtimestamp(when), datetime.now()
    return then.strftime("%H:%M:%S" if then.date() == now.date() else "%Y-%m-%d %H:%M:%S")


def seconds(value: float) -> str:
    """Return a duration in seconds, minutes or hours."""
    if value < 120:
        return f"{value:.1f}s"
    return f"{value / 60:.0f}m" if value < 7200 else f"{value / 3600:.1f}h"


_WRITERS: dict[Unit, Callable[[Any], str]] = {
    Unit.PLAIN: _plain,
    Unit.BYTES: readable_size,
    Unit.SECONDS: seconds,
    Unit.MOMENT: moment,
    Unit.SHARE: lambda share: f"{share:.0%}",
    Unit.HASH: lambda text: str(text)[:_HASH_DIGITS],
    Unit.FLAG: lambda flag: "yes" if flag else "no",
}


# --- the table of tiers ------------------------------------------------------------------------------------


class TierRow(msgspec.Struct):
    """A row of the table of tiers. Those of devices are as the clients report them, and may hold anything."""

    tier: Annotated[str, shown("Kind of the tier.", column="tier")]
    of: Annotated[str, shown("Owner and size.", column="of")]
    blocks: Annotated[Any, shown("Slots.", column="blocks")] = msgspec.UNSET
    ready: Annotated[Any, shown("Blocks that look-ups find.", column="ready")] = msgspec.UNSET
    free: Annotated[Any, shown("Free slots.", column="free")] = msgspec.UNSET
    writing: Annotated[Any, shown("Slots being written.", column="writing")] = msgspec.UNSET
    evictable: Annotated[Any, shown("Evictable blocks.", column="evictable")] = msgspec.UNSET
    evictions: Annotated[Any, shown("Blocks evicted.", column="evictions")] = msgspec.UNSET


def tier_rows(tiers: TiersView) -> list[TierRow]:
    """Return a row for each tier: the service's host and storage tier, and the device tiers of its clients."""
    host = tiers.host
    rows = [
        TierRow(
            tier="host",
            of=f"service, {readable_size(host.bytes)}",
            blocks=host.slots,
            ready=host.ready,
            free=host.free,
            writing=host.writing,
            evictable=host.evictable,
            evictions=host.evictions,
        )
    ]
    if tiers.storage is not None:
        rows.append(_storage_row(tiers.storage))
    names = ("blocks", "ready", "free", "writing", "evictable", "evictions")
    rows += [
        TierRow("device", str(each["client"]), **{name: each[name] for name in names if name in each})
        for each in tiers.device
    ]
    return rows


def _storage_row(storage: StorageView) -> TierRow:
    capacity, blocks = storage.capacity_blocks or 0, storage.blocks or 0
    return TierRow(
        tier="storage",
        of=f"{storage.connector}, {storage.state}, {readable_size(storage.bytes or 0)}",
        blocks=capacity,
        ready=blocks,
        free=max(capacity - blocks - storage.quarantined - storage.withheld - storage.orphans, 0),
        writing=storage.writing_blocks,
        evictions=storage.evictions,
    )
