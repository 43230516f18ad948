"""CacheView: the parts of one manager, and what is to be seen of them."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from threading import RLock

import msgspec

from fdcache._core import SLOT_FREE
from fdcache.layout import KVLayout
from fdcache.manager.assembly import make_tiers
from fdcache.manager.live_requests import LiveRequests
from fdcache.manager.plans import Plans
from fdcache.manager.publishing import Publisher
from fdcache.manager.requests import Request
from fdcache.metadata import BlockNode, CacheLevel, SwapPurpose
from fdcache.settings.cache import CacheSettings, StorageTierSettings
from fdcache.storage.connector import StorageConnector
from fdcache.tiers.host import HostCache
from fdcache.tiers.statistics import CacheStats, Counters, MemoryUsage, TierUsage
from fdcache.tiers.traffic import Traffic


class ManagerState(StrEnum):
    """Whether the manager plans anything new."""

    RUNNING = "running"
    PAUSED = "paused"
    ASLEEP = "asleep"


class CacheView:
    """What a ``CacheManager`` tells of itself. Nothing here plans, copies or forgets; calls are thread-safe."""

    def __init__(
        self,
        settings: CacheSettings,
        layout: KVLayout,
        storage: StorageTierSettings,
        lookup: StorageConnector | None,
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.layout = layout
        self._lock = RLock()
        self._state = ManagerState.RUNNING
        self._counters = Counters()
        self._tiers = make_tiers(settings, layout, storage, lookup, self._counters, clock)
        self._device, self._host, self._storage = self._tiers.device, self._tiers.host, self._tiers.storage
        self._live = LiveRequests(layout, self._tiers, settings.lookahead_tokens)
        self._publisher = Publisher(layout, self._tiers, self._counters)
        self._plans = Plans(
            layout.tp_size, settings.plan_timeout, self._tiers, self._publisher, self._counters, clock
        )

    @property
    def state(self) -> ManagerState:
        """Whether the manager plans anything new."""
        return self._state

    @property
    def host_cache(self) -> HostCache:
        """What every rank's ``CacheController.initialize_host_cache`` is given, embedded and shared."""
        return self._host.host_cache if self._host else HostCache()

    @property
    def shared_blocks_in_use(self) -> int:
        """What this engine pins and writes in a service's tier; 0 embedded, where ``get_stats`` has it."""
        return self._host.in_use if self._host and self.settings.server is not None else 0

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host tier; of a shared one, as many as the service has given this layout so far."""
        return self._host.num_blocks if self._host else 0

    @property
    def num_device_blocks(self) -> int:
        """Blocks of the device tier."""
        return self._device.stats().slots

    @property
    def reads_storage(self) -> bool:
        """Whether blocks may come from storage: of this process or of the service."""
        return self._tiers.prefetcher is not None

    @property
    def num_free_device_blocks(self) -> int:
        """Device blocks that nobody holds and that cache nothing."""
        return self._device.stats().free

    def get_stats(self) -> CacheStats:
        """Tiers and totals at this moment."""
        with self._lock:
            backups, storage = self._tiers.backups, self._storage
            usage = {level: TierUsage.of(pool) for level, pool in self._tiers.pools.items()}
            return CacheStats(
                device=usage[CacheLevel.DEVICE],
                host=usage.get(CacheLevel.HOST),
                counters=msgspec.structs.replace(self._counters),
                live_requests=len(self._live),
                plans_in_flight=self._plans.in_flight,
                queued_backups=backups.queued if backups else 0,
                traffic=self._host.traffic.copy() if self._host else Traffic(),
                queued_stores=storage.stores.queued if storage else 0,
                storing_blocks=self._plans.blocks_in_flight(SwapPurpose.STORE),
                reading_blocks=self._plans.blocks_in_flight(SwapPurpose.PREFETCH),
                storage=usage.get(CacheLevel.STORAGE),
            )

    def get_memory_usage(self) -> dict[CacheLevel, MemoryUsage]:
        """Bytes per rank of each tier."""
        return self._tiers.memory_usage(self.layout)

    def free_device_blocks(self) -> list[int]:
        """The ids of the free device blocks; visits every block."""
        with self._lock:
            return [
                slot for slot in range(self.num_device_blocks) if self._device.node(slot).state == SLOT_FREE
            ]

    def find_blocks(self, request: Request) -> dict[CacheLevel, list[BlockNode]]:
        """Where the full blocks of a request's tokens are at this moment, by tier, in path order; pins nothing.

        Of the tiers that this process has; ``fdcache inspect explain`` tells of a service's.
        """
        with self._lock:
            return self._tiers.find(self._live.bind(request).hashes)

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` naming every invariant that does not hold."""
        with self._lock:
            self._tiers.verify()
