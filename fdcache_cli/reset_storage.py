"""Remove blocks from the files of a local storage, from a shared folder or from a bucket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from fdcache.settings.kinds import readable_size
from fdcache.settings.loading import read_settings
from fdcache_cli import output
from fdcache_cli.app import confirm
from fdcache_cli.output import progress_bars
from fdcache_cli.slab_files import Removal, Selection, remove
from fdcache_cli.stored_objects import RemovedObjects, is_object_store, open_store, remove_objects


def reset_storage(
    place: str,
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
    if is_object_store(place):
        _reset_objects(place, selection, dry_run=dry_run, yes=yes, json=json)
        return
    path = Path(place)
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


def _reset_objects(place: str, selection: Selection, *, dry_run: bool, yes: bool, json: bool) -> None:
    """Remove objects for all nodes. One that reads meanwhile has a miss."""
    backend = open_store(place, read_settings(arguments={}).settings)
    try:
        if not dry_run and not yes:
            with progress_bars() as advance:
                planned = remove_objects(backend, selection, dry_run=True, on_progress=advance)
            confirm("Remove them, for every node?", _report_objects(backend.place, planned, dry_run=True))
        with progress_bars() as advance:
            removed = remove_objects(backend, selection, dry_run=dry_run, on_progress=advance)
    finally:
        backend.close()
    if json:
        output.print_json(
            {
                "dry_run": dry_run,
                "blocks": sum(one.blocks for one in removed),
                "bytes": sum(one.bytes for one in removed),
                "namespaces": [asdict(one) for one in removed],
            }
        )
        return
    for line in _report_objects(backend.place, removed, dry_run=dry_run):
        output.print_line(line)


def _report_objects(place: str, removed: Iterable[RemovedObjects], *, dry_run: bool) -> Iterator[str]:
    verb = "would remove" if dry_run else "removed"
    nothing = True
    for one in removed:
        nothing = False
        yield (
            f"{place}: {one.model or one.namespace[:16]}: {verb} {one.objects:,} objects with {one.blocks:,} blocks, "
            f"{readable_size(one.bytes)}"
        )
    if nothing:
        yield f"{place}: nothing to remove"
