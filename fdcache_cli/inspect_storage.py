"""``fdcache inspect storage``: the storage of a service, or the files of a local storage."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fdcache.service.wire.storage_views import NamespaceStorageView, StorageView
from fdcache.settings.kinds import readable_size
from fdcache_cli import errors, output
from fdcache_cli.output import progress_bars
from fdcache_cli.service_view import ServerOption, ask, connect, show_live, table


def storage(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            help="Directory of a local storage, or one of its files. Without it, the storage of a running service.",
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
    """Show the storage of a running service, or with PATH the files of a local storage. Changes nothing.

    With PATH no service is needed, and the exit status is 1 if a record, a header or a file is damaged.
    """
    if path is None:
        if verify:
            raise typer.BadParameter("it reads files; give PATH", param_hint="--verify")
        _show_service(server, json_output, watch)
        return
    if watch:
        raise typer.BadParameter("it is for a service; PATH is read once", param_hint="--watch")
    if server is not None:
        raise typer.BadParameter("it is for a service; PATH is read without one", param_hint="--server")
    _show_files(path, verify, json_output)


# --- a service ---------------------------------------------------------------------------------------------


def _show_service(server: str | None, json: bool, watch: bool) -> None:
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
        if each.error:
            output.print_line(f"{each.namespace}: {each.error}")


# --- files -------------------------------------------------------------------------------------------------

_HEADER = ("NAMESPACE", "MODEL", "RANKS", "BLOCKS", "OF", "BYTES", "DEPTH", "AGE", "UNREACHABLE", "CORRUPT")


def _show_files(path: Path, verify: bool, json: bool) -> None:
    from fdcache.service.wire.address import load_settings
    from fdcache.storage.calibration import load_storage_speed
    from fdcache.storage.offline import read_file, slab_files, summarize

    with progress_bars() as advance:
        files = [read_file(file, verify=verify, on_progress=advance) for file in slab_files(path)]
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


def _print_files(path: Path, summary: dict[str, Any]) -> None:
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
