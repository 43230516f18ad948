"""Replacements for FastDeploy's cache manager and controller (v1), built on fdcache's own.

    manager = CacheManager(fd_config)                       # in the scheduler
    controller = CacheController(fd_config, local_rank, device_id)  # in each worker

FastDeploy is not imported: configuration, requests and attention backends are read by attribute name. An engine that
uses these two classes carries plans and reports between them itself; the plug-in (``fastdeploy.plugin``) does it for
FastDeploy. docs/migration.md has a table of every member.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdcache.controller.layers import LayerDoneCounter
    from fdcache.errors import LayerSwapTimeoutError
    from fdcache.integrations.fastdeploy.config import layout_from_config, settings_from_config
    from fdcache.integrations.fastdeploy.controller import FastDeployController
    from fdcache.integrations.fastdeploy.controller import FastDeployController as CacheController
    from fdcache.integrations.fastdeploy.manager import FastDeployManager
    from fdcache.integrations.fastdeploy.manager import FastDeployManager as CacheManager
    from fdcache.integrations.fastdeploy.request_fields import MatchedPrefix

_HOME_OF = {
    "FastDeployController": "fdcache.integrations.fastdeploy.controller",
    "FastDeployManager": "fdcache.integrations.fastdeploy.manager",
    "LayerDoneCounter": "fdcache.controller.layers",
    "LayerSwapTimeoutError": "fdcache.errors",
    "MatchedPrefix": "fdcache.integrations.fastdeploy.request_fields",
    "layout_from_config": "fdcache.integrations.fastdeploy.config",
    "settings_from_config": "fdcache.integrations.fastdeploy.config",
}

_ALIASES = {"CacheController": "FastDeployController", "CacheManager": "FastDeployManager"}
"""FastDeploy's own names of the two classes."""

__all__ = [
    "CacheController",
    "CacheManager",
    "FastDeployController",
    "FastDeployManager",
    "LayerDoneCounter",
    "LayerSwapTimeoutError",
    "MatchedPrefix",
    "layout_from_config",
    "settings_from_config",
]


def __getattr__(name: str) -> Any:
    """Import the module of a name when it is first used: the description of the variables needs none of them."""
    own_name = _ALIASES.get(name, name)
    if own_name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[own_name]), own_name)
    globals()[name] = value
    return value
