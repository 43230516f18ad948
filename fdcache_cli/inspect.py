"""``fdcache inspect``: its commands and their options. What they show is imported when they run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from fdcache_cli.app import Command, new_group, refuse_options_of_group
from fdcache_cli.options import Json, NamespaceOption, PlotOption, ServerOption, WatchOption

COMMANDS = (
    Command("tiers", __name__, "tiers", "Slots and blocks of each tier."),
    Command("tree", __name__, "tree", "The hottest prefixes."),
    Command("clients", __name__, "clients", "Engines that use the service, and what each holds."),
    Command("transfers", __name__, "transfers", "Copies in flight, and bytes copied so far."),
    Command("namespaces", __name__, "namespaces", "Memory and hits of each model."),
    Command("tenants", __name__, "tenants", "Blocks and quota of each tenant."),
    Command("pins", __name__, "pins", "Prefixes that are kept in the host tier for a time."),
    Command(
        "eviction",
        __name__,
        "eviction",
        "How often blocks are used again, by class and age.",
    ),
    Command("block", __name__, "block", "Find a block by the beginning of its hash."),
    Command(
        "explain",
        __name__,
        "explain",
        "Why a prompt was a hit or a miss, block by block.",
    ),
    Command(
        "storage",
        __name__,
        "storage",
        "Storage of a service, or with PATH the files in a directory.",
    ),
)

app = new_group(
    COMMANDS,
    help="""Look into a running service, or into the files of its storage.

    Without a command: tiers, clients and transfers of the service on one screen.

    Examples: `fdcache inspect --watch`, `fdcache inspect explain --tokens prompt.json`,
    `fdcache inspect storage /var/lib/fdcache`.
    """,
)


@app.callback(invoke_without_command=True, no_args_is_help=False)
def inspect(
    context: typer.Context,
    server: ServerOption = None,
    *,
    json: Json = False,
    watch: WatchOption = False,
) -> None:
    """Show the overview of a service, if no command is given."""
    if context.invoked_subcommand is not None:
        refuse_options_of_group(context)
        return
    from fdcache_cli.inspect_views import show_overview

    show_overview(server, json=json, watch=watch)


def tiers(
    server: ServerOption = None, *, json: Json = False, watch: WatchOption = False, plot: PlotOption = None
) -> None:
    """Show each tier: host and storage of the service, and the device tiers that its clients report.

    Evictable blocks are ready blocks without users: they make room for others.
    """
    from fdcache_cli.inspect_views import TIERS

    TIERS.show(server, json=json, watch=watch, plot=plot)


def clients(
    server: ServerOption = None, *, json: Json = False, watch: WatchOption = False, plot: PlotOption = None
) -> None:
    """Show the engines that use the service.

    Slots are those that an engine may copy into, runs those that it may be loading. Prompt tokens, and the share of
    them that was found in any tier, are as the engine reports them.
    """
    from fdcache_cli.inspect_views import CLIENTS

    CLIENTS.show(server, json=json, watch=watch, plot=plot)


def transfers(
    server: ServerOption = None, *, json: Json = False, watch: WatchOption = False, plot: PlotOption = None
) -> None:
    """Show the copies of each client: in flight, queued, and bytes copied so far.

    Below, for clients that hand blocks over to other instances or fetch them: hand-overs that have ended, by peer and
    result, and the seconds that they waited and moved bytes. Held blocks are slots of fetches that no request waits
    for any more. Sends with the result "expired" are leases that ran out.
    """
    from fdcache_cli.inspect_views import TRANSFERS

    TRANSFERS.show(server, json=json, watch=watch, plot=plot)


def namespaces(
    server: ServerOption = None, *, json: Json = False, watch: WatchOption = False, plot: PlotOption = None
) -> None:
    """Show the namespaces: the blocks of one model, revision and rank count, their memory and their hits."""
    from fdcache_cli.inspect_views import NAMESPACES

    NAMESPACES.show(server, json=json, watch=watch, plot=plot)


def tenants(
    server: ServerOption = None,
    *,
    namespace: NamespaceOption = None,
    json: Json = False,
    watch: WatchOption = False,
    plot: PlotOption = None,
) -> None:
    """Show the tenants with the most blocks.

    A tenant has its name if FDCACHE_TENANT_QUOTAS gives it one, else the beginning of its key.
    """
    from fdcache_cli.inspect_views import TENANTS

    TENANTS.show(server, json=json, watch=watch, plot=plot, namespace=namespace)


def pins(server: ServerOption = None, *, json: Json = False, watch: WatchOption = False) -> None:
    """Show the pins in force, as `fdcache pin` and HTTP made them."""
    from fdcache_cli.control_service import show_pins

    show_pins(server, json=json, watch=watch)


def eviction(
    server: ServerOption = None,
    *,
    namespace: NamespaceOption = None,
    json: Json = False,
    watch: WatchOption = False,
    plot: PlotOption = None,
) -> None:
    """Show what each tier has learned of reuse, for FDCACHE_EVICTION=learned.

    A row for each class of blocks, by what they were in the last request that used them. A column for each age since
    then: the share of the blocks reaching it that were used again at it. A dash: no block has been that old. Counts
    fade with a half-life of one hour, and go on after an eviction for a while.
    """
    from fdcache_cli.inspect_eviction import show_eviction

    show_eviction(server, namespace, json=json, watch=watch, plot=plot)


def tree(
    server: ServerOption = None,
    *,
    namespace: NamespaceOption = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Number of hottest blocks.")] = 30,
    json: Json = False,
    watch: WatchOption = False,
    plot: PlotOption = None,
) -> None:
    """Draw the hottest blocks and their ancestors as a tree of prefixes."""
    from fdcache_cli.inspect_blocks import show_tree

    show_tree(server, namespace, limit, json=json, watch=watch, plot=plot)


def block(
    prefix: Annotated[str, typer.Argument(metavar="HASH", help="At least 4 hexadecimal digits.")],
    server: ServerOption = None,
    *,
    json: Json = False,
) -> None:
    """Find a block by the beginning of its hash, also one that was evicted: then with the reason and the time."""
    if not re.fullmatch(r"[0-9a-fA-F]{4,64}", prefix):
        raise typer.BadParameter("give 4 to 64 hexadecimal digits", param_hint="HASH")
    from fdcache_cli.inspect_blocks import show_block

    show_block(server, prefix, json=json)


def explain(
    tokens: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Token ids: a JSON list, or numbers and spaces.", exists=True),
    ],
    server: ServerOption = None,
    *,
    namespace: Annotated[
        str | None, typer.Option(help="Beginning of the namespace's name; needed if there are several.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant of the prompt.")] = None,
    adapter: Annotated[str | None, typer.Option(help="Adapter id of the prompt.")] = None,
    lookahead: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="FDCACHE_LOOKAHEAD_TOKENS of the engine, for draft layers. Default: that variable here, else 0.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show for each block of a prompt where it is, or why and since when it is missing."""
    from fdcache_cli.inspect_blocks import show_explanation

    show_explanation(server, tokens, namespace, tenant, adapter, lookahead, json=json)


def storage(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="PATH",
            help="Directory of a local storage, or one of its files; a shared folder; or a bucket, such as "
            "s3://bucket/folder. Without it, the storage of a running service.",
        ),
    ] = None,
    server: ServerOption = None,
    *,
    verify: Annotated[bool, typer.Option("--verify", help="Read and check every record.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh the view of a service every second until Ctrl-C.")
    ] = False,
) -> None:
    """Show the storage of a running service, or with PATH the files or objects of a storage. Changes nothing.

    With PATH no service is needed, and the exit status is 1 if a record, a header or a file is damaged.
    """
    from fdcache_cli.inspect_storage import show_files, show_objects, show_service
    from fdcache_cli.stored_objects import is_object_store

    if path is None:
        if verify:
            raise typer.BadParameter("it reads files; give PATH", param_hint="--verify")
        show_service(server, json_output, watch)
        return
    if watch:
        raise typer.BadParameter("it is for a service; PATH is read once", param_hint="--watch")
    if server is not None:
        raise typer.BadParameter("it is for a service; PATH is read without one", param_hint="--server")
    if is_object_store(path):
        show_objects(path, verify, json_output)
    else:
        show_files(Path(path), verify, json_output)
