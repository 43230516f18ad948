"""Findings of ``fdcache doctor``: what a machine offers a service and its engines, and what it lacks."""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fdcache.devices.cuda import load_kernels
from fdcache.devices.topology import Gpu, visible_gpus
from fdcache.errors import DeviceError, StorageError
from fdcache.machine.calibration import load_calibration
from fdcache.machine.memory import SHARE_OF_MEMORY, available_memory, huge_page_problem, numa_nodes
from fdcache.service.server.arenas import find_arenas, foreign_arenas
from fdcache.service.server.preflight import (
    check_address,
    check_arena,
    check_http,
    check_memory,
    check_numa,
    check_storage,
    nearest_directory,
)
from fdcache.service.wire.address import default_runtime_dir, is_directory
from fdcache.settings import Problem, Settings, Severity
from fdcache.settings.kinds import format_size
from fdcache.storage.calibration import load_storage_speed, save_storage_speed
from fdcache.storage.objects.bucket import reach_bucket
from fdcache.storage.objects.variables import ObjectSettings, mask_bucket
from fdcache.storage.speed import measure_place, measured_place

_BUCKET_SECONDS = 5.0
_DRIVERS = ((580, "cuda13"), (525, "cuda12"))
"""Oldest driver for each major version of CUDA, and the extra with CuPy for it."""

_CUPY = {"cupy-cuda13x": 580, "cupy-cuda12x": 525, "cupy": 0}
"""CuPy's distributions, and the oldest driver of each."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One property of the machine. ``problem`` keeps a service or an engine from starting; ``hint`` improves it."""

    name: str
    found: str
    problem: str | None = None
    hint: str | None = None


def examine(settings: Settings) -> list[Finding]:
    """Return what the machine has; nothing is changed."""
    return [
        *_gpus(),
        *examine_driver(),
        _memory(settings),
        _numa(settings),
        _memlock(),
        _huge_pages(settings),
        *_arena(settings),
        _runtime_directory(settings),
        _http(settings),
        _disk(settings),
        *_bucket(settings),
    ]


def _gpus() -> Iterator[Finding]:
    try:
        gpus = visible_gpus()
    except DeviceError as error:
        yield Finding("GPU", "none", hint=f"{error}; a service needs none, engines on the CPU neither")
        return
    for gpu in gpus:
        yield Finding("GPU", f"{gpu.name} {gpu.uuid}, CUDA {_release(gpu.driver)}, {gpu.topology}")


def _release(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def examine_driver(root: Path = Path("/")) -> Iterator[Finding]:
    """Yield NVIDIA's driver, the rights to its devices, and the CuPy that suits it; ``root`` holds proc and dev."""
    driver = driver_version(root)
    cupy = {name: text for name in _CUPY if (text := installed_version(name)) is not None}
    if driver is not None:
        oldest, extra = next(
            ((major, extra) for major, extra in _DRIVERS if driver >= major), (_DRIVERS[-1][0], None)
        )
        problem = (
            f"it is older than {oldest}, which CUDA 12 needs; install a newer driver" if not extra else None
        )
        yield Finding("driver", f"NVIDIA {driver}", problem)
        closed = [
            path for path in sorted(root.glob("dev/nvidia[0-9c]*")) if not os.access(path, os.R_OK | os.W_OK)
        ]
        if closed:
            remedy = "add this user to the group that owns it, or start the container with --gpus all"
            yield Finding("GPU devices", str(closed[0]), f"this user may not open {closed[0]}; {remedy}")
        yield _cupy(cupy, driver, extra)
    elif cupy:
        yield Finding("CuPy", _listed(cupy))


def _cupy(cupy: Mapping[str, str], driver: int, extra: str | None) -> Finding:
    """Return the installed CuPy; ``extra`` is fdcache's extra for the driver."""
    remedy = f"pip install 'fdcache[{extra or 'cuda12'}]'"
    if not cupy:
        return Finding("CuPy", "not installed", hint=f"engines on the GPU need it: {remedy}")
    if len(cupy) > 1:
        return Finding(
            "CuPy", _listed(cupy), f"only one may be installed; uninstall all of them, then {remedy}"
        )
    (name,) = cupy
    needed = _CUPY[name]
    if driver < needed:
        return Finding(
            "CuPy", _listed(cupy), f"{name} needs driver {needed} or newer; uninstall it, then {remedy}"
        )
    return Finding("CuPy", _listed(cupy))


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def driver_version(root: Path = Path("/")) -> int | None:
    """Return the major version of NVIDIA's kernel driver; None without one. ``root`` holds proc."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\s(\d{3,})\.\d+", text)
    return int(found[1]) if found else None


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, None without it; nothing is imported."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


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
    """Return how fast the storage was read, nothing without a folder or a bucket.

    ``measure``: now, if that was not done there before; ``force``: in any case.
    """
    place, folder = measured_place(settings), settings.transfer.calibration_dir
    if place is None or (isinstance(place, Path) and not is_directory(place)):
        return []
    found = None if force else load_storage_speed(place, folder)
    if found is None and not measure:
        hint = (
            "the first reads are not compared with computing until `fdcache init` has measured this storage"
        )
        return [Finding("storage speed", f"{place}: not measured", hint=hint)]
    if found is None:
        try:
            found = measure_place(settings)
            save_storage_speed(found, folder)
        except (StorageError, OSError) as error:
            return [Finding("storage speed", f"{place}: not measured", hint=str(error))]
    speed = f"{found.bytes_per_second / 1e9:.2f} GB/s, {1e3 * found.latency_seconds:.2f} ms for a small read"
    return [Finding("storage speed", f"{found.folder}: {speed}, measured {found.measured_at}")]


def _memory(settings: Settings) -> Finding:
    budget = available_memory()
    found = f"{_gib(budget.nbytes)} left ({budget.limit})"
    return Finding("memory", found, _first(check_memory(settings)))


def _numa(settings: Settings) -> Finding:
    numbers = ", ".join(map(str, numa_nodes()))
    found = f"number {numbers}" if numbers else "unknown"  # a node 0 alone would read as none
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
    wanted = available_memory().nbytes // SHARE_OF_MEMORY
    larger = (
        f"a service keeps its blocks there, by default {_gib(wanted)}: mount a larger tmpfs (docker run --shm-size), "
        "or give --host-memory"
    )
    yield Finding(
        "arena folder", f"{directory}, {_gib(free)} free", problem, larger if free < wanted else None
    )
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
    return Finding("runtime folder", str(directory), _first(check_address(settings)))


def _http(settings: Settings) -> Finding:
    address = settings.server.http_address
    problem = _first(check_http(settings))
    return Finding("HTTP address", address if problem is None else f"{address}, not usable", problem)


def _disk(settings: Settings) -> Finding:
    """Return the disk of the storage tier's files; without one, that of this user's files."""
    tier = settings.storage_tier
    problems = list(check_storage(settings))
    problem = _first(each for each in problems if each.severity is Severity.ERROR)
    hint = _first(each for each in problems if each.severity is not Severity.ERROR)
    if tier.connector in ("local", "shared"):
        nearest = nearest_directory(tier.directory)
        later = ", created at the start" if tier.connector == "local" else ", not there"
        state = "" if nearest == tier.directory else later
        found = f"{tier.directory}{state}, {_gib(shutil.disk_usage(nearest).free)} free"
    else:
        nearest = nearest_directory(settings.transfer.calibration_dir)
        storage = f"storage tier: {tier.connector}" if tier.is_on else "no storage tier"
        found = f"{nearest}, {_gib(shutil.disk_usage(nearest).free)} free, {storage}"
    return Finding("disk", found, problem, hint)


def _bucket(settings: Settings) -> Iterator[Finding]:
    """Yield whether the bucket of object storage answers. Without it a service starts, and asks again."""
    group = settings.group(ObjectSettings)
    if settings.storage_tier.connector != "object" or group.url is None:
        return
    shown = mask_bucket(group.url)
    try:
        reach_bucket(group, min(settings.storage_tier.timeout, _BUCKET_SECONDS))
    except StorageError as error:
        yield Finding("bucket", f"{shown}, does not answer", hint=f"{error}; see docs/nodes.md")
    else:
        yield Finding("bucket", f"{shown}, answers")


def _first(problems: Iterable[Problem]) -> str | None:
    return next(map(str, problems), None)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
