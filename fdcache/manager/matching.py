"""Prefix matching: the longest prefix of each request that is cached, device blocks first, then host blocks.

The native side matches (``BlockManager.match``); this module adds reads from storage and questions to a service.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from fdcache._core import MatchForms
from fdcache.errors import ConfigurationError
from fdcache.layout import KVLayout
from fdcache.manager import story
from fdcache.manager.cost import Cached
from fdcache.manager.keyed import OffloadRequest
from fdcache.manager.load_choices import LoadChoices
from fdcache.manager.loads_ahead import LoadsAhead
from fdcache.manager.requests import LiveRequests, Request, Unanswered
from fdcache.manager.results import MatchResult, MatchStatus
from fdcache.manager.tiers import Tiers
from fdcache.metadata import HashArray
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.fetches import Fetches, OnDevice
from fdcache.tiers.host import Found, HostTier, Reading
from fdcache.tiers.statistics import Counters, ReadTotals
from fdcache.tiers.storage_reads import leading_ready
from fdcache.tiers.waiting_fetches import Wait


class Waits:
    """Decides what is read for requests, and ends their waits once they are sooner done without.

    ::

        wait = waits.before_look_up(request, number, hashes, on_device)  # reads of this process
        if wait is None and isinstance(found := look_up(), Reading):
            wait = waits.answered(request, number, num_on_device, found)  # reads of a service

    This process knows its reads before a look-up. A service tells with each look-up how far a read has come. How fast
    its storage is for this engine follows from the reads that were waited for, their queue included, and from those
    that were late; without any, as when nothing is worth reading, from all reads of the service.
    """

    def __init__(self, choices: LoadChoices, clock: Callable[[], float], host: HostTier | None) -> None:
        self._choices = choices
        self._clock = clock
        self._fetches = host.fetches if host is not None else None
        self._table = host.fetch_table if host is not None else None
        self._service = host.service if host is not None else None
        self._before: ReadTotals | None = None
        self.waiting: dict[str, tuple[float, Wait]] = {}
        """Requests that wait for reads of a service, with the time when each began."""

    def judge_of(self, request: OffloadRequest) -> RequestReads | None:
        """Return the judge of a request's reads; None if all is read.

        While speeds are unknown it reads all, too; the wait for a read may outlast that.
        """
        return RequestReads(self, self._choices, request) if self._choices.is_auto else None

    def begin(self, request: OffloadRequest, number: int, hashes: HashArray, on_device: OnDevice) -> None:
        """Begin to read what is stored of the path of a request that has arrived."""
        if self._fetches is not None:
            self._fetches.begin(number, hashes, on_device, self.judge_of(request))

    def before_look_up(
        self, request: OffloadRequest, number: int, hashes: HashArray, on_device: OnDevice
    ) -> Wait | None:
        """Return what a request waits for of this process's reads, or None; they begin if they have not."""
        if self._table is None:
            return None
        wait = self._table.wait(number, hashes, on_device, self.judge_of(request))
        if wait is None or not wait.ends or self._is_worth(request, wait):
            return wait
        self._table.go_on(number)
        return None

    def answered(self, request: OffloadRequest, number: int, on_device: int, reading: Reading) -> Wait | None:
        """Return what a request that has ``on_device`` blocks waits for of a service's reads, or None.

        A read that is not worth it is taken back; one that has become too slow still fills the host tier.
        """
        arrived, stop, now = reading.arrived, reading.stop, self._clock()
        known = self.waiting.get(request.request_id)
        if stop <= arrived or (known is None and stop <= on_device):  # not known yet
            first = 0 if known is None else known[1].first
            return Wait(first, arrived, stop, now, is_last=reading.is_last)
        if known is None:
            began, wait = now, Wait(arrived, arrived, stop, now)
            waits, keep = self._is_begun_well(request, on_device, arrived, stop)
            self._choices.asked(request.request_id)
        else:
            began, wait = known
            if arrived > wait.arrived:
                wait = replace(wait, arrived=arrived, since=now)
            wait = replace(wait, stop=max(wait.stop, stop))
            judged = replace(wait, arrived=arrived, ends=(stop,), on_device=on_device)
            waits, keep = self._is_worth(request, judged), True
        self.waiting[request.request_id] = began, wait
        if waits:
            return replace(wait, arrived=arrived, stop=stop, is_last=reading.is_last)
        del self.waiting[request.request_id]
        if self._fetches is not None:
            self._fetches.leave(number, keep=keep)
        return None

    def _is_begun_well(
        self, request: OffloadRequest, on_device: int, arrived: int, stop: int
    ) -> tuple[bool, bool]:
        """Return True if a request waits for a service's read that has begun, and True if the read is kept.

        It is kept if it is worth it, or if its speed is worth knowing.
        """
        if (judge := self.judge_of(request)) is None:
            return True, True
        worth, waits = judge.worth_reading(on_device, arrived, stop, 0)
        return waits and worth > arrived, worth > arrived

    def _is_worth(self, request: OffloadRequest, wait: Wait) -> bool:
        return not self._choices.is_auto or self._choices.is_worth_waiting(request, wait)

    def found(self, request: OffloadRequest, arrived: int) -> None:
        """Record that a request was looked up: it waits no longer. ``arrived`` blocks of its path have come.

        Others may not, as they were waited for too long or could not be read.
        """
        if (known := self.waiting.pop(request.request_id, None)) is not None:
            began, wait = known
            blocks, seconds = wait.stop - wait.first, self._clock() - began
            self._choices.observe_read(blocks, seconds, has_ended=arrived >= wait.stop)

    def forget(self, request: OffloadRequest) -> None:
        """Forget a request that has ended."""
        self.waiting.pop(request.request_id, None)

    def observe_service(self) -> None:
        """Observe the reads of the service since the last call."""
        now, before = self._service.reads if self._service is not None else None, self._before
        self._before = now
        if now is not None and before is not None and now.reads > before.reads:
            self._choices.observe_others(now.since(before))


@dataclass(slots=True)
class RequestReads:
    """Judge of one request's reads from storage: a ``ReadJudge`` of ``fdcache.tiers.fetches``."""

    waits: Waits
    choices: LoadChoices
    request: OffloadRequest
    on_device: int = 0

    def worth_reading(self, on_device: int, first: int, stop: int, ahead: int) -> tuple[int, bool]:
        """Return up to which block to read, and True if the request is to wait for it."""
        worth = self._worth(on_device, first, stop, ahead)
        if worth > max(first, on_device):
            return worth, True
        return (stop, False) if self.choices.takes_probe() else (first, False)

    def worth_joining(self, on_device: int, first: int, stop: int) -> int:
        """Return up to which of the blocks that others read the request waits for them."""
        worth = self._worth(on_device, first, stop, 0)
        return worth if worth > max(first, on_device) else first

    def _worth(self, on_device: int, first: int, stop: int, ahead: int) -> int:
        """Return up to which block a read is worth it."""
        self.on_device = on_device
        if not self.choices.decides_reads:
            return stop
        self.waits.observe_service()
        needed = max(first, on_device)  # the host has to have those before them too
        cached = Cached(
            self.request.num_tokens,
            on_device,
            needed - on_device,
            stop - needed,
            reads_ahead=ahead + needed - first,
            loads_ahead=self.choices.loads_ahead,
        )
        return self.choices.decide_read(self.request, cached)


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
        self.cell = max(grid // block_size, 1)
        """Blocks of one cell of the grid: reuse ends on a multiple of it."""


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
        choices: LoadChoices,
        ahead: LoadsAhead | None,
    ) -> None:
        self._ahead = ahead
        self._defer_timeout = settings.defer_timeout
        self._choices = choices
        self._service = tiers.service
        self._fetches = tiers.fetches
        self._table = tiers.host.fetch_table if tiers.host is not None else None
        self._waits = Waits(choices, clock, tiers.host)
        self._on_device = partial(leading_ready, tiers.own_device)
        self._requests = requests
        self._counters = counters
        self._clock = clock
        self._reuse = ReuseLimit(settings, layout.block_size)
        self._forms = MatchForms(
            self._reuse.cell, settings.defer_timeout, MatchResult, MatchStatus.MATCHED, MatchStatus.DEFERRED
        )

    def begin(self, request: Request) -> None:
        """Start to read from storage what a request that has arrived will need."""
        if self._fetches is not None and self._fetches.is_on and self._requests.may_prefetch(request):
            number, hashes = self._requests.fetch_number(request), self._requests.matchable(request)
            self._waits.begin(request, number, hashes, self._on_device)
            story.reads_wanted(request.request_id, len(hashes))

    def forget(self, requests: list[Request]) -> None:
        """Forget requests that have ended."""
        if self._waits.waiting:
            for request in requests:
                self._waits.forget(request)
        if self._ahead is not None and self._ahead.requests:
            self._ahead.forget(requests)

    def match(self, requests: list[Request]) -> list[MatchResult]:
        """Pin the longest cached prefix of each request, short of its last token.

        One native call matches all requests. Those that a service has to be asked about are asked for together, in
        one round trip. Raises ``RequestStateError`` or ``HashingError`` before any request is matched.
        """
        began = story.match_begins(requests) if story.audience.ask() else 0
        if self._requests.is_sending and any(map(self._requests.is_finishing, requests)):
            found = self._find_unless_finishing(requests)
        else:
            found = self._find(requests)
        if self._choices.open:
            for each in found:
                if each.status is MatchStatus.MATCHED:
                    to_load = each.num_host_blocks + each.num_storage_blocks
                    self._choices.matched(each.request_id, each.num_device_blocks, to_load)
        if story.audience.listens:
            story.matched(found, began)
        return found

    def _find_unless_finishing(self, requests: list[Request]) -> list[MatchResult]:
        """Defer the requests that have finished and whose blocks are still being sent; match the others."""
        others = [each for each in requests if not self._requests.is_finishing(each)]
        found = iter(self._find(others))
        return [
            MatchResult(each.request_id, MatchStatus.DEFERRED)
            if self._requests.is_finishing(each)
            else next(found)
            for each in requests
        ]

    def _find(self, requests: list[Request]) -> list[MatchResult]:
        if self._service is not None:
            self._service.begin_look_up()
        if self._fetches is not None and self._fetches.is_on:
            return self._match_with_storage(requests, self._fetches)
        found = self._requests.match(requests, self._forms, self._clock, worth_loading=self._choices.limit)
        for each in found:
            if type(each) is not MatchResult:
                return self._answered(requests, found, ())
        return found  # type: ignore[return-value]

    def _match_with_storage(self, requests: list[Request], fetches: Fetches) -> list[MatchResult]:
        """Match the requests that do not wait for blocks which are read from storage for them."""
        self._requests.check_match(requests)
        waiting = {id(request) for request in requests if self._must_wait(request)}
        going = [request for request in requests if id(request) not in waiting]
        numbers = [self._requests.fetch_number(request) for request in going]
        uses = [fetches.storage_use(number) for number in numbers]
        found = self._requests.match(
            going,
            self._forms,
            self._clock,
            self._table.is_reading if self._table is not None else None,
            uses,
            self._choices.limit,
        )
        results = iter(self._answered(going, found, numbers))
        return [
            MatchResult(request.request_id, MatchStatus.DEFERRED)
            if id(request) in waiting
            else self._with_storage(request, next(results))
            for request in requests
        ]

    def _must_wait(self, request: Request) -> bool:
        """Return True for a request that waits for reads of this process, or for its load ahead."""
        if not self._requests.may_prefetch(request):
            return False
        number, hashes = self._requests.fetch_number(request), self._requests.matchable(request)
        wait = self._waits.before_look_up(request, number, hashes, self._on_device)
        if wait is None and not (self._ahead is not None and self._ahead.is_loading(request)):
            return False
        self._requests.wait_for_reads(request)
        if wait is not None:
            self._load_ahead(request, wait)
        return True

    def _load_ahead(self, request: Request, wait: Wait) -> None:
        """Load what is there of a request's path while others are read."""
        if self._ahead is not None:
            read = range(min(wait.first, wait.arrived), wait.arrived)
            self._ahead.load(request, self._requests.matchable(request), read)

    def _with_storage(self, request: Request, result: MatchResult) -> MatchResult:
        """Count the blocks of a match that were read from storage for the request; they need no other pin now."""
        if result.status is not MatchStatus.MATCHED:
            return result
        if self._ahead is not None and any(ahead := self._ahead.found(request, result.num_device_blocks)):
            self._requests.set_loaded_ahead(request, *ahead)
            from_host, from_storage = ahead
            result = msgspec.structs.replace(
                result, num_ahead_blocks=from_host + from_storage, num_ahead_from_storage=from_storage
            )
        if self._table is None:
            return result
        number = self._requests.fetch_number(request)
        fetched = len(self._table.fetched(number, result.num_device_blocks, result.num_host_blocks))
        self._table.unpin(number)
        if not fetched:
            return result
        self._requests.set_from_storage(request, fetched)
        return msgspec.structs.replace(
            result, num_host_blocks=result.num_host_blocks - fetched, num_storage_blocks=fetched
        )

    def _answered(
        self, requests: list[Request], found: Sequence[MatchResult | Unanswered], numbers: Sequence[int]
    ) -> list[MatchResult]:
        """Ask the service about the requests whose match it has to end."""
        results = {i: each for i, each in enumerate(found) if isinstance(each, MatchResult)}
        asked = {i: each for i, each in enumerate(found) if not isinstance(each, MatchResult)}
        if asked:
            assert self._service is not None
            paths = [(requests[i].block_hashes[:blocks], start) for i, (start, blocks) in asked.items()]
            answers = self._service.ask(paths, [numbers[i] if numbers else 0 for i in asked])
            for i, path, answer in zip(asked, paths, answers, strict=True):
                results[i] = self._end(requests[i], path, answer, numbers[i] if numbers else 0)
        return [results[i] for i in range(len(found))]

    def _end(
        self, request: Request, path: tuple[HashArray, int], answer: Found | Reading, number: int
    ) -> MatchResult:
        """End a match with a service's answer. A request that does not wait for its reads is looked up without."""
        if isinstance(answer, Reading):
            assert self._service is not None
            wait = self._waits.answered(request, number, path[1], answer)
            if wait is not None:
                self._requests.wait_for_reads(request)
                if wait.stop > wait.arrived:
                    self._load_ahead(request, wait)
                return MatchResult(request.request_id, MatchStatus.DEFERRED)
            (answer,) = self._service.ask([path], [0])
            assert isinstance(answer, Found)
        self._waits.found(request, path[1] + answer.fetched.stop)
        return self._requests.answer(request, answer, self._forms, self._clock, self._choices.limit)
