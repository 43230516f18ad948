"""``fdcache inspect eviction``: how often blocks are used again, by class and age, as tables and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fdcache.service.wire.views import ReuseView
from fdcache.tiers.reuse import GROUPS, ReuseReport, chance
from fdcache_cli import inspect_plot, output
from fdcache_cli.service_view import ask, connect, show_live

_AGES_OF_A_COLUMN = 3


def show_eviction(
    server: str | None, namespace: str | None, *, json: bool, watch: bool, plot: Path | None
) -> None:
    """Show what each tier has learned of reuse."""
    if plot is not None:
        inspect_plot.check_plot(plot, json, watch)
    with connect(server) as client:
        if plot is not None:
            tiers, _ = ask(client, list[ReuseView], "eviction", namespace=namespace)
            inspect_plot.plot_reuse(tiers, plot)
            return

        def show() -> None:
            tiers, answer = ask(client, list[ReuseView], "eviction", namespace=namespace)
            if json:
                output.print_json(answer)
            else:
                print_reuse(tiers)

        show_live(show, watch)


def print_reuse(tiers: Sequence[ReuseView]) -> None:
    """Print a table for each tier."""
    if not tiers:
        output.print_line("there is no tier yet")
    for tier in tiers:
        title = f"{tier.tier} of {tier.of}, namespace {tier.namespace}"
        if tier.learned is None:
            output.print_line(f"{title}: its order of eviction learns nothing; set FDCACHE_EVICTION=learned")
        elif not tier.learned.classes:
            output.print_line(f"{title}: nothing learned yet")
        else:
            output.print_line(title)
            output.print_table(*reuse_lines(tier.learned))
        output.print_line()


def reuse_lines(report: ReuseReport) -> tuple[list[str], list[list[str]]]:
    """Return header and cells: a row for each class, a column for each few ages."""
    bands = report.bands(_AGES_OF_A_COLUMN)
    header = ["by", "class", *(f"{_duration(begin)}-{_duration(end)}" for begin, end, _ in bands)]
    rows = []
    for group in GROUPS:
        for number, found in enumerate(report.of_group(group)):
            chances = [chance(found, band) for band in bands]
            cells = ["-" if each is None else f"{each:.1%}" for each in chances]
            rows.append(["" if number else group, found.name, *cells])
    return header, rows


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
