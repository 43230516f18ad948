"""Pictures of ``fdcache inspect --plot``: bars for tiers, clients, namespaces and tenants, and the tree of prefixes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fdcache.errors import ConfigurationError
from fdcache.service.wire.client_views import HIT_TIERS, ClientFigures, ClientView, TransferView, to_number
from fdcache.service.wire.views import NamedTenantView, NamespaceView, ReuseView
from fdcache.settings.kinds import printable
from fdcache.tiers.pool import TreeNode

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fdcache_cli.service_view import TierRow

_STATES = ("ready", "writing", "free")
_GIB = 2**30
_MOST_LABELS = 40
_REUSE_ROWS = 10
"""Height of curves, in rows of bars."""


def check_plot(path: Path, json: bool, watch: bool) -> None:
    """Refuse options that exclude a picture, and a file that cannot be drawn. Raises ``BadParameter``."""
    from fdcache_cli.link_plot import require_plotting

    if json or watch:
        raise typer.BadParameter("a picture is drawn once; leave --json and --watch out", param_hint="--plot")
    require_plotting(path)


def plot_tiers(rows: Sequence[TierRow], path: Path) -> None:
    """Draw a bar for each tier: the shares of its slots that are ready, being written and free."""

    def draw(axes: Axes) -> None:
        shares = {state: [_share(row, state) for row in rows] for state in _STATES}
        _bars(axes, [(row.tier, row.of) for row in rows], shares)
        axes.set_xlim(0, 1)
        axes.set_xlabel("share of the slots")

    _write(path, draw, len(rows))


def _share(row: TierRow, state: str) -> float:
    """Return a share of the slots, 0 to 1 whatever a client reported."""
    blocks = to_number(row.blocks)
    return min(max(to_number(getattr(row, state)) / blocks, 0.0), 1.0) if blocks > 0 else 0.0


def plot_transfers(rows: Sequence[TransferView], path: Path) -> None:
    """Draw for each client the bytes that it has copied, by direction."""

    def draw(axes: Axes) -> None:
        directions = sorted({each for row in rows for each in row.copied})
        copied = {
            direction.replace("_", " "): [
                row.copied[direction].bytes / _GIB if direction in row.copied else 0.0 for row in rows
            ]
            for direction in directions
        }
        _bars(axes, [(row.client,) for row in rows], copied)
        axes.set_xlabel("GiB copied")

    _write(path, draw, len(rows))


def plot_clients(rows: Sequence[ClientView], path: Path) -> None:
    """Draw for each client the memory that it may copy into, and the tiers in which its prompts were found."""

    def draw(held: Axes, found: Axes) -> None:
        names = [(row.name,) for row in rows]
        _bars(held, names, {"": [row.stock_bytes / _GIB for row in rows]})
        held.set_xlabel("GiB held to copy into")
        shares = [ClientFigures.of(row.figures).hit_shares() for row in rows]
        _bars(found, names, {tier: [each.get(tier, 0.0) for each in shares] for tier in HIT_TIERS})
        found.set_xlim(0, 1)
        found.set_xlabel("share of the prompts' tokens that was found")

    _write(path, draw, len(rows), panels=2)


def plot_namespaces(rows: Sequence[NamespaceView], path: Path) -> None:
    """Draw for each namespace its memory of the arena: ready blocks, slots being written and free ones."""

    def draw(axes: Axes) -> None:
        names = [(row.model, row.namespace) for row in rows]
        slot = [row.record_bytes * row.ranks / _GIB for row in rows]
        memory = {
            state: [getattr(row.tier, state) * size for row, size in zip(rows, slot, strict=True)]
            for state in _STATES
        }
        _bars(axes, names, memory)
        axes.set_xlabel("GiB of the arena")

    _write(path, draw, len(rows))


def plot_tenants(rows: Sequence[NamedTenantView], path: Path) -> None:
    """Draw for each tenant the memory of its blocks, and its quota if it has one."""

    def draw(axes: Axes) -> None:
        names = [(row.tenant, row.namespace) for row in rows]
        _bars(axes, names, {"": [row.bytes / _GIB for row in rows]})
        limited = {
            place: row.most_blocks * row.bytes / row.blocks / _GIB
            for place, row in enumerate(rows)
            if row.quota < 1 and row.blocks
        }
        if limited:
            most = list(limited.values())
            axes.scatter(most, list(limited), marker="|", s=300, color="black", label="may have", zorder=2)
            axes.legend(loc="lower right")
        axes.set_xlabel("GiB of the arena")

    _write(path, draw, len(rows))


def _bars(axes: Axes, names: Sequence[Sequence[str]], parts: Mapping[str, Sequence[float]]) -> None:
    """Draw a bar for each name, the first on top, made of parts by label. The lines of a name may be any text."""
    places = range(len(names))
    left = [0.0] * len(names)
    for label, amounts in parts.items():
        axes.barh(places, amounts, left=left, label=label)
        left = [before + amount for before, amount in zip(left, amounts, strict=True)]
    labels = ["\n".join(map(printable, lines)) for lines in names]
    axes.set_yticks(places, labels=labels, parse_math=False)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    if any(parts):
        axes.legend(loc="lower right")


def plot_tree(found: Sequence[TreeNode], path: Path) -> None:
    """Draw the blocks by depth, each parent amid its children; a hotter block is darker."""
    children: dict[str | None, list[TreeNode]] = {}
    for each in found:
        children.setdefault(each.parent, []).append(each)
    place: dict[str, float] = {}
    lanes = 0
    # Post-order without recursion: paths can be thousands of blocks deep.
    waiting = [(node, False) for node in reversed(children.get(None, []))]
    while waiting:
        node, done = waiting.pop()
        below = children.get(node.hash, [])
        if done or not below:
            if below:
                place[node.hash] = sum(place[each.hash] for each in below) / len(below)
            else:
                place[node.hash] = lanes
                lanes += 1
            continue
        waiting.append((node, True))
        waiting += [(each, False) for each in reversed(below)]

    def draw(axes: Axes) -> None:
        depths = {each.hash: each.depth for each in found}
        for each in found:
            if each.parent is not None:
                above, key = each.parent, each.hash
                axes.plot(
                    [depths[above], depths[key]], [place[above], place[key]], color="0.7", linewidth=0.8
                )
        points = axes.scatter(
            [each.depth for each in found],
            [place[each.hash] for each in found],
            c=[each.hits for each in found],
            cmap="viridis_r",
            zorder=2,
        )
        if len(found) <= _MOST_LABELS:
            for each in found:
                axes.annotate(each.hash[:8], (each.depth, place[each.hash]), fontsize=6)
        axes.figure.colorbar(points, ax=axes, label="hits")
        axes.set_xlabel("block of the path")
        axes.set_yticks([])
        axes.invert_yaxis()

    _write(path, draw, lanes)


def plot_reuse(tiers: Sequence[ReuseView], path: Path) -> None:
    """Draw for each tier that learns the reuses of a block per hour against its age, a line for each role."""
    learned = [(tier, tier.learned) for tier in tiers if tier.learned is not None and tier.learned.classes]

    def draw(*panels: Axes) -> None:
        for axes, (tier, report) in zip(panels, learned, strict=False):
            for found in [*report.of_group("all"), *report.of_group("role")]:
                points = [
                    (math.sqrt((begin + 1) * (end + 1)), 3600 * rate)
                    for begin, end, rate in zip(report.ages, report.ages[1:], found.rates(), strict=False)
                    if rate
                ]
                style: dict[str, Any] = {"color": "black", "linewidth": 2} if found.group == "all" else {}
                axes.plot(*zip(*points, strict=True) if points else ([], []), label=found.name, **style)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlabel("seconds since the last use")
            axes.set_title(printable(f"{tier.tier} of {tier.of}"), fontsize="medium", parse_math=False)
            axes.grid(visible=True, alpha=0.3)
        panels[0].set_ylabel("reuses of a block per hour")
        if learned:
            panels[0].legend(fontsize="x-small")
        else:
            panels[0].set_title(
                "no tier has learned of reuse, as FDCACHE_EVICTION=learned does", fontsize="medium"
            )

    _write(path, draw, _REUSE_ROWS, panels=max(len(learned), 1))


def _write(path: Path, draw: Callable[..., None], rows: int, panels: int = 1) -> None:
    """Draw ``panels`` side by side, which share their rows, into a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + 0.4 * min(max(rows, 3), 60)), layout="constrained")
    draw(*figure.subplots(1, panels, sharey=True, squeeze=False)[0])
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigurationError(f"--plot: {path} cannot be written: {error.strerror or error}") from error
