"""CacheManager: the scheduler side. It plans copies, and counts them once the workers have reported them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fdcache._core import AdvanceResult, AllocationForms, Loads
from fdcache.errors import RequestStateError
from fdcache.hashing import Tokens
from fdcache.layout import KVLayout
from fdcache.manager import story
from fdcache.manager.base import requests_of
from fdcache.manager.hooks import HandoverHooks, HookedParts
from fdcache.manager.loads_ahead import make_loads_ahead
from fdcache.manager.matching import PrefixMatcher
from fdcache.manager.own_device import ManagerState, OwnDevice
from fdcache.manager.requests import LiveRequests, Request
from fdcache.manager.results import Allocation, AllocationFailure, MatchResult, MatchStatus
from fdcache.metadata import TransferPlan
from fdcache.settings import Settings
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.host import HostService
from fdcache.tiers.statistics import Counters

_ALLOCATIONS = AllocationForms(Allocation, AllocationFailure.NO_BLOCKS, AllocationFailure.DEFERRED)


class CacheManager(OwnDevice):
    """The device tier of one engine and the tiers below it, for all its ranks.

    ::

        with CacheManager.from_settings(layout) as manager:
            result = manager.match_prefix([request])[0]
            manager.allocate_device_blocks([(request, request.num_tokens)])
            plans = manager.take_plans()              # send them to every rank, then compute the step
            outcomes = manager.apply(reports)         # of every rank
            manager.commit([(request, num_computed_tokens)])
            manager.finish([request])

    Calls take lists of requests and are thread-safe. Any number of steps may be in flight.

    ``settings`` to ``priors``: as for ``TierManager``. ``loads_ahead=False``: load nothing to the device for a request
    that still waits for storage, as for an engine that submits plans only when a step follows; or a function that tells
    if free device blocks may be written now, outside of a step.
    """

    loads_ahead_by_default = True

    def _check(self, settings: CacheSettings, layout: KVLayout) -> None:
        layout.require_one_group("CacheManager")

    @staticmethod
    def _cache_settings(
        settings: Settings, layout: KVLayout, device_bytes: int | Callable[[], int] | None
    ) -> CacheSettings:
        return settings.cache_for(layout, device_bytes)

    def _make_requests(self, loads_ahead: Callable[[], bool] | bool) -> Loads:
        settings, layout, tiers, counters = self.settings, self.layout, self._tiers, self._counters
        self._state = ManagerState.RUNNING
        self._device = tiers.own_device
        self._hooks: HandoverHooks | None = None
        requests = self._requests = LiveRequests(settings, layout, tiers, counters)
        ahead = make_loads_ahead(
            layout, tiers, requests.loads, counters, lambda: self._plans.ahead, loads_ahead
        )
        self._matcher = PrefixMatcher(
            settings, layout, tiers, requests, counters, self._clock, self._choices, ahead
        )
        return requests.loads

    def attach_hooks(self, hooks: HandoverHooks) -> HookedParts:
        """Call these hooks from now on; return what they work with. ``fdcache.transfer.Handovers`` does so."""
        with self._lock:
            self._hooks = self._plans.hooks = hooks
        return HookedParts(
            self._lock,
            self._set_time,
            self.layout,
            self.settings.lookahead_tokens,
            self._requests,
            self._counters,
            lambda: self._device.stats().slots,
            self._choices.seconds_to_compute,
        )

    # --- a scheduler step ---------------------------------------------------------------------------------

    def begin(self, requests: Iterable[Request]) -> None:
        """Start to read blocks of requests from storage into the host tier. Call it when requests arrive.

        The blocks are pinned there until the request is matched or finished.
        """
        with self._lock:
            if self._state is ManagerState.RUNNING:
                for request in requests_of(requests):
                    self._matcher.begin(request)

    def match_prefix(self, requests: Iterable[Request]) -> list[MatchResult]:
        """Pin the longest cached prefix of each request, without its last token.

        Raises ``RequestStateError`` for a request that is matched or running already, ``HashingError`` for tokens
        that cannot be hashed; no request is matched then.
        """
        requests = requests_of(requests)
        with self._lock:
            self._set_time()
            if self._deletions is not None:
                self._deletions.take()
            if self._service is not None:
                self._reset_device_if_asked(self._service)
            if self._state is not ManagerState.RUNNING:
                return [MatchResult(request.request_id, MatchStatus.DEFERRED) for request in requests]
            return self._matcher.match(requests)

    def unmatch(self, requests: Iterable[Request]) -> None:
        """Undo matches that no allocation followed: unpin their blocks. Reads from storage go on."""
        with self._lock:
            for request in requests_of(requests):
                if self._hooks is not None:
                    self._hooks.unmatched(request)
                self._requests.unmatch(request)

    def can_allocate_device_blocks(self, num_blocks: int) -> bool:
        """Return True if an allocation of that many blocks would get them. Always False while paused or asleep.

        Raises ``RequestStateError`` for a negative number.
        """
        if num_blocks < 0:
            raise RequestStateError(
                f"can_allocate_device_blocks: num_blocks is {num_blocks}; it has to be at least 0"
            )
        if self._state is not ManagerState.RUNNING:
            return False
        enough = self._device.available + self._device.above_copies >= num_blocks
        if not enough:
            self._give_way()
        return enough

    def allocate_device_blocks(self, demands: Iterable[tuple[Request, int]]) -> list[Allocation]:
        """Extend the block table of each request to ``num_tokens`` tokens, all or nothing per request.

        The first call after a match also plans the loads of its host blocks. Raises ``RequestStateError`` for a
        request that is not matched or demands fewer tokens than its match found; no request gets blocks then.
        """
        demands = list(demands)
        with self._lock:
            self._set_time()
            if self._state is not ManagerState.RUNNING:
                paused = AllocationFailure.PAUSED
                return [Allocation(request.request_id, failure=paused) for request, _ in demands]
            given = self._requests.allocate(demands, self._plans.open, _ALLOCATIONS)
            for each in given:
                if each.failure is AllocationFailure.NO_BLOCKS:
                    self._give_way()
            if story.audience.listens:
                story.allocated(demands, given)
            return given

    def _give_way(self) -> None:
        if self._tiers.copies is not None:
            self._tiers.copies.give_way()

    def take_plans(self) -> list[TransferPlan]:
        """Close the step and return its plans. Every rank has to submit them in this order before it computes.

        There are at most three: the step's own, one of loads for requests that wait for storage, and one of background
        copies, so that no load waits for the report of a backup.
        """
        with self._lock:
            self._set_time()
            if self._deletions is not None:
                self._deletions.take()
            if self._service is not None:
                self._reset_device_if_asked(self._service)
            if self._hints.open:
                self._hints.settle()
            if self._state is ManagerState.RUNNING:
                self._plans.plan_background()
            return self._close_step()

    def commit(self, progress: Iterable[tuple[Request, int]]) -> None:
        """Publish the full blocks of each request's first ``num_tokens`` tokens, which have their KV on every rank.

        Count accepted tokens only. Blocks above an unconfirmed load become matchable once it is confirmed. Raises
        ``RequestStateError`` for more tokens than the request or its block table has; nothing is committed then.
        """
        progress = list(progress)
        with self._lock:
            self._set_time()
            if self._service is not None:
                self._describe(request for request, _ in progress)
            self._requests.commit(progress)
            if self._hooks is not None:
                self._hooks.committed(progress)
            if self._choices.open:
                self._choices.computed(progress)

    def advance(
        self,
        requests: Sequence[Request],
        tokens: Tokens | Sequence[int | Tokens],
        *,
        uncomputed_tokens: int = 1,
    ) -> AdvanceResult:
        """Append accepted tokens, extend the block tables to hold them, and publish full blocks: a decode step.

        ::

            added = manager.advance(running, sampled)         # one int32 token for each request
            tables[added.positions, ...] = added.block_ids

        ``tokens``: an int32 or int64 array or list with one token for each request, or a list with the tokens of each.
        ``uncomputed_tokens``: how many tokens at the end of each request have no KV yet: the one just sampled.

        Requests in ``failed`` got their tokens and no blocks: none was free, or the manager is paused. Raises
        ``RequestStateError`` for a request without blocks, ``HashingError`` for tokens that cannot be hashed; nothing
        is changed then.
        """
        with self._lock:
            self._set_time()
            plan = self._plans.open if self._state is ManagerState.RUNNING else None
            result = self._requests.advance(requests, tokens, uncomputed_tokens, plan)
            if self._service is not None:
                self._describe(requests)
            if self._choices.open:
                self._choices.computed((each, each.num_tokens - uncomputed_tokens) for each in requests)
            if not result.ok:
                self._give_way()
            return result

    def _release(self, requests: list[Request]) -> None:
        if self._hooks is not None:
            for request in requests:
                self._hooks.released(request)
        self._requests.finish(requests)
        if self._choices.open:
            self._choices.forget(requests)
        self._matcher.forget(requests)

    def _all_counters(self) -> Counters:
        counters = super()._all_counters()
        self._requests.count(counters)
        return counters

    def _reset_device_if_asked(self, service: HostService) -> None:
        """Forget the device tier if an operator of the service has asked for it."""
        if service.take_device_reset():
            self._reset_device()
