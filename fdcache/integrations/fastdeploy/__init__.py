"""Replacements for FastDeploy's cache manager and controller (v1), built on fdcache's own.

    manager = CacheManager(fd_config)                       # in the scheduler
    controller = CacheController(fd_config, local_rank, device_id)  # in each worker

FastDeploy is not imported: configuration, requests and attention backends are read by attribute name. An engine that
uses these two classes carries plans and reports between them itself; the plug-in (``fastdeploy.plugin``) does it for
FastDeploy. docs/migration.md has a table of every member.
"""

from fdcache.controller.layers import LayerDoneCounter
from fdcache.errors import LayerSwapTimeoutError
from fdcache.integrations.fastdeploy.config import layout_from_config, settings_from_config
from fdcache.integrations.fastdeploy.controller import CacheController
from fdcache.integrations.fastdeploy.manager import CacheManager, MatchedPrefix

__all__ = [
    "CacheController",
    "CacheManager",
    "LayerDoneCounter",
    "LayerSwapTimeoutError",
    "MatchedPrefix",
    "layout_from_config",
    "settings_from_config",
]
