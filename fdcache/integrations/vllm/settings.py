"""Settings from vLLM's configuration: read and checked before the weights are loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fdcache.errors import ConfigurationError
from fdcache.machine.memory import SHARE_OF_MEMORY, available_memory
from fdcache.settings import Candidate, Settings, SettingsError, Source, Sourced
from fdcache.settings.checks import REMOVED, require_host_tier, suggest
from fdcache.settings.kinds import format_size
from fdcache.settings.sources import OWN_PREFIX
from fdcache.settings.tree import GROUPS, KNOWN_NAMES, VARIABLES
from fdcache.settings.variable import Component
from fdcache.storage.factory import require_connector
from fdcache.transfer.access import rank_address
from fdcache.transfer.factory import require_connector as require_transfer

logger = logging.getLogger(__name__)

FILE = "kv_connector_extra_config"
_FAILURE_POLICY = "kv_load_failure_policy"
_FOLDER, _HOST_MEMORY, _SERVER = "FDCACHE_STORAGE_DIR", "FDCACHE_HOST_MEMORY", "FDCACHE_SERVER"
_GPUS = Path("/proc/driver/nvidia/gpus")

_ACTS = {Component.EVERYWHERE, Component.MANAGER, Component.CONTROLLER, Component.STORAGE, Component.VLLM}
_WITHOUT_EFFECT = {
    "FDCACHE_DEVICE_BLOCKS",
    "FDCACHE_DEVICE_MEMORY",
    "FDCACHE_EVENT_BUFFER",
    "FDCACHE_TRANSFER_DIR",
}
"""Settings of an engine that has its device cache from fdcache, or planes on the CPU."""

_OF_PEERS = {variable.name for variable in GROUPS["peers"]}
_TRANSFER, _ROLE, _ADDRESS = "FDCACHE_TRANSFER", "FDCACHE_TRANSFER_ROLE", "FDCACHE_TRANSFER_ADDRESS"
_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "mixed"}
"""vLLM's roles, and those of hand-overs."""

_OF_SERVICE = (_HOST_MEMORY, "FDCACHE_EVICTION")
"""Settings that are those of the service where there is one."""


def check_settings(transfer_config: Any, top: Any, vllm_config: Any) -> None:
    """Check everything that is known before the weights are loaded, and choose the host memory if nothing gives it.

    The choice goes into ``kv_connector_extra_config``, so that every process of the engine has the same. ``top``: the
    transfer configuration in which ``transfer_config`` is, itself if there is no other.

    Raises ``ConfigurationError`` for what ``load_settings``, ``failure_policy`` and the manager would raise for.
    """
    settings = given_settings(transfer_config)
    failure_policy(transfer_config, top)
    if all(settings.source(name) is Source.DEFAULT for name in (_HOST_MEMORY, _SERVER)):
        _choose_host_memory(transfer_config, top, vllm_config)
        settings = given_settings(transfer_config)
    _require_startable(settings)
    require_connector(settings.storage_tier, settings.connector_options)
    require_transfer(settings.peers_in_force)
    _require_role(transfer_config, settings)
    _require_agreement(vllm_config, settings)
    for name, wrong in _without_effect(settings):
        if settings.source(name) is Source.ARGUMENT:
            raise ConfigurationError(f"FdcacheConnector: {wrong}; leave it out")


def given_settings(transfer_config: Any, **defaults: object) -> Settings:
    """Return the settings: ``kv_connector_extra_config`` first, then the environment.

    Raises ``ConfigurationError`` for a name that is no setting, and for a wrong value.
    """
    arguments = extra_settings(transfer_config.kv_connector_extra_config)
    try:
        return Settings.load(arguments=arguments, defaults=defaults)
    except SettingsError as error:
        # It is a ValueError, of which vLLM's configuration would make an error of its own.
        raise ConfigurationError(f"FdcacheConnector: {error}") from error


def load_settings(vllm_config: Any, block_size: int) -> Settings:
    """Load the settings of an engine with blocks of ``block_size`` tokens.

    Blocks are copied to the host as soon as they are computed, unless ``FDCACHE_WRITE_POLICY`` says otherwise. Draft
    layers depend on the next token, so a match then looks one token ahead.

    Raises the errors of ``given_settings``, and ``ConfigurationError`` for settings that do not go together.
    """
    settings = given_settings(
        vllm_config.kv_transfer_config,
        FDCACHE_BLOCK_SIZE=block_size,
        FDCACHE_RANKS=int(vllm_config.parallel_config.world_size),
        FDCACHE_WRITE_POLICY="write_through",
        FDCACHE_LOOKAHEAD_TOKENS=int(_has_drafts(vllm_config)),
        FDCACHE_TRANSFER_ROLE=_ROLES[vllm_config.kv_transfer_config.kv_role],
    )
    _require_startable(settings)
    _require_role(vllm_config.kv_transfer_config, settings)
    _require_agreement(vllm_config, settings)
    engine = getattr(vllm_config.parallel_config, "data_parallel_index", 0)
    return _with_own_address(_with_own_folder(settings, engine), engine)


def _require_role(transfer_config: Any, settings: Settings) -> None:
    """Raise an error for a role of which nothing would come."""
    role = transfer_config.kv_role
    if role != "kv_both" and not settings.peers.is_on:
        raise ConfigurationError(
            f"FdcacheConnector: kv_role {role!r} hands blocks over, and {_TRANSFER} is 'none'; set it to rdma, or to "
            "ipc on one node with GPUs, or kv_role to 'kv_both'"
        )
    if settings.source(_ROLE) is not Source.DEFAULT and settings.peers.role.value != _ROLES[role]:
        raise ConfigurationError(
            f"{_ROLE}={settings.peers.role.value} ({settings.place(_ROLE)}): kv_role is {role!r}; unset it"
        )


def _has_drafts(vllm_config: Any) -> bool:
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.use_eagle())


def _require_startable(settings: Settings) -> None:
    """Raise an error for what no engine could start with."""
    if settings.cache.server is None and not settings.cache.host_memory:
        raise ConfigurationError(
            f"FdcacheConnector: {_HOST_MEMORY}=0 ({settings.place(_HOST_MEMORY)}): vLLM has a device cache of its own, "
            f"and below it there would be nothing; set {_HOST_MEMORY}, such as 8GiB, or {_SERVER}"
        )
    require_host_tier(settings)
    if settings.cache.server is not None and settings.storage_tier.is_on:
        raise ConfigurationError(
            f"FDCACHE_STORAGE ({settings.place('FDCACHE_STORAGE')}): with {_SERVER} the storage belongs to the "
            f"service; set it for `fdcache serve` and unset it here, or unset {_SERVER}"
        )


def _require_agreement(vllm_config: Any, settings: Settings) -> None:
    """Raise an error for settings that do not go with vLLM's."""
    lookahead, cache = "FDCACHE_LOOKAHEAD_TOKENS", vllm_config.cache_config
    theirs = {"FDCACHE_RANKS": int(vllm_config.parallel_config.world_size)}
    if getattr(cache, "user_specified_block_size", False):  # else vLLM may still choose another
        theirs["FDCACHE_BLOCK_SIZE"] = int(cache.block_size)
    for name, value in theirs.items():
        if settings.source(name) is not Source.DEFAULT and settings.value(name) != value:
            raise ConfigurationError(
                f"{name}={settings.value(name)} ({settings.place(name)}): vLLM has {value}; unset it"
            )
    is_set = settings.source(lookahead) is not Source.DEFAULT
    if is_set and _has_drafts(vllm_config) and settings.cache.lookahead_tokens < 1:
        raise ConfigurationError(
            f"{lookahead}=0 ({settings.place(lookahead)}): the KV of draft layers depends on the next token; set it to "
            "1"
        )
    if getattr(cache, "calculate_kv_scales", False):
        for name, is_on in (
            (_SERVER, settings.cache.server is not None),
            ("FDCACHE_STORAGE", settings.storage_tier.is_on),
        ):
            if is_on:
                raise ConfigurationError(
                    f"{name} ({settings.place(name)}): calculate_kv_scales makes other scales in each run, so that "
                    "no other engine can read its blocks; give the model KV scales, or unset the variable"
                )


# --- settings without effect --------------------------------------------------------------------------------


def warn_of_settings_without_effect(settings: Settings) -> None:
    """Log a warning for each setting that was given for an engine and has no effect in this one."""
    for _, wrong in _without_effect(settings):
        logger.warning("%s", wrong)


def _without_effect(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield each setting that has no effect, and a sentence with its place.

    The environment may be that of a service as well: its variables are not meant. ``kv_connector_extra_config`` is the
    connector's own.
    """
    for name, variable in VARIABLES.items():
        source, place = settings.source(name), settings.place(name)
        if source in (Source.DEFAULT, Source.DERIVED):
            continue
        is_own = source is Source.ARGUMENT
        if settings.cache.server is not None and name in _OF_SERVICE:
            server = f"{_SERVER} ({settings.place(_SERVER)})"
            yield name, f"{name} ({place}) has no effect beside {server}: the service's counts"
        elif name in (_WITHOUT_EFFECT if settings.peers.is_on else _WITHOUT_EFFECT | _OF_PEERS) and (
            is_own or settings.changed(name)
        ):
            yield name, f"{name} ({place}) has no effect in vLLM"
        elif is_own and not _ACTS.intersection(variable.used_in):
            whose = "a service" if name.startswith(OWN_PREFIX) else "another engine"
            yield name, f"{name} ({place}) has no effect in vLLM: it is a setting of {whose}"


# --- host memory --------------------------------------------------------------------------------------------


def _choose_host_memory(transfer_config: Any, top: Any, vllm_config: Any) -> None:
    """Set host memory that is safe for the machine: this engine's part of a quarter of what is available."""
    budget, engines = available_memory(), _engines_of_machine(vllm_config.parallel_config)
    chosen = f"{budget.nbytes // SHARE_OF_MEMORY // engines >> 20}MiB"
    if chosen == "0MiB":
        return
    for each in _places_of(transfer_config, top):
        each[FILE] = {**each.get(FILE, {}), _HOST_MEMORY: chosen}
    transfer_config.kv_connector_extra_config = {
        **transfer_config.kv_connector_extra_config,
        _HOST_MEMORY: chosen,
    }
    logger.info(
        "%s is not set: %s, a quarter of %s (%s)%s",
        _HOST_MEMORY,
        chosen,
        format_size(budget.nbytes),
        budget.limit,
        f" for {engines} engines" if engines > 1 else "",
    )


def _places_of(transfer_config: Any, top: Any) -> list[dict[str, Any]]:
    """Return copies of the entries of this connector in an outer one, in the place of the user's."""
    outer = top.kv_connector_extra_config
    if top is transfer_config or not isinstance(connectors := outer.get("connectors"), list):
        return []
    copies = [dict(each) for each in connectors]
    top.kv_connector_extra_config = {**outer, "connectors": copies}
    return [each for each in copies if each.get("kv_connector") == transfer_config.kv_connector]


def _engines_of_machine(parallel: Any) -> int:
    """Return how many engines like this one the machine may have: one for each of its GPUs, or of their groups."""
    gpus = len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0
    ranks = max(int(parallel.world_size) // int(getattr(parallel, "nnodes", 1)), 1)
    return max(gpus // ranks, int(getattr(parallel, "data_parallel_size_local", 1)), 1)


# --- vLLM's own options -------------------------------------------------------------------------------------


def failure_policy(transfer_config: Any, top: Any) -> str:
    """Return what vLLM does with a request whose load failed: "recompute" unless this connector's settings say "fail".

    vLLM does not tell its default, 'fail', from one that the user gave: ``kv_connector_extra_config`` does. Under an
    outer connector the outer one's policy counts, for every connector in it.

    Raises ``ConfigurationError`` for a policy that vLLM does not have, and for one that the outer connector's is not.
    """
    policy = transfer_config.kv_connector_extra_config.get(_FAILURE_POLICY)
    if policy not in (None, "fail", "recompute"):
        raise ConfigurationError(f"{FILE}: {_FAILURE_POLICY}={policy!r}; set it to 'recompute' or 'fail'")
    wanted = policy or "recompute"
    if top is not transfer_config and top.kv_load_failure_policy != wanted:
        raise ConfigurationError(
            f"FdcacheConnector under {top.kv_connector}: {_FAILURE_POLICY} is {top.kv_load_failure_policy!r} for all "
            f"connectors in it, and {wanted!r} here, so that each request whose load fails would "
            f"{'be computed' if wanted == 'fail' else 'end with an error'}; set {_FAILURE_POLICY} to {wanted!r} beside "
            f"'kv_connector': {top.kv_connector!r}, or to {top.kv_load_failure_policy!r} in the {FILE} of "
            "FdcacheConnector"
        )
    return wanted


def choose_failure_policy(transfer_config: Any, top: Any) -> None:
    """Make vLLM compute what cannot be loaded; by default it ends the request with an error.

    Raises the errors of ``failure_policy``.
    """
    wanted = failure_policy(transfer_config, top)
    if wanted != transfer_config.kv_load_failure_policy and top is transfer_config:
        logger.info(
            "kv_load_failure_policy is %r: %s", wanted, _COMPUTES if wanted == "recompute" else _FAILS
        )
    transfer_config.kv_load_failure_policy = wanted


_FAILS = "a request whose load fails ends with an error"
_COMPUTES = (
    "what cannot be loaded is computed, and no request fails for it. To let such requests fail, set "
    f"kv_load_failure_policy to 'fail' in {FILE}"
)


# --- what is given ------------------------------------------------------------------------------------------


def _with_own_folder(settings: Settings, engine: int) -> Settings:
    """Return the settings of one of several data parallel engines: the files of local storage have one owner."""
    if not engine or settings.storage_tier.connector != "local":
        return settings
    folder = settings.storage_tier.directory / f"engine-{engine}"
    place = f"{settings.place(_FOLDER)}, with data_parallel_index {engine}"
    return settings.with_derived({_FOLDER: (Candidate(Source.DERIVED, _FOLDER, place, folder), folder)})


def _with_own_address(settings: Settings, engine: int) -> Settings:
    """Return the settings of one of several data parallel engines: each rank of each engine answers at its own port."""
    address = settings.peers.address
    if not engine or address is None:
        return settings
    first = rank_address(address, engine * settings.value("FDCACHE_RANKS"))
    place = f"{settings.place(_ADDRESS)}, with data_parallel_index {engine}"
    return settings.with_derived({_ADDRESS: (Candidate(Source.DERIVED, _ADDRESS, place, first), first)})


def settings_in_force(settings: Settings) -> str:
    """Return the settings that differ from their defaults with their places, in one line, secrets masked.

    ``fdcache env show`` does not see ``kv_connector_extra_config``.
    """
    changed = (name for name in VARIABLES if settings.changed(name))
    return ", ".join(f"{name}={settings.render(name)} ({settings.place(name)})" for name in changed)


def extra_settings(extra: Mapping[str, object]) -> dict[str, Sourced]:
    """Return the values of ``kv_connector_extra_config`` by variable. Raises ``ConfigurationError`` for other names."""
    given = {name: value for name, value in extra.items() if name != _FAILURE_POLICY}
    for name in given:
        if name not in KNOWN_NAMES:
            near = suggest(name, KNOWN_NAMES)
            remedy = f"did you mean {near}?" if near else "`fdcache env show` lists the names"
            remedy = REMOVED.get(name, remedy)
            raise ConfigurationError(f"{FILE}: {name} is no setting; {remedy}")
    return {name: Sourced(FILE, value) for name, value in given.items()}
