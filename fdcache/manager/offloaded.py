"""Requests of an engine that owns its device cache: what was found for them, and what they have offered."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fdcache import _core, tracing
from fdcache.block_owners import BlockOwners
from fdcache.layout import KVLayout
from fdcache.manager.keyed import KeyedRequest, OffloadRequest, not_a_request
from fdcache.manager.load_choices import LoadChoices
from fdcache.manager.loads import EngineLoad, EngineLoads, Tracked
from fdcache.manager.matching import ReuseLimit, Waits
from fdcache.manager.requests import Request
from fdcache.manager.results import LoadOutcome, MatchStatus, OffloadMatch, load_forms
from fdcache.manager.states import MatchEnds, StatePaths
from fdcache.metadata import HashArray, Int32Array
from fdcache.plans.ledger import ROOT, OpenPlan
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.host import Found, HostTier, Reading, find_and_pin, find_only, find_whole, nothing
from fdcache.tiers.statistics import Counters
from fdcache.tiers.waiting_fetches import Wait

_ASK_AGAIN = 0.1
"""Seconds for which the answer that nothing was found is kept: others may store the blocks meanwhile."""


class OffloadedRequests:
    """The requests that have arrived and not ended, by id.

    ``streams``: what is being read counts as found once its first blocks have come; ``loads`` follow it to its end.
    """

    def __init__(
        self,
        settings: CacheSettings,
        layout: KVLayout,
        host: HostTier,
        counters: Counters,
        clock: Callable[[], float],
        choices: LoadChoices,
        *,
        streams: bool = False,
    ) -> None:
        self._counters = counters
        self._choices = choices
        self._streams = streams and not layout.groups
        self._caches_prefixes = settings.enable_prefix_caching
        self._defer_timeout = settings.defer_timeout
        self._pin_timeout = settings.plan_timeout
        self._block_size = layout.block_size
        self._records = layout.page_records
        self._owners = BlockOwners(layout)
        self._units = layout.page_records + layout.num_states
        self._states = StatePaths(layout, host) if layout.num_states else None
        self._ends = MatchEnds(layout, host) if layout.groups else None
        self._host = host
        self._fetches = host.fetches
        self._waits = Waits(choices, clock, host)
        self._cell = ReuseLimit(settings, layout.block_size).cell * max(layout.page_records, 1)
        self._clock = clock
        self._tracked: dict[str, Tracked] = {}
        self.pinned: set[Tracked] = set()
        """Those of which something found is pinned."""
        self._hasher = _core.BlockManager(
            _core.Tier(1), layout.block_size, layout.fingerprint, settings.lookahead_tokens
        )
        self._load_forms = load_forms(layout)
        self.released: Callable[[OffloadRequest], None] | None = None
        """Called with each request that ends, where blocks are handed over."""
        self.native_loads = self._hasher.loads
        self.loads = EngineLoads(layout, host, self.native_loads, counters)

    def __len__(self) -> int:
        return len(self._tracked)

    @property
    def arena(self) -> str | None:
        """Name of the shared arena that slots found now refer to; None if every worker has its own."""
        return self._host.service.arena if self._host.service is not None else None

    def prepare(self, request: OffloadRequest, *, keeps_gil: bool = False) -> None:
        """Hash the tokens of a request, unless they are hashed. Raises ``HashingError``, ``RequestStateError``.

        ``keeps_gil``: in the thread of the engine's steps the GIL would be waited for longer than this takes.
        """
        if isinstance(request, Request):
            self._hasher.prepare(request, keeps_gil=keeps_gil)
        elif not isinstance(request, KeyedRequest):
            raise not_a_request(request)

    def get(self, request: OffloadRequest) -> Tracked | None:
        """Return a request that has arrived and not ended. Raises ``RequestStateError`` for anything else."""
        if not isinstance(request, (Request, KeyedRequest)):
            raise not_a_request(request)
        tracked = self._tracked.get(request.request_id)
        return tracked if tracked is not None and tracked.request is request else None

    def named(self, request_id: str) -> Tracked | None:
        """Return the request of this id that has arrived and not ended."""
        return self._tracked.get(request_id)

    def track(self, request: OffloadRequest) -> Tracked:
        """Return a request, which arrives now if it has not before. One with the same id ends."""
        if (tracked := self.get(request)) is not None:
            return tracked
        if (former := self._tracked.get(request.request_id)) is not None:
            self.finish(former.request)
        tracked = self._tracked[request.request_id] = Tracked(request)
        return tracked

    def finish(self, request: OffloadRequest) -> None:
        """Unpin what a request has, and end its reads from storage."""
        tracked = self.get(request)
        if tracked is None:
            return
        if self.released is not None:
            self.released(request)
        del self._tracked[request.request_id]
        self.unpin(tracked)
        if tracked.load is not None:
            self.native_loads.cut_off(tracked.load.load, "the request has ended")
        self._choices.forget([request])
        if self._waits.waiting:
            self._waits.forget(request)
        if tracked.fetch and self._fetches is not None:
            self._fetches.end(tracked.fetch)

    def forget_found(self, reason: str) -> None:
        """Forget what was found and what was offered, as after a reset; loads in flight count for nothing."""
        for tracked in self._tracked.values():
            self.unpin(tracked)
            tracked.path = None
        self.native_loads.revoke(reason)

    def change_fingerprint(self, fingerprint: bytes) -> None:
        """Hash with another layout from now on; requests that have arrived find and leave nothing."""
        self.forget_found("the model has other weights")
        for tracked in self._tracked.values():
            tracked.is_stale = True
        self._hasher.change_fingerprint(fingerprint)

    def expire(self) -> None:
        """Unpin what nothing has asked for lately."""
        if not self.pinned:
            return
        oldest = self._clock() - self._pin_timeout
        for tracked in [each for each in self.pinned if each.asked_at < oldest]:
            self.unpin(tracked)

    # --- match --------------------------------------------------------------------------------------------

    def begin_fetch(self, tracked: Tracked, whole: bool) -> None:
        """Start to read from storage what a request that has arrived will need."""
        if self._may_fetch(tracked) and self._may_load(tracked):
            hashes = self._matchable(tracked, whole)
            if self._states is not None:
                if not (end := self._states.end(hashes, 0)):
                    return  # a store that is asked has answered by the time of the match
                tracked.end, hashes = end, self._states.path(hashes, end)
            self._waits.begin(
                tracked.request, self._fetch_number(tracked), hashes, lambda _: tracked.device_blocks
            )

    def match(self, request: OffloadRequest, device_tokens: int, whole: bool) -> OffloadMatch:
        """Find and pin what can be loaded, or defer the request."""
        tracked = self.track(request)
        tracked.path = None  # one that is matched has no blocks
        if not self._pin(tracked, device_tokens, whole):
            self._counters.deferred_lookups += 1
            coming = self._page_tokens(tracked.coming)
            return OffloadMatch(request.request_id, MatchStatus.DEFERRED, coming=coming)
        tokens, theirs = self.tokens(tracked, tracked.remaining), 0
        is_stored = tracked.coming or (tracked.found is not None and tracked.found.fetched)
        stored = min(self._page_tokens(tracked.from_storage + tracked.coming), tokens) if is_stored else 0
        if tracked.peer is not None and tracked.from_peer:
            theirs = tracked.peer.num_tokens - device_tokens - tokens
        return OffloadMatch(
            request.request_id,
            MatchStatus.MATCHED,
            tokens + theirs,
            stored,
            theirs,
            ended_by=tracked.ended_by,
        )

    def _page_tokens(self, num_records: int) -> int:
        """Return the tokens of this many records of pages."""
        return num_records // max(self._records, 1) * self._block_size

    def _pin(self, tracked: Tracked, device_tokens: int, whole: bool) -> bool:
        """Find and pin what can be loaded; return False if the request has to ask later."""
        tracked.asked_at = self._clock()
        size = self._block_size
        tracked.device_pages = device_tokens // size
        tracked.device_blocks = tracked.device_pages * self._records
        if device_tokens % size or not self._may_load(tracked):
            self.unpin(tracked)
            return True
        hashes = self._matchable(tracked, whole)
        if self._is_kept(tracked, len(hashes)):
            return True
        self.unpin(tracked)
        states = self._states_at_end(tracked)
        if tracked.peer is not None:
            self._aim(tracked, 0)
        found = self._find(tracked, hashes) if states is None else self._find_end(tracked, hashes, states)
        if found is None:
            return False
        (tracked.found, tracked.coming), tracked.start = found, tracked.device_blocks
        tracked.limit, tracked.arena, tracked.found_at = len(hashes), self.arena, tracked.asked_at
        if tracked.lease:
            self.pinned.add(tracked)
        tracked.deferred_since = None
        if self._ends is not None:
            tracked.ended_by = self._ended_by(self._ends, tracked, whole)
        if self._choices.open:
            ahead = tracked.remaining + tracked.from_peer
            self._choices.matched(tracked.request.request_id, tracked.device_blocks, ahead)
        return True

    def _states_at_end(self, tracked: Tracked) -> StatePaths | None:
        """Return the paths to look for if what is found is of use with states at its end alone: a peer has others."""
        return self._states if tracked.peer is None else None

    def _ended_by(self, ends: MatchEnds, tracked: Tracked, whole: bool) -> int | None:
        """Return the group of layers that ended the match; None if none did."""
        pages = tracked.device_pages + self.tokens(tracked, tracked.remaining) // self._block_size
        return ends.group_after(tracked.matchable(self._block_size, whole), pages)

    def tokens(self, tracked: Tracked, num_records: int) -> int:
        """Return the tokens that the first of the remaining records stand for: with states all of them, or none."""
        if self._states_at_end(tracked) is None:
            return self._page_tokens(num_records)
        is_whole = num_records and num_records >= tracked.remaining
        return (tracked.end - tracked.device_pages) * self._block_size if is_whole else 0

    def loadable(self, tracked: Tracked | None, ids: Int32Array) -> Int32Array:
        """Return the device blocks that a load of what was found fills, the first of ``ids``."""
        if tracked is None or tracked.arena != self.arena:
            return ids[:0]
        if tracked.peer is not None and (theirs := tracked.from_peer):
            own = tracked.remaining
            fits = len(ids) == own + theirs and tracked.peer.fits(tracked.device_blocks + own, ids[own:])
            return ids if fits else ids[:0]
        if self._states_at_end(tracked) is not None:
            return ids[: tracked.remaining if len(ids) >= tracked.remaining else 0]
        return ids[: min(len(ids) // self._records * self._records, tracked.remaining)]

    def unpin(self, tracked: Tracked) -> None:
        """Unpin the blocks found; those being loaded stay pinned until the load ends."""
        if (tracked.found is not None or tracked.coming) and (lease := self._hand_over(tracked)):
            self._host.index.release(lease)

    def _is_kept(self, tracked: Tracked, limit: int) -> bool:
        is_same = tracked.found is not None and tracked.arena == self.arena and not tracked.coming
        if is_same and not tracked.lease and tracked.asked_at - tracked.found_at >= _ASK_AGAIN:
            return False
        if self._states_at_end(tracked) is not None and tracked.lease:
            is_same &= tracked.start == tracked.device_blocks and tracked.device_pages < tracked.end
        return is_same and tracked.start <= tracked.device_blocks and tracked.limit == limit

    def _find_end(self, tracked: Tracked, hashes: HashArray, states: StatePaths) -> tuple[Found, int] | None:
        """Return what the host tier has of the longest prefix at whose end it has states; None to ask later.

        Of a prefix that is not whole nothing is of use.
        """
        most = len(hashes)
        while pages := self._end(tracked, hashes[:most], states):
            path = states.path(hashes, pages)
            self._aim(tracked, pages)
            answer = self._find(tracked, path)
            if answer is None:
                return None
            found = answer[0]
            is_whole = len(found) == len(path) - tracked.device_blocks
            if is_whole and self._is_end_worth_loading(tracked):
                return found, 0
            self._host.index.release(found.lease)
            if is_whole:
                return nothing(), 0
            whole = (tracked.device_blocks + len(found)) // self._records if self._records else pages
            most = min(whole, pages - 1)
        if pages is None:
            tracked.coming = 0
            return None
        tracked.end = 0
        return nothing(), 0

    def _end(self, tracked: Tracked, hashes: HashArray, states: StatePaths) -> int | None:
        """Return after how many pages there are states; None to ask later, but not for ever."""
        pages = states.end(hashes, tracked.device_pages)
        if pages is None and tracked.deferred_for(self._clock()) >= self._defer_timeout:
            return states.end(hashes, tracked.device_pages, waits=False)
        return pages

    def _aim(self, tracked: Tracked, pages: int) -> None:
        """Read from storage what belongs to a prefix of this many pages: another one is wanted no longer."""
        if tracked.end != pages:
            tracked.end = pages
            if tracked.fetch and self._fetches is not None:
                self._fetches.end(tracked.fetch)
                tracked.fetch = 0

    def _find(self, tracked: Tracked, hashes: HashArray) -> tuple[Found, int] | None:
        """Return what the host tier has, and how many blocks after it are coming; None to ask later.

        What the reuse grid does not allow is left out.
        """
        start = tracked.device_blocks
        if start >= len(hashes):
            return nothing(), 0
        found, stop = self._look(tracked, hashes, start)
        if stop is not None:
            if self._states_at_end(tracked) is None:
                stop -= stop % self._cell
            if len(found) and stop > start + len(found) and tracked.peer is None:
                return found, stop - start - len(found)
        if stop is not None or (found.pending and tracked.deferred_for(self._clock()) < self._defer_timeout):
            self._host.index.release(found.lease)
            tracked.coming = 0 if stop is None else max(stop - start, 0)
            return None
        if tracked.fetch:
            self._unpin_fetch(tracked)
        count = self._worth_loading(tracked, len(found))
        if not count:
            self._host.index.release(found.lease)
            return nothing(), 0
        if count == len(found):
            return found, 0
        fetched = range(min(found.fetched.start, count), min(found.fetched.stop, count))
        return found.part(0, count, fetched), 0

    def _look(self, tracked: Tracked, hashes: HashArray, start: int) -> tuple[Found, int | None]:
        """Pin what the host tier has of a path from ``start`` on, and return where its reads in flight end.

        The end is None unless the request waits for reads.
        """
        request, number = tracked.request, 0
        if self._may_fetch(tracked):
            number = self._fetch_number(tracked)
            wait = self._waits.before_look_up(request, number, hashes, lambda _: tracked.device_blocks)
            if wait is not None:
                return self._arrived(hashes, start, wait)
        found = find_and_pin(self._host, hashes, start, number)
        if isinstance(found, Reading):
            wait = self._waits.answered(request, number, start, found)
            if wait is not None:
                return self._arrived(hashes, start, wait)
            found = find_only(self._host, hashes, start)
        if self._waits.waiting:
            self._waits.found(request, start + found.fetched.stop)
        return found, None

    def _arrived(self, hashes: HashArray, start: int, wait: Wait) -> tuple[Found, int]:
        """Pin what has come of a path of which no more is read than ``wait`` says; return where its reads end."""
        if not wait.is_last:
            return nothing(), max(wait.stop, start)
        pinned = find_whole(self._host, hashes[: wait.arrived], start) if self._streams else nothing()
        read = range(min(max(wait.first - start, 0), len(pinned)), len(pinned))
        return pinned.part(0, len(pinned), read), wait.stop

    def _unpin_fetch(self, tracked: Tracked) -> None:
        if self._host.fetch_table is not None and tracked.fetch:
            self._host.fetch_table.unpin(tracked.fetch)

    def _worth_loading(self, tracked: Tracked, found: int) -> int:
        """Return how many of the blocks found are worth loading, down to the reuse grid; with states all of them."""
        start, request = tracked.device_blocks, tracked.request
        if self._states is not None or tracked.peer is not None:  # which has what follows
            return found
        limit = self._choices.limit
        if found and limit is not None and tracked.parent == ROOT:
            last = request.block_hashes[(start + found - 1) // self._records].tobytes()
            found = limit(request.request_id, request.num_tokens, start, found, last)
        end = start + found
        return max(end - end % self._cell - start, 0)

    def _is_end_worth_loading(self, tracked: Tracked) -> bool:
        """Return True if the pages up to the states found are on the reuse grid, and are not sooner computed."""
        request, limit = tracked.request, self._choices.limit
        if tracked.end % max(self._cell // max(self._records, 1), 1):
            return False
        if limit is None or tracked.parent != ROOT:
            return True
        start, found = (
            each * self._units for each in (tracked.device_pages, tracked.end - tracked.device_pages)
        )
        last = request.block_hashes[tracked.end - 1].tobytes()
        return limit(request.request_id, request.num_tokens, start, found, last) == found

    def _may_fetch(self, tracked: Tracked) -> bool:
        return self._fetches is not None and self._fetches.is_on

    def _may_load(self, tracked: Tracked) -> bool:
        request = tracked.request
        allowed = self._caches_prefixes and request.use_cache and not request.device_only
        return allowed and not tracked.is_stale and tracked.load is None

    def _matchable(self, tracked: Tracked, whole: bool) -> HashArray:
        """Return the keys that a match may find; with states at its end the hashes of the pages."""
        pages = tracked.matchable(self._block_size, whole)
        if self._records == 1 or self._states_at_end(tracked) is not None:
            return pages
        return tracked.keys_of_pages(self._records)[: len(pages) * self._records]

    def _fetch_number(self, tracked: Tracked) -> int:
        if not tracked.fetch and self._fetches is not None:
            tracked.fetch = self._fetches.number("" if tracing.spans is None else tracked.request.request_id)
        return tracked.fetch

    # --- loads and offers ---------------------------------------------------------------------------------

    def load(self, tracked: Tracked, ids: Int32Array, plan: OpenPlan) -> int:
        """Plan to load the blocks found into these device blocks; return how many of them are planned now."""
        run, first, stored = tracked.take(len(ids)), tracked.device_blocks, tracked.from_storage
        if tracked.coming and len(run) == len(ids):
            self.leave_fetch(tracked)
        tracked.load = loading = self.loads.plan(tracked.request, first, ids, run, plan)
        loading.pages = range(tracked.device_pages, tracked.end)
        of_pages = len(ids) - (self._units - self._records)  # the states come last
        from_storage = self._page_tokens(min(stored, len(run), of_pages))
        self.loads.count_hits(loading, max(self.tokens(tracked, len(run)) - from_storage, 0), from_storage)
        if tracked.peer is not None and len(run) < len(ids):
            self.loads.fetch_rest(loading, tracked.peer)
            loading.pages = range(tracked.device_pages, tracked.peer.num_tokens // self._block_size)
            tracked.peer = None
        loading.lease = self._hand_over(tracked)
        return len(run)

    def _hand_over(self, tracked: Tracked) -> int:
        """Return the lease of what was found, which is not the request's any more."""
        lease, tracked.found, tracked.coming = tracked.lease, None, 0
        self.pinned.discard(tracked)
        return lease

    def withdraw(self, tracked: Tracked, step: OpenPlan, ahead: OpenPlan) -> bool:
        """Withdraw the load that is planned for a request; False if there is none, or a plan of it was sent."""
        loading = tracked.load
        if loading is None or not self.loads.withdraw(loading, step, ahead):
            return False
        tracked.load = None
        self._choices.matched(tracked.request.request_id, loading.load.first, 0)
        return True

    def look(self, loading: EngineLoad) -> tuple[Found, bool]:
        """Pin the blocks of a load that have been read since its last part; False if no others are waited for."""
        tracked, load = self._waiting_for(loading), loading.load
        if tracked is None:
            return nothing(), False
        found, stop = self._look(tracked, tracked.keys_of_pages(self._records)[: load.stop], load.planned)
        if stop is None:
            self._unpin_fetch(tracked)
        elif load.planned + len(found) == load.stop:
            self.leave_fetch(tracked)
        return found, stop is not None

    def leave_fetch(self, tracked: Tracked) -> None:
        """Wait for no read any more, as the load needs no other block; what is being read is read to its end."""
        if self._fetches is not None and tracked.fetch:
            self._fetches.leave(tracked.fetch, keep=True)

    def _waiting_for(self, loading: EngineLoad) -> Tracked | None:
        """Return the request that waits for a load; None if it has ended since, whether or not it began anew."""
        tracked = self._tracked.get(loading.request.request_id)
        return tracked if tracked is not None and tracked.load is loading else None

    def load_of(self, request: OffloadRequest) -> int:
        """Return the number of the load that a request waits for; 0 for none."""
        tracked = self.get(request)
        return tracked.load.load.number if tracked is not None and tracked.load is not None else 0

    def take_outcomes(self) -> list[LoadOutcome]:
        """Return the loads that have ended since the last call."""
        return [self._end_wait(each) for each in self.loads.take_ended()]

    def _end_wait(self, loading: EngineLoad) -> LoadOutcome:
        """End the wait for a load. A request whose load failed by itself loads nothing more."""
        load, request = loading.load, loading.request
        if (tracked := self._waiting_for(loading)) is not None:
            tracked.load = None
            if not load.is_confirmed:
                request.device_only |= load.is_overdue or not load.is_revoked
                self._choices.matched(request.request_id, load.first, load.arrived - load.first)
        unplanned = tuple(self._owners.blocks(loading.unplanned).tolist())
        outcome: LoadOutcome = load.outcome(self._load_forms, request.request_id, unplanned)
        if self._states is None:
            return outcome
        pages = loading.pages.stop if load.is_confirmed else loading.pages.start
        return msgspec.structs.replace(outcome, recompute_from=pages * self._block_size)

    def may_offer(self, tracked: Tracked) -> bool:
        """Return True for a request whose blocks may be stored."""
        return not tracked.is_stale and self._caches_prefixes and tracked.request.use_cache
