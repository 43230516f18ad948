"""``fdcache reset arena``: remove the memory that stopped services keep for their next start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fdcache_cli import output
from fdcache_cli.app import confirm

if TYPE_CHECKING:
    from fdcache.service.server.arenas import FoundArena


def arena(
    *,
    server: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Only the memory of the service with this address."),
    ] = None,
    arena_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the arenas. Default: FDCACHE_ARENA_DIR.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")] = False,
) -> None:
    """Remove the host tiers that stopped services keep in shared memory. Running services are left alone.

    A service that ends keeps its host tier for its next start, unless it runs with --discard.

    Examples: `fdcache reset arena --dry-run`, `fdcache reset arena --yes`
    """
    from fdcache.service.server.arena import arena_name
    from fdcache.service.server.arenas import find_arenas, remove_arena
    from fdcache.service.wire.address import socket_path
    from fdcache.settings.loading import read_settings

    folder = arena_dir or read_settings(arguments={}).settings.server.arena_dir
    name = None if server is None else arena_name(socket_path(server))
    found = [each for each in find_arenas(folder) if not each.alive and name in (None, each.name)]
    if found and not dry_run and not yes:
        confirm("Remove them?", _report(folder, found, dry_run=True))
    if not dry_run:
        for each in found:
            remove_arena(each)
    if json:
        arenas = [{"address": each.address, "name": each.name, "bytes": each.nbytes} for each in found]
        output.print_json({"dry_run": dry_run, "directory": str(folder), "arenas": arenas})
        return
    for line in _report(folder, found, dry_run=dry_run):
        output.print_line(line)


def _report(folder: Path, arenas: Iterable[FoundArena], *, dry_run: bool) -> Iterator[str]:
    verb = "would remove" if dry_run else "removed"
    nothing = True
    for each in arenas:
        nothing = False
        yield f"{folder}: {verb} {each.size} of {each.words}"
    if nothing:
        yield f"{folder}: no memory of a stopped service"
