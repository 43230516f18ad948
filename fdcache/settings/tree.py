"""The settings model: every group, and the source of each value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

from pydantic import Field, PrivateAttr, create_model
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from fdcache.settings.cache import CacheSettings, CopySettings, DeploymentSettings, StorageTierSettings
from fdcache.settings.extensions import SomeGroup, extensions
from fdcache.settings.peers import PeerSettings, TransferRole
from fdcache.settings.problems import Problem, SettingsError, Severity, disagreement, error
from fdcache.settings.server import FileSettings, ServerSettings
from fdcache.settings.sources import FILE_SUFFIX, OWN_PREFIX, Candidate, Source
from fdcache.settings.variable import Group, Variable, describe

if TYPE_CHECKING:
    from fdcache.layout import KVLayout

SOURCES = "sources"
"""Keyword under which ``SettingsTree`` takes the sources to read; it is not a field."""


class OwnSettings(BaseSettings):
    """The groups of fdcache's own settings, and the source of each value."""

    model_config = SettingsConfigDict(frozen=True, case_sensitive=True, hide_input_in_errors=True)

    files: FileSettings = Field(default_factory=FileSettings)
    deployment: DeploymentSettings = Field(default_factory=DeploymentSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    server: ServerSettings = Field(default_factory=ServerSettings)
    transfer: CopySettings = Field(default_factory=CopySettings)
    peers: PeerSettings = Field(default_factory=PeerSettings)
    storage_tier: StorageTierSettings = Field(default_factory=StorageTierSettings)

    _candidates: Mapping[str, tuple[Candidate, ...]] = PrivateAttr(default_factory=dict)
    _warnings: tuple[Problem, ...] = PrivateAttr(default=())

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources passed as ``SOURCES``; without any, only the groups passed."""
        passed = cast(InitSettingsSource, init_settings).init_kwargs
        sources: tuple[PydanticBaseSettingsSource, ...] = passed.get(SOURCES, (init_settings,))
        return sources

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """Problems that do not stop fdcache: unknown and deprecated names, values wrong for the engine alone."""
        return self._warnings

    @property
    def misspelt(self) -> tuple[Problem, ...]:
        """Warnings about names with fdcache's prefix that no setting has."""
        return tuple(
            problem
            for problem in self._warnings
            if problem.severity is Severity.WARNING
            if all(
                name.startswith(OWN_PREFIX) and KNOWN_NAMES.isdisjoint((name, name.removesuffix(FILE_SUFFIX)))
                for name in problem.variables
            )
        )

    @property
    def peers_in_force(self) -> PeerSettings:
        """Settings of hand-overs, with the role ``mixed`` if a split deployment may become a centralised one."""
        if not self.value("FD_PD_CHANGEABLE"):
            return self.peers
        return self.peers.model_copy(update={"role": TransferRole.MIXED})

    def group(self, kind: type[SomeGroup]) -> SomeGroup:
        """Return the group of a class, such as one of an integration."""
        return next(value for _, value in self if isinstance(value, kind))

    @property
    def connector_options(self) -> Group | None:
        """The group that has the name of the storage connector: its own settings, if it has some."""
        found = getattr(self, self.storage_tier.connector, None)
        return found if isinstance(found, Group) else None

    def conflict(self, names: Sequence[str], wrong: str, right: str) -> Problem:
        """Return an error about several variables."""
        return disagreement({name: self.place(name) for name in names}, wrong, right)

    def value(self, name: str) -> Any:
        """Return the value of a variable by its environment name."""
        variable = VARIABLES[name]
        return getattr(getattr(self, variable.group), variable.field)

    def candidates(self, name: str) -> tuple[Candidate, ...]:
        """Return every value given for a variable, the one in effect first; empty if none was given."""
        return self._candidates.get(name, ())

    def source(self, name: str) -> Source:
        """Return the source of a variable's value."""
        candidates = self.candidates(name)
        return candidates[0].source if candidates else Source.DEFAULT

    def place(self, name: str) -> str:
        """Return where a variable's value is set: file and line, an option, or the kind of source."""
        candidates = self.candidates(name)
        return candidates[0].place if candidates else Source.DEFAULT.value

    def without_sources(self, group: str) -> Self:
        """Return a copy that forgets where the values of a group came from, for a caller that replaces them."""
        replaced = {variable.name for variable in GROUPS[group]}
        return self.with_candidates(
            {name: each for name, each in self._candidates.items() if name not in replaced}
        )

    def with_candidates(self, candidates: Mapping[str, tuple[Candidate, ...]]) -> Self:
        """Return a copy with the values given for each variable, the one in effect first."""
        result = self.model_copy()
        result._candidates = dict(candidates)
        return result

    def with_derived(self, derived: Mapping[str, tuple[Candidate, Any]]) -> Self:
        """Return a copy with other values for some variables, and where each comes from."""
        groups: dict[str, dict[str, Any]] = {}
        candidates = dict(self._candidates)
        for name, (candidate, value) in derived.items():
            groups.setdefault(VARIABLES[name].group, {})[VARIABLES[name].field] = value
            candidates[name] = (candidate, *candidates.get(name, ()))
        changed = {group: getattr(self, group).model_copy(update=each) for group, each in groups.items()}
        return self.model_copy(update=changed).with_candidates(candidates)

    def with_warnings(self, warnings: tuple[Problem, ...]) -> Self:
        """Return a copy with these warnings."""
        result = self.model_copy()
        result._warnings = warnings
        return result

    def changed(self, name: str) -> bool:
        """Return True if a variable's value differs from its described default."""
        return bool(self.value(name) != DEFAULTS.value(name))

    def render(self, name: str) -> str | None:
        """Write a variable's value as text, a secret masked."""
        return VARIABLES[name].render(self.value(name))

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the names and values in effect, without secrets, in hexadecimal."""
        values = {name: self.render(name) for name, variable in VARIABLES.items() if not variable.secret}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def check_layout(self, layout: KVLayout) -> None:
        """Compare block size and ranks, where they are set, with the engine's layout.

        Raises:
            SettingsError: block size or ranks differ.
        """
        pairs = (
            ("FDCACHE_BLOCK_SIZE", self.deployment.block_size, "block size", layout.block_size),
            ("FDCACHE_RANKS", self.deployment.ranks, "number of tensor-parallel ranks", layout.tp_size),
        )
        problems = [
            error(
                name,
                self.place(name),
                f"{mine} is not the layout's {what} {theirs}",
                f"set {name}={theirs}",
            )
            for name, mine, what, theirs in pairs
            if mine != theirs and self.source(name) is not Source.DEFAULT
        ]
        if problems:
            raise SettingsError(problems)

    def cache_for(
        self, layout: KVLayout, device_bytes: int | Callable[[], int] | None = None
    ) -> CacheSettings:
        """Return the cache's settings with ``FDCACHE_DEVICE_MEMORY``, if that is set, converted to blocks.

        Args:
            layout: the layout of the blocks.
            device_bytes: memory of one rank's device, for a share of it; a function is called only for a share.

        Raises:
            SettingsError: the memory is less than one block, or a share is set without ``device_bytes``.
        """
        name, memory = "FDCACHE_DEVICE_MEMORY", self.deployment.device_memory
        if memory is None or self._strength("FDCACHE_DEVICE_BLOCKS") < self._strength(name):
            return self.cache
        if isinstance(memory, float):
            if device_bytes is None:
                wrong = f"{memory} is a share of a device whose memory is unknown"
                raise SettingsError([error(name, self.place(name), wrong, "give a size such as 40GiB")])
            memory = int(memory * (device_bytes() if callable(device_bytes) else device_bytes))
        block_bytes = sum(
            plane.device_stride * (layout.draft_block_ratio if layout.is_draft(plane.layer) else 1)
            for plane in layout.planes
        )
        blocks = int(memory / block_bytes)
        if not blocks:
            wrong = f"{memory} bytes are less than one block of {block_bytes:g} bytes"
            raise SettingsError([error(name, self.place(name), wrong, "give at least one block")])
        return self.cache.model_copy(update={"device_blocks": blocks})

    def _strength(self, name: str) -> int:
        return list(Source).index(self.source(name))


if TYPE_CHECKING:

    class SettingsTree(OwnSettings):
        """Every group of settings, those of integrations too. ``Settings`` adds reading them."""

else:
    _FROM_INTEGRATIONS = {
        name: (group, Field(default_factory=group))
        for extension in extensions()
        for name, group in extension.groups.items()
    }
    SettingsTree = create_model(
        "SettingsTree", __base__=OwnSettings, __module__=__name__, **_FROM_INTEGRATIONS
    )

GROUPS: Mapping[str, tuple[Variable, ...]] = {
    group: tuple(describe(group, info.annotation))
    for group, info in SettingsTree.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, Group)
}
VARIABLES: Mapping[str, Variable] = {
    variable.name: variable for members in GROUPS.values() for variable in members
}
KNOWN_NAMES = frozenset(
    name for variable in VARIABLES.values() for name in (variable.name, *variable.aliases)
)
DEFAULTS = SettingsTree()
