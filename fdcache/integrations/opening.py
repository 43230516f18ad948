"""The tiers below memory of an engine, opened for one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from fdcache.controller.cache_controller import CacheController
from fdcache.devices.base import Device
from fdcache.layout import KVLayout
from fdcache.manager.offload import OffloadManager
from fdcache.settings import Settings
from fdcache.settings.cache import CopySettings


def open_tiers(
    layout: KVLayout,
    settings: Settings,
    planes: Sequence[Any],
    device: Callable[[CopySettings], Device] | None = None,
) -> tuple[OffloadManager, CacheController]:
    """Return the tiers over an engine's planes and what copies between them, with the blocks that storage has."""
    manager = OffloadManager.from_settings(layout, settings)
    with ExitStack() as opened:
        opened.callback(manager.close)
        controller = CacheController.from_settings(layout, settings, device=device)
        opened.callback(controller.shutdown)
        controller.register_kv_cache(planes)
        controller.initialize_host_cache(manager.host_cache)
        if (scan := controller.open_storage()) is not None:
            manager.restore_storage([scan])
        opened.pop_all()
    return manager, controller
