"""Picture of a sweep: hit rate against memory, a line for each policy and one for the optimum."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fdcache.errors import ReplayError
from fdcache.replay.capacities import Axis
from fdcache.replay.sweep import Sweep, SweepPoint
from fdcache.settings.kinds import readable_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = (("o", "#0b5394"), ("s", "#b45f06"), ("^", "#38761d"), ("D", "#741b47"), ("v", "#444444"))
"""Markers and colours of policies, which differ in print without colour, too."""

_LOGARITHMIC_FROM = 8
"""Ratio of the largest to the smallest memory from which the axis is logarithmic."""

_LABEL_DISTANCE = 0.09
"""Least distance of two labels, as a share of the axis."""


def write_sweep_plot(sweep: Sweep, path: Path) -> None:
    """Draw a sweep; the file name's suffix chooses the format. Raises ``ReplayError`` if it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    styles = cycle(_STYLES)
    _draw(axes, sweep, lambda point: point.optimum, linestyle="--", color="black", label="optimum (Belady)")
    for policy in sweep.config.policies:
        marker, color = next(styles)
        style = {"marker": marker, "color": color, "markersize": 5, "label": policy.value}
        _draw(axes, sweep, methodcaller("hit_rate", policy), **style)
    _label_memory(axes, sweep)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda rate, _: f"{rate:.0%}")
    axes.set_ylabel("hit rate (prompt tokens)")
    axes.grid(visible=True, alpha=0.3)
    if axes.lines:
        axes.legend(loc="lower right")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ReplayError(f"--plot: {path} cannot be written: {error.strerror or error}") from error


def _draw(axes: Axes, sweep: Sweep, rate_of: Callable[[SweepPoint], float | None], **style: Any) -> None:
    """Draw the line of the points that have a rate."""
    rates = [(point.memory, rate) for point in sweep.points if (rate := rate_of(point)) is not None]
    axes.plot(*zip(*rates, strict=True), **style)


def _label_memory(axes: Axes, sweep: Sweep) -> None:
    """Label the capacities: memory below, blocks above."""
    tier = "device" if sweep.config.capacities.axis is Axis.DEVICE_BLOCKS else "host"
    layout = sweep.config.replay.layout
    memory = [point.memory for point in sweep.points]
    if memory[0] and memory[-1] >= _LOGARITHMIC_FROM * memory[0]:
        axes.set_xscale("log")
    shown = _apart(axes, memory)
    labels = {point.memory: f"{point.blocks:,}" for point in sweep.points}
    above = axes.secondary_xaxis("top")
    for each in (axes.xaxis, above.xaxis):
        each.set_ticks(shown)
        each.set_ticks([], minor=True)
    axes.set_xticklabels([readable_size(size) for size in shown])
    above.set_xticklabels([labels[size] for size in shown])
    axes.set_xlabel(f"{tier} memory")
    above.set_xlabel(f"{tier} blocks of {layout.block_size} tokens")


def _apart(axes: Axes, memory: list[int]) -> list[int]:
    """Return the sizes to label: the last one, and the others where there is room."""
    scale = axes.get_xaxis().get_transform()
    places = [float(scale.transform(size)) for size in memory]
    width = (places[-1] - places[0]) or 1.0
    shown: list[int] = []
    at = float("inf")
    for size, place in zip(reversed(memory), reversed(places), strict=True):
        if at - place >= _LABEL_DISTANCE * width:
            shown.append(size)
            at = place
    return shown
