"""Plot of a calibration: speed by size and method, in both directions."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fdcache.errors import ConfigurationError
from fdcache.machine.calibration import Calibration


def require_plotting(path: Path) -> None:
    """Raise ``ConfigurationError`` when no plot can be written to ``path``; call it before a long run."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("--plot needs matplotlib; install it with: pip install 'fdcache[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in formats:
        raise ConfigurationError(f"--plot {path}: the name must end in one of {', '.join(sorted(formats))}")
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(f"--plot {path}: the folder {path.parent} does not exist")


def write_plot(calibration: Calibration, path: Path) -> None:
    """Write the plot in the format of the file's suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    links = {"host to device": calibration.link_to_device, "device to host": calibration.link_to_host}
    for axes, (direction, link) in zip(figure.subplots(1, 2, sharey=True), links.items(), strict=True):
        found = [each for each in calibration.measurements if each.direction == direction]
        for method in ("direct", "staged"):
            points = [(each.piece_bytes, each.gb_per_s) for each in found if each.method == method]
            axes.plot(*zip(*points, strict=True), marker="o", label=method)
        for each in found:
            if each.method == "kernel":
                axes.axhline(each.gb_per_s, linewidth=0.5, linestyle=":")
                axes.annotate(f"kernel, {each.thread_blocks}", (found[0].piece_bytes, each.gb_per_s))
        axes.axhline(link, color="black", linewidth=0.8, label="one large copy")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("bytes of a piece")
        axes.set_title(direction)
        axes.legend()
        axes.set_ylabel("GB/s")
    figure.savefig(path)
