"""Prefix matching: the longest prefix of each request that is cached, device blocks first, then host blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fdcache._core import MatchRun
from fdcache.errors import ConfigurationError
from fdcache.layout import KVLayout
from fdcache.manager.requests import HostRun, LiveRequest, LiveRequests, Request
from fdcache.manager.results import NO_BLOCKS, MatchResult, MatchStatus
from fdcache.manager.tiers import Tiers
from fdcache.metadata import HashArray
from fdcache.plans.ledger import OpenPlan
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.host import NOTHING, HostMatch
from fdcache.tiers.pool import ABSENT
from fdcache.tiers.statistics import Counters


class ReuseLimit:
    """Rounds a match down to the engine's reuse grid.

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
        """True if the grid is coarser than a block."""
        return self._cell > 1

    def allowed(self, blocks: int) -> int:
        """Return how many of ``blocks`` leading blocks may be reused."""
        return blocks // self._cell * self._cell


@dataclass(slots=True)
class _Search:
    """The match of one request after its device part; without ``hashes`` nothing is looked up.

    With a reuse grid ``run`` is None: the device blocks are pinned once the length of the whole match is known.
    ``is_reading``: the request waits for its reads from storage.
    """

    live: LiveRequest
    hashes: HashArray
    run: MatchRun | None = None
    on_device: int = 0
    is_reading: bool = False

    @property
    def asks_host(self) -> bool:
        """False if all is found, nothing may be loaded, or the next block is on its way to the device."""
        if self.live.request.device_only or self.on_device == len(self.hashes):
            return False
        return self.run is None or not self.run.pending


class PrefixMatcher:
    """Finds and pins what requests can reuse, and starts their reads from storage."""

    def __init__(
        self,
        settings: CacheSettings,
        layout: KVLayout,
        tiers: Tiers,
        requests: LiveRequests,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._defer_timeout = settings.defer_timeout
        self._device = tiers.device
        self._host = tiers.host
        self._prefetcher = tiers.prefetcher
        self._requests = requests
        self._counters = counters
        self._clock = clock
        self._reuse = ReuseLimit(settings, layout.block_size)

    def prefetch(self, request: Request, plan: OpenPlan) -> None:
        """Start to read from storage what a request that has arrived will need."""
        if self._prefetcher and self._requests.may_prefetch(request):
            hashes = self._requests.matchable(request)
            self._prefetcher.prefetch(self._requests.fetch_number(request), hashes, plan)

    def match(self, requests: Sequence[Request], plan: OpenPlan) -> list[MatchResult]:
        """Pin the longest cached prefix of each request, short of its last token.

        The host tier is asked once for all requests: one round trip to a service.
        """
        searches = [self._search_device(request, plan) for request in requests]
        asking = [search for search in searches if search.asks_host]
        if not self._host or not asking:
            return [self._end(search, NOTHING) for search in searches]
        paths = [(search.hashes, search.on_device) for search in asking]
        fetches = self._prefetcher
        numbers = (
            [fetches.looked_up(self._requests.fetch_number(each.live.request)) for each in asking]
            if fetches
            else ()
        )
        found = iter(self._host.match_paths(paths, numbers))
        return [self._end(search, next(found) if search.asks_host else NOTHING) for search in searches]

    def _search_device(self, request: Request, plan: OpenPlan) -> _Search:
        hashes = self._requests.matchable(request)
        live = self._requests.admit(request)
        if not live.publishes:
            return _Search(live, hashes[:0])
        if self._prefetcher and not request.device_only:
            number = self._requests.fetch_number(request)
            if self._prefetcher.must_wait(number, hashes, plan):
                return _Search(live, hashes[:0], is_reading=True)
        if self._reuse.is_on:
            known = self._device.contains(hashes) != ABSENT
            return _Search(live, hashes, None, len(known) if known.all() else int(np.argmin(known)))
        run = live.match_device(hashes)
        return _Search(live, hashes, run, len(run))

    def _fetch_to_look_up(self, search: _Search) -> int:
        number = self._requests.fetch_number(search.live.request)
        return self._prefetcher.looked_up(number) if self._prefetcher else 0

    def _end(self, search: _Search, host: HostMatch) -> MatchResult:
        """Join what device and host found, and pin it; or defer the request."""
        live, run, on_device = search.live, search.run, search.on_device
        request = live.request
        if search.is_reading or host.fetching:
            # The prefetch policy bounds this wait, not ``defer_timeout``.
            self._requests.unmatch(request)
            return self._deferred(request)
        live.pin_host(host.lease)
        on_host = len(host)
        pending = host.pending and not self._is_reading(search.hashes, on_device + on_host)
        if self._reuse.is_on:
            allowed = self._reuse.allowed(on_device + on_host)
            on_device, on_host = min(allowed, on_device), max(allowed - on_device, 0)
            run = live.match_device(search.hashes[:on_device])
        if run is not None and run.pending:
            pending, on_host = True, 0
            run, on_device = self._cut(live, search.hashes, run)
        if pending and live.deferred_for(self._clock()) < self._defer_timeout:
            self._requests.defer(request)
            return self._deferred(request)
        reused = host.first(on_host) if on_host else NOTHING
        host_run = (
            HostRun(on_device, reused.slots, reused.generations, reused.unverified) if on_host else None
        )
        fetched = 0
        if self._prefetcher:
            number = self._requests.fetch_number(request)
            fetched = self._prefetcher.fetched(number, on_device, reused)
            self._prefetcher.let_go(number)
        slots = run.slots if run is not None and on_device else NO_BLOCKS
        return MatchResult(
            request.request_id,
            MatchStatus.MATCHED,
            num_device_blocks=on_device,
            num_host_blocks=on_host - fetched,
            num_storage_blocks=fetched,
            num_cached_tokens=live.accept_match(slots, host_run, fetched),
        )

    def _cut(self, live: LiveRequest, hashes: HashArray, run: MatchRun) -> tuple[MatchRun, int]:
        """Match again up to the grid a run that ended early."""
        allowed = self._reuse.allowed(len(run))
        if allowed < len(run):
            live.unpin_device()
            run = live.match_device(hashes[:allowed])
        return run, allowed

    def _is_reading(self, hashes: HashArray, block: int) -> bool:
        """Return True for a pending block that comes from storage: the wait for it has ended before the match."""
        return self._prefetcher is not None and self._prefetcher.is_reading(hashes[block].tobytes())

    def _deferred(self, request: Request) -> MatchResult:
        self._counters.deferred_lookups += 1
        return MatchResult(request.request_id, MatchStatus.DEFERRED)
