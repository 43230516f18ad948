"""Hand-overs between instances, on the scheduler's side: what plans send to peers or fetch from them.

    manager = CacheManager.from_settings(layout, settings)
    handovers = Handovers.from_settings(manager, settings)  # None with FDCACHE_TRANSFER=none
    handovers.send([(request, name)])                       # prefill, after the allocation
    handovers.fetch([(request, source)])                    # decode, between match and allocation

The tasks travel with the manager's plans, and their outcomes come back with its ``apply`` and ``expire``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fdcache._core import InFlightPlan
from fdcache.errors import RequestStateError
from fdcache.manager.cache_manager import CacheManager
from fdcache.manager.requests import PeerSource, PlannedFetch, Request
from fdcache.metadata import HashArray, PeerTask, TransferPlan
from fdcache.settings import Settings
from fdcache.transfer.handover_tasks import HandoverTasks, PeerTerms

__all__ = ["Handovers", "PeerTerms"]


@dataclass(slots=True, eq=False)
class _Send:
    """A send that has not ended.

    One that was ``delayed`` by a load, whose end decides what lies below the blocks, is planned once all are committed.
    ``is_computed``: all its blocks are.
    """

    request: Request
    transfer: str
    delayed: bool
    is_computed: bool
    committed_tokens: int = 0


class Handovers(HandoverTasks[_Send, PlannedFetch]):
    """The hand-overs of one manager. Sends keep the blocks of their request; fetches hold slots until their report.

    Calls are thread-safe, as a manager's are. Raises ``TransferNotFoundError`` for a connector that does not exist.
    """

    def __init__(self, manager: CacheManager, terms: PeerTerms) -> None:
        super().__init__(terms)
        self._unsent: list[_Send] = []
        self._below: dict[int, int] = {}  # fetch to the plan with the loads below it, while that is in flight
        self._stashed: dict[int, list[InFlightPlan]] = {}  # fetches that ended before that plan
        self._manager = parts = manager.attach_hooks(self)
        self._lock, self._loads = parts.lock, parts.requests.loads
        self._layout, self._requests = parts.layout, parts.requests
        self._peer_layout = parts.layout.with_tp_size(terms.settings.peer_ranks or parts.layout.tp_size)

    @classmethod
    def from_settings(cls, manager: CacheManager, settings: Settings | None = None) -> Handovers | None:
        """Return those of a manager, None with FDCACHE_TRANSFER=none. ``settings``: by default the environment's."""
        terms = PeerTerms.of(settings or Settings.load())
        return cls(manager, terms) if terms.settings.is_on else None

    # --- calls of the engine ----------------------------------------------------------------------------------

    def send(self, transfers: Iterable[tuple[Request, str]], *, is_computed: bool = False) -> None:
        """Hand over the full blocks of requests under these names, to the decode instance that asks for them.

        Call it after the allocation: with the next plan the workers hand over what the engine then reports with
        ``CacheController.layer_computed``; or, with ``is_computed``, after the last block was computed. A request keeps
        its blocks until then, also after ``finish``; end what will not be completed with ``end_transfers``. Raises
        ``RequestStateError`` for a request without blocks or a name that another send has.
        """
        with self._manager.lock:
            for request, transfer in transfers:
                self._send(request, transfer, is_computed)

    def fetch(self, sources: Iterable[tuple[Request, PeerSource]]) -> list[int]:
        """Make the allocation of matched requests fetch the blocks that they lack from a prefill instance.

        Call it between match and allocation. Return how many blocks each request will fetch, 0 if it has all or may
        hold no more; the peer is told. Compute the request once ``apply`` or ``expire`` has returned its outcome.
        Raises ``RequestStateError`` for a request that is not matched.
        """
        with self._manager.lock:
            return [self._fetch(request, source) for request, source in sources]

    @property
    def fetch_room(self) -> int:
        """Number of requests that may begin to fetch now, so that at most FD_EP_MAX_PREFETCH_TASK_NUM wait for peers.

        Admit the others in a later step.
        """
        with self._manager.lock:
            waiting = sum(each.is_waited_for for each in self._fetches.values())
            return max(max(self._terms.most_ahead, 1) - waiting, 0)

    def end_transfers(self, requests: Iterable[Request]) -> None:
        """End the hand-overs of requests that are aborted or preempted, and tell the peers. Idempotent."""
        with self._manager.lock:
            self._manager.set_time()
            for request in requests:
                self._end(request)

    # --- prefill ----------------------------------------------------------------------------------------------

    def _send(self, request: Request, transfer: str, is_computed: bool) -> None:
        count = len(request.block_hashes)
        if not request.is_live or request.num_blocks < count:
            raise RequestStateError(
                f"request {request.request_id!r} has {request.num_blocks} of the {count} blocks to hand over; allocate "
                "them first"
            )
        self._require_new(transfer)
        self._named[transfer] = send = _Send(request, transfer, request.is_loading, is_computed)
        self._unsent.append(send)
        self._requests.begin_send(request)

    def _end(self, request: Request) -> None:
        for each in [each for each in self._unsent if each.request is request]:
            self._unsent.remove(each)
            self._requests.end_send(request)
        self._cancelled += [plan_id for plan_id, each in self._sends.items() if each.request is request]
        self._named = {name: each for name, each in self._named.items() if each.request is not request}
        self._unwanted(request)

    # --- decode -----------------------------------------------------------------------------------------------

    def _fetch(self, request: Request, source: PeerSource) -> int:
        if self._holds_too_much(self._manager.num_device_blocks()):
            self._manager.counters.fetches_skipped += 1
            count = 0
        else:
            count = self._requests.expect_from_peer(request, source)
        if not count:
            self._requests.take_unasked(request)
            self._declined.append(source)
        return count

    def unmatched(self, request: Request) -> None:
        """Take note that a request found no room, or is not wanted; call it before the request is released."""
        if not self._terms.keeps_asking:
            self._decline_unasked(request)

    def released(self, request: Request) -> None:
        """End what a request fetches, or would fetch; call it before the request is released."""
        self._decline_unasked(request)
        self._unwanted(request)

    def _decline_unasked(self, request: Request) -> None:
        if (source := self._requests.take_unasked(request)) is not None:
            self._declined.append(source)

    def _unwanted(self, request: Request) -> None:
        """End the fetches that a request waits for."""
        self._requests.give_up_fetch(request)
        for plan_id, each in self._fetches.items():
            if each.request is request and each.is_waited_for:
                self._cancelled.append(plan_id)

    # --- plans ------------------------------------------------------------------------------------------------

    def _due_fetches(self) -> list[PlannedFetch]:
        return self._requests.take_fetches()

    def _fetch_sent(self, task: PeerTask, fetch: PlannedFetch, plan: TransferPlan) -> None:
        if fetch.part.has_parts_below:  # without the blocks below it a fetched block has no parent
            self._below[task.plan_id] = plan.plan_id

    def stash(self, flight: InFlightPlan) -> bool:
        """Keep a fetch for ``take_stashed`` and return True if the load of the blocks below it is in flight."""
        below = self._below.get(flight.plan.plan_id)
        if below is None:
            return False
        self._stashed.setdefault(below, []).append(flight)
        return True

    def take_stashed(self, flight: InFlightPlan) -> list[InFlightPlan]:
        """Return the fetches that waited for this plan, whose loads have ended; others wait no more."""
        plan_id = flight.plan.plan_id
        for fetch in [fetch for fetch, below in self._below.items() if below == plan_id]:
            del self._below[fetch]
        return self._stashed.pop(plan_id, [])

    def committed(self, progress: Iterable[tuple[Request, int]]) -> None:
        """Record the tokens of requests that have their KV."""
        delayed = {each.request.request_id: each for each in self._unsent if each.delayed}
        if delayed:
            for request, num_tokens in progress:
                if (each := delayed.get(request.request_id)) is not None:
                    each.committed_tokens = num_tokens

    def _due_sends(self) -> list[_Send]:
        """Remove and return the sends that may be planned."""
        size = self._layout.block_size
        due = [
            each
            for each in self._unsent
            if not each.request.is_loading
            and (not each.delayed or each.committed_tokens // size >= len(each.request.block_hashes))
        ]
        if due:
            self._unsent = [each for each in self._unsent if each not in due]
        return due

    def _send_task(self, unsent: _Send) -> PeerTask:
        request, hashes = unsent.request, unsent.request.block_hashes
        cached = request.num_cached_tokens // self._layout.block_size
        computed = len(hashes) if unsent.delayed or unsent.is_computed else cached
        return self._task_of_send(unsent.transfer, hashes, request.block_table[: len(hashes)], computed)

    def _send_ended(self, send: _Send) -> None:
        self._requests.end_send(send.request)

    def _seconds_to_compute(self, fetch: PlannedFetch) -> float | None:
        """Prefill may begin to compute only now: it has as long as this instance would need, before its blocks come."""
        first = fetch.part.first * self._layout.block_size
        seconds = self._manager.seconds_to_compute(first, fetch.request.num_tokens)
        return None if seconds is None else 2 * seconds

    def _path_of(self, fetch: PlannedFetch) -> tuple[HashArray, bytes]:
        first, stop = fetch.part.first, fetch.part.first + len(fetch.slots)
        hashes, peer_hashes = fetch.request.block_hashes[:stop], b""
        if self._peer_layout is not self._layout:
            theirs = fetch.request.hashes_for(self._peer_layout, self._manager.lookahead_tokens)
            peer_hashes = theirs[first:stop].tobytes()
        return hashes, peer_hashes
