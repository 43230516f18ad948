"""How much of a cached prefix may be reused: whole cells of the engine's grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fdcache._core import MatchRun
from fdcache.errors import ConfigurationError
from fdcache.layout import KVLayout
from fdcache.manager.live_requests import LiveRequests
from fdcache.manager.requests import HostRun, Request
from fdcache.manager.results import MatchResult, MatchStatus
from fdcache.manager.tiers import Tiers
from fdcache.metadata import HashArray
from fdcache.plans.ledger import OpenPlan
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.host import NOTHING, HostMatch
from fdcache.tiers.pool import ABSENT
from fdcache.tiers.statistics import Counters


class ReuseLimit:
    """Cuts what a look-up found.

    An engine that computes on a fixed grid gives the same bits for a hit and a miss only if the hit ends on that
    grid. Raises ``ConfigurationError`` for a grid that neither divides the block size nor is a multiple of it.
    """

    def __init__(self, settings: CacheSettings, block_size: int) -> None:
        grid = settings.reuse_grid or block_size
        if grid % block_size and block_size % grid:
            raise ConfigurationError(
                f"reuse_grid: {grid} tokens neither divide the block size {block_size} nor are a multiple of it"
            )
        self._cell = max(grid // block_size, 1)

    @property
    def is_on(self) -> bool:
        """Whether it ever cuts anything."""
        return self._cell > 1

    def allowed(self, blocks: int) -> int:
        """How many of so many leading blocks may be reused."""
        return blocks // self._cell * self._cell


@dataclass(slots=True)
class _Search:
    """A look-up between its device and its host part; no ``hashes``: nothing is looked up.

    Where reuse is limited, the device's ``run`` is pinned when it is known how far the whole goes.
    """

    request: Request
    hashes: HashArray
    run: MatchRun | None
    on_device: int = 0
    is_read: bool = False  # from storage, and worth waiting for

    @property
    def goes_on(self) -> bool:
        """Whether the host is asked: not for what lies below a block that is still on its way to the device."""
        if self.request.device_only or self.on_device == len(self.hashes):
            return False
        return self.run is None or not self.run.pending


class PrefixLookup:
    """Finds and pins what requests can reuse, and has read from storage what they will need."""

    def __init__(
        self,
        settings: CacheSettings,
        layout: KVLayout,
        tiers: Tiers,
        live: LiveRequests,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._block_size = layout.block_size
        self._tiers = tiers
        self._device = tiers.device
        self._host = tiers.host
        self._prefetcher = tiers.prefetcher
        self._live = live
        self._counters = counters
        self._clock = clock
        self._reuse = ReuseLimit(settings, layout.block_size)

    def prefetch(self, request: Request, plan: OpenPlan) -> None:
        """Begin to read from storage what a request that has arrived will need."""
        if (
            self._prefetcher
            and self._settings.enable_prefix_caching
            and request.use_cache
            and not request.device_only
            and not request._lease
        ):
            self._prefetcher.prefetch(request, self._live.matchable(request), plan)

    def match(self, requests: Sequence[Request], plan: OpenPlan) -> list[MatchResult]:
        """Pin the longest prefix of each that is cached, device blocks first, short of the last token.

        What the device does not have is asked of the host in one call for all requests.
        """
        searches = [self._search_device(request, plan) for request in requests]
        going_on = [search for search in searches if search.goes_on]
        if not self._host or not going_on:
            return [self._match(search, NOTHING) for search in searches]
        paths = [(search.hashes, search.on_device) for search in going_on]
        asks = self._prefetcher
        fetches = [asks.number(search.request) for search in going_on] if asks else ()
        found = iter(self._host.match_paths(paths, fetches))
        return [self._match(search, next(found) if search.goes_on else NOTHING) for search in searches]

    def _search_device(self, request: Request, plan: OpenPlan) -> _Search:
        hashes = self._live.matchable(request)
        self._live.admit(request)
        request._publishes = request._publishes and self._settings.enable_prefix_caching
        if not request._publishes:
            return _Search(request, hashes[:0], None)
        reader = None if request.device_only else self._prefetcher
        if reader and reader.must_wait(request, hashes, plan):
            return _Search(request, hashes[:0], None, is_read=True)
        if self._reuse.is_on:
            known = self._device.contains(hashes) != ABSENT
            return _Search(request, hashes, None, len(known) if known.all() else int(np.argmin(known)))
        run = self._tiers.match(request, hashes)
        return _Search(request, hashes, run, len(run))

    def _match(self, search: _Search, host: HostMatch) -> MatchResult:
        request, run, on_device = search.request, search.run, search.on_device
        if search.is_read or host.fetching:
            return self._postpone(request)
        request._host_lease = host.lease
        on_host = len(host)
        pending = host.pending and not self._is_reading(search.hashes, on_device + on_host)
        if self._reuse.is_on:
            allowed = self._reuse.allowed(on_device + on_host)
            on_device, on_host = min(allowed, on_device), max(allowed - on_device, 0)
            run = self._tiers.match(request, search.hashes[:on_device])
        if run is not None and run.pending:
            pending, on_host = True, 0
            run, on_device = self._cut(request, search.hashes, run)
        if pending and self._must_wait(request):
            return self._defer(request)
        reused = host.first(on_host) if on_host else NOTHING
        if reused:
            request._host_run = HostRun(on_device, reused.slots, reused.generations, reused.unverified)
        else:
            self._live.drop_host_run(request)
        if run is not None and on_device:
            request._table.extend(run.slots)
            request._committed_blocks = request._told_blocks = on_device
        return self._matched(request, on_device, reused)

    def _cut(self, request: Request, hashes: HashArray, run: MatchRun) -> tuple[MatchRun, int]:
        """A run that ended early, at the last place where reuse may end."""
        allowed = self._reuse.allowed(len(run))
        if allowed < len(run):
            self._device.release(request._lease)
            request._lease = self._device.open_lease()
            run = self._tiers.match(request, hashes[:allowed])
        return run, allowed

    def _is_reading(self, hashes: HashArray, block: int) -> bool:
        """Whether a block comes from storage: how long to wait for it was decided before the match."""
        return self._prefetcher is not None and self._prefetcher.is_reading(hashes[block].tobytes())

    def _matched(self, request: Request, on_device: int, host: HostMatch) -> MatchResult:
        request._deferred_since = None
        fetched, on_host = 0, len(host)
        if self._prefetcher:
            fetched = self._prefetcher.fetched(request, on_device, host)
            self._prefetcher.let_go(request)
        request._fetched_blocks = fetched
        request.num_cached_tokens = (on_device + on_host) * self._block_size
        return MatchResult(
            request.request_id,
            MatchStatus.MATCHED,
            num_device_blocks=on_device,
            num_host_blocks=on_host - fetched,
            num_storage_blocks=fetched,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _must_wait(self, request: Request) -> bool:
        now = self._clock()
        if request._deferred_since is None:
            request._deferred_since = now
        return now - request._deferred_since < self._settings.defer_timeout

    def _postpone(self, request: Request) -> MatchResult:
        """Its blocks are being read; how long that may take is not for ``defer_timeout`` to say."""
        self._live.let_go(request)
        self._counters.deferred_lookups += 1
        return MatchResult(request.request_id, MatchStatus.DEFERRED)

    def _defer(self, request: Request) -> MatchResult:
        self._live.defer(request)
        self._counters.deferred_lookups += 1
        return MatchResult(request.request_id, MatchStatus.DEFERRED)
