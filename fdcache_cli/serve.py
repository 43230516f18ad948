"""``fdcache serve``: one screen saying what is served, then the service."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fdcache.errors import ConfigurationError
from fdcache.settings import Settings
from fdcache.settings.parsing import format_size
from fdcache_cli import output

if TYPE_CHECKING:
    from fdcache.server.lifecycle import Server


def serve(
    *,
    socket: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Where clients connect, as ipc:///run/fdcache/x.sock."),
    ] = None,
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Probes, metrics and views; off for none.")
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes of the arena. Default: a quarter of what is free."),
    ] = None,
    arena_dir: Annotated[Path | None, typer.Option(help="The folder of the arena.")] = None,
    recover: Annotated[
        bool | None, typer.Option("--recover/--no-recover", help="Take over what a dead service left.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Check the settings and end.")] = False,
) -> None:
    """Serve one warm host tier to all engines of this node.

    SIGTERM drains and ends it; a second signal ends it at once.
    """
    from fdcache.server import logs
    from fdcache.server.lifecycle import Server, endpoints
    from fdcache.server.signals import ended_by_signals

    settings = Settings.load(
        arguments={
            "FDCACHE_SERVER": socket,
            "FDCACHE_HTTP_ADDRESS": http,
            "FDCACHE_HOST_MEMORY": host_memory,
            "FDCACHE_ARENA_DIR": None if arena_dir is None else str(arena_dir),
            "FDCACHE_RECOVER": recover,
        }
    )
    endpoints(settings)
    if check:
        output.print_line(f"the settings are right; fingerprint {settings.fingerprint}")
        return
    logs.configure(settings)
    server = Server(settings)
    with ended_by_signals(lambda: server.is_serving, lambda force: server.stop(force=force)):
        _serve(server, settings)


def _serve(server: Server, settings: Settings) -> None:
    where = server.endpoints
    web = None
    try:
        server.start(_progress)
        if where.http is not None:
            from fdcache.server.http import HttpServer, make_app

            keys = tuple(key.get_secret_value() for key in settings.service.api_keys)
            try:
                web = HttpServer(make_app(where.address, keys), *where.http)
            except OSError as error:
                raise ConfigurationError(
                    f"FDCACHE_HTTP_ADDRESS: {where.http[0]}:{where.http[1]}: {error}; choose another with --http"
                ) from error
            web.start()
        _screen(server, settings, web.port if web else None)
        server.run()
    finally:
        if web is not None:
            web.stop()
        server.close()


def _progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{what}: {done}/{total} extents" + ("\n" if done == total else ""))


def _screen(server: Server, settings: Settings, port: int | None) -> None:
    from fdcache.server.leftovers import find_arenas
    from fdcache.server.lifecycle import parse_http

    arena = server.arena
    http = parse_http(settings.server.http_address)
    rows = [
        ("address", server.endpoints.address),
        ("http", "off" if http is None else f"http://{http[0]}:{port}"),
        ("memory", f"{format_size(arena.total_bytes)} in {arena.directory}"),
        ("extents", f"{arena.manifest.extents} of {format_size(arena.manifest.extent_bytes)}"),
        ("recovered", f"{server.recovered} blocks"),
        ("settings", settings.fingerprint[:16]),
    ]
    rows += [
        ("dead arena", f"{each.size} of {each.words}: {each.remedy}")
        for each in find_arenas(arena.directory)
        if not each.alive
    ]
    for name, text in rows:
        output.print_line(f"{name:<10} {text}")
    output.print_line("ready; Ctrl-C ends it")
    sys.stdout.flush()
