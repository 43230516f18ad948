"""``fdcache inspect``: a running service in tables; ``explain`` and the storage have modules of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

import typer

from fdcache.node.figures import number
from fdcache.settings.parsing import readable_size
from fdcache_cli import inspect_plot, output
from fdcache_cli.app import Command, new_group
from fdcache_cli.live import show_live
from fdcache_cli.service_view import (
    Columns,
    Json,
    NamespaceOption,
    PlotOption,
    Rows,
    ServerOption,
    WatchOption,
    connect,
    figure,
    moment,
    seconds,
    table,
)
from fdcache_cli.storage_view import tier_rows

COMMANDS = (
    Command("tiers", __name__, "tiers", "What each tier holds."),
    Command("tree", "fdcache_cli.inspect_tree", "tree", "The hottest prefixes."),
    Command("clients", __name__, "clients", "Who uses the service, and what each holds."),
    Command("transfers", __name__, "transfers", "What is being copied."),
    Command("namespaces", __name__, "namespaces", "The layouts and their shares."),
    Command("tenants", __name__, "tenants", "What each tenant has of a layout, and may have."),
    Command("block", __name__, "block", "Where a block is, by the beginning of its hash."),
    Command(
        "explain",
        "fdcache_cli.inspect_explain",
        "explain",
        "Why a prompt was a hit or a miss, block by block.",
    ),
    Command(
        "storage",
        "fdcache_cli.inspect_storage",
        "storage",
        "What a service has stored, or with PATH what is in files.",
    ),
)

app = new_group(COMMANDS, help="Look into a running service, or what fdcache keeps on disk.")

_NAMESPACES: Columns = (
    ("namespace", "namespace", str),
    ("model", "model", str),
    ("ranks", "ranks", str),
    ("block", "block_size", str),
    ("record", "record_bytes", readable_size),
    ("memory", "bytes", readable_size),
    ("clients", "clients", str),
    ("ready", "ready", str),
    ("free", "free", str),
    ("hits", "hit_blocks", str),
    ("asked", "looked_up_blocks", str),
    ("stored", "stored", str),
    ("evicted", "evicted", str),
    ("corrupt", "corrupt", str),
)
_CLIENTS: Columns = (
    ("client", "name", str),
    ("pid", "pid", str),
    ("namespace", "namespace", str),
    ("ranks", "ranks", lambda ranks: ",".join(map(str, ranks))),
    ("since", "connected_seconds", seconds),
    ("silent", "silent_seconds", seconds),
    ("slots", "stock", str),
    ("runs", "runs", str),
    ("lookups", "lookups", str),
    ("stored", "stored", str),
    ("prompt tokens", "lookup_tokens", figure),
    ("found", "found", str),
    ("requests", "live_requests", figure),
)
_TRANSFERS: Columns = (
    ("client", "client", str),
    ("plans", "plans_in_flight", figure),
    ("queued backups", "queued_backups", figure),
    ("writable slots", "writable_slots", str),
    ("pinned runs", "pinned_runs", str),
    ("to device", "host_to_device", str),
    ("to host", "device_to_host", str),
)
_TENANTS: Columns = (
    ("namespace", "namespace", str),
    ("tenant", "tenant", str),
    ("blocks", "blocks", str),
    ("memory", "bytes", readable_size),
    ("quota", "quota", lambda share: f"{share:.0%}"),
    ("most blocks", "most_blocks", str),
)
_TIERS: Columns = (
    ("tier", "tier", str),
    ("of", "of", str),
    ("blocks", "blocks", figure),
    ("ready", "ready", figure),
    ("free", "free", figure),
    ("writing", "writing", figure),
    ("evictable", "evictable", figure),
    ("evictions", "evictions", figure),
)
_BLOCKS: Columns = (
    ("namespace", "namespace", str),
    ("hash", "hash", lambda text: text[:16]),
    ("slot", "slot", str),
    ("depth", "depth", str),
    ("pins", "pins", str),
    ("hits", "hits", str),
    ("idle", "idle_seconds", seconds),
    ("since", "stored_at", moment),
    ("stored", "stored", lambda stored: "yes" if stored else "no"),
    ("left", "reason", str),
    ("at", "left_at", moment),
)


@app.callback()
def inspect() -> None:
    """Hold the commands together."""


def tiers(
    server: ServerOption = None, *, json: Json = False, watch: WatchOption = False, plot: PlotOption = None
) -> None:
    """What each tier holds: the service's host and storage tier, and the device tiers of its clients."""
    if plot is not None:
        inspect_plot.check_plot(plot, json, watch)
        with connect(server) as client:
            inspect_plot.plot_tiers(_tier_rows(client.ask("tiers")), plot)
        return
    _show(server, "tiers", _tier_rows, _TIERS, json=json, watch=watch)


def clients(server: ServerOption = None, *, json: Json = False, watch: WatchOption = False) -> None:
    """Who uses the service, what each holds, and by its own account how much of its prompts was found."""
    _show(server, "clients", _client_rows, _CLIENTS, json=json, watch=watch)


def transfers(
    server: ServerOption = None, *, json: Json = False, watch: WatchOption = False, plot: PlotOption = None
) -> None:
    """What is being copied, by client, and what was copied so far."""
    if plot is not None:
        inspect_plot.check_plot(plot, json, watch)
        with connect(server) as client:
            inspect_plot.plot_transfers(client.ask("transfers"), plot)
        return
    _show(server, "transfers", _transfer_rows, _TRANSFERS, json=json, watch=watch)


def namespaces(server: ServerOption = None, *, json: Json = False, watch: WatchOption = False) -> None:
    """The layouts and their shares of the arena."""
    _show(server, "namespaces", _namespace_rows, _NAMESPACES, json=json, watch=watch)


def tenants(
    server: ServerOption = None,
    *,
    namespace: NamespaceOption = None,
    json: Json = False,
    watch: WatchOption = False,
) -> None:
    """The tenants with the most blocks: by name where a quota names them, else by the beginning of a key."""
    _show(server, "tenants", list, _TENANTS, json=json, watch=watch, namespace=namespace)


def block(
    prefix: Annotated[str, typer.Argument(metavar="HASH", help="At least 4 hexadecimal digits.")],
    server: ServerOption = None,
    *,
    json: Json = False,
) -> None:
    """Where a block is, or when it was evicted."""
    if not re.fullmatch(r"[0-9a-fA-F]{4,64}", prefix):
        raise typer.BadParameter("give 4 to 64 hexadecimal digits", param_hint="HASH")
    with connect(server) as client:
        found = client.ask("block", hash=prefix)
    if json:
        output.print_json(found)
    elif found:
        output.print_table(*table(found, _BLOCKS))
    else:
        output.print_line(f"no block that begins with {prefix} is there, and none is known to have left")


def _show(
    server: str | None,
    what: str,
    rows: Callable[[Any], Rows],
    columns: Columns,
    *,
    json: bool,
    watch: bool,
    **arguments: Any,
) -> None:
    with connect(server) as client:

        def show() -> None:
            answer = client.ask(what, **arguments)
            if json:
                output.print_json(answer)
            else:
                output.print_table(*table(rows(answer), columns))

        show_live(show, watch)


def _transfer_rows(answer: Any) -> Rows:
    return [{**each, **{way: _copied(figures) for way, figures in each["copied"].items()}} for each in answer]


def _copied(figures: dict[str, Any]) -> str:
    total, spent = figures["bytes"], figures["seconds"]
    return readable_size(total) + (f" at {total / spent / 1e9:.1f} GB/s" if spent else "")


def _tier_rows(answer: Any) -> Rows:
    host = answer["host"]
    rows = [
        {"tier": "host", "of": f"service, {readable_size(host['bytes'])}", "blocks": host["slots"], **host}
    ]
    rows += tier_rows(answer["storage"])
    rows += [{**each, "tier": "device", "of": each["client"]} for each in answer["device"]]
    return rows


def _client_rows(answer: Any) -> Rows:
    return [
        {
            **each,
            "lookup_tokens": (counters := each["figures"].get("counters") or {}).get("lookup_tokens"),
            "found": _found(counters),
            "live_requests": each["figures"].get("live_requests"),
        }
        for each in answer
    ]


def _found(counters: dict[str, Any]) -> str:
    asked = number(counters.get("lookup_tokens"))
    hits = sum(number(counters.get(f"{tier}_hit_tokens")) for tier in ("device", "host", "storage"))
    return f"{hits / asked:.1%}" if 0 <= hits <= asked and asked else "-"


def _namespace_rows(answer: Any) -> Rows:
    return [{**each, **each["totals"], **each["tier"]} for each in answer]
