"""Settings that integrations describe: groups of variables, what follows from them, and what conflicts.

An extension is a module with an ``EXTENSION``. ``Settings`` has its groups beside fdcache's own, so that every command
and every source works for both; fdcache itself reads their values by the names of the variables.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fdcache.settings.cache import CacheSettings, DeploymentSettings, StorageTierSettings
from fdcache.settings.problems import Problem
from fdcache.settings.sources import Candidate, Source
from fdcache.settings.variable import Group

SomeGroup = TypeVar("SomeGroup", bound=Group)

_MODULES = (
    "fdcache.storage.objects.variables",
    "fdcache.transfer.nodes.variables",
    "fdcache.integrations.mooncake.variables",
    "fdcache.integrations.fastdeploy.variables",
)


class GivenSettings(Protocol):
    """What the rules of an extension may ask of the settings; ``SettingsTree`` explains it."""

    @property
    def deployment(self) -> DeploymentSettings: ...  # noqa: D102

    @property
    def cache(self) -> CacheSettings: ...  # noqa: D102

    @property
    def storage_tier(self) -> StorageTierSettings: ...  # noqa: D102

    def group(self, kind: type[SomeGroup]) -> SomeGroup: ...  # noqa: D102

    def value(self, name: str) -> Any: ...  # noqa: D102

    def source(self, name: str) -> Source: ...  # noqa: D102

    def place(self, name: str) -> str: ...  # noqa: D102

    def conflict(self, names: Sequence[str], wrong: str, right: str) -> Problem: ...  # noqa: D102


def _nothing(_: GivenSettings) -> Iterator[tuple[str, Candidate]]:
    return iter(())


def _no_problem(_: GivenSettings) -> Iterator[Problem]:
    return iter(())


@dataclass(frozen=True, slots=True)
class Extension:
    """Groups by name, in the order of pages and templates.

    ``derive`` yields values of variables that follow from others; ``check`` yields conflicts.
    """

    groups: Mapping[str, type[Group]]
    derive: Callable[[GivenSettings], Iterator[tuple[str, Candidate]]] = _nothing
    check: Callable[[GivenSettings], Iterator[Problem]] = _no_problem


def extensions() -> Iterator[Extension]:
    """Import and yield every extension."""
    for name in _MODULES:
        yield importlib.import_module(name).EXTENSION
