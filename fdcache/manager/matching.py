"""Prefix matching: the longest prefix of each request that is cached, device blocks first, then host blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from fdcache.errors import ConfigurationError
from fdcache.layout import KVLayout
from fdcache.manager.requests import LiveRequests, Request
from fdcache.manager.results import MatchResult, MatchStatus
from fdcache.manager.tiers import Tiers
from fdcache.metadata import HashArray
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.host import NOTHING, HostMatch
from fdcache.tiers.pool import ABSENT
from fdcache.tiers.statistics import Counters
from fdcache.tiers.storage_reads import leading_ready


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
        self.is_on = self._cell > 1
        """True if the grid is coarser than a block."""

    def allowed(self, blocks: int) -> int:
        """Return how many of ``blocks`` leading blocks may be reused."""
        return blocks // self._cell * self._cell


@dataclass(slots=True)
class _Search:
    """The match of one request after its device part; without ``hashes`` nothing is looked up.

    ``waits``: for its reads from storage, and is not matched. ``pending``: the block after the ``on_device`` blocks
    found is on its way to the device. With a reuse grid they are pinned once the length of the whole match is known.
    """

    request: Request
    hashes: HashArray
    waits: bool = False
    on_device: int = 0
    pending: bool = False

    @property
    def asks_host(self) -> bool:
        """False if all is found, nothing may be loaded, or the next block is on its way to the device."""
        return not (self.request.device_only or self.pending or self.on_device == len(self.hashes))


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
        self._fetches = tiers.fetches
        self._on_device = partial(leading_ready, tiers.device)
        self._requests = requests
        self._counters = counters
        self._clock = clock
        self._reuse = ReuseLimit(settings, layout.block_size)
        self._has_device_only = self._host is None and not self._reuse.is_on

    def prefetch(self, request: Request) -> None:
        """Start to read from storage what a request that has arrived will need."""
        if self._fetches is not None and self._requests.may_prefetch(request):
            number, hashes = self._requests.fetch_number(request), self._requests.matchable(request)
            self._fetches.begin(number, hashes, self._on_device)

    def match(self, requests: list[Request]) -> list[MatchResult]:
        """Pin the longest cached prefix of each request, short of its last token.

        The host tier is asked once for all requests: one round trip to a service. Raises ``RequestStateError`` or
        ``HashingError`` before any request is matched.
        """
        if self._has_device_only:
            self._requests.match_all(requests)
            return [self._matched(request, request.num_blocks) for request in requests]
        self._requests.check_match(requests)
        searches = [self._search_device(request) for request in requests]
        asking = [search for search in searches if search.asks_host]
        if not self._host or not asking:
            return [self._end(search, NOTHING) for search in searches]
        paths = [(search.hashes, search.on_device) for search in asking]
        numbers = [self._requests.fetch_number(search.request) for search in asking]
        found = iter(self._host.match_paths(paths, numbers))
        return [self._end(search, next(found) if search.asks_host else NOTHING) for search in searches]

    def _search_device(self, request: Request) -> _Search:
        hashes = self._requests.matchable(request)
        if self._fetches is not None and self._requests.may_prefetch(request):
            number = self._requests.fetch_number(request)
            if self._fetches.must_wait(number, hashes, self._on_device):
                return _Search(request, hashes[:0], waits=True)
        pending = self._requests.match_device(request, 0 if self._reuse.is_on else len(hashes))
        if not self._requests.publishes(request):
            return _Search(request, hashes[:0])
        if self._reuse.is_on:
            known = self._device.contains(hashes) != ABSENT
            return _Search(request, hashes, on_device=len(known) if known.all() else int(np.argmin(known)))
        return _Search(request, hashes, on_device=request.num_blocks, pending=pending)

    def _end(self, search: _Search, host: HostMatch) -> MatchResult:
        """Join what device and host found, and pin it; or defer the request."""
        request, on_device, on_host = search.request, search.on_device, len(host)
        if search.waits or host.fetching:
            self._requests.wait_for_reads(request)
            return self._deferred(request)
        self._requests.pin_host(request, host.lease)
        on_its_way = search.pending
        if self._reuse.is_on:
            allowed = self._reuse.allowed(on_device + on_host)
            on_device, on_host = min(allowed, on_device), max(allowed - on_device, 0)
            on_its_way = self._requests.shorten(request, on_device)
        if on_its_way:
            on_device, on_host = self._cut(request), 0
        pending = host.pending or on_its_way
        if pending and self._requests.deferred_for(request, self._clock()) < self._defer_timeout:
            self._requests.defer(request)
            return self._deferred(request)
        run, fetched = None, 0
        if on_host:
            run = host.blocks.select(slice(on_host))
            fetched = min(host.fetched.stop, on_host) - min(host.fetched.start, on_host)
        if self._fetches is not None:
            self._fetches.unpin(self._requests.fetch_number(request))
        self._requests.accept(request, run, fetched)
        return self._matched(request, on_device, on_host - fetched, fetched)

    def _cut(self, request: Request) -> int:
        """Match again up to the grid a run that ended early; return its length."""
        allowed = self._reuse.allowed(request.num_blocks)
        if allowed < request.num_blocks:
            self._requests.shorten(request, allowed)
        return allowed

    def _matched(
        self, request: Request, on_device: int, on_host: int = 0, in_storage: int = 0
    ) -> MatchResult:
        return MatchResult(
            request.request_id, MatchStatus.MATCHED, on_device, on_host, in_storage, request.num_cached_tokens
        )

    def _deferred(self, request: Request) -> MatchResult:
        self._counters.deferred_lookups += 1
        return MatchResult(request.request_id, MatchStatus.DEFERRED)
