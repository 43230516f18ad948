"""``fdcache reset``: forget the blocks of a service, and say what was freed; on disk: ``reset_storage``."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from typing import Annotated, Any

import typer

from fdcache.client.tool import Client
from fdcache.settings.parsing import parse_duration
from fdcache_cli import errors, output
from fdcache_cli.app import Command, new_group
from fdcache_cli.service_view import ServerOption, connect, size

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
    help="""Forget cached blocks of a running service, or with `storage` those on disk. Requests under way keep theirs.

    A device reset takes place at each engine's next step; exit 1 if an engine has not done it within --wait.
    """,
)


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
    older_than: Annotated[
        float | None,
        typer.Option(
            parser=_duration,
            metavar="TIME",
            help="Only host and storage blocks that nobody has used for so long.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    wait: Annotated[
        float,
        typer.Option(
            parser=_duration, metavar="TIME", help="How long engines have to reset their device tiers."
        ),
    ] = 5.0,
    json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Forget cached blocks of a service, where no command is given."""
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    with connect(server) as client:
        arguments: dict[str, Any] = {"tier": tier.value, "namespace": namespace, "older_than": older_than}
        if not dry_run and not yes:
            _confirm(client.ask("reset", dry_run=True, **arguments))
        answer = client.ask("reset", dry_run=dry_run, **arguments)
        late = [] if dry_run else _wait_for_devices(client, answer["device"], wait)
    answer["device_not_acknowledged"] = late
    if json:
        output.print_json(answer)
    else:
        _print(answer, dry_run)
    if late:
        raise typer.Exit(errors.FAILED)


def _refuse_options(context: typer.Context) -> None:
    """What stands before a command would be ignored, as a --dry-run that is none."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(
                f"it is for a service; options of {context.invoked_subcommand!r} stand behind it",
                param_hint=option,
            )


def _confirm(planned: Any) -> None:
    if not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal to ask on; give --yes")
    _print({**planned, "device_not_acknowledged": []}, True)
    typer.confirm("Forget them?", abort=True)


def _wait_for_devices(client: Client, told: list[dict[str, str]], wait: float) -> list[str]:
    waiting = {each["session"] for each in told}
    deadline = time.monotonic() + wait
    while True:
        clients = {each["session"]: each for each in client.ask("clients")}
        late = [
            clients[session]["name"]
            for session in waiting
            if session in clients
            and clients[session]["device_resets_applied"] < clients[session]["device_resets"]
        ]
        if not late or time.monotonic() > deadline:
            return late
        time.sleep(0.1)


def _print(answer: Any, dry_run: bool) -> None:
    verb = "would forget" if dry_run else "forgot"
    for each in answer["host"]:
        used = f"; {each['in_use']} in use stay with their users until these end" if each["in_use"] else ""
        output.print_line(
            f"host {each['namespace']}: {verb} {each['blocks']} blocks, {size(each['bytes'])}{used}"
        )
    for each in answer["storage"]:
        what = "all blocks" if each["blocks"] is None else f"{each['blocks']} blocks, {size(each['bytes'])}"
        output.print_line(f"storage {each['namespace']}: {verb} {what}")
    for each in answer["device"]:
        late = each["client"] in answer["device_not_acknowledged"]
        state = "would be told" if dry_run else "has not answered yet" if late else "done"
        output.print_line(f"device of {each['client']}: {state}")
    if not answer["host"] and not answer["storage"] and not answer["device"]:
        output.print_line("there was nothing to reset")
