"""Drop-in for the old environment module: ``envs.NAME`` is a variable's value in its old type.

    from fdcache import envs

    envs.FD_LOG_DIR               # "log"
    envs.FD_DEBUG = 1             # validates and sets os.environ["FD_DEBUG"]

Reads follow the environment. Assigning None, or ``del``, removes a variable; ``dir()`` lists them. The description of
the variables is imported at the first access.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...

    def get_unique_name(name: str) -> str:
        """Return ``name`` with the suffix ``SHM_UUID``, which differs between deployments, if it is set."""
        ...


class _Unloaded(ModuleType):
    """The module before its first access, which replaces its class."""

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
    from fdcache.integrations.fastdeploy.old_module import VariablesModule

    module = sys.modules[__name__]
    module.__class__ = VariablesModule
    return module


sys.modules[__name__].__class__ = _Unloaded
