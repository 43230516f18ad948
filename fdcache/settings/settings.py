"""``Settings``: every group in one model, and where each value came from."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from typing import Any, Protocol

from pydantic import Field, PrivateAttr

from fdcache.settings.attention import AttentionSettings
from fdcache.settings.cache import CacheSettings
from fdcache.settings.deployment import DeploymentSettings
from fdcache.settings.disaggregation import DisaggregationSettings
from fdcache.settings.engine_cache import EngineCacheSettings
from fdcache.settings.files import FileSettings
from fdcache.settings.hardware import HardwareSettings
from fdcache.settings.kernels import KernelSettings
from fdcache.settings.logging import LoggingSettings
from fdcache.settings.model import ModelSettings
from fdcache.settings.moe import MoeSettings
from fdcache.settings.problems import Problem, SettingsError, error
from fdcache.settings.sampling import SamplingSettings
from fdcache.settings.scheduling import SchedulingSettings
from fdcache.settings.server import ServerSettings
from fdcache.settings.service import ServiceSettings
from fdcache.settings.sources import Candidate, Source
from fdcache.settings.storage import StorageSettings
from fdcache.settings.tracing import TracingSettings
from fdcache.settings.transfer import TransferSettings
from fdcache.settings.usage import UsageSettings
from fdcache.settings.variable import Group, Variable, describe


class Layout(Protocol):
    """What a KV layout has that settings must agree with."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""
        ...


class Settings(Group):
    """Everything configurable. ``Settings()`` is the defaults, ``Settings.load()`` what is in force."""

    files: FileSettings = Field(default_factory=FileSettings)
    deployment: DeploymentSettings = Field(default_factory=DeploymentSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    server: ServerSettings = Field(default_factory=ServerSettings)
    transfer: TransferSettings = Field(default_factory=TransferSettings)
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

    @staticmethod
    def load(
        *,
        environ: Mapping[str, str] | None = None,
        arguments: Mapping[str, object] | None = None,
        defaults: Mapping[str, object] | None = None,
    ) -> Settings:
        """Read every source: arguments > environment > secrets directory > dotenv file > defaults.

        ``environ`` stands for the process environment; ``arguments`` maps variable names to explicit values,
        of which None counts as not given; ``defaults`` are a caller's own, in place of those described.

        Raises:
            SettingsError: the configuration is wrong; its ``problems`` name every variable concerned.
        """
        from fdcache.settings.survey import survey

        found = survey(environ, arguments, defaults)
        if found.errors:
            raise SettingsError(found.errors)
        for deprecated in found.deprecations:
            warnings.warn(str(deprecated), FutureWarning, stacklevel=2)
        return found.settings

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """What is doubtful but keeps nothing from starting: unknown and deprecated names."""
        return self._warnings

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

    def check_layout(self, layout: Layout) -> None:
        """Compare with the layout of the engine.

        Raises:
            SettingsError: block size or ranks differ.
        """
        pairs = (
            ("FDCACHE_BLOCK_SIZE", self.deployment.block_size, "block size", layout.block_size),
            ("FDCACHE_RANKS", self.deployment.ranks, "number of tensor-parallel ranks", layout.tp_size),
        )
        problems = [
            error(
                (name,),
                self.source(name),
                f"{mine} is not the layout's {what} {theirs}",
                f"set {name}={theirs}",
            )
            for name, mine, what, theirs in pairs
            if mine != theirs
        ]
        if problems:
            raise SettingsError(problems)


VARIABLES: Mapping[str, Variable] = {
    variable.name: variable
    for group, info in Settings.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, Group)
    for variable in describe(group, info.annotation)
}
DEFAULTS = Settings()
