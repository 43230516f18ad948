"""The tiers of one manager: what a plan's end, a lost worker, a reset or new weights mean to all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fdcache._core import MatchRun
from fdcache.errors import ConfigurationError
from fdcache.layout import KVLayout
from fdcache.manager.backups import BackupPlanner
from fdcache.manager.prefetch import Prefetching
from fdcache.manager.requests import Request
from fdcache.metadata import BlockNode, CacheLevel, HashArray, SwapPurpose
from fdcache.plans.ledger import InFlightPlan, OpenPlan, PlanLedger
from fdcache.tiers.completion import settle
from fdcache.tiers.events import CacheEvent, events_of
from fdcache.tiers.host import HostTier, LocalHostTier
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.statistics import Counters, MemoryUsage
from fdcache.tiers.storage import StorageTier


@dataclass(frozen=True, slots=True)
class Tiers:
    """Device, host and storage, and who moves blocks between them: ``backups`` down, ``prefetcher`` up.

    What the settings do not ask for is None. ``backups`` are there with a host tier, storage only with one.
    """

    device: BlockPool
    host: HostTier | None
    storage: StorageTier | None
    backups: BackupPlanner | None
    prefetcher: Prefetching | None

    @property
    def pools(self) -> dict[CacheLevel, BlockPool | HostTier]:
        """Those that have slots, from the device down."""
        pools: dict[CacheLevel, BlockPool | HostTier] = {CacheLevel.DEVICE: self.device}
        if self.host is not None:
            pools[CacheLevel.HOST] = self.host
        if self.storage is not None and self.storage.pool is not None:
            pools[CacheLevel.STORAGE] = self.storage.pool
        return pools

    def match(self, request: Request, hashes: HashArray, start: int = 0) -> MatchRun:
        """Pin the device's run of a request's path. A request hits a block once, however often it has to ask."""
        run = self.device.match(request._lease, hashes, start, request._hit_blocks)
        stop = start + len(run)
        first = max(start, request._hit_blocks)
        if first < stop:
            request._hit_blocks = stop
            if self.backups:
                self.backups.on_match(hashes[first:stop], run.hits[first - start :])
        return run

    def plan_background(self, plan: OpenPlan, ledger: PlanLedger) -> None:
        """Copies that nobody waits for, as far as those under way leave room."""
        if self.backups:
            self.backups.plan_background(plan, ledger.blocks_in_flight(SwapPurpose.BACKUP))
        if self.storage:
            self.storage.plan_background(plan, ledger.blocks_in_flight(SwapPurpose.STORE))

    def settle(self, flight: InFlightPlan, counters: Counters) -> None:
        """Every rank has reported a plan: what arrived can be found."""
        settle(flight, self.device, self.host, self.storage.index if self.storage else None, counters)
        if self.storage:
            self.storage.settled(flight)

    def reset_device(self) -> None:
        """Forget the device tier, and what of it was to be copied down."""
        self.device.reset()
        if self.backups:
            self.backups.forget()

    def reset(self, plan: OpenPlan) -> int:
        """Forget every block; returns how many. The plan tells the workers to empty their local storage."""
        forgotten = sum(pool.stats().ready for pool in (self.device, self.host) if pool is not None)
        self.reset_device()
        if self.host:
            self.host.reset()
        if self.storage:
            forgotten += self.storage.reset(plan)
        return forgotten

    def worker_lost(self, plan: OpenPlan) -> None:
        """A rank is gone and its part of every block with it; what it was to do for storage leaves the plan."""
        self.reset_device()
        if self.host:
            self.host.worker_lost()
        if self.storage:
            self.storage.rank_lost(plan)

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
