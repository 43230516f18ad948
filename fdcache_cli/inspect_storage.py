"""``fdcache inspect storage``: the storage of a service, or the files of a local storage."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from fdcache.errors import StorageError
from fdcache.service.wire.storage_views import NamespaceStorageView, NodeView, StorageView
from fdcache.settings.kinds import readable_size
from fdcache_cli import errors, output
from fdcache_cli.output import progress_bars
from fdcache_cli.service_view import ask, connect, show_live, table

# --- a service ---------------------------------------------------------------------------------------------


def show_service(server: str | None, json: bool, watch: bool) -> None:
    """Show the storage of a running service."""
    with connect(server) as client:

        def show() -> None:
            found, answer = ask(client, StorageView | None, "storage")  # type: ignore[arg-type]
            if json:
                output.print_json(answer)
            else:
                _print_service(found)

        show_live(show, watch)


def _print_service(found: StorageView | None) -> None:
    if found is None:
        output.print_line("the service has no storage tier; FDCACHE_STORAGE or --storage gives it one")
        return
    loading = found.loading
    state = f"loading, {loading.done:,} of {loading.total:,} slots" if loading.active else found.state
    output.print_line(
        f"{found.connector}: {state}, {found.blocks:,} blocks, {readable_size(found.bytes or 0)}"
    )
    output.print_table(*table(found.layouts, NamespaceStorageView))
    for each in found.layouts:
        if each.nodes:
            output.print_table(*table(each.nodes, NodeView))
        for node in each.nodes:
            if node.last_error and node.last_error != each.error:
                output.print_line(f"last failure of {node.last_error}")
        if each.error:
            output.print_line(f"{each.namespace}: {each.error}")


# --- files -------------------------------------------------------------------------------------------------

_HEADER = ("NAMESPACE", "MODEL", "RANKS", "BLOCKS", "OF", "BYTES", "DEPTH", "AGE", "UNREACHABLE", "CORRUPT")


def show_files(path: Path, verify: bool, json: bool) -> None:
    """Show the files of a local storage; exit with 1 if one is damaged."""
    from fdcache.service.wire.address import load_settings
    from fdcache.storage.calibration import load_storage_speed
    from fdcache_cli.slab_files import GIVE_FOLDER, read_file, slab_files, summarize

    found = slab_files(path)
    if verify and not found:
        raise StorageError(f"{path}: there are no storage files to verify; {GIVE_FOLDER}")
    with progress_bars() as advance:
        files = [read_file(file, verify=verify, on_progress=advance) for file in found]
    summary = summarize(files, verified=verify)
    folder = path if path.is_dir() else path.parent
    speed = load_storage_speed(folder, load_settings({}).transfer.calibration_dir)
    if json:
        output.print_json({**summary, "speed": None if speed is None else asdict(speed)})
    else:
        _print_files(path, summary)
        if speed is not None:
            gb_per_s = speed.bytes_per_second / 1e9
            output.print_line(f"read at {gb_per_s:.2f} GB/s by `fdcache init`, {speed.measured_at}")
    if summary["corrupt_blocks"] or summary["damaged_files"]:
        raise typer.Exit(errors.FAILED)


# --- objects -----------------------------------------------------------------------------------------------

_OBJECTS_HEADER = ("NAMESPACE", "MODEL", "RANKS", "OBJECTS", "BLOCKS", "BYTES", "USED", "CORRUPT")


def show_objects(place: str, verify: bool, json: bool) -> None:
    """Show the objects of a bucket or a shared folder; exit with 1 if a record is damaged."""
    from fdcache.service.wire.address import load_settings
    from fdcache_cli.stored_objects import open_store, read_store

    backend = open_store(place, load_settings({}))
    with progress_bars() as advance:
        found = read_store(backend, verify=verify, on_progress=advance)
    if json:
        output.print_json(found)
    else:
        checked = "all checked" if verify else "records not checked; --verify checks them"
        output.print_line(
            f"{found['place']}: {found['objects']:,} objects, {readable_size(found['bytes'])}, "
            f"{found['corrupt_blocks']:,} corrupt ({checked})"
        )
        output.print_table(_OBJECTS_HEADER, [_objects_row(each) for each in found["namespaces"]])
        for name in found["corrupt_objects"]:
            output.print_line(f"corrupt: {name}")
    if found["corrupt_blocks"]:
        raise typer.Exit(errors.FAILED)


def _objects_row(one: dict[str, Any]) -> tuple[str, ...]:
    known = one["model"] is not None
    return (
        one["namespace"][:16],
        f"{one['model']}@{one['revision']}" if known else "unknown",
        f"{one['ranks']} of {one['tp_size']}" if known else str(one["ranks"]),
        f"{one['objects']:,}",
        f"{one['blocks']:,}" if known else "-",
        readable_size(one["bytes"]),
        f"{_age(one['newest_seconds'])} to {_age(one['oldest_seconds'])}",
        f"{one['corrupt_blocks']:,}",
    )


def _print_files(path: Path, summary: dict[str, Any]) -> None:
    if not summary["namespaces"] and not summary["damaged_files"]:
        output.print_line(f"{path}: there are no storage files")
        return
    checked = "all checked" if summary["verified"] else "records not checked; --verify checks them"
    output.print_line(
        f"{path}: {summary['blocks']:,} blocks, {readable_size(summary['bytes'])}, "
        f"{summary['corrupt_blocks']:,} corrupt ({checked})"
    )
    output.print_table(_HEADER, [_row(namespace) for namespace in summary["namespaces"]])
    for damaged in summary["damaged_files"]:
        output.print_line(f"damaged: {damaged['reason']}")


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    empty = one["oldest_seconds"] is None
    return (
        one["namespace"][:16],
        f"{one['model']}@{one['revision']}",
        f"{len(one['ranks'])} of {one['tp_size']}",
        f"{one['blocks']:,}",
        f"{one['capacity_blocks']:,}",
        readable_size(one["bytes"]),
        "-" if one["deepest"] is None else f"{one['mean_depth']} (to {one['deepest']})",
        "-" if empty else f"{_age(one['newest_seconds'])} to {_age(one['oldest_seconds'])}",
        f"{one['unreachable_blocks']:,}",
        f"{one['corrupt_blocks']:,}",
    )


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"
