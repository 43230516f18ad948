"""``fdcache inspect``: a running service in tables; ``explain`` and the storage have modules of their own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from fdcache_cli import inspect_plot, output
from fdcache_cli.app import Command, new_group
from fdcache_cli.live import show_live
from fdcache_cli.service_view import Columns, Json, Rows, ServerOption, connect, seconds, size, table
from fdcache_cli.storage_view import tier_rows

COMMANDS = (
    Command("tiers", __name__, "tiers", "What each tier holds."),
    Command("tree", __name__, "tree", "The hottest prefixes."),
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

Watch = Annotated[bool, typer.Option("--watch", help="Show it anew every second, until Ctrl-C.")]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw a picture instead (needs fdcache[plot]).")
]
Namespace = Annotated[str | None, typer.Option(help="The beginning of a layout's name.")]

_NAMESPACES: Columns = (
    ("namespace", "namespace", str),
    ("model", "model", str),
    ("ranks", "ranks", str),
    ("block", "block_size", str),
    ("record", "record_bytes", size),
    ("memory", "bytes", size),
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
)
_TRANSFERS: Columns = (
    ("client", "client", str),
    ("plans", "plans_in_flight", str),
    ("queued backups", "queued_backups", str),
    ("writable slots", "writable_slots", str),
    ("pinned runs", "pinned_runs", str),
    ("to device", "host_to_device", str),
    ("to host", "device_to_host", str),
)
_TENANTS: Columns = (
    ("namespace", "namespace", str),
    ("tenant", "tenant", str),
    ("blocks", "blocks", str),
    ("memory", "bytes", size),
    ("quota", "quota", lambda share: f"{share:.0%}"),
    ("most blocks", "most_blocks", str),
)
_TIERS: Columns = (
    ("tier", "tier", str),
    ("of", "of", str),
    ("blocks", "blocks", str),
    ("ready", "ready", str),
    ("free", "free", str),
    ("writing", "writing", str),
    ("evictable", "evictable", str),
    ("evictions", "evictions", str),
)
_BLOCKS: Columns = (
    ("namespace", "namespace", str),
    ("hash", "hash", lambda text: text[:16]),
    ("slot", "slot", str),
    ("depth", "depth", str),
    ("pins", "pins", str),
    ("hits", "hits", str),
    ("idle", "idle_seconds", seconds),
    ("since", "stored_at", lambda when: datetime.fromtimestamp(when).strftime("%H:%M:%S")),
    ("left", "reason", str),
    ("at", "left_at", lambda when: datetime.fromtimestamp(when).strftime("%H:%M:%S")),
)


@app.callback()
def inspect() -> None:
    """Hold the commands together."""


def tiers(
    server: ServerOption = None, *, json: Json = False, watch: Watch = False, plot: Plot = None
) -> None:
    """What each tier holds: the service's host and storage tier, and the device tiers of its clients."""
    if plot is not None:
        _check_plot(plot, json, watch)
        with connect(server) as client:
            inspect_plot.plot_tiers(_tier_rows(client.ask("tiers")), plot)
        return
    _show(server, "tiers", _tier_rows, _TIERS, json=json, watch=watch)


def clients(server: ServerOption = None, *, json: Json = False, watch: Watch = False) -> None:
    """Who uses the service, and what each holds."""
    _show(server, "clients", list, _CLIENTS, json=json, watch=watch)


def transfers(
    server: ServerOption = None, *, json: Json = False, watch: Watch = False, plot: Plot = None
) -> None:
    """What is being copied, by client, and what was copied so far."""
    if plot is not None:
        _check_plot(plot, json, watch)
        with connect(server) as client:
            inspect_plot.plot_transfers(client.ask("transfers"), plot)
        return
    _show(server, "transfers", _transfer_rows, _TRANSFERS, json=json, watch=watch)


def namespaces(server: ServerOption = None, *, json: Json = False, watch: Watch = False) -> None:
    """The layouts and their shares of the arena."""
    _show(server, "namespaces", _namespace_rows, _NAMESPACES, json=json, watch=watch)


def tenants(
    server: ServerOption = None, *, namespace: Namespace = None, json: Json = False, watch: Watch = False
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
    _show(server, "block", list, _BLOCKS, json=json, watch=False, hash=prefix)


def tree(
    server: ServerOption = None,
    *,
    namespace: Namespace = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Hottest blocks.")] = 30,
    json: Json = False,
    watch: Watch = False,
    plot: Plot = None,
) -> None:
    """Draw the hottest prefixes."""
    if plot is not None:
        _check_plot(plot, json, watch)
    with connect(server) as client:
        if plot is not None:
            inspect_plot.plot_tree(client.ask("tree", limit=limit, namespace=namespace), plot)
            return

        def show() -> None:
            found = client.ask("tree", limit=limit, namespace=namespace)
            if json:
                output.print_json(found)
            else:
                for line in draw_tree(found):
                    output.print_line(line)

        show_live(show, watch)


def draw_tree(found: Rows) -> list[str]:
    """The blocks as an indented tree; runs without branches become one line."""
    children: dict[str | None, Rows] = {}
    for each in found:
        children.setdefault(each["parent"], []).append(each)
    lines: list[str] = []

    def draw(node: dict[str, Any], indent: str) -> None:
        length = 1
        last = node
        while len(below := children.get(last["hash"], [])) == 1 and below[0]["hits"] == node["hits"]:
            last = below[0]
            length += 1
        blocks = "block" if length == 1 else "blocks"
        lines.append(
            f"{indent}{node['hash'][:12]}  {length} {blocks}, {node['hits']} hits, idle {seconds(last['idle_seconds'])}"
        )
        for child in sorted(children.get(last["hash"], []), key=lambda each: -each["hits"]):
            draw(child, indent + "  ")

    for root in sorted(children.get(None, []), key=lambda each: -each["hits"]):
        draw(root, "")
    return lines


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


def _check_plot(path: Path, json: bool, watch: bool) -> None:
    from fdcache.devices.link_plot import require_plotting

    if json or watch:
        raise typer.BadParameter("a picture is drawn once; leave --json and --watch out", param_hint="--plot")
    require_plotting(path)


def _transfer_rows(answer: Any) -> Rows:
    return [{**each, **{way: _copied(figures) for way, figures in each["copied"].items()}} for each in answer]


def _copied(figures: dict[str, Any]) -> str:
    total, spent = figures["bytes"], figures["seconds"]
    return f"{total / 2**30:.2f} GiB" + (f" at {total / spent / 1e9:.1f} GB/s" if spent else "")


def _tier_rows(answer: Any) -> Rows:
    host = answer["host"]
    rows = [{"tier": "host", "of": f"service, {size(host['bytes'])}", "blocks": host["slots"], **host}]
    rows += tier_rows(answer["storage"])
    rows += [{"tier": "device", "of": each["client"], **each} for each in answer["device"]]
    return rows


def _namespace_rows(answer: Any) -> Rows:
    return [{**each, **each["totals"], **each["tier"]} for each in answer]
