"""Findings of ``fdcache init``: what a machine offers a service and its engines, and what it lacks; its set-up."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fdcache.devices.calibration import load_calibration
from fdcache.devices.cuda import load_kernels
from fdcache.devices.topology import Gpu, visible_gpus
from fdcache.errors import ConfigurationError, DeviceError, StorageError
from fdcache.machine.memory import available_memory, huge_page_problem, numa_nodes
from fdcache.machine.session import user_config_dir
from fdcache.service.server.arenas import find_arenas, foreign_arenas, remove_arena
from fdcache.service.server.preflight import (
    check_arena,
    check_memory,
    check_numa,
    check_storage,
    nearest_directory,
)
from fdcache.service.wire.address import default_runtime_dir, is_directory, runtime_dir_problem
from fdcache.settings import Problem, Settings, Severity, Source
from fdcache.settings.kinds import format_size
from fdcache.settings.templates import render_dotenv
from fdcache.storage.calibration import load_storage_speed, measure_storage, save_storage_speed

_DIRECTORY_MODE = 0o700


@dataclass(frozen=True, slots=True)
class Finding:
    """One property of the machine. ``problem`` keeps a service from starting; ``hint`` would improve it."""

    name: str
    found: str
    problem: str | None = None
    hint: str | None = None


def examine(settings: Settings) -> list[Finding]:
    """Return what the machine has; nothing is changed."""
    return [
        *_gpus(),
        _memory(settings),
        _numa(settings),
        _memlock(),
        _huge_pages(settings),
        *_arena(settings),
        _runtime_directory(settings),
        _disk(settings),
    ]


def _gpus() -> Iterator[Finding]:
    try:
        gpus = visible_gpus()
    except DeviceError as error:
        yield Finding("GPU", "none", hint=f"{error}; a service needs none, engines on the CPU neither")
        return
    for gpu in gpus:
        yield Finding("GPU", f"{gpu.name} {gpu.uuid}, driver {gpu.driver}, {gpu.topology}")


def kernels(gpus: Iterable[Gpu]) -> dict[str, Finding]:
    """Compile the swap kernels for each GPU and return the result by UUID; engines cannot use a GPU without them."""
    found = {}
    for gpu in gpus:
        problem = None
        try:
            load_kernels(gpu.ordinal)
        except DeviceError as error:
            problem = str(error)
        state = "compiled" if problem is None else "not compiled"
        found[gpu.uuid] = Finding("swap kernels", f"{gpu.uuid}: {state}", problem)
    return found


def calibrations(settings: Settings) -> list[Finding]:
    """Return when each GPU was measured. Raises ``DeviceError`` without a GPU."""
    found = []
    for gpu in visible_gpus():
        saved = load_calibration(gpu, settings.transfer.calibration_dir)
        if saved is not None:
            state, hint = f"measured {saved.measured_at}", None
        else:
            state, hint = "none", "copies go by safe defaults until `fdcache init` has measured this GPU"
        found.append(Finding("calibration", f"{gpu.uuid}: {state}", hint=hint))
    return found


def storage_speed(settings: Settings, *, measure: bool = False, force: bool = False) -> list[Finding]:
    """Return how fast the folder of local storage was read, nothing without one.

    ``measure``: now, if that was not done there before; ``force``: in any case.
    """
    tier, folder = settings.storage_tier, settings.transfer.calibration_dir
    if tier.connector != "local" or not is_directory(tier.directory):
        return []
    found = None if force else load_storage_speed(tier.directory, folder)
    if found is None and not measure:
        hint = "the first reads are not compared with computing until `fdcache init` has measured this folder"
        return [Finding("storage speed", f"{tier.directory}: not measured", hint=hint)]
    if found is None:
        try:
            found = measure_storage(tier.directory, threads=min(tier.threads, 16))
            save_storage_speed(found, folder)
        except (StorageError, OSError) as error:
            return [Finding("storage speed", f"{tier.directory}: not measured", hint=str(error))]
    speed = f"{found.bytes_per_second / 1e9:.2f} GB/s, {1e3 * found.latency_seconds:.2f} ms for a small read"
    return [Finding("storage speed", f"{found.folder}: {speed}, measured {found.measured_at}")]


def _memory(settings: Settings) -> Finding:
    budget = available_memory()
    found = f"{_gib(budget.nbytes)} left ({budget.limit})"
    return Finding("memory", found, _first(check_memory(settings)))


def _numa(settings: Settings) -> Finding:
    found = ", ".join(map(str, numa_nodes())) or "unknown"
    return Finding("NUMA nodes", found, _first(check_numa(settings)))


def _memlock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock", "unlimited")
    hint = "engines that pin host memory for a GPU or RDMA may need more: ulimit -l unlimited"
    return Finding("memlock", format_size(soft), hint=hint)


def _huge_pages(settings: Settings) -> Finding:
    hint = huge_page_problem(settings.server.arena_dir)
    return Finding("huge pages", "available" if hint is None else "none", hint=hint)


def _arena(settings: Settings) -> Iterator[Finding]:
    directory = settings.server.arena_dir
    problem = _first(check_arena(settings))
    if not is_directory(directory):
        yield Finding("arena folder", f"{directory}, not usable", problem)
        return
    free = shutil.disk_usage(directory).free
    yield Finding("arena folder", f"{directory}, {_gib(free)} free", problem)
    for arena in find_arenas(directory):
        state = "alive" if arena.alive else "dead"
        hint = None if arena.alive else arena.remedy
        yield Finding("arena", f"{state}, {arena.size} of {arena.words}", hint=hint)
    for foreign in foreign_arenas(directory):
        size = f"{foreign.nbytes / 2**20:.0f} MiB"
        yield Finding("arena", f"skipped, {size} of user {foreign.uid}, which this user may not read")


def _runtime_directory(settings: Settings) -> Finding:
    directory = default_runtime_dir(settings.server.runtime_dir)
    if not os.path.lexists(directory):
        return Finding("runtime folder", f"{directory}, created at the start")
    problem = runtime_dir_problem(directory)
    return Finding("runtime folder", str(directory), None if problem is None else "; ".join(problem))


def _disk(settings: Settings) -> Finding:
    """Return the disk of the storage tier's files; without one, that of this user's files."""
    tier = settings.storage_tier
    problems = list(check_storage(settings))
    problem = _first(each for each in problems if each.severity is Severity.ERROR)
    hint = _first(each for each in problems if each.severity is not Severity.ERROR)
    if tier.connector == "local":
        nearest = nearest_directory(tier.directory)
        state = "" if nearest == tier.directory else ", created at the start"
        found = f"{tier.directory}{state}, {_gib(shutil.disk_usage(nearest).free)} free"
    else:
        nearest = nearest_directory(settings.transfer.calibration_dir)
        storage = f"storage tier: {tier.connector}" if tier.is_on else "no storage tier"
        found = f"{nearest}, {_gib(shutil.disk_usage(nearest).free)} free, {storage}"
    return Finding("disk", found, problem, hint)


def _first(problems: Iterable[Problem]) -> str | None:
    return next(map(str, problems), None)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def clean_arenas(settings: Settings) -> list[str]:
    """Remove the dead arenas and return a description of each.

    Raises ``ConfigurationError`` when their directory does not exist.
    """
    directory = settings.server.arena_dir
    if not is_directory(directory):
        raise ConfigurationError(f"FDCACHE_ARENA_DIR: {directory} is not a directory; mount a tmpfs there")
    removed = []
    for arena in find_arenas(directory):
        if not arena.alive:
            remove_arena(arena)
            removed.append(f"{arena.size} of {arena.words}")
    return removed


def default_env_file() -> Path:
    """Return the path of this user's settings file."""
    return user_config_dir() / "fdcache" / "fdcache.env"


def make_directories(settings: Settings) -> list[Finding]:
    """Create the directories that are missing and return them; those that could not be created are problems."""
    directories = [
        ("FDCACHE_RUNTIME_DIR", default_runtime_dir(settings.server.runtime_dir)),
        ("FDCACHE_CALIBRATION_DIR", settings.transfer.calibration_dir),
    ]
    if settings.source("FD_LOG_DIR") is not Source.DEFAULT:
        directories.append(("FD_LOG_DIR", settings.value("FD_LOG_DIR")))
    if settings.storage_tier.connector == "local":
        directories.append(("FDCACHE_STORAGE_DIR", settings.storage_tier.directory))
    return [_make_directory(name, each) for name, each in directories if not is_directory(each)]


def _make_directory(name: str, directory: Path) -> Finding:
    try:
        directory.mkdir(mode=_DIRECTORY_MODE, parents=True)
    except OSError as error:
        problem = (
            f"{name}: {directory} cannot be created: {error.strerror}; choose another that this user may use"
        )
        return Finding("folder", f"{directory}, not created", problem)
    return Finding("folder", f"{directory}, created")


def write_env_file(path: Path, findings: Iterable[Finding]) -> Finding:
    """Write every setting with its meaning, and the findings as a comment; an existing file is left alone."""
    use = f"use it with: export FDCACHE_ENV_FILE={path}"
    if path.exists():
        return Finding("settings file", f"{path}, exists and was not changed; {use}")
    found = "".join(f"#   {each.name}: {each.found}\n" for each in findings)
    text = f"# Written by `fdcache init`, which found on this machine:\n{found}#\n{render_dotenv()}"
    try:
        path.parent.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=False)  # secrets may be added to it
        path.write_text(text)
    except OSError as error:
        problem = f"--env-file: {path} cannot be written: {error.strerror}; choose another"
        return Finding("settings file", f"{path}, not written", problem)
    return Finding("settings file", f"{path}, written; {use}")
