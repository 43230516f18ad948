"""What a machine has for a service and its engines, and what would make serving fail."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fdcache.devices.calibration import load_calibration
from fdcache.devices.kernels import load_kernels
from fdcache.devices.topology import Gpu, visible_gpus
from fdcache.errors import ConfigurationError, DeviceError
from fdcache.machine.memory import available_memory, huge_page_problem, numa_nodes
from fdcache.machine.session import user_config_dir
from fdcache.service.server.arena import find_arenas, foreign_arenas, remove_arena
from fdcache.service.server.lifecycle import arena_folder_problem
from fdcache.service.server.preflight import existing, numa_problem
from fdcache.service.wire.address import default_runtime_dir, is_directory, runtime_dir_problem
from fdcache.settings import Settings, Source
from fdcache.settings.kinds import format_size
from fdcache.settings.templates import render_dotenv


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. ``problem`` says what makes serving fail, and the remedy; ``hint`` what could be better."""

    name: str
    found: str
    problem: str | None = None
    hint: str | None = None


def examine(settings: Settings) -> list[Finding]:
    """Look at the machine; nothing is changed."""
    return [
        *_gpus(),
        *_memory(settings),
        _numa(settings),
        _memlock(),
        _huge_pages(settings),
        *_arena_folder(settings),
        _runtime_folder(settings),
        *_disk(settings),
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
    """Whether the swap kernels compile, by the UUID of each GPU; no engine can use one where they do not."""
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
    """What was measured of each GPU earlier. Raises ``DeviceError`` when there is none."""
    found = []
    for gpu in visible_gpus():
        kept = load_calibration(gpu, settings.transfer.calibration_dir)
        if kept is not None:
            words, hint = f"measured {kept.measured_at}", None
        else:
            words, hint = "none", "copies go by safe defaults until `fdcache init` has measured this GPU"
        found.append(Finding("calibration", f"{gpu.uuid}: {words}", hint=hint))
    return found


def _memory(settings: Settings) -> Iterator[Finding]:
    budget = available_memory()
    wanted = settings.cache.host_memory
    problem = None
    if wanted > budget.nbytes:
        problem = f"FDCACHE_HOST_MEMORY: {format_size(wanted)} are more than is left; ask for less, or raise the limit"
    yield Finding("memory", f"{_gib(budget.nbytes)} left ({budget.limit})", problem)


def _numa(settings: Settings) -> Finding:
    nodes = numa_nodes()
    wrong = numa_problem(settings)
    problem = None if wrong is None else f"FDCACHE_NUMA_NODE: {wrong[0]}; {wrong[1]}"
    return Finding("NUMA nodes", ", ".join(map(str, nodes)) or "unknown", problem)


def _memlock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft == resource.RLIM_INFINITY else format_size(soft)
    hint = (
        None
        if soft == resource.RLIM_INFINITY
        else "engines that pin host memory for a GPU or RDMA may need more: ulimit -l unlimited"
    )
    return Finding("memlock", found, hint=hint)


def _huge_pages(settings: Settings) -> Finding:
    hint = huge_page_problem(settings.server.arena_dir)
    return Finding("huge pages", "available" if hint is None else "none", hint=hint)


def _arena_folder(settings: Settings) -> Iterator[Finding]:
    folder = settings.server.arena_dir
    if wrong := arena_folder_problem(settings):
        yield Finding("arena folder", f"{folder}, not usable", "FDCACHE_ARENA_DIR: " + "; ".join(wrong))
        return
    free, wanted = shutil.disk_usage(folder).free, settings.cache.host_memory
    problem = None
    if wanted > free:
        problem = (
            f"FDCACHE_ARENA_DIR: {folder} has no room for {format_size(wanted)}; give the container a larger one "
            "(docker run --shm-size, an emptyDir of medium Memory), or ask for less"
        )
    yield Finding("arena folder", f"{folder}, {_gib(free)} free", problem)
    for arena in find_arenas(folder):
        state = "alive" if arena.alive else "dead"
        hint = None if arena.alive else arena.remedy
        yield Finding("arena", f"{state}, {arena.size} of {arena.words}", hint=hint)
    for foreign in foreign_arenas(folder):
        size = f"{foreign.nbytes / 2**20:.0f} MiB"
        yield Finding("arena", f"passed over, {size} of user {foreign.uid}, which this user may not read")


def _runtime_folder(settings: Settings) -> Finding:
    folder = default_runtime_dir(settings.server.runtime_dir)
    if not os.path.lexists(folder):
        return Finding("runtime folder", f"{folder}, made at the start")
    wrong = runtime_dir_problem(folder)
    return Finding(
        "runtime folder", str(folder), None if wrong is None else f"{folder}: {wrong[0]}; {wrong[1]}"
    )


def _disk(settings: Settings) -> Iterator[Finding]:
    """The disk of the storage tier's files; of this user's files where there is none."""
    tier = settings.storage_tier
    if tier.connector != "local":
        folder = existing(settings.transfer.calibration_dir)
        storage = f"storage tier: {tier.connector}" if tier.is_on else "no storage tier"
        yield Finding("disk", f"{folder}, {_gib(shutil.disk_usage(folder).free)} free, {storage}")
        return
    folder, problem, hint = existing(tier.directory), None, None
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK | os.X_OK):
        problem = f"FDCACHE_STORAGE_DIR: {folder} cannot be written by this user; give it to them"
    elif free < tier.size:
        hint = (
            f"FDCACHE_STORAGE_SIZE: {format_size(tier.size)} for each rank and layout are more than is free"
        )
    made = "" if folder == tier.directory else ", made at the start"
    yield Finding("disk", f"{tier.directory}{made}, {_gib(free)} free", problem, hint)


def clean_arenas(settings: Settings) -> list[str]:
    """Remove the dead arenas of the arena folder; what was removed, in words.

    Raises ``ConfigurationError`` when there is no such folder.
    """
    folder = settings.server.arena_dir
    if not is_directory(folder):
        raise ConfigurationError(f"FDCACHE_ARENA_DIR: {folder} is no folder; make it a tmpfs")
    removed = []
    for arena in find_arenas(folder):
        if not arena.alive:
            remove_arena(arena)
            removed.append(f"{arena.size} of {arena.words}")
    return removed


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


_FOLDER_MODE = 0o700


def default_env_file() -> Path:
    """Where the settings of this user are written down when no other place is named."""
    return user_config_dir() / "fdcache" / "fdcache.env"


def make_folders(settings: Settings) -> list[Finding]:
    """Make the folders that are not there yet; those that could not be made are problems."""
    return [found for name, folder in _folders(settings) if (found := _make(name, folder)) is not None]


def _folders(settings: Settings) -> Iterator[tuple[str, Path]]:
    yield "FDCACHE_RUNTIME_DIR", default_runtime_dir(settings.server.runtime_dir)
    yield "FDCACHE_CALIBRATION_DIR", settings.transfer.calibration_dir
    if settings.source("FD_LOG_DIR") is not Source.DEFAULT:
        yield "FD_LOG_DIR", settings.logging.directory
    if settings.storage_tier.connector == "local":
        yield "FDCACHE_STORAGE_DIR", settings.storage_tier.directory


def _make(name: str, folder: Path) -> Finding | None:
    if is_directory(folder):
        return None
    try:
        folder.mkdir(mode=_FOLDER_MODE, parents=True)
    except OSError as error:
        problem = f"{name}: {folder} cannot be made: {error.strerror}; choose another that this user may use"
        return Finding("folder", f"{folder}, not made", problem)
    return Finding("folder", f"{folder}, made")


def write_env_file(path: Path, findings: Iterable[Finding]) -> Finding:
    """Write every setting with its meaning, below what was found of the machine; a file that is there stays."""
    hint = f"export FDCACHE_ENV_FILE={path}"
    if path.exists():
        return Finding("settings file", f"{path}, kept as it is; in use with {hint}")
    found = "".join(f"#   {each.name}: {each.found}\n" for each in findings)
    text = f"# Written by `fdcache init`, which found on this machine:\n{found}#\n{render_dotenv()}"
    try:
        path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=False)  # secrets may come to stand in it
        path.write_text(text)
    except OSError as error:
        problem = f"--env-file: {path} cannot be written: {error.strerror}; choose another"
        return Finding("settings file", f"{path}, not written", problem)
    return Finding("settings file", f"{path}, written; in use with {hint}")
