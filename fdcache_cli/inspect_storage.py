"""``fdcache inspect storage``: the files of the local storage in a table, or the storage of a service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fdcache.settings.kinds import readable_size
from fdcache_cli import errors, output
from fdcache_cli.output import progress_bars
from fdcache_cli.service_view import ServerOption
from fdcache_cli.storage_view import show_storage


def storage(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            help="The folder of the storage, or one of its files; without it, the storage of a running service.",
        ),
    ] = None,
    server: ServerOption = None,
    *,
    verify: Annotated[bool, typer.Option("--verify", help="Read and check every record.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show a service's anew every second, until Ctrl-C.")
    ] = False,
) -> None:
    """Tell what the files of the local storage hold, or what a running service has stored; changes nothing.

    With PATH it needs no service, and ends with status 1 when a record, a header or a file is damaged.
    """
    if path is None:
        if verify:
            raise typer.BadParameter("it reads files; give PATH", param_hint="--verify")
        show_storage(server, json=json_output, watch=watch)
        return
    if watch:
        raise typer.BadParameter("it is for a service; PATH is read once", param_hint="--watch")
    if server is not None:
        raise typer.BadParameter("it is for a service; PATH is read without one", param_hint="--server")
    from fdcache.storage.offline import read_file, slab_files
    from fdcache.storage.summary import summarize

    with progress_bars() as advance:
        files = [read_file(file, verify=verify, on_progress=advance) for file in slab_files(path)]
    summary = summarize(files, verified=verify)
    if json_output:
        output.print_json(summary)
    else:
        _print(path, summary)
    if summary["corrupt_blocks"] or summary["damaged_files"]:
        raise typer.Exit(errors.FAILED)


def _print(path: Path, summary: dict[str, Any]) -> None:
    checked = "all checked" if summary["verified"] else "records not checked; --verify does it"
    output.print_line(
        f"{path}: {summary['blocks']:,} blocks, {readable_size(summary['bytes'])}, "
        f"{summary['corrupt_blocks']:,} corrupt ({checked})"
    )
    header = (
        "NAMESPACE",
        "MODEL",
        "RANKS",
        "BLOCKS",
        "OF",
        "BYTES",
        "DEPTH",
        "AGE",
        "UNREACHABLE",
        "CORRUPT",
    )
    output.print_table(header, [_row(namespace) for namespace in summary["namespaces"]])
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
