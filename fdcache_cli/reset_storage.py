"""``fdcache reset storage``: remove blocks from the files of the local storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fdcache_cli import output
from fdcache_cli.app import confirm
from fdcache_cli.output import progress_bars

if TYPE_CHECKING:
    from fdcache.storage.offline import Removal


def _duration(text: str) -> float:
    from fdcache.settings.kinds import parse_duration

    units = {"d": 86400.0, "w": 7 * 86400.0}
    try:
        if text[-1:] in units:
            return float(text[:-1]) * units[text[-1]]
        return float(parse_duration(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no duration; write 30m, 12h, 7d or 2w") from None


def storage(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="The folder of the storage, or one of its files.")
    ],
    *,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only this model, or the fingerprint that begins so."),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(parser=_duration, metavar="AGE", help="Only blocks written longer ago, as 12h or 7d."),
    ] = None,
    corrupt: Annotated[
        bool, typer.Option("--corrupt", help="Only what a check of every record refuses.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Everything.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Remove blocks from the files of the local storage, and what hangs below them; needs no server.

    Conditions add up. A file that an engine has open is refused. Files of others in the folder are not touched.
    """
    from fdcache.storage.offline import Selection, remove

    if everything == bool(namespace or older_than is not None or corrupt):
        raise typer.BadParameter("say what to remove: --all, or any of --namespace, --older-than, --corrupt")
    selection = Selection(namespace, older_than, corrupt, everything)
    if not dry_run and not yes:
        with progress_bars() as advance:
            planned = remove(path, selection, dry_run=True, on_progress=advance)
        confirm("Remove them?", _told(path, planned, dry_run=True))
    with progress_bars() as advance:
        removals = remove(path, selection, dry_run=dry_run, on_progress=advance)
    if json_output:
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
    for line in _told(path, removals, dry_run=dry_run):
        output.print_line(line)


def _told(path: Path, removals: Iterable[Removal], *, dry_run: bool) -> Iterator[str]:
    verb = "would remove" if dry_run else "removed"
    nothing = True
    for one in removals:
        nothing = False
        yield f"{one.path}: {verb} {'the file and its ' if one.whole else ''}{one.blocks:,} blocks"
    if nothing:
        yield f"{path}: nothing to remove"
