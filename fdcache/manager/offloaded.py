"""Requests of an engine that owns its device cache: what was found for them, and what they have offered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from fdcache import _core
from fdcache._core import LoadForms
from fdcache.groups import record_keys
from fdcache.layout import KVLayout
from fdcache.manager.device_contents import DevicePath, device_ids_of
from fdcache.manager.keyed import KeyedRequest, OffloadRequest
from fdcache.manager.load_choices import LoadChoices
from fdcache.manager.matching import ReuseLimit
from fdcache.manager.requests import Request
from fdcache.manager.service_reads import Wait
from fdcache.metadata import HashArray, Int32Array
from fdcache.plans.blocks import ROOT, Blocks
from fdcache.plans.ledger import PlanLedger
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.host import NOTHING, HostMatch, HostTier
from fdcache.tiers.statistics import Counters

_ASK_AGAIN = 0.1
"""Seconds for which the answer that nothing was found is kept: others may store the blocks meanwhile."""


class Tracked:
    """A request between its arrival and its end.

    ``found`` is the kept answer of the host tier, for blocks from ``start`` on; ``arena`` names the memory that its
    slots refer to. ``device_blocks`` is the number that the engine had when it asked last. ``keys`` are those of the
    records of its pages; everything here counts records, of which a page has one for each group of layers.
    """

    __slots__ = (
        "arena",
        "asked_at",
        "counted_blocks",
        "deferred_since",
        "device_blocks",
        "fetch",
        "found",
        "found_at",
        "is_counted",
        "is_stale",
        "keys",
        "limit",
        "loading_from",
        "path",
        "request",
        "start",
    )

    def __init__(self, request: OffloadRequest) -> None:
        self.request = request
        self.keys: HashArray = np.empty((0, 32), np.uint8)
        self.found: HostMatch | None = None
        self.start = 0
        self.limit = 0
        self.arena: str | None = None
        self.asked_at = self.found_at = 0.0
        self.device_blocks = 0
        self.deferred_since: float | None = None
        self.fetch = 0
        self.path: DevicePath | None = None
        self.loading_from: int | None = None
        self.counted_blocks = 0
        self.is_counted = False
        self.is_stale = False

    @property
    def lease(self) -> int:
        """The lease of ``found``, 0 without one."""
        return self.found.lease if self.found is not None else 0

    @property
    def remaining(self) -> int:
        """Number of blocks found beyond those on the device."""
        if self.found is None:
            return 0
        return max(self.start + len(self.found) - self.device_blocks, 0)

    @property
    def from_storage(self) -> int:
        """How many of the remaining blocks were read from storage for the request."""
        if self.found is None:
            return 0
        first = self.device_blocks - self.start
        return max(self.found.fetched.stop - max(self.found.fetched.start, first), 0)

    def take(self, count: int) -> Blocks:
        """Return the first ``count`` of the remaining blocks."""
        assert self.found is not None
        first = self.device_blocks - self.start
        return self.found.blocks.select(slice(first, first + count))

    def forget_device(self) -> None:
        """Forget what was offered: a request that is matched has no blocks."""
        self.path = None


@dataclass(slots=True, eq=False)
class OffloadedLoad:
    """The part of a plan's loads that one request waits for: ``count`` blocks from ``first_block`` of its path on.

    It ends with an outcome even if its request has ended before. Nothing counts of one that a reset has revoked.
    ``copied`` of them are copied, all unless some are outside of their windows: nothing counts of such a load then
    unless all of it does, since what is left would be needed below the first block that failed.
    """

    tracked: Tracked
    offset: int
    count: int
    first_block: int
    copied: int
    is_revoked: bool = False

    def good(self, flags: HashArray) -> int:
        """Return how many of the blocks are there; ``flags`` tell which of the plan's were copied."""
        first = flags.tobytes().find(0, self.offset, self.offset + self.copied)
        if self.is_revoked:
            return 0
        if first < 0:
            return self.count
        return first - self.offset if self.copied == self.count else 0


class OffloadedRequests:
    """The requests that have arrived and not ended, by id."""

    def __init__(
        self,
        settings: CacheSettings,
        layout: KVLayout,
        host: HostTier,
        counters: Counters,
        clock: Callable[[], float],
        choices: LoadChoices,
    ) -> None:
        self._counters = counters
        self._choices = choices
        self._caches_prefixes = settings.enable_prefix_caching
        self._defer_timeout = settings.defer_timeout
        self._pin_timeout = settings.plan_timeout
        self._block_size = layout.block_size
        self._groups = layout.num_groups
        self._has_windows = any(layout.windows)
        self._host = host
        self._fetches = host.fetches
        self._cell = ReuseLimit(settings, layout.block_size).cell * layout.num_groups
        self._clock = clock
        self._tracked: dict[str, Tracked] = {}
        self._pinned: set[Tracked] = set()
        self._planned: list[OffloadedLoad] = []  # in the open plan
        self._loads: dict[int, list[OffloadedLoad]] = {}  # by plan in flight
        self._hasher = _core.BlockManager(
            _core.Tier(1), layout.block_size, layout.fingerprint, settings.lookahead_tokens
        )

    def __len__(self) -> int:
        return len(self._tracked)

    def prepare(self, request: OffloadRequest) -> None:
        """Hash the tokens of a request, unless they are hashed. Raises ``HashingError``, ``RequestStateError``.

        The GIL is kept, as this is the thread of the engine's steps: it would be waited for longer than this takes.
        """
        if isinstance(request, Request):
            self._hasher.prepare(request, keeps_gil=True)

    def get(self, request: OffloadRequest) -> Tracked | None:
        """Return a request that has arrived and not ended."""
        tracked = self._tracked.get(request.request_id)
        return tracked if tracked is not None and tracked.request is request else None

    def track(self, request: OffloadRequest) -> Tracked:
        """Return a request, which arrives now if it has not before. One with the same id ends."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None and tracked.request is request:
            return tracked
        if tracked is not None:
            self.finish(tracked.request)
        tracked = self._tracked[request.request_id] = Tracked(request)
        return tracked

    def finish(self, request: OffloadRequest) -> None:
        """Unpin what a request has, and end its reads from storage."""
        tracked = self.get(request)
        if tracked is None:
            return
        self.unpin(tracked)
        self._choices.forget([request])
        if tracked.fetch and self._fetches is not None:
            self._fetches.end(tracked.fetch)
        del self._tracked[request.request_id]

    def _keys(self, tracked: Tracked) -> HashArray:
        """Return the keys of the records of a request's pages."""
        hashes = tracked.request.block_hashes
        if self._groups == 1:
            return hashes
        have = len(tracked.keys) // self._groups
        if have < len(hashes):
            tracked.keys = np.concatenate((tracked.keys, record_keys(hashes[have:], self._groups)))
        return tracked.keys

    def forget_found(self) -> None:
        """Forget what was found and what was offered, as after a reset; loads in flight count for nothing."""
        for tracked in self._tracked.values():
            self.unpin(tracked)
            tracked.path = None
        for load in chain(self._planned, *self._loads.values()):
            load.is_revoked = True

    def change_fingerprint(self, fingerprint: bytes) -> None:
        """Hash with another layout from now on; requests that have arrived find and leave nothing."""
        self.forget_found()
        for tracked in self._tracked.values():
            tracked.is_stale = True
        self._hasher.change_fingerprint(fingerprint)

    def expire(self) -> None:
        """Unpin what nothing has asked for lately."""
        if not self._pinned:
            return
        oldest = self._clock() - self._pin_timeout
        for tracked in [each for each in self._pinned if each.asked_at < oldest]:
            self.unpin(tracked)

    # --- match --------------------------------------------------------------------------------------------

    def begin_fetch(self, tracked: Tracked, whole: bool) -> None:
        """Start to read from storage what a request that has arrived will need."""
        if self._may_fetch(tracked) and self._may_load(tracked):
            assert self._fetches is not None
            hashes = self._matchable(tracked, whole)
            number, judge = self._fetch_number(tracked), self._choices.reads_for(tracked.request)
            self._fetches.begin(number, hashes, lambda _: tracked.device_blocks, judge)

    def match(self, tracked: Tracked, device_tokens: int, whole: bool) -> bool:
        """Find and pin what can be loaded; return False if the request has to ask later."""
        tracked.asked_at = self._clock()
        size = self._block_size
        tracked.device_blocks = device_tokens // size * self._groups
        if device_tokens % size or not self._may_load(tracked):
            self.unpin(tracked)
            return True
        hashes = self._matchable(tracked, whole)
        if self._is_kept(tracked, len(hashes)):
            return True
        self.unpin(tracked)
        found = self._find(tracked, hashes)
        if found is None:
            return False
        tracked.found, tracked.start, tracked.limit = found, tracked.device_blocks, len(hashes)
        if found.lease:
            self._pinned.add(tracked)
        tracked.arena, tracked.found_at = self._host.arena, tracked.asked_at
        tracked.deferred_since = None
        self._choices.matched(tracked.request.request_id, tracked.device_blocks, tracked.remaining)
        return True

    def unpin(self, tracked: Tracked) -> None:
        """Unpin the blocks found; those being loaded stay pinned until the load ends."""
        if tracked.lease:
            self._host.release(tracked.lease)
            self._pinned.discard(tracked)
        tracked.found = None

    def _is_kept(self, tracked: Tracked, limit: int) -> bool:
        is_same = tracked.found is not None and tracked.arena == self._host.arena
        if is_same and not tracked.lease and tracked.asked_at - tracked.found_at >= _ASK_AGAIN:
            return False
        return is_same and tracked.start <= tracked.device_blocks and tracked.limit == limit

    def _find(self, tracked: Tracked, hashes: HashArray) -> HostMatch | None:
        """Ask the host tier; None for later. What the reuse grid does not allow is left out."""
        fetches, start = self._fetches, tracked.device_blocks
        if start >= len(hashes):
            return NOTHING
        number = 0
        if fetches is not None and self._may_fetch(tracked):
            number = self._fetch_number(tracked)
            judge = self._choices.reads_for(tracked.request)
            if fetches.must_wait(number, hashes, lambda _: tracked.device_blocks, judge):
                return None
        (found,) = self._host.match_paths([(hashes, start)], [number])
        reads = self._choices.service_reads
        if found.fetching:
            wait = reads.judge(tracked.request, start, found.fetched.start, found.fetched.stop)
            if wait is not Wait.WAIT and fetches is not None:
                fetches.leave(number, keep=wait is Wait.LEAVE)
                (found,) = self._host.match_paths([(hashes, start)], [0])
        if not found.fetching:
            reads.found(tracked.request)
        if found.fetching:
            return None
        if found.pending and self._deferred_for(tracked) < self._defer_timeout:
            self._host.release(found.lease)
            return None
        if fetches is not None:
            fetches.unpin(number)
        count = self._worth_loading(tracked, len(found))
        if not count:
            self._host.release(found.lease)
            return NOTHING
        fetched = range(min(found.fetched.start, count), min(found.fetched.stop, count))
        return HostMatch(found.lease, found.blocks.select(slice(count)), fetched=fetched)

    def _worth_loading(self, tracked: Tracked, found: int) -> int:
        """Return how many of the blocks found are worth loading, down to the reuse grid."""
        start, request = tracked.device_blocks, tracked.request
        limit = self._choices.limit
        if found and limit is not None and _begins_at_root(request):
            last = request.block_hashes[(start + found - 1) // self._groups].tobytes()
            found = limit(request.request_id, request.num_tokens, start, found, last)
        end = start + found
        return max(end - end % self._cell - start, 0)

    def _may_fetch(self, tracked: Tracked) -> bool:
        return _begins_at_root(tracked.request) and self._fetches is not None and self._fetches.is_on

    def _may_load(self, tracked: Tracked) -> bool:
        request = tracked.request
        allowed = self._caches_prefixes and request.use_cache and not request.device_only
        return allowed and not tracked.is_stale and tracked.loading_from is None

    def _matchable(self, tracked: Tracked, whole: bool) -> HashArray:
        """Return the keys that a match may find."""
        request, keys = tracked.request, self._keys(tracked)
        if isinstance(request, KeyedRequest):
            return keys
        most = request.num_tokens - (not whole)
        if request.max_cached_tokens is not None:
            most = min(most, request.max_cached_tokens)
        return keys[: max(most, 0) // self._block_size * self._groups]

    def _fetch_number(self, tracked: Tracked) -> int:
        if not tracked.fetch and self._fetches is not None:
            tracked.fetch = self._fetches.number()
        return tracked.fetch

    def _deferred_for(self, tracked: Tracked) -> float:
        now = self._clock()
        if tracked.deferred_since is None:
            tracked.deferred_since = now
        return now - tracked.deferred_since

    # --- loads and offers ---------------------------------------------------------------------------------

    def plan_load(self, tracked: Tracked, offset: int, count: int, copied: int) -> None:
        """Let a request wait for ``count`` of the blocks found, at this position of the open plan's loads.

        ``copied`` of them are among the loads; the engine has no use for the others.
        """
        load = OffloadedLoad(tracked, offset, count, tracked.device_blocks, copied)
        tracked.loading_from = load.first_block
        self._planned.append(load)

    def send_loads(self, plan: int) -> None:
        """Let the loads planned in this step wait for this plan's reports."""
        if self._planned:
            self._loads[plan], self._planned = self._planned, []

    def end_loads(self, plan: int, copied: HashArray) -> list[tuple[str, int, int, int]]:
        """End the loads of a plan, of which blocks were ``copied``; see ``WaitingRequests``."""
        ended = []
        for load in self._loads.pop(plan, ()):
            count, groups = load.good(copied), self._groups
            self._end(load, failed=count < load.count)
            name = load.tracked.request.request_id
            ended.append((name, load.first_block // groups, count // groups, load.count // groups))
        return ended

    def give_up_loads(self, plan: int) -> list[tuple[str, int]]:
        """Let the requests that wait for a plan's loads go on without; its report makes no second outcome."""
        given_up = self._loads.pop(plan, [])
        for load in given_up:
            load.tracked.loading_from = None
            load.tracked.request.device_only = True
        return [(load.tracked.request.request_id, load.first_block // self._groups) for load in given_up]

    def whole_reports(self, plans: PlanLedger, tells_arrivals: bool, forms: LoadForms) -> None:
        """Return None: reports are counted in Python."""

    def pass_on_published(self) -> None:
        """Do nothing: the device cache is the engine's."""

    def _end(self, load: OffloadedLoad, *, failed: bool) -> None:
        load.tracked.loading_from = None
        if failed:
            self._counters.loads_failed += 1
            load.tracked.request.device_only = True
        else:
            self._counters.loads_confirmed += 1

    def offer(
        self, tracked: Tracked, num_tokens: int, device_ids: Int32Array
    ) -> tuple[DevicePath, int] | None:
        """Return the path of a request on the device with the position of its first new block; None for none."""
        request, path = tracked.request, tracked.path
        start = 0 if path is None else len(path)
        stop = min(num_tokens // self._block_size, len(device_ids) // self._groups) * self._groups
        if tracked.loading_from is not None:
            stop = min(stop, tracked.loading_from)
        if stop <= start or tracked.is_stale or not (self._caches_prefixes and request.use_cache):
            return None
        self.prepare(request)
        hashes = self._keys(tracked)
        stop = min(stop, len(hashes))
        if stop <= start:
            return None
        ids = device_ids_of(device_ids[start:stop], with_none=self._has_windows)
        if path is None:
            parent = request.parent if isinstance(request, KeyedRequest) else ROOT
            path = tracked.path = DevicePath(hashes, parent)
        path.extend(hashes, ids)
        return path, start


def _begins_at_root(request: OffloadRequest) -> bool:
    return not isinstance(request, KeyedRequest) or request.parent == ROOT
