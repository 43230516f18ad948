"""Prefix matching: the longest prefix of each request that is cached, device blocks first, then host blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fdcache._core import MatchRun
from fdcache.errors import ConfigurationError
from fdcache.layout import KVLayout
from fdcache.manager.requests import LiveRequest, LiveRequests, Request
from fdcache.manager.results import NO_BLOCKS, MatchResult, MatchStatus
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

    ``live`` is None while the request waits for its reads from storage. With a reuse grid ``run`` is None: the device
    blocks are pinned once the length of the whole match is known.
    """

    request: Request
    live: LiveRequest | None
    hashes: HashArray
    run: MatchRun | None = None
    on_device: int = 0

    @property
    def asks_host(self) -> bool:
        """False if all is found, nothing may be loaded, or the next block is on its way to the device."""
        if self.request.device_only or self.on_device == len(self.hashes):
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
        self._fetches = tiers.fetches
        self._on_device = partial(leading_ready, tiers.device)
        self._requests = requests
        self._counters = counters
        self._clock = clock
        self._reuse = ReuseLimit(settings, layout.block_size)

    def prefetch(self, request: Request) -> None:
        """Start to read from storage what a request that has arrived will need."""
        if self._fetches is not None and self._fetches.is_on and self._requests.may_prefetch(request):
            number, hashes = self._requests.fetch_number(request), self._requests.matchable(request)
            self._fetches.begin(number, hashes, self._on_device)

    def match(self, requests: Sequence[Request]) -> list[MatchResult]:
        """Pin the longest cached prefix of each request, short of its last token.

        The host tier is asked once for all requests: one round trip to a service.
        """
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
        if self._fetches is not None and self._fetches.is_on and self._requests.may_prefetch(request):
            number = self._requests.fetch_number(request)
            if self._fetches.must_wait(number, hashes, self._on_device):
                return _Search(request, None, hashes[:0])
        live = self._requests.admit(request)
        if not live.publishes:
            return _Search(request, live, hashes[:0])
        if self._reuse.is_on:
            known = self._device.contains(hashes) != ABSENT
            return _Search(request, live, hashes, None, len(known) if known.all() else int(np.argmin(known)))
        run = live.match_device(hashes)
        return _Search(request, live, hashes, run, len(run))

    def _end(self, search: _Search, host: HostMatch) -> MatchResult:
        """Join what device and host found, and pin it; or defer the request."""
        request, live, run, on_device = search.request, search.live, search.run, search.on_device
        if live is None or host.fetching:
            self._requests.wait_for_reads(request)
            return self._deferred(request)
        live.pin_host(host.lease)
        on_host = len(host)
        pending = host.pending
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
        host_run, fetched = None, 0
        if on_host:
            host_run = host.blocks.select(slice(on_host))
            fetched = min(host.fetched.stop, on_host) - min(host.fetched.start, on_host)
        if self._fetches is not None:
            self._fetches.unpin(self._requests.fetch_number(request))
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

    def _deferred(self, request: Request) -> MatchResult:
        self._counters.deferred_lookups += 1
        return MatchResult(request.request_id, MatchStatus.DEFERRED)
