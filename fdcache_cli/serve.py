"""``fdcache serve``: print a summary, then run the service."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fdcache.errors import ConfigurationError
from fdcache.service.server import listening
from fdcache_cli import output
from fdcache_cli.errors import print_problems
from fdcache_cli.output import Advance, progress_bars

if TYPE_CHECKING:
    from fdcache.service.server.http_server import HttpServer
    from fdcache.service.server.lifecycle import Server
    from fdcache.settings import Settings, Sourced

log = logging.getLogger(__name__)


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
            "local, shared, object, nodes, mooncake, none.",
        ),
    ] = None,
    storage_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Size of the files of each rank and layout. Default: 64GiB."),
    ] = None,
    arena_dir: Annotated[Path | None, typer.Option(help="Directory of the arena, a tmpfs.")] = None,
    recover: Annotated[
        bool | None,
        typer.Option("--recover/--no-recover", help="Take over the blocks of an earlier service."),
    ] = None,
    discard: Annotated[
        bool | None,
        typer.Option(
            "--discard/--keep",
            help="Remove the host tier's memory at the end, or keep it for the next start. Default: keep.",
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Check the settings and exit.")] = False,
) -> None:
    """Serve one host tier, and a storage tier below it, to all engines of this node.

    Engines find the service through FDCACHE_SERVER. The first SIGTERM or Ctrl-C waits for them to leave; a second one
    ends the service at once. The next start at the same address finds the host tier as this one leaves it; --discard,
    or `fdcache reset arena` afterwards, frees its memory.

    Example: `fdcache serve --host-memory 40GiB --storage /var/lib/fdcache`
    """
    from fdcache.service.server.preflight import require_ready
    from fdcache.service.wire.address import load_settings
    from fdcache.settings.logs import log_crashes

    settings = load_settings(
        {
            "FDCACHE_SERVER": _option("--socket", socket),
            "FDCACHE_HTTP_ADDRESS": _option("--http", http),
            "FDCACHE_HOST_MEMORY": _option("--host-memory", host_memory),
            "FDCACHE_ARENA_DIR": _option("--arena-dir", None if arena_dir is None else str(arena_dir)),
            "FDCACHE_RECOVER": _option("--no-recover" if recover is False else "--recover", recover),
            "FDCACHE_DISCARD": _option("--keep" if discard is False else "--discard", discard),
            **_storage_arguments(storage, storage_size),
        }
    )
    if storage_size is not None and settings.storage_tier.connector not in ("local", "object", "shared"):
        raise typer.BadParameter(
            f"FDCACHE_STORAGE={settings.storage_tier.connector} keeps no files; give --storage DIR",
            param_hint="--storage-size",
        )
    require_ready(settings)
    if check:
        print_problems(settings.warnings, sys.stderr)
        output.print_line(f"the settings are valid; fingerprint {settings.fingerprint}")
        return
    from fdcache.service.server import process
    from fdcache.service.server.lifecycle import Server
    from fdcache.service.server.process import ended_by_signals

    print_problems(settings.misspelt, sys.stderr)
    process.configure(settings)
    log_crashes()
    process.raise_descriptor_limit()
    server = Server(settings)
    signals = ended_by_signals(lambda: server.is_serving, lambda force: server.stop(force=force))
    with signals, progress_bars() as advance:
        _serve(server, settings, advance)


def _serve(server: Server, settings: Settings, advance: Advance | None) -> None:
    with server, ExitStack() as at_end:
        server.bind()
        for place in listening.drop():
            log.warning("nothing of the service is at %s, where a supervisor listens for it", place)
        web = _bind_http(server, settings)
        if web is not None:
            at_end.callback(web.stop)
        if advance is None:
            server.start()
        else:
            server.start(advance)
        if web is not None:
            web.start()
        _print_summary(server, settings, web)
        server.on_ready = _print_ready
        server.run()


def _bind_http(server: Server, settings: Settings) -> HttpServer | None:
    """Return the HTTP server, which has its address and serves nothing yet; None if it is off."""
    endpoints = server.endpoints
    if endpoints.http is None:
        return None
    from fdcache.service.server.http_server import HttpServer

    keys = tuple(key.get_secret_value() for key in settings.value("FD_API_KEY"))
    try:
        return HttpServer(endpoints.address, keys, *endpoints.http)
    except OSError as error:
        raise ConfigurationError(
            f"FDCACHE_HTTP_ADDRESS: {':'.join(map(str, endpoints.http))}: {error}; choose another with --http"
        ) from error


def _storage_arguments(storage: str | None, size: str | None) -> dict[str, Sourced]:
    """Return the storage options as settings: ``--storage`` takes a directory or a connector."""
    is_directory = storage is not None and "/" in storage
    return {
        "FDCACHE_STORAGE": _option("--storage", "local" if is_directory else storage),
        "FDCACHE_STORAGE_DIR": _option("--storage", storage if is_directory else None),
        "FDCACHE_STORAGE_SIZE": _option("--storage-size", size),
    }


def _option(option: str, value: object) -> Sourced:
    from fdcache.settings import Sourced

    return Sourced(f"{option} of fdcache serve", value)


def _print_ready() -> None:
    output.print_line("ready; Ctrl-C ends it")
    sys.stdout.flush()


def _print_summary(server: Server, settings: Settings, web: HttpServer | None) -> None:
    from fdcache.service.server.arenas import find_arenas
    from fdcache.service.server.endpoints import parse_http
    from fdcache.settings.kinds import format_size

    arena = server.arena
    http = parse_http(settings.server.http_address)
    rows = [
        ("address", server.endpoints.address),
        ("http", "off" if http is None or web is None else f"http://{http[0]}:{web.port}"),
        *([] if http is None or web is None else _web_rows(f"http://{http[0]}:{web.port}/", web)),
        *_event_rows(server),
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


def _event_rows(server: Server) -> list[tuple[str, str]]:
    """Return where routers read events, with the ports that were chosen."""
    if (feeds := server.service.namespaces.feeds) is None:
        return []
    replay = feeds.publisher.replay_address
    return [("events", feeds.publisher.address), *([("replay", replay)] if replay else [])]


def _web_rows(page: str, web: HttpServer) -> list[tuple[str, str]]:
    return [("page", page), ("http key", str(web.key_path))]


def _storage_row(settings: Settings) -> str:
    from fdcache.settings.kinds import format_size
    from fdcache.storage.speed import measured_place

    tier = settings.storage_tier
    if not tier.is_on:
        return "none"
    if tier.connector == "local":
        return f"{format_size(tier.size)} for each rank and layout in {tier.directory}"
    place = measured_place(settings)
    return tier.connector if place is None else f"{format_size(tier.size)} for all nodes in {place}"
