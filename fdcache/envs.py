"""Drop-in for the old environment module: ``envs.NAME`` gives a variable's value in its old type.

Reads follow the environment. Assigning validates and writes the environment (None removes), ``del`` removes,
``dir()`` lists the variables. The description of the variables is loaded at the first access.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...

    def get_unique_name(name: str) -> str:
        """Give a shared-memory name of its own to each deployment that sets ``SHM_UUID``."""
        ...


class _Unloaded(ModuleType):
    """The module before its first access, which turns it into the real one."""

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return _load().__dict__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_load(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(_load(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_load(), name)

    def __dir__(self) -> list[str]:
        return dir(_load())


def _load() -> ModuleType:
    from fdcache.settings.legacy import VariablesModule

    module = sys.modules[__name__]
    module.__class__ = VariablesModule
    return module


sys.modules[__name__].__class__ = _Unloaded
