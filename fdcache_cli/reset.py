"""``fdcache reset``: forget the blocks of a running service; ``fdcache reset storage``: remove them from files."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from fdcache_cli.app import Command, new_group, refuse_options_of_group
from fdcache_cli.options import Json, ServerOption

COMMANDS = (
    Command(
        "storage",
        __name__,
        "storage",
        "Remove blocks from a local storage's files, a shared folder or a bucket; needs no service.",
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


class Tier(StrEnum):
    """Tiers to reset."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"
    ALL = "all"


def duration(text: str) -> float:
    """Return the seconds of a time such as 30s or 2w. Raises ``typer.BadParameter``."""
    from fdcache.settings.kinds import parse_duration

    weeks = text.endswith("w")
    try:
        seconds = parse_duration(f"{text[:-1]}d" if weeks else text)
    except ValueError:
        seconds = -1.0
    if seconds < 0:
        raise typer.BadParameter(f"{text!r} is not a duration; write 30s, 10m, 12h, 7d or 2w")
    return 7 * seconds if weeks else seconds


DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


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
            parser=duration,
            metavar="TIME",
            help="Only host and storage blocks unused for that long, such as 1h or 7d; device tiers are left alone.",
        ),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    wait: Annotated[
        float | None,
        typer.Option(
            parser=duration,
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
    from fdcache_cli.reset_service import reset_service

    reset_service(
        server,
        tier=tier.value,
        namespace=namespace,
        tenant=tenant,
        older_than=older_than,
        dry_run=dry_run,
        yes=yes,
        wait=wait,
        acknowledge=_ACKNOWLEDGE_SECONDS if wait is None else wait,
        json=json,
    )


# --- files -------------------------------------------------------------------------------------------------


def storage(
    place: Annotated[
        str,
        typer.Argument(
            metavar="PLACE",
            help="Directory of local storage, or one of its files; a shared folder, or a bucket such as "
            "s3://bucket/folder.",
        ),
    ],
    *,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only this model, or the fingerprint that begins so."),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            parser=duration, metavar="AGE", help="Only blocks written longer ago, such as 12h or 7d."
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
    other files in the directory are not touched. From a shared folder or a bucket objects are removed as a whole, for
    every node and at any time: --older-than is then about their last use.
    """
    if everything == bool(namespace or older_than is not None or corrupt):
        raise typer.BadParameter("say what to remove: --all, or any of --namespace, --older-than, --corrupt")
    from fdcache_cli.reset_storage import reset_storage

    reset_storage(place, namespace, older_than, corrupt=corrupt, dry_run=dry_run, yes=yes, json=json)
