"""``fdcache reset``: forget the blocks of a running service; ``fdcache reset storage``: remove them from files."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fdcache.service.client.connection import Client
from fdcache.service.wire.client_views import ClientView
from fdcache.service.wire.views import InFlightView, ResetView
from fdcache.settings.kinds import parse_duration, printable, readable_size
from fdcache_cli import errors, output
from fdcache_cli.app import Command, confirm, new_group, refuse_options_of_group
from fdcache_cli.output import progress_bars
from fdcache_cli.service_view import ServerOption, ask, connect

if TYPE_CHECKING:
    from fdcache.storage.offline import Removal

COMMANDS = (
    Command(
        "storage", __name__, "storage", "Remove blocks from the files of a local storage; needs no service."
    ),
    Command(
        "arena",
        "fdcache_cli.reset_arena",
        "arena",
        "Remove the memory that stopped services keep for their next start.",
    ),
)

app = new_group(
    COMMANDS,
    help="""Forget cached blocks of a running service, with `storage` those in files, or with `arena` the memory that
    stopped services keep.

    A host tier that clients are loading from is not reset: --wait lets these loads end, and no new ones begin. A device
    tier is reset at its engine's next step. The exit status is 1 if loads were in flight, or if an engine has not
    reset its device tier in time.

    Examples: `fdcache reset --dry-run`, `fdcache reset --tier host --older-than 1h`,
    `fdcache reset --wait 30s --yes`, `fdcache reset storage /var/lib/fdcache --corrupt`.
    """,
)

_ACKNOWLEDGE_SECONDS = 5.0
_POLL_SECONDS = 0.1
_LONG_UNITS = {"d": 86400.0, "w": 7 * 86400.0}


class Tier(StrEnum):
    """Tiers to reset."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"
    ALL = "all"


def _duration(text: str) -> float:
    try:
        if text[-1:] in _LONG_UNITS:
            return float(text[:-1]) * _LONG_UNITS[text[-1]]
        return float(parse_duration(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a duration; write 30s, 10m, 12h, 7d or 2w") from None


DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
Json = Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")]


# --- a service ---------------------------------------------------------------------------------------------


@app.callback(invoke_without_command=True, no_args_is_help=False)
def reset(
    context: typer.Context,
    server: ServerOption = None,
    *,
    tier: Annotated[Tier, typer.Option(help="Tier to reset.")] = Tier.ALL,
    namespace: Annotated[
        str | None,
        typer.Option(help="Only namespaces whose name begins so; `fdcache inspect namespaces` lists them."),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Only the blocks of one tenant; device tiers are left alone.")
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            parser=_duration,
            metavar="TIME",
            help="Only host and storage blocks unused for that long, such as 1h or 7d; device tiers are left alone.",
        ),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    wait: Annotated[
        float | None,
        typer.Option(
            parser=_duration,
            metavar="TIME",
            help="Wait at most that long for loads in flight to end, and for engines to reset their device tiers. "
            f"Default: refuse if loads are in flight, and wait {_ACKNOWLEDGE_SECONDS:g} s for engines.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Forget cached blocks of a service, if no command is given."""
    if context.invoked_subcommand is not None:
        refuse_options_of_group(context)
        return
    if tier is Tier.DEVICE and (tenant is not None or older_than is not None):
        raise typer.BadParameter(
            "a device tier is reset as a whole; leave --tenant and --older-than out", param_hint="--tier"
        )
    with connect(server) as client:
        arguments: dict[str, Any] = {
            "tier": tier.value,
            "namespace": namespace,
            "tenant": None if tenant is None else _key(tenant),
            "tenant_name": tenant,
            "older_than": older_than,
        }
        if not dry_run and not yes:
            planned, _ = ask(client, ResetView, "reset", dry_run=True, **arguments)
            confirm("Forget them?", _report(planned, ()))
        result, answer = _reset(client, wait, {"dry_run": dry_run, **arguments})
        late: list[str] = []
        if not dry_run:
            late = _await_devices(client, result, _ACKNOWLEDGE_SECONDS if wait is None else wait)
    refused = bool(result.in_flight) and not dry_run
    if json:
        output.print_json({**answer, "device_not_acknowledged": late})
    elif refused:
        _print_refusal(result.in_flight, wait)
    else:
        for line in _report(result, late):
            output.print_line(printable(line))
    if late or refused:
        raise typer.Exit(errors.FAILED)


def _key(tenant: str) -> str:
    from fdcache.hashing import tenant_key

    return tenant_key(tenant).hex()


def _reset(client: Client, wait: float | None, arguments: dict[str, Any]) -> tuple[ResetView, Any]:
    """Reset; with ``wait``, drain the loads in flight first."""
    if wait is None:
        return ask(client, ResetView, "reset", in_flight="refuse", **arguments)
    deadline = time.monotonic() + wait
    while True:
        result, answer = ask(client, ResetView, "reset", in_flight="drain", **arguments)
        if not result.in_flight or arguments["dry_run"] or time.monotonic() > deadline:
            return result, answer
        time.sleep(_POLL_SECONDS)


def _await_devices(client: Client, result: ResetView, wait: float) -> list[str]:
    """Wait until engines have reset their device tiers. Return the names of those that have not."""
    waiting = {each.session for each in result.device}
    deadline = time.monotonic() + wait
    while waiting:
        clients, _ = ask(client, list[ClientView], "clients")
        late = [
            each.name
            for each in clients
            if each.session in waiting and each.device_resets_applied < each.device_resets
        ]
        if not late or time.monotonic() > deadline:
            return late
        time.sleep(_POLL_SECONDS)
    return []


def _print_refusal(in_flight: Iterable[InFlightView], wait: float | None) -> None:
    for each in in_flight:
        sys.stderr.write(
            f"error: {printable(each.client)} (process {each.pid}) is loading from {each.pinned_runs} runs of "
            f"{each.namespace}\n"
        )
    remedy = "wait longer" if wait is not None else "let these loads end with --wait 30s"
    sys.stderr.write(f"error: nothing was reset; {remedy}, or pause these engines\n")


def _report(result: ResetView, late: Iterable[str]) -> Iterator[str]:
    verb = "would forget" if result.dry_run else "forgot"
    for loading in result.in_flight:
        yield f"in flight: {loading.client} is loading from {loading.pinned_runs} runs"
    for host in result.host:
        used = f"; {host.in_use} in use stay with their users until these end" if host.in_use else ""
        yield f"host {host.namespace}: {verb} {host.blocks} blocks, {readable_size(host.bytes)}{used}"
    for stored in result.storage:
        blocks = (
            "all blocks"
            if stored.blocks is None
            else f"{stored.blocks} blocks, {readable_size(stored.bytes or 0)}"
        )
        yield f"storage {stored.namespace}: {verb} {blocks}"
    for device in result.device:
        state = "would be reset" if result.dry_run else "not reset yet" if device.client in late else "reset"
        yield f"device of {device.client}: {device.blocks} blocks, {state}"
    if not result.host and not result.storage and not result.device:
        yield "there was nothing to reset"


# --- files -------------------------------------------------------------------------------------------------


def storage(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Directory of the storage, or one of its files.")
    ],
    *,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only this model, or the fingerprint that begins so."),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            parser=_duration, metavar="AGE", help="Only blocks written longer ago, such as 12h or 7d."
        ),
    ] = None,
    corrupt: Annotated[
        bool, typer.Option("--corrupt", help="Only records that fail a check. Every record is read.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Every block.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Remove blocks, and those that continue them, from the files of a local storage. Needs no service.

    Conditions are combined: a block is removed if all of them hold. A file that an engine has open is refused, and
    other files in the directory are not touched.
    """
    from fdcache.storage.offline import Selection, remove

    if everything == bool(namespace or older_than is not None or corrupt):
        raise typer.BadParameter("say what to remove: --all, or any of --namespace, --older-than, --corrupt")
    selection = Selection(namespace, older_than, corrupt, everything)
    if not dry_run and not yes:
        with progress_bars() as advance:
            planned = remove(path, selection, dry_run=True, on_progress=advance)
        confirm("Remove them?", _report_removals(path, planned, dry_run=True))
    with progress_bars() as advance:
        removals = remove(path, selection, dry_run=dry_run, on_progress=advance)
    if json:
        output.print_json(
            {
                "dry_run": dry_run,
                "blocks": sum(one.blocks for one in removals),
                "bytes": sum(one.nbytes for one in removals),
                "files": [
                    {"path": str(one.path), "blocks": one.blocks, "bytes": one.nbytes, "whole": one.whole}
                    for one in removals
                ],
            }
        )
        return
    for line in _report_removals(path, removals, dry_run=dry_run):
        output.print_line(line)


def _report_removals(path: Path, removals: Iterable[Removal], *, dry_run: bool) -> Iterator[str]:
    verb = "would remove" if dry_run else "removed"
    nothing = True
    for one in removals:
        nothing = False
        yield f"{one.path}: {verb} {'the file and its ' if one.whole else ''}{one.blocks:,} blocks"
    if nothing:
        yield f"{path}: nothing to remove"
