"""``fdcache inspect tree``: the hottest prefixes, drawn."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fdcache_cli import inspect_plot, output
from fdcache_cli.live import show_live
from fdcache_cli.service_view import (
    Json,
    NamespaceOption,
    PlotOption,
    Rows,
    ServerOption,
    WatchOption,
    connect,
    seconds,
)


def tree(
    server: ServerOption = None,
    *,
    namespace: NamespaceOption = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Hottest blocks.")] = 30,
    json: Json = False,
    watch: WatchOption = False,
    plot: PlotOption = None,
) -> None:
    """Draw the hottest prefixes."""
    if plot is not None:
        inspect_plot.check_plot(plot, json, watch)
    with connect(server) as client:
        if plot is not None:
            inspect_plot.plot_tree(client.ask("tree", limit=limit, namespace=namespace), plot)
            return

        def show() -> None:
            found = client.ask("tree", limit=limit, namespace=namespace)
            if json:
                output.print_json(found)
            else:
                for line in draw_trees(found):
                    output.print_line(line)

        show_live(show, watch)


def draw_trees(found: Rows) -> list[str]:
    """A tree for each layout, below its name where there are several."""
    layouts = {each["namespace"]: None for each in found}
    if not layouts:
        return ["there are no blocks"]
    lines = []
    for layout in layouts:
        lines += [f"namespace {layout}"] if len(layouts) > 1 else []
        lines += draw_tree([each for each in found if each["namespace"] == layout])
    return lines


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
