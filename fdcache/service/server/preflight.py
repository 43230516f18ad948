"""Checks of what a service needs at its start: address, keys, memory, directories, storage. They change nothing."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from fdcache.errors import ConfigurationError, HostMemoryError, StorageError
from fdcache.machine.memory import available_memory, numa_nodes
from fdcache.service.server.arena import arena_name, extent_bytes
from fdcache.service.server.arenas import FoundArena, find_arenas
from fdcache.service.server.endpoints import parse_http, require_keys
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

_ENGINES_TOO = {"FDCACHE_STORAGE", "FDCACHE_STORAGE_DIR"}
"""Variables that stop an embedded engine as well, not only a service."""
_CHOOSE_ARENA = "choose another one, a tmpfs such as /dev/shm"


def require_ready(settings: Settings) -> None:
    """Raise ``SettingsError`` with every problem that would keep a service from starting."""
    problems = [each for each in check_all(settings) if each.severity is Severity.ERROR]
    if problems:
        raise SettingsError(problems)


def check_all(settings: Settings) -> Iterator[Problem]:
    """Yield every problem a service would meet at its start."""
    checks = (check_address, check_http, check_arena, check_memory, check_numa, check_logs, check_storage)
    for check in checks:
        yield from check(settings)


def check_environment(settings: Settings) -> Iterator[Problem]:
    """Yield the same problems for an environment that may be an engine's or a service's.

    Errors that only a service meets become notes, unless the variable was set.
    """
    for problem in check_all(settings):
        concerns_engines = problem.variables[0] in _ENGINES_TOO
        is_set = any(settings.source(name) is not Source.DEFAULT for name in problem.variables)
        if concerns_engines or is_set or problem.severity is not Severity.ERROR:
            yield problem
        else:
            wrong = f"`fdcache serve` cannot start: {problem.wrong}"
            yield replace(problem, severity=Severity.NOTE, wrong=wrong)


def _error(settings: Settings, name: str, wrong: str, right: str) -> Problem:
    return error(name, settings.place(name), wrong, right)


def _raised(settings: Settings, name: str, check: Callable[[], object]) -> Iterator[Problem]:
    """Run ``check``; yield the error that it raises as a problem of one variable."""
    try:
        check()
    except (ConfigurationError, HostMemoryError, StorageError) as problem:
        wrong, _, right = str(problem).removeprefix(f"{name}: ").rpartition("; ")
        yield _error(settings, name, wrong or right, right if wrong else "choose another")


# --- addresses ----------------------------------------------------------------------------------------------


def check_address(settings: Settings) -> Iterator[Problem]:
    """Check the address of the service and the directory of its socket."""
    is_default = settings.source("FDCACHE_SERVER") is Source.DEFAULT
    name = "FDCACHE_RUNTIME_DIR" if is_default else "FDCACHE_SERVER"
    address = _address(settings)
    invalid = list(_raised(settings, name, lambda: socket_path(address)))
    yield from invalid
    if invalid:
        return
    path = socket_path(address)
    if problem := runtime_dir_problem(path.parent) or socket_problem(path):
        yield _error(settings, name, *problem)


def check_http(settings: Settings) -> Iterator[Problem]:
    """Check the HTTP address; its port must be free unless a service with these settings is running."""
    name = "FDCACHE_HTTP_ADDRESS"

    def check() -> None:
        http = parse_http(settings.server.http_address)
        require_keys(http, settings)
        if http is not None and not any(each.alive for each in _own_arenas(settings)):
            _require_free(*http)

    yield from _raised(settings, name, check)


def _require_free(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        raise ConfigurationError(f"{host}:{port}: {error.strerror}; choose another") from error


# --- memory -------------------------------------------------------------------------------------------------


def check_arena(settings: Settings) -> Iterator[Problem]:
    """Check the directory of the arena, its room, and that the arena holds an extent."""
    name, directory = "FDCACHE_ARENA_DIR", settings.server.arena_dir
    if problem := arena_folder_problem(settings):
        yield _error(settings, name, *problem)
        return
    wanted = settings.cache.host_memory
    if wanted > shutil.disk_usage(directory).free + _bytes_held(settings):
        yield _error(
            settings,
            name,
            f"{directory} has no room for {format_size(wanted)}",
            "give the container a larger one (docker run --shm-size, an emptyDir of medium Memory), or ask for less",
        )
    if wanted:
        huge = settings.server.huge_pages
        yield from _raised(settings, "FDCACHE_HOST_MEMORY", lambda: extent_bytes(wanted, huge))


def check_arena_dir(settings: Settings) -> None:
    """Raise ``ConfigurationError`` unless the arena directory exists and this user can write to it."""
    if problem := arena_folder_problem(settings):
        raise ConfigurationError("FDCACHE_ARENA_DIR: " + "; ".join(problem))


def arena_folder_problem(settings: Settings) -> tuple[str, str] | None:
    """Return what is wrong with the arena directory, and the remedy."""
    folder = settings.server.arena_dir
    if not is_directory(folder):
        return f"{folder} is not a directory", "mount a tmpfs there"
    if not os.access(folder, os.W_OK | os.X_OK) or is_read_only(folder):
        usual = folder.resolve().is_relative_to("/dev/shm")
        remedy = (
            "mount it so that this user may write there, or name another tmpfs" if usual else _CHOOSE_ARENA
        )
        return f"{folder} cannot be written by this user", remedy
    return None


def check_memory(settings: Settings) -> Iterator[Problem]:
    """Check that the memory of the arena is available."""
    wanted = settings.cache.host_memory
    if wanted > available_memory().nbytes + _bytes_held(settings):
        wrong = f"{format_size(wanted)} are more than is left"
        yield _error(settings, "FDCACHE_HOST_MEMORY", wrong, "ask for less, or raise the limit")


def check_numa(settings: Settings) -> Iterator[Problem]:
    """Check that the machine has the NUMA node."""
    wanted = settings.server.numa_node
    if wanted is not None and wanted not in numa_nodes():
        yield _error(
            settings, "FDCACHE_NUMA_NODE", f"this machine has no NUMA node {wanted}", "unset the variable"
        )


def _address(settings: Settings) -> str:
    return settings.cache.server or default_address(settings.server.runtime_dir)


def _own_arenas(settings: Settings) -> list[FoundArena]:
    """Return the arenas of a service with these settings, running or dead."""
    try:
        name = arena_name(socket_path(_address(settings)))
    except ConfigurationError:
        return []  # a problem of the address
    return [each for each in find_arenas(settings.server.arena_dir) if each.name == name]


def _bytes_held(settings: Settings) -> int:
    """Return the bytes that a service with these settings holds already."""
    return sum(each.nbytes for each in _own_arenas(settings))


# --- directories --------------------------------------------------------------------------------------------


def check_logs(settings: Settings) -> Iterator[Problem]:
    """Check the directory of the logs, if it was set."""
    name = "FD_LOG_DIR"
    is_set = settings.source(name) is not Source.DEFAULT
    if is_set and (problem := _writable_problem(settings.value("FD_LOG_DIR"))):
        yield _error(settings, name, *problem)


def check_storage(settings: Settings) -> Iterator[Problem]:
    """Check the storage connector and its directory, and warn of a disk that is too small for local files."""
    tier = settings.storage_tier
    yield from _raised(
        settings, "FDCACHE_STORAGE", lambda: require_connector(tier, settings.connector_options)
    )
    if tier.connector not in ("local", "shared"):
        return
    if problem := _writable_problem(tier.directory):
        yield _error(settings, "FDCACHE_STORAGE_DIR", *problem)
        return
    if tier.connector == "shared":
        if not is_directory(tier.directory):
            wrong = f"{tier.directory} is not there, and fdcache does not make a folder that nodes share"
            yield _error(settings, "FDCACHE_STORAGE_DIR", wrong, "make it once, in the shared file system")
        return
    stored = sum(path.stat().st_blocks * 512 for path in tier.directory.glob("fdcache-*") if path.is_file())
    if shutil.disk_usage(nearest_directory(tier.directory)).free + stored < tier.size:
        name = "FDCACHE_STORAGE_SIZE"
        wrong = f"{format_size(tier.size)} for each rank and layout are more than is free"
        yield warning(name, settings.place(name), wrong, "give less, or a larger disk")


def _writable_problem(directory: Path) -> tuple[str, str] | None:
    """Return why files cannot be created in a directory, and the remedy."""
    nearest = nearest_directory(directory)
    if nearest != directory:
        below = nearest / directory.absolute().relative_to(nearest.absolute()).parts[0]
        if below.is_symlink():
            return f"{directory} cannot be created: {below} is a broken link", "choose another directory"
        if os.path.lexists(below):
            return f"{directory} cannot be created: {below} is a file", "choose another directory"
    if not os.access(nearest, os.W_OK | os.X_OK) or is_read_only(nearest):
        verb = "written" if nearest == directory else "created"
        return f"{directory} cannot be {verb} by this user", "choose another directory, or mount it writable"
    return None


def nearest_directory(path: Path) -> Path:
    """Return the directory itself, or the nearest one above it that exists."""
    absolute = path.absolute()
    return next(each for each in (path, *absolute.parents) if is_directory(each))
