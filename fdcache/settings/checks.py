"""Names that look like settings but are none, and what was probably meant."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from fdcache.machine.memory import MemoryLimits
from fdcache.settings.cache import WritePolicy
from fdcache.settings.kinds import format_size
from fdcache.settings.problems import Problem, SettingsError, Severity, disagreement, note, warning
from fdcache.settings.sources import FILE_SUFFIX, OWN_PREFIX, PREFIXES, Layer, Source
from fdcache.settings.tree import SettingsTree

logger = logging.getLogger(__name__)

_logged: set[Problem] = set()

_LINK_NAME = re.compile(r".+_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://\S+:\d+")


def is_service_link(name: str, value: object) -> bool:
    """Whether Kubernetes puts such a variable into the pods of a namespace for a Service of some name."""
    if _LINK_NAME.fullmatch(name):
        return True
    return name.endswith("_PORT") and is_link_address(value)


def is_link_address(value: object) -> bool:
    """Whether a value is what Kubernetes writes into a service link, such as ``tcp://10.0.0.1:80``."""
    return isinstance(value, str) and _LINK_VALUE.fullmatch(value) is not None


def suggest(name: str, names: Iterable[str]) -> str | None:
    """Give the name that was probably meant, if any is close."""
    folded = {known.casefold(): known for known in names}
    close = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.75)
    return folded[close[0]] if close else None


def _is_near_miss(name: str, known: str) -> bool:
    """Return whether a name is a known one misspelt. Names of the engine share words, so that each word counts."""
    words, meant = name.casefold().split("_"), known.casefold().split("_")
    if len(words) != len(meant):
        return _likeness(name, known) > 0.9
    return all(_likeness(*pair) >= 0.6 for pair in zip(words, meant, strict=True))


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def unknown_names(layers: Iterable[Layer], known: Collection[str]) -> Iterator[Problem]:
    """Find names with the prefixes of settings that no variable has; service links are left alone.

    Each release of the engine has names of its own that are not described here. They are worth a note; a warning is
    for what looks like a known name, and for names of fdcache.
    """
    for layer in layers:
        for name, given in layer.given.items():
            if not name.startswith(PREFIXES) or name in known or name.removesuffix(FILE_SUFFIX) in known:
                continue
            if is_service_link(name, given.value):
                continue
            is_own = name.startswith(OWN_PREFIX)
            meant = suggest(name, known)
            if meant and (is_own or _is_near_miss(name, meant)):
                yield warning(name, given.place, "there is no such setting", f"did you mean {meant}?")
            elif is_own:
                see = "see `fdcache env show --all` for those there are"
                yield warning(name, given.place, "there is no such setting", see)
            else:
                yield note(name, given.place, "fdcache does not know it", "it is left to the engine")


def log_misspelt(problems: Iterable[Problem]) -> None:
    """Warn of names that no setting has, of each once in a process."""
    for problem in problems:
        if problem not in _logged:
            _logged.add(problem)
            logger.warning("%s", problem)


def cross_checks(settings: SettingsTree, memory: MemoryLimits) -> Iterator[Problem]:
    """Run every check; each problem names the variables that disagree and what to do."""
    yield from _reuse_grid(settings)
    yield from _deterministic_grid(settings)
    yield from _host_memory(settings, memory)
    yield from _device_memory(settings)
    yield from _host_tier(settings)
    yield from _storage_beside_a_service(settings)
    yield from _mooncake(settings)
    yield from _recovery(settings)
    yield from _ranks(settings)


def require_host_tier(settings: SettingsTree) -> None:
    """Raise ``SettingsError`` where an engine has no host tier and settings that need one."""
    problems = tuple(_without_host_tier(settings))
    if problems:
        raise SettingsError(problems)


def _disagree(settings: SettingsTree, names: Sequence[str], wrong: str, right: str) -> Problem:
    return disagreement({name: settings.place(name) for name in names}, wrong, right)


def _reuse_grid(settings: SettingsTree) -> Iterator[Problem]:
    """In deterministic mode the grid is the split size, which is compared with the block size below."""
    name = "FDCACHE_REUSE_GRID"
    grid, block = settings.cache.reuse_grid, settings.deployment.block_size
    given = settings.source(name) not in (Source.DEFAULT, Source.DERIVED)
    if given and grid and grid % block and block % grid:
        yield _disagree(
            settings,
            (name, "FDCACHE_BLOCK_SIZE"),
            f"a grid of {grid} tokens neither divides the block size {block} nor is a multiple of it",
            f"make FDCACHE_REUSE_GRID a multiple of {block}, or unset it",
        )
    tokens = settings.cache.device_blocks * block
    if grid > tokens and settings.deployment.device_memory is None:
        cause = "FD_DETERMINISTIC_SPLIT_KV_SIZE" if settings.source(name) is Source.DERIVED else name
        problem = _disagree(
            settings,
            (cause, "FDCACHE_DEVICE_BLOCKS"),
            f"prefixes are reused in steps of {grid} tokens, and the device tier has {tokens}: nothing is ever reused",
            f"make it at most {tokens}, or FDCACHE_DEVICE_BLOCKS more",
        )
        yield replace(problem, severity=Severity.WARNING)


def _deterministic_grid(settings: SettingsTree) -> Iterator[Problem]:
    split, block = settings.attention.split_kv_size, settings.deployment.block_size
    if not settings.attention.deterministic:
        return
    grid = settings.cache.reuse_grid
    if max(grid, block) % split and not split % block:
        names = ("FDCACHE_REUSE_GRID", "FD_DETERMINISTIC_SPLIT_KV_SIZE")
        yield _disagree(
            settings,
            names,
            f"in deterministic mode prefixes reused up to a multiple of {max(grid, block)} tokens may end off the grid "
            f"of {split}",
            "unset FDCACHE_REUSE_GRID, or make it a multiple of FD_DETERMINISTIC_SPLIT_KV_SIZE",
        )
    if split % block and block % split:
        names = ("FD_DETERMINISTIC_SPLIT_KV_SIZE", "FDCACHE_BLOCK_SIZE")
        yield _disagree(
            settings,
            names,
            f"in deterministic mode {split} must divide the block size {block} or be divided by it",
            "make both powers of two, such as 16 and 64",
        )


def _host_memory(settings: SettingsTree, memory: MemoryLimits) -> Iterator[Problem]:
    wanted = settings.cache.host_memory
    limits = {"the cgroup": memory.cgroup, "the machine": memory.machine}
    tightest = min(((size, owner) for owner, size in limits.items() if size is not None), default=None)
    if tightest is None or wanted <= tightest[0]:
        return
    size, owner = tightest
    yield _disagree(
        settings,
        ("FDCACHE_HOST_MEMORY",),
        f"{format_size(wanted)} do not fit into the {size // 2**20}MiB that {owner} has",
        f"set FDCACHE_HOST_MEMORY below {size // 2**20}MiB or give the container more memory",
    )


def _device_memory(settings: SettingsTree) -> Iterator[Problem]:
    names = ("FDCACHE_DEVICE_BLOCKS", "FDCACHE_DEVICE_MEMORY")
    sources = {settings.source(name) for name in names}
    if len(sources) == 1 and Source.DEFAULT not in sources:
        yield _disagree(settings, names, "both say how large the device tier is", "unset one of them")


def _has_host_tier(settings: SettingsTree) -> bool:
    """A service has one always, and so has its client."""
    return settings.cache.host_memory > 0 or settings.cache.server is not None


def _host_tier(settings: SettingsTree) -> Iterator[Problem]:
    """A service, a replay and many an engine have host memory of their own accord, so that none given is a note."""
    given = settings.source("FDCACHE_HOST_MEMORY") is not Source.DEFAULT
    for problem in _without_host_tier(settings):
        if given:
            yield problem
        else:
            wrong = f"an engine whose own default is no host tier does not start: {problem.wrong}"
            yield replace(problem, severity=Severity.NOTE, wrong=wrong)


def _without_host_tier(settings: SettingsTree) -> Iterator[Problem]:
    if _has_host_tier(settings):
        return
    name = "FDCACHE_WRITE_POLICY"
    if settings.source(name) is not Source.DEFAULT:
        yield _disagree(
            settings,
            (name, "FDCACHE_HOST_MEMORY"),
            f"{WritePolicy(settings.cache.write_policy).value} writes to a host tier, and there is none",
            "set FDCACHE_HOST_MEMORY, such as 8GiB, or unset FDCACHE_WRITE_POLICY",
        )
    if settings.storage_tier.is_on:
        names = ("FDCACHE_STORAGE", "FDCACHE_HOST_MEMORY")
        yield _disagree(
            settings,
            names,
            f"{settings.storage_tier.connector} reads and writes through a host tier, and there is none",
            "set FDCACHE_HOST_MEMORY, such as 8GiB, or FDCACHE_STORAGE=none",
        )


def _storage_beside_a_service(settings: SettingsTree) -> Iterator[Problem]:
    """An argument is of one command, which knows itself; what is set otherwise is for services and engines alike."""
    names = ("FDCACHE_STORAGE", "FDCACHE_SERVER")
    sources = {settings.source(name) for name in names}
    if settings.storage_tier.is_on and sources.isdisjoint((Source.DEFAULT, Source.ARGUMENT)):
        problem = _disagree(
            settings,
            names,
            f"a service starts with {settings.storage_tier.connector} storage at an address, and an engine does not: "
            "its storage is the service's then",
            "give FDCACHE_STORAGE to `fdcache serve` alone, or unset FDCACHE_SERVER for an engine",
        )
        yield replace(problem, severity=Severity.NOTE)


def _mooncake(settings: SettingsTree) -> Iterator[Problem]:
    if settings.storage_tier.connector.lower() == "mooncake" and not (
        settings.mooncake.master or settings.mooncake.config_path
    ):
        names = ("FDCACHE_STORAGE", "MOONCAKE_MASTER_SERVER_ADDR")
        yield _disagree(
            settings,
            names,
            "mooncake has no master to ask",
            "set MOONCAKE_MASTER_SERVER_ADDR, such as master:50051, or MOONCAKE_CONFIG_PATH",
        )


def _recovery(settings: SettingsTree) -> Iterator[Problem]:
    if settings.scheduling.v1 and settings.scheduling.disabled_recover:
        names = ("FD_DISABLED_RECOVER", "ENABLE_V1_KVCACHE_SCHEDULER")
        yield _disagree(
            settings,
            names,
            "the v1 scheduler recomputes requests when the cache is full and cannot do without",
            "set FD_DISABLED_RECOVER=0, or ENABLE_V1_KVCACHE_SCHEDULER=0",
        )


def _ranks(settings: SettingsTree) -> Iterator[Problem]:
    devices = settings.hardware.visible_devices
    if not devices or devices == ("-1",) or settings.deployment.ranks <= len(devices):
        return
    names = ("FDCACHE_RANKS", "CUDA_VISIBLE_DEVICES")
    yield _disagree(
        settings,
        names,
        f"{settings.deployment.ranks} ranks need a device each, and {len(devices)} are visible",
        f"set FDCACHE_RANKS={len(devices)} or make more devices visible",
    )
