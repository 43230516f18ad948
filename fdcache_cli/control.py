"""``fdcache pin``, ``unpin``, ``prefetch``, ``move``, ``delete`` and ``quota``: commands to a running service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fdcache_cli.options import Json, NamespaceOption, ServerOption
from fdcache_cli.reset import Yes, duration

Tokens = Annotated[
    Path | None, typer.Option("--tokens", metavar="FILE", help="File with the token ids of a prompt.")
]
Hashes = Annotated[
    Path | None,
    typer.Option("--hashes", metavar="FILE", help="File with the hashes of its blocks, in path order."),
]
Tenant = Annotated[str | None, typer.Option(help="The tenant that the tokens belong to.")]
Adapter = Annotated[str | None, typer.Option(help="The adapter that computes the tokens.")]
Lookahead = Annotated[
    int | None, typer.Option(metavar="TOKENS", help="FDCACHE_LOOKAHEAD_TOKENS of the engines.")
]
Wait = Annotated[
    float,
    typer.Option(parser=duration, metavar="TIME", help="Wait at most that long for the end, such as 30s."),
]


def pin(
    tokens: Tokens = None,
    hashes: Hashes = None,
    *,
    seconds: Annotated[
        float,
        typer.Option("--for", parser=duration, metavar="TIME", help="Time after which the pin ends."),
    ] = "5m",  # type: ignore[assignment]
    most_blocks: Annotated[
        int | None, typer.Option(min=1, metavar="BLOCKS", help="Blocks that the pin may hold.")
    ] = None,
    server: ServerOption = None,
    namespace: NamespaceOption = None,
    tenant: Tenant = None,
    adapter: Adapter = None,
    lookahead: Lookahead = None,
    json: Json = False,
) -> None:
    """Keep the blocks of a prefix that are in the host tier there, for a time.

    All pins together hold at most half of a namespace's blocks, and of a tenant's quota. A pin ends with its time, with
    `fdcache unpin`, when its blocks are reset or deleted, and with the service.

    Example: `fdcache pin --tokens prompt.txt --for 1h`.
    """
    from fdcache_cli.control_service import pin as run
    from fdcache_cli.control_service import prefix_of

    run(
        server,
        prefix_of(tokens, hashes, namespace, tenant, adapter, lookahead),
        seconds,
        most_blocks,
        json=json,
    )


def unpin(
    number: Annotated[
        int | None, typer.Argument(metavar="PIN", min=1, help="Number of the pin.", show_default=False)
    ] = None,
    tokens: Tokens = None,
    hashes: Hashes = None,
    *,
    server: ServerOption = None,
    namespace: NamespaceOption = None,
    tenant: Tenant = None,
    adapter: Adapter = None,
    lookahead: Lookahead = None,
    json: Json = False,
) -> None:
    """End a pin, by the number that `fdcache inspect pins` shows, or all pins of exactly this prefix.

    The exit status is 1 if there is none.
    """
    from fdcache_cli.control_service import prefix_of
    from fdcache_cli.control_service import unpin as run

    if number is None:
        run(server, prefix_of(tokens, hashes, namespace, tenant, adapter, lookahead), json=json)
    elif tokens is not None or hashes is not None:
        raise typer.BadParameter("give a number or a prefix, not both", param_hint="PIN")
    else:
        run(server, number, json=json)


def prefetch(
    tokens: Tokens = None,
    hashes: Hashes = None,
    *,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="ADDRESS", help="Node that is asked first, of FDCACHE_NODES."),
    ] = None,
    wait: Wait = "0s",  # type: ignore[assignment]
    server: ServerOption = None,
    namespace: NamespaceOption = None,
    tenant: Tenant = None,
    adapter: Adapter = None,
    lookahead: Lookahead = None,
    json: Json = False,
) -> None:
    """Read what storage has of a prefix into the host tier.

    Example: `fdcache prefetch --tokens prompt.txt --wait 30s`. The exit status is 1 if the read is still under way,
    or `--from` names a node that does not give all of it.
    """
    from fdcache_cli.control_service import prefetch as run
    from fdcache_cli.control_service import prefix_of

    run(server, prefix_of(tokens, hashes, namespace, tenant, adapter, lookahead), source, wait, json=json)


def move(
    tokens: Tokens = None,
    hashes: Hashes = None,
    *,
    wait: Wait = "0s",  # type: ignore[assignment]
    server: ServerOption = None,
    namespace: NamespaceOption = None,
    tenant: Tenant = None,
    adapter: Adapter = None,
    lookahead: Lookahead = None,
    json: Json = False,
) -> None:
    """Write a prefix to storage, and free its memory in the host tier once all of it is stored.

    Blocks that are in use, or that other prompts continue, stay. The exit status is 1 if it is still under way.
    """
    from fdcache_cli.control_service import move as run
    from fdcache_cli.control_service import prefix_of

    run(server, prefix_of(tokens, hashes, namespace, tenant, adapter, lookahead), wait, json=json)


def delete(
    tokens: Tokens = None,
    hashes: Hashes = None,
    *,
    start: Annotated[
        int, typer.Option(min=0, metavar="BLOCK", help="The first block to delete; those before it stay.")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count the blocks of the prefix.")] = False,
    yes: Yes = False,
    server: ServerOption = None,
    namespace: NamespaceOption = None,
    tenant: Tenant = None,
    adapter: Adapter = None,
    lookahead: Lookahead = None,
    json: Json = False,
) -> None:
    """Delete blocks of a prefix, and all that continue them, from the host tier and from local storage.

    Requests that use them keep them until they end. `fdcache reset --tenant NAME` deletes all blocks of a tenant.
    """
    from fdcache_cli.control_service import delete as run
    from fdcache_cli.control_service import prefix_of

    run(
        server,
        prefix_of(tokens, hashes, namespace, tenant, adapter, lookahead),
        start,
        dry_run=dry_run,
        yes=yes,
        json=json,
    )


def quota(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Name of the tenant.")],
    share: Annotated[
        float,
        typer.Argument(metavar="SHARE", min=0.0, max=1.0, help="Share of each namespace, such as 0.25."),
    ],
    *,
    server: ServerOption = None,
    json: Json = False,
) -> None:
    """Set the share of each namespace that a tenant may have, until the service ends.

    FDCACHE_TENANT_QUOTAS keeps it for later starts; `fdcache inspect tenants` shows the quotas in force.
    """
    from fdcache_cli.control_service import set_quota

    set_quota(server, tenant, share, json=json)
