"""Remove blocks from the files of a local storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from fdcache_cli import output
from fdcache_cli.app import confirm
from fdcache_cli.output import progress_bars
from fdcache_cli.slab_files import Removal, Selection, remove


def reset_storage(
    path: Path,
    namespace: str | None,
    older_than: float | None,
    *,
    corrupt: bool,
    dry_run: bool,
    yes: bool,
    json: bool,
) -> None:
    """Remove the chosen blocks, all of them without any condition, after a question unless ``yes``."""
    everything = not (namespace or older_than is not None or corrupt)
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
