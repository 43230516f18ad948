"""A stand-in for FastDeploy's cache manager and controller (v1), over the real API of fdcache.

``CacheManager`` is what its scheduler calls, ``CacheController`` what its workers call. FastDeploy is not imported:
configuration, requests and attention backends are read by attribute name. An engine that uses these two carries plans
and reports itself; with the plug-in (``fastdeploy_plugin``) they travel by themselves. docs/migration.md has a table of
every member.
"""

from fdcache.controller.layers import LayerDoneCounter
from fdcache.errors import LayerSwapTimeoutError
from fdcache.integrations.fastdeploy_config import layout_from_config, settings_from_config
from fdcache.integrations.fastdeploy_controller import CacheController
from fdcache.integrations.fastdeploy_manager import CacheManager
from fdcache.integrations.fastdeploy_requests import MatchedPrefix

__all__ = [
    "CacheController",
    "CacheManager",
    "LayerDoneCounter",
    "LayerSwapTimeoutError",
    "MatchedPrefix",
    "layout_from_config",
    "settings_from_config",
]
