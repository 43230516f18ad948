"""The tiers of one manager: what a plan's end, a lost worker, a reset or new weights mean to all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fdcache.errors import ConfigurationError
from fdcache.layout import KVLayout
from fdcache.manager.backups import BackupPlanner
from fdcache.metadata import EXTENT_BYTES, BlockNode, CacheLevel, HashArray, StorageTask, SwapPurpose
from fdcache.plans.ledger import InFlightPlan, OpenPlan, PlanLedger
from fdcache.settings.cache import CacheSettings, StorageTierSettings
from fdcache.storage.connector import StorageConnector
from fdcache.tiers.events import CacheEvent, events_of
from fdcache.tiers.fetches import Fetches, FetchTable, FetchTerms
from fdcache.tiers.host import HostCache, HostTier, LocalHostTier, complete_copies
from fdcache.tiers.pool import HOST_SPARE, BlockPool
from fdcache.tiers.statistics import Counters, MemoryUsage
from fdcache.tiers.storage import StorageTier, make_index


@dataclass(frozen=True, slots=True)
class Tiers:
    """Device, host and storage, and who moves blocks between them: ``backups`` down, ``fetches`` up.

    What the settings do not ask for is None. ``backups`` are there with a host tier, storage only with one.
    """

    device: BlockPool
    host: HostTier | None
    storage: StorageTier | None
    backups: BackupPlanner | None
    fetches: Fetches | None

    @property
    def pools(self) -> dict[CacheLevel, BlockPool | HostTier]:
        """Those that have slots, from the device down."""
        pools: dict[CacheLevel, BlockPool | HostTier] = {CacheLevel.DEVICE: self.device}
        if self.host is not None:
            pools[CacheLevel.HOST] = self.host
        if self.storage is not None and self.storage.pool is not None:
            pools[CacheLevel.STORAGE] = self.storage.pool
        return pools

    def plan_background(self, plan: OpenPlan, ledger: PlanLedger) -> None:
        """Copies that nobody waits for, as far as those under way leave room."""
        if self.backups:
            self.backups.plan_background(plan, ledger.blocks_in_flight(SwapPurpose.BACKUP))
        if self.storage:
            self.storage.plan_work(ledger.blocks_in_flight(SwapPurpose.STORE))

    def complete(self, flight: InFlightPlan, counters: Counters) -> None:
        """End the transfers of a plan that every rank has reported: blocks that arrived can be found."""
        if isinstance(flight.plan, StorageTask):
            assert self.storage is not None
            self.storage.complete(flight)
        elif flight.swaps:
            assert self.host is not None
            complete_copies(flight, self.device, self.host, counters)
            if self.storage:
                for result in flight.swaps.values():
                    self.storage.copies_ended(result)

    def reset_device(self) -> None:
        """Forget the device tier, and what of it was to be copied down."""
        self.device.reset()
        if self.backups:
            self.backups.forget()

    def reset(self) -> int:
        """Forget every block; returns how many. The plan tells the workers to empty their local storage."""
        forgotten = sum(pool.usage().ready for pool in (self.device, self.host) if pool is not None)
        self.reset_device()
        if self.host:
            self.host.reset()
        if self.storage:
            forgotten += self.storage.reset()
        return forgotten

    def worker_lost(self) -> None:
        """A rank is gone and its part of every block with it; what it was to do for storage leaves the plan."""
        self.reset_device()
        if self.host:
            self.host.worker_lost()
        if self.storage:
            self.storage.rank_lost()

    def change_layout(self, layout: KVLayout) -> int:
        """The engine has other weights; returns how many blocks of this process go.

        Raises ``ConfigurationError`` with a storage tier.
        """
        if self.storage:
            raise ConfigurationError(
                "change_revision: a storage tier belongs to one revision; shut the manager down and make a new one"
            )
        forgotten = self.device.stats().ready
        if isinstance(self.host, LocalHostTier):
            forgotten += self.host.stats().ready
        self.reset_device()
        if self.host:
            self.host.change_layout(layout)
        return forgotten

    def take_events(self, block_size: int) -> Iterator[CacheEvent]:
        """What entered and left each tier since the last call."""
        for level, pool in self.pools.items():
            yield from events_of(pool, level, block_size)

    def find(self, hashes: HashArray) -> dict[CacheLevel, list[BlockNode]]:
        """Where blocks of one path are, by tier; pins nothing. A service's tier is not looked into."""
        return {
            level: pool.nodes(pool.find(hashes).slots.tolist())
            for level, pool in self.pools.items()
            if isinstance(pool, BlockPool)
        }

    def memory_usage(self, layout: KVLayout) -> dict[CacheLevel, MemoryUsage]:
        """Bytes per rank: planes on the device, records below it."""
        block_bytes = {CacheLevel.DEVICE: layout.payload_bytes}
        return {
            level: MemoryUsage.of(pool, block_bytes.get(level, layout.record_bytes))
            for level, pool in self.pools.items()
        }

    def verify(self) -> None:
        """Raise ``IntegrityError`` naming every invariant that does not hold."""
        for pool in self.pools.values():
            pool.verify()


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
        fetches=host.fetches if host else None,
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

    if storage.is_on:
        raise ConfigurationError(
            f"FDCACHE_STORAGE={storage.connector} is the service's where FDCACHE_SERVER is set: give it to "
            "`fdcache serve` and unset it here, or unset FDCACHE_SERVER"
        )
    return RemoteHostTier(settings, layout, FetchTerms.of(storage))


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
    host.on_evict = tier.writes.on_evict
    host.fetches = FetchTable(lambda: tier.reads, FetchTerms.of(storage))
    return tier
