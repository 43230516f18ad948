"""What a connector is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fdcache.layout import KVLayout
from fdcache.settings.cache import MooncakeSettings, StorageTierSettings


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """What a connector is made from. ``rank`` None: for the scheduler, which only asks what exists.

    ``verify``: whether every read is compared with its checksum. ``on_progress`` is told of slots that are scanned.
    """

    layout: KVLayout
    rank: int | None
    settings: StorageTierSettings
    mooncake: MooncakeSettings
    verify: bool = True
    on_progress: Callable[[int, int], None] | None = None
