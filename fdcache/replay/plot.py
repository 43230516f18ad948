"""A picture of a replay: hit rate and tier occupancy over time."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fdcache.errors import ReplayError, ReplayOptionError
from fdcache.replay.report import Report


def require_plotting(path: Path) -> None:
    """Raise ``ReplayOptionError`` where no picture can be written to ``path``; cheap, for before a run."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ReplayOptionError("--plot", "needs matplotlib; install it with: pip install 'fdcache[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in formats:
        raise ReplayOptionError("--plot", f"{path}: the name must end in one of {', '.join(sorted(formats))}")
    if not path.absolute().parent.is_dir():
        raise ReplayOptionError("--plot", f"{path}: the folder {path.parent} does not exist")


def write_plot(report: Report, path: Path) -> None:
    """Write the picture in the format that the file's name ends in. Raises ``ReplayError`` when it cannot."""
    from matplotlib.figure import Figure

    samples = report.timeline.samples
    seconds = [sample.seconds for sample in samples]
    figure = Figure(figsize=(9, 6), layout="constrained")
    rates, tiers = figure.subplots(2, sharex=True)
    rates.plot(seconds, [sample.hit_rate for sample in samples], label="so far")
    recent = [sample.recent_hit_rate for sample in samples]
    rates.plot(seconds, recent, label="recently", linewidth=0.6, alpha=0.6)
    rates.set_ylabel("hit rate (tokens)")
    for tier in samples[-1].occupancy if samples else ():
        tiers.plot(seconds, [sample.occupancy[tier] for sample in samples], label=tier)
    tiers.set_ylabel("occupied share of the tier")
    tiers.set_xlabel("seconds")
    for axes in (rates, tiers):
        axes.set_ylim(0, 1.02)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(loc="lower right")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ReplayError(f"--plot: {path} cannot be written: {error.strerror or error}") from error
