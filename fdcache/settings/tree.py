"""Every group in one model, and where each value came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self, cast

from pydantic import Field, PrivateAttr
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from fdcache.settings.cache import (
    CacheSettings,
    DeploymentSettings,
    MooncakeSettings,
    StorageTierSettings,
    TransferSettings,
)
from fdcache.settings.engine_model import (
    AttentionSettings,
    HardwareSettings,
    KernelSettings,
    ModelSettings,
    MoeSettings,
    SamplingSettings,
)
from fdcache.settings.engine_serving import (
    DisaggregationSettings,
    EngineCacheSettings,
    SchedulingSettings,
    ServiceSettings,
    StorageSettings,
)
from fdcache.settings.observability import LoggingSettings, TracingSettings, UsageSettings
from fdcache.settings.problems import Problem, SettingsError, Severity, error
from fdcache.settings.server import FileSettings, ServerSettings
from fdcache.settings.sources import FILE_SUFFIX, OWN_PREFIX, Candidate, Source
from fdcache.settings.variable import Group, Variable, describe

if TYPE_CHECKING:
    from fdcache.layout import KVLayout

SOURCES = "sources"
"""The name under which the sources to read are passed; it is no field, and no value."""


class SettingsTree(BaseSettings):
    """Every group, and where each value came from."""

    model_config = SettingsConfigDict(frozen=True, case_sensitive=True, hide_input_in_errors=True)

    files: FileSettings = Field(default_factory=FileSettings)
    deployment: DeploymentSettings = Field(default_factory=DeploymentSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    server: ServerSettings = Field(default_factory=ServerSettings)
    transfer: TransferSettings = Field(default_factory=TransferSettings)
    storage_tier: StorageTierSettings = Field(default_factory=StorageTierSettings)
    mooncake: MooncakeSettings = Field(default_factory=MooncakeSettings)
    logging: LoggingSettings = Field(default_factory=LoggingSettings)
    tracing: TracingSettings = Field(default_factory=TracingSettings)
    usage: UsageSettings = Field(default_factory=UsageSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    attention: AttentionSettings = Field(default_factory=AttentionSettings)
    moe: MoeSettings = Field(default_factory=MoeSettings)
    kernels: KernelSettings = Field(default_factory=KernelSettings)
    scheduling: SchedulingSettings = Field(default_factory=SchedulingSettings)
    engine_cache: EngineCacheSettings = Field(default_factory=EngineCacheSettings)
    storage: StorageSettings = Field(default_factory=StorageSettings)
    disaggregation: DisaggregationSettings = Field(default_factory=DisaggregationSettings)
    service: ServiceSettings = Field(default_factory=ServiceSettings)
    hardware: HardwareSettings = Field(default_factory=HardwareSettings)

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
        """Take the sources that are passed; without any, the groups that are passed and nothing else."""
        passed = cast(InitSettingsSource, init_settings).init_kwargs
        sources: tuple[PydanticBaseSettingsSource, ...] = passed.get(SOURCES, (init_settings,))
        return sources

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """What is doubtful but keeps nothing of fdcache from starting: unknown and deprecated names, values that are
        wrong for the engine.
        """
        return self._warnings

    @property
    def misspelt(self) -> tuple[Problem, ...]:
        """Those of the warnings that are about names of fdcache which no setting has."""
        return tuple(
            problem
            for problem in self._warnings
            if problem.severity is Severity.WARNING
            if all(
                name.startswith(OWN_PREFIX) and KNOWN_NAMES.isdisjoint((name, name.removesuffix(FILE_SUFFIX)))
                for name in problem.variables
            )
        )

    def value(self, name: str) -> Any:
        """Give the value of a variable by its environment name."""
        variable = VARIABLES[name]
        return getattr(getattr(self, variable.group), variable.field)

    def candidates(self, name: str) -> tuple[Candidate, ...]:
        """Give every value found for a variable, the one in force first; empty where the default holds."""
        return self._candidates.get(name, ())

    def source(self, name: str) -> Source:
        """Say which source the value of a variable came from."""
        candidates = self.candidates(name)
        return candidates[0].source if candidates else Source.DEFAULT

    def place(self, name: str) -> str:
        """Say where the value of a variable stands: a file and its line, an option, or the kind of source."""
        candidates = self.candidates(name)
        return candidates[0].place if candidates else Source.DEFAULT.value

    def without_sources(self, group: str) -> Self:
        """Give the same settings for a caller who replaces a group: where its values came from is forgotten."""
        result = self.model_copy()
        replaced = {variable.name for variable in GROUPS[group]}
        result._candidates = {name: each for name, each in self._candidates.items() if name not in replaced}
        return result

    def changed(self, name: str) -> bool:
        """Whether a variable's value differs from its default."""
        return bool(self.value(name) != DEFAULTS.value(name))

    def render(self, name: str) -> str | None:
        """Write a variable's value as text, a secret masked."""
        return VARIABLES[name].render(self.value(name))

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the names and values in force that are no secrets, in hexadecimal."""
        values = {name: self.render(name) for name, variable in VARIABLES.items() if not variable.secret}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def check_layout(self, layout: KVLayout) -> None:
        """Compare the block size and ranks that were given with the layout of the engine.

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
        """Give the cache's settings with ``FDCACHE_DEVICE_MEMORY``, where that is set, turned into blocks.

        ``device_bytes`` is the memory of one rank's device, of which a share is taken; a function is called for it only
        then.

        Raises:
            SettingsError: the memory holds not one block, or a share is set and ``device_bytes`` is not known.
        """
        name, memory = "FDCACHE_DEVICE_MEMORY", self.deployment.device_memory
        if memory is None or self._strength("FDCACHE_DEVICE_BLOCKS") < self._strength(name):
            return self.cache
        if isinstance(memory, float):
            if device_bytes is None:
                wrong = f"{memory} is a share of a device whose memory is not known"
                raise SettingsError([error(name, self.place(name), wrong, "give a size such as 40GiB")])
            memory = int(memory * (device_bytes() if callable(device_bytes) else device_bytes))
        block_bytes = sum(
            plane.device_stride * (layout.draft_block_ratio if layout.is_draft(plane.layer) else 1)
            for plane in layout.planes
        )
        blocks = int(memory / block_bytes)
        if not blocks:
            wrong = f"{memory} bytes hold not one block of {block_bytes:g} bytes"
            raise SettingsError([error(name, self.place(name), wrong, "give at least that")])
        return self.cache.model_copy(update={"device_blocks": blocks})

    def _strength(self, name: str) -> int:
        return list(Source).index(self.source(name))


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
