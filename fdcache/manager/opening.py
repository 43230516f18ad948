"""What a manager made from settings starts with: settings that fit, the storage look-up, measured speeds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fdcache import tracing
from fdcache.layout import KVLayout
from fdcache.machine.calibration import calibrated_link
from fdcache.manager.cost import Priors
from fdcache.settings import Settings, logs
from fdcache.settings.checks import log_misspelt, require_host_tier
from fdcache.storage.calibration import load_storage_speed
from fdcache.storage.connector import ConnectorContext, StorageConnector
from fdcache.storage.factory import open_lookup
from fdcache.storage.speed import measured_place


def settings_for(layout: KVLayout, settings: Settings | None) -> Settings:
    """Return settings that fit the layout, by default those of the environment. Raises ``SettingsError``."""
    settings = settings or Settings.load()
    settings.check_layout(layout)
    require_host_tier(settings)
    logs.follow(settings)
    tracing.follow(settings.deployment.traces, "fdcache-engine")
    log_misspelt(settings.misspelt)
    return settings


@contextmanager
def lookup_for(
    layout: KVLayout, settings: Settings, lookup: StorageConnector | None
) -> Iterator[StorageConnector | None]:
    """Open the storage look-up of the settings, unless there is one; close it if the block fails.

    None if the settings have no store that a look-up could ask, or a service asks it.
    """
    if lookup is None and settings.cache.server is None:
        lookup = open_lookup(
            ConnectorContext(layout, None, settings.storage_tier, settings.connector_options)
        )
    try:
        yield lookup
    except BaseException:
        if lookup is not None:
            lookup.close()
        raise


def calibrated_priors(settings: Settings) -> Priors:
    """Return the speeds that ``fdcache init`` has measured: of the link, and of the storage."""
    folder = settings.transfer.calibration_dir
    link, place = calibrated_link(folder), measured_place(settings)
    found = None if place is None else load_storage_speed(place, folder)
    if found is None:
        return Priors(link)
    return Priors(link, found.bytes_per_second, found.latency_seconds)
