"""Pictures of what ``fdcache inspect`` shows: tiers, the hottest prefixes, transfers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fdcache.errors import ConfigurationError
from fdcache.node.figures import number
from fdcache_cli.service_view import Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STATES = ("ready", "writing", "free")
_MOST_LABELS = 40


def check_plot(path: Path, json: bool, watch: bool) -> None:
    """Refuse, before anything is asked, a picture that cannot be drawn."""
    from fdcache.devices.link_plot import require_plotting

    if json or watch:
        raise typer.BadParameter("a picture is drawn once; leave --json and --watch out", param_hint="--plot")
    require_plotting(path)


def plot_tiers(rows: Rows, path: Path) -> None:
    """A bar for each tier: the shares of its slots that are ready, being written and free."""

    def draw(axes: Axes) -> None:
        names = [f"{row['tier']}\n{row['of']}" for row in rows]
        left = [0.0] * len(rows)
        for state in _STATES:
            shares = [_share(row, state) for row in rows]
            axes.barh(names, shares, left=left, label=state)
            left = [before + share for before, share in zip(left, shares, strict=True)]
        axes.set_xlim(0, 1)
        axes.set_xlabel("share of the slots")
        axes.legend(loc="lower right")

    _write(path, draw, len(rows))


def _share(row: dict[str, Any], state: str) -> float:
    """Of what a client tells, only what can be a share is drawn."""
    blocks = number(row.get("blocks"))
    return min(max(number(row.get(state)) / blocks, 0.0), 1.0) if blocks > 0 else 0.0


def plot_transfers(rows: Rows, path: Path) -> None:
    """For each client the bytes that it has copied, by direction."""

    def draw(axes: Axes) -> None:
        names = [row["client"] for row in rows]
        left = [0.0] * len(rows)
        for direction in sorted({each for row in rows for each in row["copied"]}):
            amounts = [row["copied"].get(direction, {"bytes": 0})["bytes"] / 2**30 for row in rows]
            axes.barh(names, amounts, left=left, label=direction.replace("_", " "))
            left = [before + amount for before, amount in zip(left, amounts, strict=True)]
        axes.set_xlabel("GiB copied")
        if any(row["copied"] for row in rows):
            axes.legend(loc="lower right")

    _write(path, draw, len(rows))


def plot_tree(found: Rows, path: Path) -> None:
    """The blocks by depth; a parent stands above its children, and the hotter a block, the darker it is."""
    children: dict[str | None, Rows] = {}
    for each in found:
        children.setdefault(each["parent"], []).append(each)
    place: dict[str, float] = {}
    lanes = 0
    # Post-order without recursion: paths may be thousands of blocks deep.
    waiting = [(node, False) for node in reversed(children.get(None, []))]
    while waiting:
        node, done = waiting.pop()
        below = children.get(node["hash"], [])
        if done or not below:
            if below:
                place[node["hash"]] = sum(place[each["hash"]] for each in below) / len(below)
            else:
                place[node["hash"]] = lanes
                lanes += 1
            continue
        waiting.append((node, True))
        waiting += [(each, False) for each in reversed(below)]

    def draw(axes: Axes) -> None:
        depths = {each["hash"]: each["depth"] for each in found}
        for each in found:
            if each["parent"] is not None:
                above, key = each["parent"], each["hash"]
                axes.plot(
                    [depths[above], depths[key]], [place[above], place[key]], color="0.7", linewidth=0.8
                )
        points = axes.scatter(
            [each["depth"] for each in found],
            [place[each["hash"]] for each in found],
            c=[each["hits"] for each in found],
            cmap="viridis_r",
            zorder=2,
        )
        if len(found) <= _MOST_LABELS:
            for each in found:
                axes.annotate(each["hash"][:8], (each["depth"], place[each["hash"]]), fontsize=6)
        axes.figure.colorbar(points, ax=axes, label="hits")
        axes.set_xlabel("block of the path")
        axes.set_yticks([])
        axes.invert_yaxis()

    _write(path, draw, lanes)


def _write(path: Path, draw: Any, rows: int) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + 0.4 * min(max(rows, 3), 60)), layout="constrained")
    draw(figure.subplots())
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigurationError(f"--plot: {path} cannot be written: {error.strerror or error}") from error
