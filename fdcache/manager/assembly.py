"""Which tiers a manager has, by its settings."""

from __future__ import annotations

from collections.abc import Callable

from fdcache.errors import ConfigurationError
from fdcache.layout import KVLayout
from fdcache.manager.backups import BackupPlanner
from fdcache.manager.prefetch import Prefetcher, Prefetching, RemotePrefetcher
from fdcache.manager.tiers import Tiers
from fdcache.metadata import EXTENT_BYTES, CacheLevel
from fdcache.settings.cache import CacheSettings, StorageTierSettings
from fdcache.storage.connector import StorageConnector
from fdcache.tiers.host import HostCache, HostTier, LocalHostTier
from fdcache.tiers.pool import HOST_SPARE, BlockPool
from fdcache.tiers.statistics import Counters
from fdcache.tiers.storage import StorageTier, make_index


def make_tiers(
    settings: CacheSettings,
    layout: KVLayout,
    storage_settings: StorageTierSettings,
    lookup: StorageConnector | None,
    counters: Counters,
    clock: Callable[[], float],
) -> Tiers:
    """All of them, empty. Raises ``ConfigurationError`` for settings that do not fit together."""
    device = BlockPool(CacheLevel.DEVICE, settings.device_blocks, settings.eviction)
    host = _make_host(settings, layout, storage_settings)
    storage = _make_storage(settings, layout, storage_settings, lookup, host, counters, clock)
    tiers = Tiers(
        device=device,
        host=host,
        storage=storage,
        backups=BackupPlanner(settings, device, host, counters) if host else None,
        prefetcher=_make_prefetcher(storage_settings, device, host, storage),
    )
    for pool in tiers.pools.values():
        pool.record_events(settings.event_buffer)
    return tiers


def _own_host(settings: CacheSettings, layout: KVLayout, blocks: int) -> LocalHostTier:
    extent = max(EXTENT_BYTES // layout.record_bytes, 1)
    return LocalHostTier(CacheLevel.HOST, blocks, settings.eviction, extent=extent, spare=HOST_SPARE)


def _make_host(settings: CacheSettings, layout: KVLayout, storage: StorageTierSettings) -> HostTier | None:
    """The service's where one is named, else an own one, if there is memory for it."""
    if settings.server is None:
        blocks = HostCache.of(settings, layout).num_blocks
        return _own_host(settings, layout, blocks) if blocks else None
    from fdcache.service.client.remote_tier import RemoteHostTier  # brings the network library
    from fdcache.service.wire.protocol import FetchTerms

    if storage.is_on:
        raise ConfigurationError(
            f"FDCACHE_STORAGE={storage.connector} is the service's where FDCACHE_SERVER is set: give it to "
            "`fdcache serve` and unset it here, or unset FDCACHE_SERVER"
        )
    terms = FetchTerms(storage.prefetch_policy, storage.prefetch_timeout, float(storage.prefetch_bandwidth))
    return RemoteHostTier(settings, layout, terms)


def _make_storage(
    settings: CacheSettings,
    layout: KVLayout,
    storage: StorageTierSettings,
    lookup: StorageConnector | None,
    host: HostTier | None,
    counters: Counters,
    clock: Callable[[], float],
) -> StorageTier | None:
    """The storage tier below an own host tier; a service has its own."""
    if not storage.is_on:
        return None
    if not isinstance(host, LocalHostTier):
        raise ConfigurationError(
            f"FDCACHE_STORAGE={storage.connector} reads and writes through the host tier; set FDCACHE_HOST_MEMORY"
        )
    index = make_index(storage, layout, lookup, clock)
    tier = StorageTier(settings, storage, layout, host, index, counters, clock)
    host.on_evict = tier.stores.on_evict
    return tier


def _make_prefetcher(
    settings: StorageTierSettings,
    device: BlockPool,
    host: HostTier | None,
    storage: StorageTier | None,
) -> Prefetching | None:
    """Who reads for requests that have arrived: this process, a service, or nobody."""
    if storage is not None:
        return Prefetcher(settings, device, storage.reads)
    if host is None or isinstance(host, LocalHostTier):
        return None
    from fdcache.service.client.remote_tier import RemoteHostTier

    assert isinstance(host, RemoteHostTier)
    return RemotePrefetcher(device, host)
