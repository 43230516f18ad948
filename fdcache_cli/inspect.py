"""``fdcache inspect``: a running service in tables; ``explain`` and the storage have modules of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fdcache.settings.kinds import readable_size
from fdcache_cli import inspect_plot, output
from fdcache_cli.app import Command, new_group, refuse_options_of_group
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
    found_shares,
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

app = new_group(
    COMMANDS,
    help="""Look into a running service, or what fdcache keeps on disk.

    Without a command: tiers, clients and transfers of the service on one screen.
    """,
)

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


@dataclass(frozen=True, slots=True)
class View:
    """One question to a service: its answer as rows, which columns a table has of them, and how a picture is drawn."""

    what: str
    rows: Callable[[Any], Rows]
    columns: Columns
    draw: Callable[[Rows, Path], None]

    def show(
        self, server: str | None, *, json: bool, watch: bool, plot: Path | None, **arguments: Any
    ) -> None:
        """Ask, and show it as the options say."""
        if plot is not None:
            inspect_plot.check_plot(plot, json, watch)
        with connect(server) as client:
            if plot is not None:
                self.draw(self.rows(client.ask(self.what, **arguments)), plot)
                return

            def show() -> None:
                answer = client.ask(self.what, **arguments)
                if json:
                    output.print_json(answer)
                else:
                    output.print_table(*table(self.rows(answer), self.columns))

            show_live(show, watch)


@app.callback(invoke_without_command=True, no_args_is_help=False)
def inspect(
    context: typer.Context,
    server: ServerOption = None,
    *,
    json: Json = False,
    watch: WatchOption = False,
) -> None:
    """Show the overview of a service, where no command is given."""
    if context.invoked_subcommand is not None:
        refuse_options_of_group(context)
        return
    with connect(server) as client:

        def show() -> None:
            answers = {view.what: client.ask(view.what) for view in _OVERVIEW}
            if json:
                output.print_json(answers)
                return
            for view in _OVERVIEW:
                rows = view.rows(answers[view.what])
                output.print_line(view.what)
                if rows:
                    output.print_table(*table(rows, view.columns))
                else:
                    output.print_line("  none")
                output.print_line()

        show_live(show, watch)


def tiers(
    server: ServerOption = None, *, json: Json = False, watch: WatchOption = False, plot: PlotOption = None
) -> None:
    """What each tier holds: the service's host and storage tier, and the device tiers of its clients."""
    _TIERS_VIEW.show(server, json=json, watch=watch, plot=plot)


def clients(
    server: ServerOption = None, *, json: Json = False, watch: WatchOption = False, plot: PlotOption = None
) -> None:
    """Who uses the service, what each holds, and by its own account how much of its prompts was found."""
    _CLIENTS_VIEW.show(server, json=json, watch=watch, plot=plot)


def transfers(
    server: ServerOption = None, *, json: Json = False, watch: WatchOption = False, plot: PlotOption = None
) -> None:
    """What is being copied, by client, and what was copied so far."""
    _TRANSFERS_VIEW.show(server, json=json, watch=watch, plot=plot)


def namespaces(
    server: ServerOption = None, *, json: Json = False, watch: WatchOption = False, plot: PlotOption = None
) -> None:
    """The layouts and their shares of the arena."""
    view = View("namespaces", _namespace_rows, _NAMESPACES, inspect_plot.plot_namespaces)
    view.show(server, json=json, watch=watch, plot=plot)


def tenants(
    server: ServerOption = None,
    *,
    namespace: NamespaceOption = None,
    json: Json = False,
    watch: WatchOption = False,
    plot: PlotOption = None,
) -> None:
    """The tenants with the most blocks: by name where a quota names them, else by the beginning of a key."""
    view = View("tenants", list, _TENANTS, inspect_plot.plot_tenants)
    view.show(server, json=json, watch=watch, plot=plot, namespace=namespace)


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
            "lookup_tokens": (each["figures"].get("counters") or {}).get("lookup_tokens"),
            "found": _found(each["figures"]),
            "live_requests": each["figures"].get("live_requests"),
        }
        for each in answer
    ]


def _found(figures: dict[str, Any]) -> str:
    shares = found_shares(figures)
    return f"{sum(shares.values()):.1%}" if shares else "-"


def _namespace_rows(answer: Any) -> Rows:
    return [{**each, **each["totals"], **each["tier"]} for each in answer]


_TIERS_VIEW = View("tiers", _tier_rows, _TIERS, inspect_plot.plot_tiers)
_CLIENTS_VIEW = View("clients", _client_rows, _CLIENTS, inspect_plot.plot_clients)
_TRANSFERS_VIEW = View("transfers", _transfer_rows, _TRANSFERS, inspect_plot.plot_transfers)
_OVERVIEW = (_TIERS_VIEW, _CLIENTS_VIEW, _TRANSFERS_VIEW)
