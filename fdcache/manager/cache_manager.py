"""CacheManager: the scheduler side. It decides; workers copy; reports change what is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from threading import RLock
from types import TracebackType

import msgspec

from fdcache._core import SLOT_FREE
from fdcache.errors import PlanError, RequestStateError
from fdcache.layout import KVLayout
from fdcache.manager.matching import PrefixMatcher
from fdcache.manager.plans import Plans
from fdcache.manager.requests import LiveRequest, LiveRequests, Request
from fdcache.manager.results import Allocation, AllocationFailure, LoadOutcome, MatchResult, MatchStatus
from fdcache.manager.tiers import make_tiers
from fdcache.metadata import BlockNode, CacheLevel, StorageScan, SwapPurpose, TransferPlan, TransferReport
from fdcache.settings import Settings
from fdcache.settings.cache import CacheSettings, StorageTierSettings
from fdcache.settings.checks import log_misspelt, require_host_tier
from fdcache.storage.connector import ConnectorContext, StorageConnector
from fdcache.storage.factory import open_lookup
from fdcache.tiers.events import CacheEvent
from fdcache.tiers.host import HostCache
from fdcache.tiers.statistics import CacheStats, Counters, MemoryUsage, TierUsage
from fdcache.tiers.traffic import Traffic


class ManagerState(StrEnum):
    """Whether the manager plans anything new."""

    RUNNING = "running"
    PAUSED = "paused"
    ASLEEP = "asleep"


class CacheManager:
    """Device and host tier of one engine, for all its ranks.

    One scheduler step: ``match_prefix`` the new requests, ``allocate_device_blocks`` for everything scheduled,
    ``take_plans`` and send them to every rank with the step; then ``apply`` the ranks' reports, ``commit`` the tokens
    the engine accepted, ``request_finish`` what ended. Any number of steps may be under way. Calls are thread-safe.

    ``settings`` and ``layout`` are all it is told; every rank of ``layout.tp_size`` has to report each plan.
    ``storage`` turns the storage tier on: local files, whose scans ``restore_storage`` waits for, or a store that
    ``lookup`` asks, and which ``close`` closes. ``from_settings`` makes a manager as the environment says. Raises
    ``ConfigurationError`` when the host memory holds not one block, or storage has no host tier to read into.
    """

    def __init__(
        self,
        settings: CacheSettings,
        layout: KVLayout,
        *,
        storage: StorageTierSettings | None = None,
        lookup: StorageConnector | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.layout = layout
        self._storage_lookup = lookup
        self._lock = RLock()
        self._state = ManagerState.RUNNING
        counters = self._counters = Counters()
        tiers = self._tiers = make_tiers(
            settings, layout, storage or StorageTierSettings(), lookup, counters, clock
        )
        self._device, self._host, self._storage = tiers.device, tiers.host, tiers.storage
        self._requests = LiveRequests(settings, layout, tiers)
        self._matcher = PrefixMatcher(settings, layout, tiers, self._requests, counters, clock)
        self._plans = Plans(layout, settings.plan_timeout, tiers, counters, clock)

    @classmethod
    def from_settings(
        cls,
        layout: KVLayout,
        settings: Settings | None = None,
        *,
        device_bytes: int | Callable[[], int] | None = None,
        lookup: StorageConnector | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> CacheManager:
        """Make a manager as the environment says: tiers, write policy, deadlines, storage.

        ``settings`` are what ``Settings.load`` found, ``Settings.load(arguments=...)`` with a caller's own values above
        the environment; by default they are loaded here. ``device_bytes``, asked only when ``FDCACHE_DEVICE_MEMORY``
        is a share, is the memory of one rank's device. ``lookup`` stands in for the storage's connector.

        Raises ``SettingsError`` for wrong settings and for those that do not fit the layout, ``StorageError`` when
        the connector cannot be opened.
        """
        settings = settings or Settings.load()
        settings.check_layout(layout)
        require_host_tier(settings)
        log_misspelt(settings.misspelt)
        cache, storage = settings.cache_for(layout, device_bytes), settings.storage_tier
        if lookup is None and cache.server is None:
            lookup = open_lookup(ConnectorContext(layout, None, storage, settings.mooncake))
        try:
            return cls(cache, layout, storage=storage, lookup=lookup, clock=clock)
        except BaseException:
            if lookup is not None:
                lookup.close()
            raise

    def close(self) -> None:
        """Say goodbye to the service, if there is one: what this engine held there is free at once.

        Call it when every worker has shut down. Harmless when done before, and in embedded use.
        """
        if self._host:
            self._host.close()
        if self._storage_lookup is not None:
            self._storage_lookup.close()

    def __enter__(self) -> CacheManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def restore_storage(self, scans: Sequence[StorageScan]) -> int:
        """Take up the blocks that the local storage of every rank holds; returns how many.

        Until then nothing is read from storage or written to it. Raises ``PlanError`` unless there is one scan for
        each rank.
        """
        with self._lock:
            if sorted(scan.rank for scan in scans) != list(range(self.layout.tp_size)):
                raise PlanError(f"restore_storage needs a scan of each of the {self.layout.tp_size} ranks")
            return self._storage.restore(scans, self._plans.open) if self._storage else 0

    # --- a scheduler step ---------------------------------------------------------------------------------

    def prefetch(self, requests: Iterable[Request]) -> None:
        """Begin to read from storage what requests that have arrived will need; to be called before their match.

        What comes is kept in the host tier for them until they are matched, or finished without.
        """
        with self._lock:
            if self._state is ManagerState.RUNNING:
                for request in requests:
                    self._matcher.prefetch(request, self._plans.open)

    def match_prefix(self, requests: Iterable[Request]) -> list[MatchResult]:
        """Find and pin the longest cached prefix of each request, short of its last token.

        Raises ``RequestStateError`` for a request that is matched or running already, ``HashingError`` for tokens
        that cannot be hashed; nothing is matched then.
        """
        requests = list(requests)
        with self._lock:
            self._heed_device_reset()
            if self._state is not ManagerState.RUNNING:
                return [MatchResult(request.request_id, MatchStatus.DEFERRED) for request in requests]
            self._requests.check_match(requests)
            return self._matcher.match(requests, self._plans.open)

    def unmatch(self, requests: Iterable[Request]) -> None:
        """Undo matches that were followed by no allocation: the pins go, what is read from storage still comes."""
        with self._lock:
            for request in requests:
                self._requests.unmatch(request)

    def can_allocate_device_blocks(self, num_blocks: int) -> bool:
        """Whether that many blocks are free or can be made free now; none are while nothing is planned."""
        if self._state is not ManagerState.RUNNING:
            return False
        enough = self._device.available >= num_blocks
        if not enough and self._tiers.backups:
            self._tiers.backups.give_way()
        return enough

    def allocate_device_blocks(self, demands: Iterable[tuple[Request, int]]) -> list[Allocation]:
        """Let each request's block table cover ``num_tokens`` tokens, all or nothing per request.

        The first call after a match also plans the loads of its host blocks. Raises ``RequestStateError`` when a
        request was not matched or asks for fewer tokens than its match found; nobody gets blocks then.
        """
        demands = list(demands)
        with self._lock:
            if self._state is not ManagerState.RUNNING:
                paused = AllocationFailure.PAUSED
                return [Allocation(request.request_id, failure=paused) for request, _ in demands]
            checked = self._requests.check_allocate(demands)
            return [
                self._allocate(live, num_tokens)
                for live, (_, num_tokens) in zip(checked, demands, strict=True)
            ]

    def _allocate(self, live: LiveRequest, num_tokens: int) -> Allocation:
        request_id, backups = live.request.request_id, self._tiers.backups
        if live.host_run and not live.refresh_host_run():
            self._requests.defer(live.request)
            self._counters.deferred_lookups += 1
            return Allocation(request_id, failure=AllocationFailure.DEFERRED)
        wanted = -(-num_tokens // self.layout.block_size) - len(live.table)
        if wanted > 0 and (missing := wanted - self._device.available) > 0:
            self._counters.allocation_failures += 1
            if backups:
                backups.give_way()
            return Allocation(request_id, failure=AllocationFailure.NO_BLOCKS, shortfall=missing)
        live.count_hits(self._counters)
        if wanted > 0:
            # Copies of evicted blocks hold slots that were evictable: take every slot before planning the first copy.
            evicted = live.take_blocks(wanted, self._plans.open)
            if backups:
                backups.on_evict(evicted, self._plans.open)
        return Allocation(request_id, live.take_added_blocks())

    def take_plans(self) -> list[TransferPlan]:
        """Close the step: what every rank has to copy, to be submitted in this order before the step computes.

        At most two plans: the step's own, and one of background copies, which are reported by themselves so
        that no load waits for them to be confirmed.
        """
        with self._lock:
            self._heed_device_reset()
            if self._state is ManagerState.RUNNING:
                self._plans.plan_background()
            if self._host:
                self._host.report(lambda: msgspec.json.encode(self.get_stats()))
                self._host.flush()
            return self._plans.close(self._host.arena if self._host else None)

    def commit(self, progress: Iterable[tuple[Request, int]]) -> None:
        """Tell how many tokens of each request are accepted and have their KV on every rank.

        Full blocks become matchable, those above an unconfirmed load once it is confirmed. Raises
        ``RequestStateError`` for more tokens than the request or its block table has; nothing is committed then.
        """
        progress = list(progress)
        with self._lock:
            checked = self._requests.check_commit(progress)
            for live, (_, num_tokens) in zip(checked, progress, strict=True):
                live.commit(num_tokens)

    def apply(self, reports: Iterable[TransferReport]) -> list[LoadOutcome]:
        """Take the ranks' reports; returns the loads that ended with them.

        Raises ``PlanError`` for a report that does not fit its plan; none is taken then. One that came before is
        counted, no more.
        """
        reports = list(reports)
        with self._lock:
            return self._plans.apply(reports)

    def expire(self) -> list[LoadOutcome]:
        """The loads of plans whose deadline has passed; each is told once. Their slots wait for the reports."""
        with self._lock:
            return self._plans.expire()

    def request_finish(self, requests: Iterable[Request]) -> None:
        """End, abort or preempt requests: their blocks stay cached, their pins go. Idempotent."""
        with self._lock:
            for request in requests:
                self._requests.finish(request)

    # --- the whole cache ----------------------------------------------------------------------------------

    def worker_lost(self, rank: int) -> list[LoadOutcome]:
        """A rank's process is proved gone, and its part of every block with it: its tiers are reset.

        The host tier of a service outlives it. Its local storage is out of use until ``restore_storage`` is told
        what the ranks' files hold. Raises ``PlanError`` for a rank that there is not.
        """
        with self._lock:
            outcomes = self._plans.lose_rank(rank)
            self._tiers.worker_lost(self._plans.open)
            self._requests.stop_publishing()
            return outcomes

    def reset_cache(self) -> int:
        """Forget every block of every tier; returns how many. Running requests keep theirs and publish no more.

        The workers empty their local storage with the next plan.
        """
        with self._lock:
            self._requests.stop_publishing()
            return self._tiers.reset(self._plans.open)

    def change_revision(self, revision: str) -> int:
        """The engine has loaded other weights: nothing of the former ones is found again; returns how many blocks go.

        Running requests keep their blocks and publish no more, leases from before are stale and harmless, and a
        service's blocks of this revision are shared with all engines that have it. Between steps; workers need not be
        told. Raises ``LayoutError`` for the revision that there is, ``ConfigurationError`` with a storage tier, whose
        files belong to one revision: make a new manager then.
        """
        with self._lock:
            layout = self.layout.with_revision(revision)
            forgotten = self._tiers.change_layout(layout)
            self._requests.change_fingerprint(layout.fingerprint)
            self.layout = layout
            return forgotten

    def resize_device_pool(self, num_blocks: int) -> bool:
        """Change the number of device blocks. False, and nothing changed, while a block beyond it is in use.

        Raises ``ConfigurationError`` for a number that no pool can have.
        """
        with self._lock:
            return self._device.resize(num_blocks) == 0

    def pause(self) -> int:
        """Plan nothing new until ``wakeup``: matches are deferred, allocations refused, backups stop.

        Commits, reports and finishes go on. Returns the number of plans whose reports are still out.
        """
        with self._lock:
            if self._state is ManagerState.RUNNING:
                self._state = ManagerState.PAUSED
            return self._plans.in_flight

    def sleep(self) -> None:
        """Pause and forget the device tier, whose memory the workers may then give back.

        Raises ``RequestStateError`` while requests are running or copies are under way.
        """
        with self._lock:
            plans = self._plans.unfinished
            if self._requests or plans:
                raise RequestStateError(
                    f"cannot sleep with {len(self._requests)} requests and {plans} plans under way; "
                    "pause, finish the requests, take the last plans, apply the reports, then sleep"
                )
            self._state = ManagerState.ASLEEP
            self._tiers.reset_device()

    def wakeup(self) -> None:
        """Go on after ``pause`` or ``sleep``."""
        with self._lock:
            self._state = ManagerState.RUNNING

    def take_events(self) -> list[CacheEvent]:
        """What entered and left each tier since the last call; empty unless ``settings.event_buffer`` is set."""
        with self._lock:
            return list(self._tiers.take_events(self.layout.block_size))

    # --- what it holds ------------------------------------------------------------------------------------

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
                live_requests=len(self._requests),
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
            return self._tiers.find(self._requests.bind(request).hashes)

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` naming every invariant that does not hold."""
        with self._lock:
            self._tiers.verify()

    def _heed_device_reset(self) -> None:
        """Forget the device tier if an operator of the service asked for it."""
        if self._host and self._host.take_device_reset():
            self._reset_device()

    def _reset_device(self) -> None:
        self._tiers.reset_device()
        self._requests.stop_publishing()
