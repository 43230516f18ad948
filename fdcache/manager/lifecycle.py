"""The life of a request: match, allocate, commit, finish."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fdcache._core import BlockList, MatchRun
from fdcache.errors import IntegrityError, RequestStateError
from fdcache.hashing import TokenBlocks
from fdcache.layout import KVLayout
from fdcache.manager.backups import BackupPlanner
from fdcache.manager.blocks import ROOT, Blocks, parents_of
from fdcache.manager.ledger import InFlightPlan, LoadRange, OpenPlan
from fdcache.manager.prefetch import Prefetching
from fdcache.manager.requests import HostRun, Request
from fdcache.manager.results import (
    NO_BLOCKS,
    Allocation,
    AllocationFailure,
    LoadOutcome,
    LoadStatus,
    MatchResult,
    MatchStatus,
)
from fdcache.manager.reuse import ReuseLimit
from fdcache.manager.stats import Counters
from fdcache.metadata import HashArray, SwapPurpose
from fdcache.settings.cache import CacheSettings
from fdcache.tiers import BlockPool, HostMatch, HostTier
from fdcache.tiers.host_tier import NOTHING

_ABSENT = 0


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
        return self.on_device < len(self.hashes) and not (self.run is not None and self.run.pending)


class RequestLifecycle:
    """What happens to one request at a time, and the plan of the present step."""

    def __init__(
        self,
        settings: CacheSettings,
        layout: KVLayout,
        device: BlockPool,
        host: HostTier | None,
        backups: BackupPlanner | None,
        prefetcher: Prefetching | None,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._block_size = layout.block_size
        self._fingerprint = layout.fingerprint
        self._former_fingerprints: set[bytes] = set()
        self._device = device
        self._host = host
        self._backups = backups
        self._prefetcher = prefetcher
        self._counters = counters
        self._clock = clock
        self._reuse = ReuseLimit(settings, layout.block_size)
        self.live: dict[str, Request] = {}
        self.plan = OpenPlan()

    def close_plan(self) -> OpenPlan:
        """What this step has planned; the next step starts with nothing."""
        closed, self.plan = self.plan, OpenPlan()
        return closed

    def bind(self, request: Request) -> TokenBlocks:
        """The request's tokens, hashed for this layout. Raises ``HashingError``, ``RequestStateError``."""
        return request._bind(self._block_size, self._fingerprint, self._former_fingerprints)

    def change_fingerprint(self, fingerprint: bytes) -> None:
        """From now on keys are those of another layout; running requests keep their blocks and publish no more."""
        self._former_fingerprints.add(self._fingerprint)
        self._former_fingerprints.discard(fingerprint)
        self._fingerprint = fingerprint
        self.stop_publishing()

    def stop_publishing(self) -> None:
        """After a reset: running requests keep their blocks, nobody will find them any more."""
        for request in self.live.values():
            request._publishes = False

    def check_match(self, requests: Sequence[Request]) -> None:
        """Raise for the first request that cannot be matched, before anything changes for any of them."""
        seen: dict[str, Request] = {}
        for request in requests:
            if request._lease or seen.get(request.request_id) is request:
                raise RequestStateError(
                    f"request {request.request_id!r} is matched or running; finish it before it is matched again"
                )
            if request.request_id in self.live or request.request_id in seen:
                raise RequestStateError(f"another request with the id {request.request_id!r} is running")
            self.bind(request)
            seen[request.request_id] = request

    def check_allocate(self, demands: Sequence[tuple[Request, int]]) -> None:
        """As ``check_match``, for requests that cannot be given so many tokens' blocks."""
        for request, num_tokens in demands:
            if self.live.get(request.request_id) is not request:
                raise RequestStateError(
                    f"request {request.request_id!r} has to be matched before it gets blocks"
                )
            if num_tokens < request.num_cached_tokens:
                raise RequestStateError(
                    f"request {request.request_id!r}: {num_tokens} tokens are fewer than the "
                    f"{request.num_cached_tokens} that its match found"
                )

    def check_commit(self, progress: Sequence[tuple[Request, int]]) -> None:
        """As ``check_match``, for requests that have no blocks or not so many tokens."""
        for request, num_tokens in progress:
            limit = min(request.num_tokens, len(request._table) * self._block_size)
            if self.live.get(request.request_id) is not request or not 0 <= num_tokens <= limit:
                raise RequestStateError(
                    f"request {request.request_id!r}: cannot commit {num_tokens} tokens, it has blocks for {limit}"
                )

    def prefetch(self, request: Request) -> None:
        """Begin to read from storage what a request that has arrived will need."""
        if (
            self._prefetcher
            and self._settings.enable_prefix_caching
            and request.use_cache
            and not request._lease
        ):
            self._prefetcher.prefetch(request, self._matchable(request), self.plan)

    def _matchable(self, request: Request) -> HashArray:
        """The hashes of the blocks that a match may find: short of the last token."""
        tokens = self.bind(request)
        return tokens.hashes[: (request.num_tokens - 1) // self._block_size]

    def match(self, requests: Sequence[Request]) -> list[MatchResult]:
        """Pin the longest prefix of each that is cached, device blocks first, short of the last token.

        What the device does not have is asked of the host in one call for all requests.
        """
        searches = [self._search_device(request) for request in requests]
        going_on = [search for search in searches if search.goes_on]
        paths = [(search.hashes, search.on_device) for search in going_on]
        asks = self._prefetcher
        fetches = [asks.number(search.request) for search in going_on] if asks else ()
        found = iter(self._host.match_paths(paths, fetches) if self._host and paths else ())
        return [
            self._match(search, next(found) if self._host and search.goes_on else None) for search in searches
        ]

    def _search_device(self, request: Request) -> _Search:
        hashes = self._matchable(request)
        self.live[request.request_id] = request
        request._lease = self._device.open_lease()
        request._publishes = request._publishes and self._settings.enable_prefix_caching
        if not request._publishes:
            return _Search(request, hashes[:0], None)
        if self._prefetcher and self._prefetcher.must_wait(request, hashes, self.plan):
            return _Search(request, hashes[:0], None, is_read=True)
        if self._reuse.is_on:
            known = self._device.contains(hashes) != _ABSENT
            return _Search(request, hashes, None, len(known) if known.all() else int(np.argmin(known)))
        run = self._device.match(request._lease, hashes)
        return _Search(request, hashes, run, len(run))

    def _match(self, search: _Search, host: HostMatch | None) -> MatchResult:
        request, run, on_device = search.request, search.run, search.on_device
        if search.is_read or (host is not None and host.fetching):
            return self._postpone(request)
        on_host, pending = 0, False
        if host is not None:
            request._host_lease = host.lease
            on_host = len(host)
            pending = host.pending and not self._is_reading(search.hashes, on_device + on_host)
        if self._reuse.is_on:
            allowed = self._reuse.allowed(on_device + on_host)
            on_device, on_host = min(allowed, on_device), max(allowed - on_device, 0)
            run = self._device.match(request._lease, search.hashes[:on_device])
        if run is not None and run.pending:
            pending, on_host = True, 0
            run, on_device = self._cut(request, search.hashes, run)
        if pending and self._must_wait(request):
            return self._defer(request)
        reused = host.first(on_host) if host is not None and on_host else NOTHING
        if reused:
            request._host_run = HostRun(on_device, reused.slots, reused.generations, reused.unverified)
        else:
            self._drop_host_run(request)
        if run is not None and on_device:
            request._table.extend(run.slots)
            request._committed_blocks = request._told_blocks = on_device
            if self._backups:
                self._backups.on_match(search.hashes[:on_device], run.hits)
        return self._matched(request, on_device, reused)

    def _cut(self, request: Request, hashes: HashArray, run: MatchRun) -> tuple[MatchRun, int]:
        """A run that ended early, at the last place where reuse may end."""
        allowed = self._reuse.allowed(len(run))
        if allowed < len(run):
            self._device.release(request._lease)
            request._lease = self._device.open_lease()
            run = self._device.match(request._lease, hashes[:allowed])
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
        self._let_go(request)
        self._counters.deferred_lookups += 1
        return MatchResult(request.request_id, MatchStatus.DEFERRED)

    def _defer(self, request: Request) -> MatchResult:
        since = request._deferred_since
        self._let_go(request)
        request._deferred_since = since
        self._counters.deferred_lookups += 1
        return MatchResult(request.request_id, MatchStatus.DEFERRED)

    def allocate(self, request: Request, num_tokens: int) -> Allocation:
        """Grow the block table to ``num_tokens`` tokens; the first time, plan the loads as well."""
        if request._host_run and not self._host_run_is_loadable(request):
            self._defer(request)
            return Allocation(request.request_id, failure=AllocationFailure.DEFERRED)
        wanted = -(-num_tokens // self._block_size) - len(request._table)
        if wanted > 0 and (missing := wanted - self._device.available) > 0:
            self._counters.allocation_failures += 1
            return Allocation(request.request_id, NO_BLOCKS, AllocationFailure.NO_BLOCKS, missing)
        if not request._counted:
            self._count_hits(request)
        if wanted > 0:
            self._take_blocks(request, wanted)
        told, request._told_blocks = request._told_blocks, len(request._table)
        added = request._table.slots[told:] if request._told_blocks > told else NO_BLOCKS
        return Allocation(request.request_id, added)

    def _take_blocks(self, request: Request, wanted: int) -> None:
        """Extend the block table by so many available blocks, those to be loaded first."""
        # Copies out hold blocks that were evictable, so every slot is taken before the first of them is planned.
        stop = len(request._table) + wanted
        evicted = [self._plan_loads(request, request._host_run)] if request._host_run else []
        if fresh := stop - len(request._table):
            taken = self._device.reserve(request._lease, fresh)
            if taken.missing:
                raise IntegrityError(
                    f"request {request.request_id!r}: {taken.missing} available blocks are gone"
                )
            request._table.extend(taken.slots)
            evicted.append(taken.evicted)
        if self._backups:
            self._backups.on_evict(evicted, self.plan)

    def _count_hits(self, request: Request) -> None:
        request._counted = True
        on_host = len(request._host_run or ())
        counters = self._counters
        counters.lookups += 1
        counters.lookup_tokens += request.num_tokens
        counters.device_hit_tokens += request._committed_blocks * self._block_size
        from_storage = min(request._fetched_blocks, on_host)
        counters.host_hit_tokens += (on_host - from_storage) * self._block_size
        counters.storage_hit_tokens += from_storage * self._block_size

    def _host_run_is_loadable(self, request: Request) -> bool:
        """Since the match, others may have brought blocks of the run to the device: those are device hits now.

        False: another request is loading the next one, or a reset took the run away; match again later.
        """
        run = request._host_run
        tokens = request._blocks
        if run is None or tokens is None or not request._publishes:
            return False
        found = self._device.match(request._lease, tokens.hashes[: run.start + len(run)], run.start)
        if len(found):
            request._table.extend(found.slots)
            request._committed_blocks += len(found)
            request._host_run = run.without(len(found)) if len(found) < len(run) else None
        return not found.pending

    def _plan_loads(self, request: Request, run: HostRun) -> BlockList:
        """Reserve device blocks for the run and plan its copies; returns what was evicted for them."""
        assert self._host and request._blocks
        stop = run.start + len(run)
        hashes = request._blocks.hashes
        source = Blocks(
            run.slots, run.generations, hashes[run.start : stop], parents_of(hashes, run.start, stop)
        )
        taken = self._device.reserve_copies(request._lease, source.parents, source.hashes)
        if len(taken) != len(run):
            raise IntegrityError(
                f"request {request.request_id!r}: {len(run)} loads got {len(taken)} device blocks"
            )
        self._host.begin_load(request._host_lease, run.slots)
        self._drop_host_run(request)
        offset = self.plan.add(
            SwapPurpose.LOAD, source, taken.slots, taken.generations, unverified=run.unverified
        )
        self.plan.loads.append(LoadRange(request, request._incarnation, offset, len(run), run.start))
        request._loading = True
        request._table.extend(taken.slots)
        return taken.evicted

    def _drop_host_run(self, request: Request) -> None:
        request._host_run = None
        if self._host and request._host_lease:
            self._host.release(request._host_lease)
            request._host_lease = 0

    def commit(self, request: Request, num_tokens: int) -> None:
        """Publish the full blocks among the first ``num_tokens`` tokens, but none above an unconfirmed load."""
        request._reported_tokens = num_tokens
        if request._publishes and not request._loading:
            self._publish(request)

    def _publish(self, request: Request) -> None:
        start, stop = request._committed_blocks, request._reported_tokens // self._block_size
        if start >= stop or request._blocks is None:
            return
        hashes = request._blocks.hashes
        parent = hashes[start - 1].tobytes() if start else ROOT
        status = self._device.commit(
            request._lease, parent, hashes[start:stop], request._table.slots[start:stop]
        )
        request._committed_blocks = start + len(status)
        if request._tenant is not None and self._host:
            self._host.own(hashes[0].tobytes(), request._tenant)
        if self._backups and len(status):
            self._backups.on_commit(hashes[start : start + len(status)], status)

    def finish(self, request: Request) -> None:
        """Give back everything the request holds; copies under way keep their slots until they are reported."""
        if self._prefetcher:
            self._prefetcher.release(request)
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """Release what a match pinned; its reads from storage go on."""
        if self.live.get(request.request_id) is not request:
            return
        del self.live[request.request_id]
        self._drop_host_run(request)
        self._device.release(request._lease)
        request._reset()

    def confirm(self, load: LoadRange, flight: InFlightPlan) -> LoadOutcome:
        """Every rank has reported the request's load."""
        request = load.request
        request._loading = False
        copied = flight.copied[SwapPurpose.LOAD][load.offset : load.offset + load.count]
        good = load.count if copied.all() else int(np.argmin(copied))
        request._committed_blocks += good
        if good < load.count:
            request.num_cached_tokens = request._committed_blocks * self._block_size
            self._counters.loads_failed += 1
            return self._outcome(
                load, LoadStatus.FAILED, good, "; ".join(flight.errors) or "the cache was reset"
            )
        self._counters.loads_confirmed += 1
        if request._publishes:
            self._publish(request)
        return self._outcome(load, LoadStatus.CONFIRMED, good, None)

    def overdue(self, load: LoadRange) -> LoadOutcome:
        """The load's deadline has passed; its slots wait for the report all the same."""
        self._counters.loads_overdue += 1
        return self._outcome(load, LoadStatus.OVERDUE, 0, "no report within the plan's deadline")

    def _outcome(self, load: LoadRange, status: LoadStatus, good: int, message: str | None) -> LoadOutcome:
        recompute_from = (load.first_block + good) * self._block_size
        return LoadOutcome(load.request.request_id, status, recompute_from, message)
