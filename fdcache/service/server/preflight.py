"""Checks of what a service, and the first use of a tier, would find: addresses, keys, folders, memory, storage."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from fdcache.errors import ConfigurationError, HostMemoryError, StorageError
from fdcache.machine.memory import available_memory, numa_nodes
from fdcache.service.server.arena import FoundArena, arena_name, extent_bytes, find_arenas
from fdcache.service.server.lifecycle import arena_folder_problem, parse_http, require_keys
from fdcache.service.wire.address import (
    default_address,
    is_directory,
    is_read_only,
    runtime_dir_problem,
    socket_path,
    socket_problem,
)
from fdcache.settings import Problem, Settings, SettingsError, Severity, Source
from fdcache.settings.kinds import format_size
from fdcache.settings.problems import error, warning
from fdcache.storage.factory import require_connector


def require_ready(settings: Settings) -> None:
    """Raise ``SettingsError`` with everything that would keep a service from starting with these settings."""
    problems = [each for each in preflight(settings) if each.severity is Severity.ERROR]
    if problems:
        raise SettingsError(problems)


def preflight(settings: Settings) -> Iterator[Problem]:
    """Look at everything that a service touches at its start; nothing is changed."""
    for check in (_server, _http, _arena, _memory, _numa, _logs, _storage):
        yield from check(settings)


def preflight_of_an_environment(settings: Settings) -> Iterator[Problem]:
    """Do the same where it is not known whether a service is to start.

    What an engine of its own does without is a note then, unless it was set.
    """
    for problem in preflight(settings):
        is_shared = problem.variables[0] in _ENGINES_TOO
        given = any(settings.source(name) is not Source.DEFAULT for name in problem.variables)
        if is_shared or given or problem.severity is not Severity.ERROR:
            yield problem
        else:
            yield replace(
                problem, severity=Severity.NOTE, wrong=f"`fdcache serve` cannot start: {problem.wrong}"
            )


_ENGINES_TOO = {"FDCACHE_STORAGE", "FDCACHE_STORAGE_DIR"}


def _error(settings: Settings, name: str, wrong: str, right: str) -> Problem:
    return error(name, settings.place(name), wrong, right)


def _told(settings: Settings, name: str, check: Callable[[], object]) -> Iterator[Problem]:
    """Make what a check raises a problem of one variable."""
    try:
        check()
    except (ConfigurationError, HostMemoryError, StorageError) as problem:
        wrong, _, right = str(problem).removeprefix(f"{name}: ").rpartition("; ")
        yield _error(settings, name, wrong or right, right if wrong else "choose another")


# --- where it is reached ------------------------------------------------------------------------------------


def _server(settings: Settings) -> Iterator[Problem]:
    is_default = settings.source("FDCACHE_SERVER") is Source.DEFAULT
    name = "FDCACHE_RUNTIME_DIR" if is_default else "FDCACHE_SERVER"
    address = settings.cache.server or default_address(settings.server.runtime_dir)
    wrong = list(_told(settings, name, lambda: socket_path(address)))
    yield from wrong
    if wrong:
        return
    socket = socket_path(address)
    if problem := runtime_dir_problem(socket.parent) or socket_problem(socket):
        yield _error(settings, name, *problem)


def _http(settings: Settings) -> Iterator[Problem]:
    """Where a service with these settings runs already, the port is its own."""
    name = "FDCACHE_HTTP_ADDRESS"

    def check() -> None:
        http = parse_http(settings.server.http_address)
        require_keys(http, settings)
        if http is not None and not any(each.alive for each in _own_arenas(settings)):
            _require_free(*http)

    yield from _told(settings, name, check)


def _require_free(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            line.bind(address)
    except OSError as error:
        raise ConfigurationError(f"{host}:{port}: {error.strerror}; choose another") from error


# --- memory -------------------------------------------------------------------------------------------------


def _arena(settings: Settings) -> Iterator[Problem]:
    name, folder = "FDCACHE_ARENA_DIR", settings.server.arena_dir
    if problem := arena_folder_problem(settings):
        yield _error(settings, name, *problem)
        return
    wanted = settings.cache.host_memory
    if wanted > shutil.disk_usage(folder).free + _held_already(settings):
        yield _error(
            settings,
            name,
            f"{folder} has no room for {format_size(wanted)}",
            "give the container a larger one (docker run --shm-size, an emptyDir of medium Memory), or ask for less",
        )
    if wanted:
        most, huge = settings.server.extent_size, settings.server.huge_pages
        yield from _told(settings, "FDCACHE_HOST_MEMORY", lambda: extent_bytes(wanted, most, huge))


def _held_already(settings: Settings) -> int:
    """Give the bytes of the service that runs with these settings, or ran and left them."""
    return sum(each.nbytes for each in _own_arenas(settings))


def _own_arenas(settings: Settings) -> list[FoundArena]:
    address = settings.cache.server or default_address(settings.server.runtime_dir)
    try:
        name = arena_name(socket_path(address))
    except ConfigurationError:
        return []  # told of as the address
    return [each for each in find_arenas(settings.server.arena_dir) if each.name == name]


def _memory(settings: Settings) -> Iterator[Problem]:
    wanted = settings.cache.host_memory
    if wanted > available_memory().nbytes + _held_already(settings):
        name = "FDCACHE_HOST_MEMORY"
        wrong = f"{format_size(wanted)} are more than is left"
        yield _error(settings, name, wrong, "ask for less, or raise the limit")


def _numa(settings: Settings) -> Iterator[Problem]:
    if problem := numa_problem(settings):
        yield _error(settings, "FDCACHE_NUMA_NODE", *problem)


def numa_problem(settings: Settings) -> tuple[str, str] | None:
    """Say that the NUMA node is none of this machine, and the remedy."""
    wanted = settings.server.numa_node
    if wanted is None or wanted in numa_nodes():
        return None
    return f"this machine has no NUMA node {wanted}", "unset it"


# --- files --------------------------------------------------------------------------------------------------


def _logs(settings: Settings) -> Iterator[Problem]:
    name = "FD_LOG_DIR"
    if settings.source(name) is not Source.DEFAULT and (
        problem := writable_problem(settings.logging.directory)
    ):
        yield _error(settings, name, *problem)


def _storage(settings: Settings) -> Iterator[Problem]:
    tier = settings.storage_tier
    yield from _told(settings, "FDCACHE_STORAGE", lambda: require_connector(tier, settings.mooncake))
    if tier.connector != "local":
        return
    name = "FDCACHE_STORAGE_DIR"
    if problem := writable_problem(tier.directory):
        yield _error(settings, name, *problem)
        return
    free = shutil.disk_usage(existing(tier.directory)).free + _stored(tier.directory)
    if free < tier.size:
        name, wrong = "FDCACHE_STORAGE_SIZE", f"{format_size(tier.size)} for each rank and layout"
        place = settings.place(name)
        yield warning(name, place, f"{wrong} are more than is free", "give less, or a larger disk")


def _stored(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("fdcache-*") if path.is_file())


def writable_problem(folder: Path) -> tuple[str, str] | None:
    """Say why a folder cannot be made or written to, and the remedy."""
    nearest = existing(folder)
    if nearest != folder:
        below = nearest / folder.absolute().relative_to(nearest.absolute()).parts[0]
        if below.is_symlink():
            return f"{folder} cannot be made: {below} is a link to no folder", "choose another folder"
        if os.path.lexists(below):
            return f"{folder} cannot be made: a part of it is a file", "choose another folder"
    if not os.access(nearest, os.W_OK | os.X_OK) or is_read_only(nearest):
        verb = "written" if nearest == folder else "made"
        return f"{folder} cannot be {verb} by this user", "choose another folder, or mount it writable"
    return None


def existing(folder: Path) -> Path:
    """Give the folder, or the nearest one above it that is there."""
    return folder if is_directory(folder) else existing(folder.absolute().parent)
