"""The tiers of one manager as one object: its parts by the settings, and what concerns all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from uuid import uuid4

import numpy as np

from fdcache._core import DeviceContents, InFlightPlan, SwapInFlight
from fdcache.errors import ConfigurationError, StorageError
from fdcache.layout import KVLayout
from fdcache.manager.copy_out import CopyOut
from fdcache.metadata import (
    EXTENT_BYTES,
    BlockNode,
    CacheLevel,
    CacheSwapMetadata,
    HashArray,
    PeerTask,
    StorageTask,
    SwapPurpose,
)
from fdcache.settings.cache import CacheSettings, StorageTierSettings, WritePolicy
from fdcache.storage.connector import StorageConnector
from fdcache.tiers.events import CacheEvent, DeviceEvents, EventSource, events_of
from fdcache.tiers.fetches import Fetches, FetchTable, FetchTerms
from fdcache.tiers.host import (
    HostCache,
    HostService,
    HostTier,
    LocalHostTier,
    complete_copies,
    shared_host_tier,
)
from fdcache.tiers.pool import ABSENT, HOST_SPARE, READY, BlockPool
from fdcache.tiers.reuse import Reports, ReuseReport
from fdcache.tiers.statistics import Counters, MemoryUsage
from fdcache.tiers.storage import StorageTier, make_index

Arrived = tuple[CacheSwapMetadata, HashArray]
"""A copy to the host tier of this process: the transfer, and 1 for each block that is in the tier."""


@dataclass(frozen=True)
class Tiers:
    """The tiers of one manager; ``copies`` go to the host, ``fetches`` read from storage.

    Parts that the settings turn off are None; ``device`` is None where the engine owns the device cache. ``copies``
    need a host tier, and so does a storage tier of this process.
    """

    host: HostTier | None
    storage: StorageTier | None
    copies: CopyOut | None
    device: BlockPool | None = None
    device_events: DeviceEvents | None = None

    @property
    def fetches(self) -> Fetches | None:
        """The reads from storage."""
        return self.host.fetches if self.host is not None else None

    @property
    def own_device(self) -> BlockPool:
        """The device tier of a manager that owns the device cache."""
        assert self.device is not None
        return self.device

    def fetch_from(self, source: str, hashes: HashArray, keys: HashArray) -> str:
        """Ask another node first for a path, with the records ``keys``; return why that cannot be, or nothing."""
        if self.service is not None:
            return self.service.fetch_from(source, hashes)
        if self.storage is None:
            return "there is no storage tier; FDCACHE_STORAGE=nodes reads from other nodes"
        try:
            self.storage.index.name_source(keys, source)
        except StorageError as error:
            return str(error)
        return ""

    @property
    def service(self) -> HostService | None:
        """What only the host tier of a service has."""
        return self.host.service if self.host is not None else None

    @property
    def pools(self) -> dict[CacheLevel, BlockPool | HostTier]:
        """The tiers that have slots, from the top down."""
        pools: dict[CacheLevel, BlockPool | HostTier] = dict(self.own_pools)
        if self.host is not None:
            pools[CacheLevel.HOST] = self.host
        return pools

    @property
    def own_pools(self) -> dict[CacheLevel, BlockPool]:
        """The tiers of this process, from the top down."""
        pools: dict[CacheLevel, BlockPool] = {}
        if self.device is not None:
            pools[CacheLevel.DEVICE] = self.device
        if self.host is not None and self.host.pool is not None:
            pools[CacheLevel.HOST] = self.host.pool
        if self.storage is not None and self.storage.pool is not None:
            pools[CacheLevel.STORAGE] = self.storage.pool
        return pools

    def set_clock(self, seconds: float) -> None:
        """Take the time of the tiers of this process from the caller. It does not go back, nor begin below 0."""
        for pool in self.own_pools.values():
            pool.set_clock(max(int(seconds * 1000), 0))

    def reuse(self) -> Reports:
        """Return what the tiers of this process whose order of eviction learns have learned."""
        return {
            level: ReuseReport.of(tables)
            for level, pool in self.own_pools.items()
            if (tables := pool.reuse()) is not None
        }

    def complete(self, flight: InFlightPlan, counters: Counters) -> None:
        """End the transfers of a plan that every rank has reported: blocks that arrived can be found."""
        if isinstance(flight.plan, StorageTask):
            assert self.storage is not None
            self.storage.complete(flight)
            return
        if isinstance(flight.plan, PeerTask):
            self._complete_handover(flight, counters)
            return
        for purpose, result in flight.swaps.items():
            if purpose is SwapPurpose.LOAD or self.copies is None:
                self._complete_copies(result, counters)
                continue
            for part in self.copies.ended(result):
                self._complete_copies(part, counters)

    def queue_awaited(self) -> None:
        """Queue backups of blocks that others in the storage wait for, where the device cache is known by hash.

        The write policy does not: they may have few hits, or count as copied since their record was being read.
        """
        storage, copies, host, device = self.storage, self.copies, self.host, self.device
        if storage is None or not len(storage.awaited) or copies is None or host is None or device is None:
            return
        awaited = storage.awaited
        wanted = (device.contains(awaited) == READY) & (host.index.contains(awaited) == ABSENT)
        if wanted.any():
            copies.enqueue_awaited(device.find(awaited[wanted]).slots)

    def complete_early(self, counters: Counters) -> None:
        """End the copies to the host that waited for copies above them."""
        if self.copies is not None:
            for part in self.copies.ended_early():
                self._complete_copies(part, counters)

    def blocks_arrived(self, copies: Sequence[Arrived]) -> None:
        """Pass on copies to the host of which every rank has copied everything to the storage."""
        assert self.storage is not None
        for swap, flags in copies:
            self.storage.blocks_arrived(swap, flags.view(np.bool_))

    def _complete_copies(self, result: SwapInFlight, counters: Counters) -> None:
        assert self.host is not None
        complete_copies(result, self.device, self.host.index, counters)
        if self.storage:
            self.storage.blocks_arrived(result.swap, result.copied)

    def _complete_handover(self, flight: InFlightPlan, counters: Counters) -> None:
        """Make fetched blocks findable in a device tier. Sent blocks stay what they are."""
        for purpose, result in flight.swaps.items():
            counters.count_copies(purpose, result.num_copied, result.size)
            if purpose is SwapPurpose.FETCH:
                counters.blocks_corrupt_from_peer += int(np.count_nonzero(result.corrupt))
                if self.device is not None:
                    slots = result.swap.dst_block_ids
                    result.settle(self.device.complete(slots, result.flags, result.checksums))

    def reset_device(self) -> None:
        """Forget the blocks of the device cache and their queued backups."""
        if self.device is not None:
            self.device.reset()
        if self.copies is not None:
            self.copies.forget()

    def delete_from_device(self, hashes: HashArray) -> None:
        """Forget blocks of the device cache that were deleted in the tiers below, and all below them."""
        if self.copies is not None:
            self.copies.drop(hashes)

    def reset(self) -> int:
        """Forget every block; return their number. The next plan tells the workers to clear their storage."""
        forgotten = sum(
            pool.usage().ready for level, pool in self.pools.items() if level is not CacheLevel.STORAGE
        )
        self.reset_device()
        if self.host:
            self.host.reset()
        if self.storage:
            forgotten += self.storage.reset()
        return forgotten

    def worker_lost(self) -> None:
        """Forget the blocks that a lost rank held a part of, and cancel the storage tasks not sent yet."""
        self.reset_device()
        if self.host and self.host.pool is not None:
            self.host.reset()
        if self.storage:
            self.storage.rank_lost()

    def change_layout(self, layout: KVLayout) -> int:
        """Forget the blocks of the former weights; return the number of those in this process."""
        forgotten = sum(pool.stats().ready for pool in self.own_pools.values())
        self.reset_device()
        if self.host:
            if self.host.service is None:
                self.host.reset()
            else:
                self.host.service.change_layout(layout)
        if self.storage:
            self.storage.change_layout()
        return forgotten

    def take_events(self, block_size: int) -> Iterator[CacheEvent]:
        """Yield what entered and left each tier since the last call."""
        for level, source in self._event_sources().items():
            yield from events_of(source, level, block_size)

    def _event_sources(self) -> dict[CacheLevel, EventSource]:
        events = self.device_events
        return dict(self.pools) if events is None else self.pools | {CacheLevel.DEVICE: events}

    def find(self, hashes: HashArray) -> dict[CacheLevel, list[BlockNode]]:
        """Return the blocks of a path in each tier of this process; pin nothing."""
        return {level: pool.nodes(pool.find(hashes).slots.tolist()) for level, pool in self.own_pools.items()}

    def memory_usage(self, layout: KVLayout) -> dict[CacheLevel, MemoryUsage]:
        """Return bytes per rank of each tier: planes on the device, records below it."""
        block_bytes = {CacheLevel.DEVICE: layout.payload_bytes}
        return {
            level: MemoryUsage.of(pool, block_bytes.get(level, layout.record_bytes))
            for level, pool in self.pools.items()
        }

    def verify(self) -> None:
        """Raise ``IntegrityError`` naming every invariant that does not hold."""
        for pool in self.own_pools.values():
            pool.verify()

    def record_events(self, capacity: int) -> None:
        """Keep up to ``capacity`` events of each tier for ``take_events``."""
        for pool in self.pools.values():
            pool.record_events(capacity)


def make_tiers(
    settings: CacheSettings,
    layout: KVLayout,
    storage_settings: StorageTierSettings,
    lookup: StorageConnector | None,
    counters: Counters,
    clock: Callable[[], float],
    contents: DeviceContents | None = None,
) -> Tiers:
    """Return the tiers of the settings, empty. Raises ``ConfigurationError`` for settings that contradict.

    ``contents``: what the engine tells of its own device cache; None for a device tier of the manager.
    """
    host, storage = _make_lower(settings, layout, storage_settings, lookup, counters, clock)
    pool: BlockPool | None = None
    if contents is None:
        pool = BlockPool(CacheLevel.DEVICE, settings.device_blocks, settings.eviction)
        if host is not None:
            pool.set_below(host.index, settings.write_policy is WritePolicy.WRITE_BACK)
    device = contents if pool is None else pool
    displaced = storage.writes.on_evict if storage is not None else None
    copies = None
    if host is not None and device is not None:
        copies = CopyOut(settings, device, host.index, counters, clock, displaced)
    events = DeviceEvents(pool, settings.event_buffer) if pool is not None else None
    tiers = Tiers(host, storage, copies, pool, events)
    tiers.record_events(settings.event_buffer)
    return tiers


def _make_lower(
    settings: CacheSettings,
    layout: KVLayout,
    storage_settings: StorageTierSettings,
    lookup: StorageConnector | None,
    counters: Counters,
    clock: Callable[[], float],
) -> tuple[HostTier | None, StorageTier | None]:
    """Return host and storage tier of the settings, empty. Raises ``ConfigurationError``."""
    if settings.server is not None:
        return _shared_host(settings, layout, storage_settings), None
    host = _own_host(settings, layout)
    return host, _make_storage(settings, layout, storage_settings, lookup, host, counters, clock)


def _own_host(settings: CacheSettings, layout: KVLayout) -> LocalHostTier | None:
    """Return the tier of this process, None without host memory."""
    blocks = HostCache.of(settings, layout).num_blocks
    if not blocks:
        return None
    extent = max(EXTENT_BYTES // layout.record_bytes, 1)
    name = uuid4().hex if layout.replicas > 1 else None
    tier = LocalHostTier(
        CacheLevel.HOST, blocks, settings.eviction, extent=extent, spare=HOST_SPARE, name=name
    )
    tier.set_states(layout.page_records, layout.num_states)
    return tier


def _shared_host(settings: CacheSettings, layout: KVLayout, storage: StorageTierSettings) -> HostTier:
    """Return the tier of the service."""
    if storage.is_on:
        raise ConfigurationError(
            f"FDCACHE_STORAGE={storage.connector}: with FDCACHE_SERVER the storage belongs to the service; set it for "
            "`fdcache serve` and unset it here, or unset FDCACHE_SERVER"
        )
    return shared_host_tier(settings, layout, FetchTerms.of(storage))


def _make_storage(
    settings: CacheSettings,
    layout: KVLayout,
    storage: StorageTierSettings,
    lookup: StorageConnector | None,
    host: LocalHostTier | None,
    counters: Counters,
    clock: Callable[[], float],
) -> StorageTier | None:
    """Return the storage tier below a host tier of this process, None if storage is off."""
    if not storage.is_on:
        return None
    if host is None:
        raise ConfigurationError(
            f"FDCACHE_STORAGE={storage.connector} needs a host tier to read into; set FDCACHE_HOST_MEMORY"
        )
    index = make_index(storage, layout, lookup, clock, settings.eviction)
    tier = StorageTier(settings, storage, layout, host, index, counters, clock)
    host.on_evict = tier.writes.on_evict
    host.fetch_table = FetchTable(lambda: tier.reads, FetchTerms.of(storage))
    return tier
