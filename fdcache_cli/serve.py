"""``fdcache serve``: print a summary, then run the service."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fdcache.errors import ConfigurationError
from fdcache.settings import Settings, Sourced
from fdcache.settings.kinds import format_size
from fdcache_cli import output
from fdcache_cli.errors import print_problems
from fdcache_cli.output import Advance, progress_bars

if TYPE_CHECKING:
    from fdcache.service.server.lifecycle import Server


def serve(
    *,
    socket: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Address of the service, such as ipc:///run/fdcache/x.sock."),
    ] = None,
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address of probes, metrics and views, or off.")
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Size of the arena, such as 40GiB. Default: a quarter of the free memory."
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|NAME",
            help="Storage tier below the host tier: a directory for files, written with a slash, or a connector: "
            "local, mooncake, none.",
        ),
    ] = None,
    storage_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Size of the files of each rank and layout. Default: 64GiB."),
    ] = None,
    arena_dir: Annotated[Path | None, typer.Option(help="Directory of the arena, a tmpfs.")] = None,
    recover: Annotated[
        bool | None, typer.Option("--recover/--no-recover", help="Take over the blocks of a dead service.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Check the settings and exit.")] = False,
) -> None:
    """Serve one host tier, and a storage tier below it, to all engines of this node.

    Engines find the service through FDCACHE_SERVER. The first SIGTERM or Ctrl-C waits for them to leave; a second one
    ends the service at once.

    Example: `fdcache serve --host-memory 40GiB --storage /var/lib/fdcache`
    """
    from fdcache.service.server import process
    from fdcache.service.server.lifecycle import Server
    from fdcache.service.server.preflight import require_ready
    from fdcache.service.server.process import ended_by_signals
    from fdcache.service.wire.address import load_settings
    from fdcache.settings.logs import log_crashes

    settings = load_settings(
        {
            "FDCACHE_SERVER": _option("--socket", socket),
            "FDCACHE_HTTP_ADDRESS": _option("--http", http),
            "FDCACHE_HOST_MEMORY": _option("--host-memory", host_memory),
            "FDCACHE_ARENA_DIR": _option("--arena-dir", None if arena_dir is None else str(arena_dir)),
            "FDCACHE_RECOVER": _option("--no-recover" if recover is False else "--recover", recover),
            **_storage_arguments(storage, storage_size),
        }
    )
    if storage_size is not None and settings.storage_tier.connector != "local":
        raise typer.BadParameter(
            f"FDCACHE_STORAGE={settings.storage_tier.connector} keeps no files; give --storage DIR",
            param_hint="--storage-size",
        )
    if check:
        require_ready(settings)
        print_problems(settings.warnings, sys.stderr)
        output.print_line(f"the settings are valid; fingerprint {settings.fingerprint}")
        return
    print_problems(settings.misspelt, sys.stderr)
    process.configure(settings)
    log_crashes()
    server = Server(settings)
    signals = ended_by_signals(lambda: server.is_serving, lambda force: server.stop(force=force))
    with signals, progress_bars() as advance:
        _serve(server, settings, advance)


def _serve(server: Server, settings: Settings, advance: Advance | None) -> None:
    endpoints = server.endpoints
    web = None
    try:
        if advance is None:
            server.start()
        else:
            server.start(advance)
        if endpoints.http is not None:
            from fdcache.service.server.http import HttpServer, make_app

            keys = tuple(key.get_secret_value() for key in settings.service.api_keys)
            try:
                web = HttpServer(make_app(endpoints.address, keys), *endpoints.http)
            except OSError as error:
                raise ConfigurationError(
                    f"FDCACHE_HTTP_ADDRESS: {':'.join(map(str, endpoints.http))}: {error}; "
                    "choose another with --http"
                ) from error
            web.start()
        _print_summary(server, settings, web.port if web else None)
        server.on_ready = _print_ready
        server.run()
    finally:
        if web is not None:
            web.stop()
        server.close()


def _storage_arguments(storage: str | None, size: str | None) -> dict[str, Sourced]:
    """Return the storage options as settings: ``--storage`` takes a directory or a connector."""
    is_directory = storage is not None and "/" in storage
    return {
        "FDCACHE_STORAGE": _option("--storage", "local" if is_directory else storage),
        "FDCACHE_STORAGE_DIR": _option("--storage", storage if is_directory else None),
        "FDCACHE_STORAGE_SIZE": _option("--storage-size", size),
    }


def _option(option: str, value: object) -> Sourced:
    return Sourced(f"{option} of fdcache serve", value)


def _print_ready() -> None:
    output.print_line("ready; Ctrl-C ends it")
    sys.stdout.flush()


def _print_summary(server: Server, settings: Settings, port: int | None) -> None:
    from fdcache.service.server.arena import find_arenas
    from fdcache.service.server.lifecycle import parse_http

    arena = server.arena
    http = parse_http(settings.server.http_address)
    rows = [
        ("address", server.endpoints.address),
        ("http", "off" if http is None else f"http://{http[0]}:{port}"),
        ("memory", f"{format_size(arena.total_bytes)} in {arena.directory}"),
        ("extents", f"{arena.manifest.extents} of {format_size(arena.manifest.extent_bytes)}"),
        ("recovered", f"{server.recovered} blocks"),
        ("storage", _storage_row(settings)),
        ("settings", settings.fingerprint[:16]),
    ]
    rows += [
        ("dead arena", f"{each.size} of {each.words}: {each.remedy}")
        for each in find_arenas(arena.directory)
        if not each.alive
    ]
    for name, text in rows:
        output.print_line(f"{name:<10} {text}")
    sys.stdout.flush()


def _storage_row(settings: Settings) -> str:
    tier = settings.storage_tier
    if not tier.is_on:
        return "none"
    if tier.connector != "local":
        return tier.connector
    return f"{format_size(tier.size)} for each rank and layout in {tier.directory}"
