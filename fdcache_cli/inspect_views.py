"""Views of a service in tables and pictures: its tiers, clients, transfers, namespaces and tenants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fdcache.service.wire.client_views import ClientFigures, ClientView, TransferView, to_number
from fdcache.service.wire.views import NamedTenantView, NamespaceView, TiersView
from fdcache.settings.kinds import readable_size
from fdcache_cli import inspect_plot, output
from fdcache_cli.service_view import (
    TierRow,
    ask,
    connect,
    reported,
    show_live,
    table,
    tier_rows,
)

Lines = tuple[list[str], list[list[str]]]
"""Header and rows of a table."""


@dataclass(frozen=True, slots=True)
class View:
    """A view of the service: the type of its answer, the lines of its table, and its picture.

    ``details``: the lines of a second table, which is left out if it has no rows.
    """

    what: str
    answer: Any
    lines: Callable[[Any], Lines]
    draw: Callable[[Any, Path], None]
    details: Callable[[Any], Lines] | None = None

    def print_tables(self, answer: Any) -> None:
        """Print an answer of the service."""
        output.print_table(*self.lines(answer))
        if self.details is not None and (details := self.details(answer))[1]:
            output.print_line()
            output.print_table(*details)

    def show(
        self, server: str | None, *, json: bool, watch: bool, plot: Path | None, **arguments: Any
    ) -> None:
        """Ask the service, and print a table or JSON, or draw a picture."""
        if plot is not None:
            inspect_plot.check_plot(plot, json, watch)
        with connect(server) as client:
            if plot is not None:
                self.draw(ask(client, self.answer, self.what, **arguments)[0], plot)
                return

            def show() -> None:
                if json:
                    output.print_json(client.ask(self.what, **arguments))
                else:
                    self.print_tables(ask(client, self.answer, self.what, **arguments)[0])

            show_live(show, watch)


def _client_lines(clients: list[ClientView]) -> Lines:
    return table(
        clients,
        ClientView,
        prompt_tokens=lambda client: reported(ClientFigures.of(client.figures).lookup_tokens),
        found=lambda client: _found(ClientFigures.of(client.figures)),
        requests=lambda client: reported(ClientFigures.of(client.figures).live_requests),
    )


def _found(figures: ClientFigures) -> str:
    shares = figures.hit_shares()
    return f"{sum(shares.values()):.1%}" if shares else "-"


def _transfer_lines(transfers: list[TransferView]) -> Lines:
    return table(
        transfers,
        TransferView,
        to_device=lambda transfer: _copied(transfer, "host_to_device"),
        to_host=lambda transfer: _copied(transfer, "device_to_host"),
        hand_overs=_in_hand_over,
    )


def _in_hand_over(transfer: TransferView) -> str:
    blocks = {
        "to peers": transfer.sending_blocks,
        "from peers": transfer.fetching_blocks,
        "held": transfer.held_blocks,
    }
    found = [f"{to_number(count):g} {what}" for what, count in blocks.items() if to_number(count) > 0]
    return ", ".join(found)


def _handover_lines(transfers: list[TransferView]) -> Lines:
    header = ["client", "hand-overs", "peer", "result", "number", "blocks", "bytes", "waited", "moved"]
    rows = [
        [
            transfer.client,
            each.direction,
            each.peer or "none",
            each.result.replace("_", " "),
            f"{each.transfers:,}",
            f"{each.blocks:,}",
            readable_size(each.bytes),
            f"{each.waited_seconds:.3f} s",
            f"{each.moved_seconds:.3f} s",
        ]
        for transfer in transfers
        for each in sorted(transfer.handovers, key=lambda each: (each.direction, each.peer, each.result))
    ]
    return header, rows


def _copied(transfer: TransferView, direction: str) -> str:
    copied = transfer.copied.get(direction)
    if copied is None:
        return ""
    speed = f" at {copied.bytes / copied.seconds / 1e9:.1f} GB/s" if copied.seconds else ""
    return readable_size(copied.bytes) + speed


TIERS = View(
    "tiers",
    TiersView,
    lambda tiers: table(tier_rows(tiers), TierRow),
    lambda tiers, path: inspect_plot.plot_tiers(tier_rows(tiers), path),
)
CLIENTS = View("clients", list[ClientView], _client_lines, inspect_plot.plot_clients)
TRANSFERS = View(
    "transfers", list[TransferView], _transfer_lines, inspect_plot.plot_transfers, _handover_lines
)
NAMESPACES = View(
    "namespaces",
    list[NamespaceView],
    lambda namespaces: table(namespaces, NamespaceView),
    inspect_plot.plot_namespaces,
)
TENANTS = View(
    "tenants",
    list[NamedTenantView],
    lambda tenants: table(tenants, NamedTenantView),
    inspect_plot.plot_tenants,
)
OVERVIEW = (TIERS, CLIENTS, TRANSFERS)


def show_overview(server: str | None, *, json: bool, watch: bool) -> None:
    """Show tiers, clients and transfers of a service on one screen."""
    with connect(server) as client:

        def show() -> None:
            answers = {view.what: ask(client, view.answer, view.what) for view in OVERVIEW}
            if json:
                output.print_json({what: answer for what, (_, answer) in answers.items()})
                return
            for view in OVERVIEW:
                answer = answers[view.what][0]
                output.print_line(view.what)
                if view.lines(answer)[1]:
                    view.print_tables(answer)
                else:
                    output.print_line("  none")
                output.print_line()

        show_live(show, watch)
