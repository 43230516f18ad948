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

import msgspec
import numpy as np

from fdcache._core import InFlightPlan
from fdcache.errors import RequestStateError
from fdcache.manager.cache_manager import CacheManager
from fdcache.manager.requests import PeerSource, PlannedFetch, Request
from fdcache.metadata import PeerTask, SwapPurpose, TransferPlan, TransferReport
from fdcache.plans.blocks import Blocks
from fdcache.plans.ledger import OpenPlan, PlanLedger, make_swap
from fdcache.settings import Settings
from fdcache.settings.peers import PeerSettings
from fdcache.tiers.handovers import HandoverTally
from fdcache.tiers.statistics import HandoverCount
from fdcache.transfer.factory import require_connector

_TERMS = (
    "FD_PREFILL_WAIT_DECODE_RESOURCE_SECONDS",
    "PREFILL_CONTINUOUS_REQUEST_DECODE_RESOURCES",
    "FD_EP_MAX_PREFETCH_TASK_NUM",
)


@dataclass(frozen=True, slots=True)
class PeerTerms:
    """Settings of hand-overs. ``wait``: seconds for which a send waits for a peer to ask.

    ``keeps_asking``: a fetch that finds no room is tried again; without it prefill is told that it is not wanted.
    ``most_ahead``: requests that should wait for peers at a time.
    """

    settings: PeerSettings
    wait: float = 30.0
    keeps_asking: bool = True
    most_ahead: int = 8

    @classmethod
    def of(cls, settings: Settings) -> PeerTerms:
        """Return the terms that the settings ask for."""
        wait, keeps_asking, most = (settings.value(name) for name in _TERMS)
        return cls(settings.peers_in_force, wait, keeps_asking, most)


@dataclass(slots=True, eq=False)
class _Send:
    """A send that has not ended.

    One that was ``delayed`` by a load, whose end decides what lies below the blocks, is planned once all are committed.
    """

    request: Request
    transfer: str
    delayed: bool
    committed_tokens: int = 0


class Handovers:
    """The hand-overs of one manager. Sends keep the blocks of their request; fetches hold slots until their report.

    Calls are thread-safe, as a manager's are. Raises ``TransferNotFoundError`` for a connector that does not exist.
    """

    def __init__(self, manager: CacheManager, terms: PeerTerms) -> None:
        require_connector(terms.settings)
        self._terms = terms
        self._tally = HandoverTally()
        self._unsent: list[_Send] = []
        self._declined: list[PeerSource] = []
        self._cancelled: list[int] = []
        self._sends: dict[int, _Send] = {}
        self._named: dict[str, _Send] = {}  # those that were not given up
        self._fetches: dict[int, PlannedFetch] = {}
        self._below: dict[int, int] = {}  # fetch to the plan with the loads below it, while that is in flight
        self._stashed: dict[int, list[InFlightPlan]] = {}  # fetches that ended before that plan
        self._manager = parts = manager.attach_hooks(self)
        self._layout, self._requests = parts.layout, parts.requests
        self._peer_layout = parts.layout.with_tp_size(terms.settings.peer_ranks or parts.layout.tp_size)

    @classmethod
    def from_settings(cls, manager: CacheManager, settings: Settings | None = None) -> Handovers | None:
        """Return those of a manager, None with FDCACHE_TRANSFER=none. ``settings``: by default the environment's."""
        terms = PeerTerms.of(settings or Settings.load())
        return cls(manager, terms) if terms.settings.is_on else None

    # --- calls of the engine ----------------------------------------------------------------------------------

    def send(self, transfers: Iterable[tuple[Request, str]]) -> None:
        """Hand over the full blocks of requests under these names, to the decode instance that asks for them.

        Call it after the allocation: with the next plan the workers hand over what the engine then reports with
        ``CacheController.layer_computed``. A request keeps its blocks until then, also after ``finish``; end
        what will not be completed with ``end_transfers``. Raises ``RequestStateError`` for a request without blocks
        or a name that another send has.
        """
        with self._manager.lock:
            for request, transfer in transfers:
                self._send(request, transfer)

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

    def decline(self, sources: Iterable[PeerSource]) -> None:
        """Tell prefill instances that transfers are not wanted."""
        with self._manager.lock:
            self._declined += sources

    def end_transfers(self, requests: Iterable[Request]) -> None:
        """End the hand-overs of requests that are aborted or preempted, and tell the peers. Idempotent."""
        with self._manager.lock:
            self._manager.set_time()
            for request in requests:
                self._end(request)

    # --- hooks of the manager ---------------------------------------------------------------------------------

    @property
    def held_blocks(self) -> int:
        """Slots of fetches that no request waits for any more."""
        return sum(len(each.slots) for each in self._fetches.values() if not each.is_waited_for)

    # --- prefill ----------------------------------------------------------------------------------------------

    def _send(self, request: Request, transfer: str) -> None:
        count = len(request.block_hashes)
        if not request.is_live or request.num_blocks < count:
            raise RequestStateError(
                f"request {request.request_id!r} has {request.num_blocks} of the {count} blocks to hand over; allocate "
                "them first"
            )
        if transfer in self._named:
            raise RequestStateError(
                f"transfer {transfer!r} is being sent already; give each request a name of its own"
            )
        self._named[transfer] = send = _Send(request, transfer, delayed=request.is_loading)
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
        allowed = self._terms.settings.held * self._manager.num_device_blocks()
        if self.held_blocks > allowed:
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

    def attach(self, plan: TransferPlan | None, ledger: PlanLedger, now: float) -> TransferPlan | None:
        """Add the hand-overs to a plan, an empty one if there is none; return it."""
        sends, fetches = self._due_sends(), self._requests.take_fetches()
        tasks = [
            *map(self._send_task, sends),
            *(self._fetch_task(each.source, each) for each in fetches),
            *(self._fetch_task(source) for source in self._declined),
        ]
        cancelled, self._cancelled, self._declined = tuple(self._cancelled), [], []
        if not tasks and not cancelled:
            return plan
        numbered = ledger.send_peers(tasks, now)
        for task, sent in zip(numbered, sends, strict=False):
            self._sends[task.plan_id] = sent
        plan = plan or ledger.send(OpenPlan(), now)
        for task, fetch in zip(numbered[len(sends) :], fetches, strict=False):
            self._fetches[task.plan_id] = fetch
            self._requests.loads.send_part(task.plan_id, fetch.part)
            if fetch.part.has_parts_below:  # without the blocks below it a fetched block has no parent
                self._below[task.plan_id] = plan.plan_id
        return msgspec.structs.replace(plan, peers=numbered, cancelled=plan.cancelled + cancelled)

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

    def ended(self, flight: InFlightPlan) -> None:
        """End a hand-over that every rank has reported, and that is settled in the tier."""
        task = flight.plan
        if not isinstance(task, PeerTask):
            return
        if (sent := self._sends.pop(task.plan_id, None)) is not None:
            self._requests.end_send(sent.request)
            if self._named.get(sent.transfer) is sent:
                del self._named[sent.transfer]
        if self._fetches.pop(task.plan_id, None) is not None:
            self._requests.loads.end(task.plan_id, flight.swaps[SwapPurpose.FETCH].flags, flight.errors)

    def record(self, report: TransferReport) -> None:
        """Count the hand-over that a rank has reported, if the report is of one."""
        self._tally.record(report)

    def counts(self) -> list[HandoverCount]:
        """Return the hand-overs that have ended, by peer and result."""
        return self._tally.counts()

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
        request = unsent.request
        hashes = request.block_hashes
        count = len(hashes)
        slots = np.ascontiguousarray(request.block_table[:count])
        source = Blocks.of_path(hashes, 0, slots, np.zeros(count, np.uint32))
        swap = make_swap(
            SwapPurpose.SEND, source, np.arange(count, dtype=np.int32), np.zeros(count, np.uint32)
        )
        return PeerTask(
            plan_id=0,
            swap=swap,
            transfer=unsent.transfer,
            timeout=self._terms.wait,
            computed=count if unsent.delayed else request.num_cached_tokens // self._layout.block_size,
        )

    def _fetch_task(self, source: PeerSource, fetch: PlannedFetch | None = None) -> PeerTask:
        hashes, first, peer_hashes = np.empty((0, 32), np.uint8), 0, b""
        slots, generations = np.empty(0, np.int32), np.empty(0, np.uint32)
        if fetch is not None:
            slots, generations, first = fetch.slots, fetch.generations, fetch.part.first
            hashes = fetch.request.block_hashes[: first + len(slots)]
            if self._peer_layout is not self._layout:
                theirs = fetch.request.hashes_for(self._peer_layout, self._manager.lookahead_tokens)
                peer_hashes = theirs[first : first + len(slots)].tobytes()
        positions = np.arange(first, first + len(slots), dtype=np.int32)
        run = Blocks.of_path(hashes, first, positions, np.zeros(len(slots), np.uint32))
        return PeerTask(
            plan_id=0,
            swap=make_swap(SwapPurpose.FETCH, run, slots, generations),
            transfer=source.transfer,
            timeout=self._terms.settings.timeout,
            addresses=source.addresses,
            attempt=source.attempt,
            peer_hashes=peer_hashes,
            wanted=fetch is not None and fetch.is_waited_for and not fetch.given_up,
        )
