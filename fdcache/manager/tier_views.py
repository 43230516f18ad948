"""TierViews: what one can see of a manager's tiers: blocks, events, figures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from threading import RLock
from typing import Generic, Protocol, TypeVar

import msgspec

from fdcache.groups import record_keys
from fdcache.layout import KVLayout
from fdcache.manager.keyed import OffloadRequest
from fdcache.manager.load_choices import LoadChoices
from fdcache.manager.plans import Plans
from fdcache.manager.results import LoadOutcome
from fdcache.manager.tiers import Tiers
from fdcache.metadata import BlockNode, CacheLevel, SwapPurpose
from fdcache.tiers.events import CacheEvent
from fdcache.tiers.hint_book import RequestHints
from fdcache.tiers.host import HostService
from fdcache.tiers.pool import TreeNode
from fdcache.tiers.reuse import ReuseReport
from fdcache.tiers.statistics import CacheStats, Counters, MemoryUsage, TierUsage, Traffic

RequestT_contra = TypeVar("RequestT_contra", bound=OffloadRequest, contravariant=True)


class KnownRequests(Protocol[RequestT_contra]):
    """The requests of a manager, as far as its tiers are concerned."""

    def prepare(self, request: RequestT_contra) -> None:
        """Hash the tokens of a request, unless they are hashed."""

    def change_fingerprint(self, fingerprint: bytes) -> None:
        """Publish no more of the requests that are running; hash those to come under this fingerprint."""

    def load_of(self, request: RequestT_contra) -> int:
        """Return the number of the load that a request waits for; 0 for none."""

    def take_outcomes(self) -> list[LoadOutcome]:
        """Return the loads that have ended since the last call."""

    def forget_found(self, reason: str) -> None:
        """Detach running requests from the blocks in the tiers: they use none of them and add none."""

    def __len__(self) -> int: ...


class TierViews(ABC, Generic[RequestT_contra]):
    """Blocks, events and figures of a manager's tiers. Nothing here changes what is cached or in flight."""

    layout: KVLayout
    _lock: RLock
    _tiers: Tiers
    _service: HostService | None
    _plans: Plans
    _choices: LoadChoices
    _hints: RequestHints
    _counters: Counters
    _requests: KnownRequests[RequestT_contra]

    @property
    def shared_blocks_in_use(self) -> int:
        """Pins and slots being written of this engine in a service's tier; 0 without a service."""
        host = self._tiers.host
        return host.in_use if host and self._service is not None else 0

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host tier; with a service, the number that it has assigned to this layout so far."""
        return self._tiers.host.num_blocks if self._tiers.host else 0

    @property
    def reads_storage(self) -> bool:
        """True if blocks may be read from storage, by this process or by the service."""
        return self._tiers.fetches is not None

    def take_events(self) -> list[CacheEvent]:
        """Return what entered and left each tier since the last call; empty unless ``settings.event_buffer`` is set."""
        with self._lock:
            return list(self._tiers.take_events(self.layout.block_size))

    def get_reuse(self) -> dict[CacheLevel, ReuseReport]:
        """Return what each tier of this process has learned of reuse; {} for policies that do not learn."""
        with self._lock:
            return self._tiers.reuse()

    def get_memory_usage(self) -> dict[CacheLevel, MemoryUsage]:
        """Return bytes per rank of each tier."""
        return self._tiers.memory_usage(self.layout)

    def find_blocks(self, request: RequestT_contra) -> dict[CacheLevel, list[BlockNode]]:
        """Return the full blocks of a request's tokens by tier, in path order; pin nothing.

        Covers the tiers of this process; for those of a service run ``fdcache inspect explain``.
        """
        with self._lock:
            self._requests.prepare(request)
            return self._tiers.find(record_keys(request.block_hashes, self.layout.page_records))

    def hottest_blocks(self, limit: int) -> list[TreeNode]:
        """Return the hottest blocks of this process's own host tier, each with its ancestors, parents first."""
        with self._lock:
            pool = self._tiers.own_pools.get(CacheLevel.HOST)
            if pool is None:
                return []
            name = self.layout.fingerprint.hex()[:16]
            return [TreeNode.of(name, node, parent) for node, parent in pool.hottest_paths(limit)]

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` naming every invariant that does not hold."""
        with self._lock:
            self._tiers.verify()

    def get_stats(self) -> CacheStats:
        """Return a snapshot of tiers and counters; ``device`` has an engine's blocks as far as they were offered."""
        with self._lock:
            return self._snapshot()

    @abstractmethod
    def _device_usage(self) -> TierUsage:
        """Return the blocks of the device cache."""

    def _all_counters(self) -> Counters:
        counters = msgspec.structs.replace(self._counters)
        self._plans.count(counters)
        return counters

    def _snapshot(self) -> CacheStats:
        usage = {level: pool.usage() for level, pool in self._tiers.pools.items()}
        host, storage, copies = self._tiers.host, self._tiers.storage, self._tiers.copies
        moving, hooks = self._plans.blocks_in_flight, self._plans.hooks
        return CacheStats(
            device=self._device_usage(),
            host=usage.get(CacheLevel.HOST),
            counters=self._all_counters(),
            live_requests=len(self._requests),
            plans_in_flight=self._plans.in_flight,
            queued_backups=copies.queued if copies else 0,
            queued_stores=storage.writes.queued if storage else 0,
            storing_blocks=moving(SwapPurpose.STORE),
            reading_blocks=moving(SwapPurpose.PREFETCH),
            storage=usage.get(CacheLevel.STORAGE),
            sending_blocks=moving(SwapPurpose.SEND),
            fetching_blocks=moving(SwapPurpose.FETCH),
            held_blocks=hooks.held_blocks if hooks else 0,
            traffic=host.traffic.copy() if host else Traffic(),
            loads=self._choices.figures(),
            handovers=hooks.counts() if hooks else [],
            hints=self._hints.figures.copy(),
        )
