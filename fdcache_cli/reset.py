"""``fdcache reset``: forget the blocks of a service, and say what was freed; on disk: ``reset_storage``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer

from fdcache.service.client.connection import Client
from fdcache.settings.kinds import parse_duration, printable, readable_size
from fdcache_cli import errors, output
from fdcache_cli.app import Command, confirm, new_group, refuse_options_of_group
from fdcache_cli.service_view import ServerOption, connect

COMMANDS = (
    Command(
        "storage",
        "fdcache_cli.reset_storage",
        "storage",
        "Remove blocks from the files of the local storage; no service.",
    ),
)

app = new_group(
    COMMANDS,
    help="""Forget cached blocks of a running service, or with `storage` those on disk.

    While clients are loading blocks a host tier is not reset: --wait lets them end first, and nothing new begin.
    A device reset takes place at each engine's next step. Exit 1 if something was in flight, or an engine has not
    reset its device tier in time.
    """,
)

_ACKNOWLEDGE_SECONDS = 5.0
_POLL_SECONDS = 0.1


class Tier(StrEnum):
    """What can be reset."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"
    ALL = "all"


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no duration; write 30s, 10m or 2h") from None


@app.callback(invoke_without_command=True, no_args_is_help=False)
def reset(
    context: typer.Context,
    server: ServerOption = None,
    *,
    tier: Annotated[Tier, typer.Option(help="Which tier.")] = Tier.ALL,
    namespace: Annotated[str | None, typer.Option(help="Only one layout: the beginning of its name.")] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Only one tenant's blocks; device tiers are left alone.")
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            parser=_duration,
            metavar="TIME",
            help="Only host and storage blocks that nobody has used for so long; device tiers are left alone.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    wait: Annotated[
        float | None,
        typer.Option(
            parser=_duration,
            metavar="TIME",
            help="Let what is in flight end first, and engines reset their device tiers, at most so long. "
            f"Default: refuse what is in flight, {_ACKNOWLEDGE_SECONDS:g} s for engines.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Forget cached blocks of a service, where no command is given."""
    if context.invoked_subcommand is not None:
        refuse_options_of_group(context)
        return
    if tier is Tier.DEVICE and (tenant is not None or older_than is not None):
        raise typer.BadParameter(
            "a device tier forgets everything or nothing; leave --tenant and --older-than out",
            param_hint="--tier",
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
            planned = client.ask("reset", dry_run=True, **arguments)
            confirm("Forget them?", _told({**planned, "device_not_acknowledged": []}, True))
        answer = _carry_out(client, wait, {"dry_run": dry_run, **arguments})
        late: list[str] = []
        if not dry_run:
            late = _wait_for_devices(client, answer["device"], _ACKNOWLEDGE_SECONDS if wait is None else wait)
    answer["device_not_acknowledged"] = late
    refused = bool(answer["in_flight"]) and not dry_run
    if json:
        output.print_json(answer)
    elif refused:
        _refuse(answer["in_flight"], wait)
    else:
        for line in _told(answer, dry_run):
            output.print_line(printable(line))
    if late or refused:
        raise typer.Exit(errors.FAILED)


def _key(tenant: str) -> str:
    from fdcache.hashing import tenant_key

    return tenant_key(tenant).hex()


def _carry_out(client: Client, wait: float | None, arguments: dict[str, Any]) -> Any:
    """Reset, once nothing is in flight any more; or the answer that names what still is."""
    if wait is None:
        return client.ask("reset", in_flight="refuse", **arguments)
    deadline = time.monotonic() + wait
    while (answer := client.ask("reset", in_flight="drain", **arguments))["in_flight"]:
        if arguments["dry_run"] or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    return answer


def _wait_for_devices(client: Client, told: list[dict[str, str]], wait: float) -> list[str]:
    waiting = {each["session"] for each in told}
    deadline = time.monotonic() + wait
    while waiting:
        clients = {each["session"]: each for each in client.ask("clients")}
        late = [
            clients[session]["name"]
            for session in waiting
            if session in clients
            and clients[session]["device_resets_applied"] < clients[session]["device_resets"]
        ]
        if not late or time.monotonic() > deadline:
            return late
        time.sleep(_POLL_SECONDS)
    return []


def _refuse(in_flight: list[dict[str, Any]], wait: float | None) -> None:
    for each in in_flight:
        sys.stderr.write(
            f"error: {printable(each['client'])} (process {each['pid']}) is loading from {each['pinned_runs']} runs of "
            f"{each['namespace']}\n"
        )
    remedy = "wait longer" if wait is not None else "let them end with --wait 30s"
    sys.stderr.write(f"error: nothing was forgotten; {remedy}, or pause these engines\n")


def _told(answer: Any, dry_run: bool) -> Iterator[str]:
    verb = "would forget" if dry_run else "forgot"
    for each in answer["in_flight"]:
        yield f"in flight: {each['client']} is loading from {each['pinned_runs']} runs"
    for each in answer["host"]:
        used = f"; {each['in_use']} in use stay with their users until these end" if each["in_use"] else ""
        yield f"host {each['namespace']}: {verb} {each['blocks']} blocks, {readable_size(each['bytes'])}{used}"
    for each in answer["storage"]:
        what = (
            "all blocks"
            if each["blocks"] is None
            else f"{each['blocks']} blocks, {readable_size(each['bytes'])}"
        )
        yield f"storage {each['namespace']}: {verb} {what}"
    for each in answer["device"]:
        late = each["client"] in answer["device_not_acknowledged"]
        state = "would be told" if dry_run else "has not answered yet" if late else "done"
        yield f"device of {each['client']}: {each['blocks']} blocks, {state}"
    if not answer["host"] and not answer["storage"] and not answer["device"]:
        yield "there was nothing to reset"
