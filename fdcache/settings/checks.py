"""Checks beyond single values: settings that conflict with each other or the machine, and unknown names."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from fdcache.machine.memory import MemoryLimits
from fdcache.settings.cache import WritePolicy
from fdcache.settings.extensions import extensions
from fdcache.settings.kinds import format_size
from fdcache.settings.peers import address_fault, key_fault
from fdcache.settings.problems import Problem, SettingsError, Severity, note, warning
from fdcache.settings.sources import FILE_SUFFIX, OWN_PREFIX, PREFIXES, Layer, Source
from fdcache.settings.tree import SettingsTree

logger = logging.getLogger(__name__)


def cross_checks(settings: SettingsTree, memory: MemoryLimits) -> Iterator[Problem]:
    """Run every check; each problem names the variables that conflict, and the remedy."""
    yield from _reuse_grid(settings)
    yield from _host_memory(settings, memory)
    yield from _device_memory(settings)
    yield from _host_tier(settings)
    yield from _storage_beside_a_service(settings)
    yield from _transfer_address(settings)
    for extension in extensions():
        yield from extension.check(settings)


def require_host_tier(settings: SettingsTree) -> None:
    """Raise ``SettingsError`` if an engine has no host tier and settings that need one."""
    problems = tuple(_without_host_tier(settings))
    if problems:
        raise SettingsError(problems)


def _reuse_grid(settings: SettingsTree) -> Iterator[Problem]:
    """Compare the grid with block size and device tier. In deterministic mode the grid is the split size."""
    name = "FDCACHE_REUSE_GRID"
    grid, block = settings.cache.reuse_grid, settings.deployment.block_size
    is_set = settings.source(name) not in (Source.DEFAULT, Source.DERIVED)
    if is_set and grid and grid % block and block % grid:
        yield settings.conflict(
            (name, "FDCACHE_BLOCK_SIZE"),
            f"a grid of {grid} tokens neither divides the block size {block} nor is a multiple of it",
            f"make FDCACHE_REUSE_GRID a multiple of {block}, or unset it",
        )
    tokens = settings.cache.device_blocks * block
    if grid > tokens and settings.deployment.device_memory is None:
        cause = "FD_DETERMINISTIC_SPLIT_KV_SIZE" if settings.source(name) is Source.DERIVED else name
        problem = settings.conflict(
            (cause, "FDCACHE_DEVICE_BLOCKS"),
            f"prefixes are reused in steps of {grid} tokens, and the device tier has {tokens}: nothing is ever reused",
            f"make it at most {tokens}, or raise FDCACHE_DEVICE_BLOCKS",
        )
        yield replace(problem, severity=Severity.WARNING)


def _host_memory(settings: SettingsTree, memory: MemoryLimits) -> Iterator[Problem]:
    wanted = settings.cache.host_memory
    limits = {"the cgroup": memory.cgroup, "the machine": memory.machine}
    known = [(size, owner) for owner, size in limits.items() if size is not None]
    size, owner = min(known, default=(wanted, ""))
    if wanted > size:
        yield settings.conflict(
            ("FDCACHE_HOST_MEMORY",),
            f"{format_size(wanted)} do not fit into the {size // 2**20}MiB of {owner}",
            f"set FDCACHE_HOST_MEMORY below {size // 2**20}MiB, or give the container more memory",
        )


def _device_memory(settings: SettingsTree) -> Iterator[Problem]:
    names = ("FDCACHE_DEVICE_BLOCKS", "FDCACHE_DEVICE_MEMORY")
    sources = {settings.source(name) for name in names}
    if len(sources) == 1 and Source.DEFAULT not in sources:
        yield settings.conflict(names, "both set the size of the device tier", "unset one of them")


def _host_tier(settings: SettingsTree) -> Iterator[Problem]:
    """Report a missing host tier as a note where nothing sets its size.

    A service, a replay and many engines have host memory by their own defaults.
    """
    is_set = settings.source("FDCACHE_HOST_MEMORY") is not Source.DEFAULT
    for problem in _without_host_tier(settings):
        if is_set:
            yield problem
        else:
            wrong = f"an engine whose own default is no host tier does not start: {problem.wrong}"
            yield replace(problem, severity=Severity.NOTE, wrong=wrong)


def _without_host_tier(settings: SettingsTree) -> Iterator[Problem]:
    if settings.cache.host_memory > 0 or settings.cache.server is not None:
        return  # a service always has a host tier, and so have its clients
    name = "FDCACHE_WRITE_POLICY"
    if settings.source(name) is not Source.DEFAULT:
        yield settings.conflict(
            (name, "FDCACHE_HOST_MEMORY"),
            f"{WritePolicy(settings.cache.write_policy).value} writes to a host tier, and there is none",
            "set FDCACHE_HOST_MEMORY, such as 8GiB, or unset FDCACHE_WRITE_POLICY",
        )
    if settings.storage_tier.is_on:
        yield settings.conflict(
            ("FDCACHE_STORAGE", "FDCACHE_HOST_MEMORY"),
            f"{settings.storage_tier.connector} reads and writes through a host tier, and there is none",
            "set FDCACHE_HOST_MEMORY, such as 8GiB, or FDCACHE_STORAGE=none",
        )


def _transfer_address(settings: SettingsTree) -> Iterator[Problem]:
    """Report an address of hand-overs at which no peer can ask, or everyone, as an engine refuses it."""
    address, key = settings.peers.address, settings.peers.key
    if not settings.peers.is_on or address is None:
        return
    names = ("FDCACHE_TRANSFER_ADDRESS", "FDCACHE_TRANSFER_KEY")
    if (fault := address_fault(address, settings.deployment.ranks - 1)) is not None:
        yield settings.conflict(names[:1], *fault)
    if not address.startswith("tcp://"):
        return
    if key is None:
        yield settings.conflict(
            names,
            "whoever reaches this address could read and change blocks",
            "set FDCACHE_TRANSFER_KEY_FILE to a file with a secret that all instances share",
        )
    elif (fault := key_fault(key.get_secret_value())) is not None:
        yield settings.conflict(names[1:], *fault)


def _storage_beside_a_service(settings: SettingsTree) -> Iterator[Problem]:
    """Record what starts as a service and not as an engine. An argument belongs to one command, which checks itself."""
    names = ("FDCACHE_STORAGE", "FDCACHE_SERVER")
    sources = {settings.source(name) for name in names}
    if settings.storage_tier.is_on and sources.isdisjoint((Source.DEFAULT, Source.ARGUMENT)):
        problem = settings.conflict(
            names,
            f"a service with {settings.storage_tier.connector} storage starts at this address; an engine does not "
            "start, since its storage is then the service's",
            "set FDCACHE_STORAGE for `fdcache serve` alone, or unset FDCACHE_SERVER for an engine",
        )
        yield replace(problem, severity=Severity.NOTE)


# --- names --------------------------------------------------------------------------------------------------

_LINK_NAME = re.compile(r".+_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://\S+:\d+")

_IS_CONSTANT = "unset it; its default is fixed"

REMOVED: Mapping[str, str] = {
    "FDCACHE_EVICTION_OBJECTIVE": "unset it; FDCACHE_EVICTION=learned keeps the blocks that are found most",
    "FDCACHE_FIRST_GROUP_LAYERS": _IS_CONSTANT,
    "FDCACHE_GROUP_LAYERS": _IS_CONSTANT,
    "FDCACHE_LOADS_AHEAD": _IS_CONSTANT,
    "FDCACHE_COPY_THREADS": _IS_CONSTANT,
    "FDCACHE_SWAP_CTAS": "unset it; `fdcache init` measures the number, and FDCACHE_SWAP_SM_BUDGET limits it",
    "FDCACHE_STORAGE_THREADS": _IS_CONSTANT,
    "FDCACHE_STORAGE_RETRY": _IS_CONSTANT,
    "FDCACHE_STORAGE_WRITE_BLOCKS": _IS_CONSTANT,
    "FDCACHE_PREFETCH_TIMEOUT": "unset it; FDCACHE_LOAD_OR_RECOMPUTE=auto waits for reads that take less time than "
    "computing, and FDCACHE_PREFETCH_POLICY=wait_complete waits for all",
    "FDCACHE_PREFETCH_BANDWIDTH": "unset it; FDCACHE_LOAD_OR_RECOMPUTE=auto measures the bandwidth",
    "FDCACHE_TRANSFER_THREADS": _IS_CONSTANT,
    "FDCACHE_TRANSFER_RING": _IS_CONSTANT,
    "FDCACHE_EXTENT_SIZE": "unset it; FDCACHE_HOST_MEMORY decides it",
    "FDCACHE_DEFER_TIMEOUT": _IS_CONSTANT,
    "FDCACHE_LAYER_TIMEOUT": "unset it; an engine gives `wait_for_layer` a timeout, or waits 30 s",
    "FDCACHE_STORAGE_FSYNC_INTERVAL": "unset it; FDCACHE_STORAGE_FSYNC=always syncs every write, interval every 5 s",
    "FDCACHE_EVICTION_LOG": _IS_CONSTANT,
}
"""Settings that earlier versions had, each with the remedy."""

_logged: set[Problem] = set()


def unknown_names(layers: Iterable[Layer], known: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each name with a prefix of settings that no variable has.

    Names of fdcache, and those close to a known name, are warnings. Any other is a note: every release of the
    engine has names that are not described here. Kubernetes' service links are ignored.
    """
    for layer in layers:
        for name, value in layer.values.items():
            if not name.startswith(PREFIXES) or name in known or name.removesuffix(FILE_SUFFIX) in known:
                continue
            if is_service_link(name, value.value):
                continue
            is_own = name.startswith(OWN_PREFIX)
            meant = suggest(name, known)
            if remedy := REMOVED.get(name.removesuffix(FILE_SUFFIX)):
                yield warning(name, value.place, "this setting is gone", remedy)
            elif meant and (is_own or _is_near_miss(name, meant)):
                yield warning(name, value.place, "there is no such setting", f"did you mean {meant}?")
            elif is_own:
                remedy = "`fdcache env show --all` lists the settings"
                yield warning(name, value.place, "there is no such setting", remedy)
            else:
                yield note(name, value.place, "fdcache does not know it", "it is left to the engine")


def suggest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that was probably meant; None if none is close."""
    folded = {known.casefold(): known for known in names}
    close = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.75)
    return folded[close[0]] if close else None


def _is_near_miss(name: str, known: str) -> bool:
    """Return True if ``name`` is probably ``known`` misspelt. Engine names share words, so every word must be close."""
    words, meant = name.casefold().split("_"), known.casefold().split("_")
    if len(words) != len(meant):
        return _similarity(name, known) > 0.9
    return all(_similarity(*pair) >= 0.6 for pair in zip(words, meant, strict=True))


def _similarity(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def is_service_link(name: str, value: object) -> bool:
    """Return True for a variable that Kubernetes adds to pods for a Service, such as ``FD_API_PORT_80_TCP``."""
    return _LINK_NAME.fullmatch(name) is not None or (name.endswith("_PORT") and is_link_address(value))


def is_link_address(value: object) -> bool:
    """Return True for the value of a service link, such as ``tcp://10.0.0.1:80``."""
    return isinstance(value, str) and _LINK_VALUE.fullmatch(value) is not None


def log_misspelt(problems: Iterable[Problem]) -> None:
    """Log a warning for each misspelt name, once per process."""
    for problem in problems:
        if problem not in _logged:
            _logged.add(problem)
            logger.warning("%s", problem)
