"""Hand-overs between instances, on the scheduler's side: what plans send to peers or fetch from them.

    manager = CacheManager.from_settings(layout, settings)
    handovers = Handovers.from_settings(manager, settings)  # None with FDCACHE_TRANSFER=none
    handovers.send([(request, name)])                       # prefill, after the allocation
    handovers.fetch([(request, source)])                    # decode, between match and allocation

The tasks travel with the manager's plans, and their outcomes come back with its ``apply`` and ``expire``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec
import numpy as np

from fdcache._core import InFlightPlan, LoadPart, Loads
from fdcache.errors import RequestStateError
from fdcache.manager.cache_manager import CacheManager
from fdcache.manager.requests import PeerSource, PlannedFetch, Request
from fdcache.metadata import (
    HashArray,
    Int32Array,
    PeerTask,
    SwapPurpose,
    TransferPlan,
    TransferReport,
    UInt32Array,
)
from fdcache.plans.ledger import Blocks, OpenPlan, PlanLedger, make_swap
from fdcache.settings import Settings
from fdcache.settings.peers import PeerSettings
from fdcache.tiers.statistics import HandoverCount, HandoverTally
from fdcache.transfer.factory import require_connector
from fdcache.transfer.messages import unsendable

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


LEAST_SECONDS = 0.5
"""A fetch has so long, however fast computing is: peers that are busy answer in less."""


class FetchedBlocks(Protocol):
    """Blocks of one request to fetch from a peer into these slots."""

    part: LoadPart
    slots: Int32Array
    generations: UInt32Array
    given_up: bool

    @property
    def first(self) -> int:
        """The place of the first of them in the hand-over."""

    @property
    def source(self) -> PeerSource:
        """The hand-over that is fetched."""

    @property
    def is_waited_for(self) -> bool:
        """False once nothing comes of the fetch for any request."""


class NamedSend(Protocol):
    """A send that has not ended."""

    transfer: str


SendT = TypeVar("SendT", bound=NamedSend)
FetchT = TypeVar("FetchT", bound=FetchedBlocks)


class HandoverTasks(ABC, Generic[SendT, FetchT]):
    """The hand-overs of one manager that have not ended, by plan. Its lock guards them, and it calls the hooks.

    A subclass knows the device blocks, sets ``_lock`` and ``_loads`` when it is made, and plans with them. Raises
    ``TransferNotFoundError`` for a connector that does not exist.
    """

    _lock: AbstractContextManager[object]
    _loads: Loads

    def __init__(self, terms: PeerTerms) -> None:
        require_connector(terms.settings)
        self._terms = terms
        self._tally = HandoverTally()
        self._declined: list[PeerSource] = []
        self._cancelled: list[int] = []
        self._sends: dict[int, SendT] = {}
        self._named: dict[str, SendT] = {}  # those that were not given up
        self._fetches: dict[int, FetchT] = {}

    def decline(self, sources: Iterable[PeerSource]) -> None:
        """Tell prefill instances that transfers are not wanted."""
        with self._lock:
            self._declined += sources

    # --- what a subclass knows --------------------------------------------------------------------------------

    @abstractmethod
    def _due_sends(self) -> list[SendT]:
        """Remove and return the sends that may be planned."""

    @abstractmethod
    def _send_task(self, send: SendT) -> PeerTask:
        """Return the task of a send, without its number."""

    @abstractmethod
    def _due_fetches(self) -> list[FetchT]:
        """Remove and return the fetches that may be planned."""

    @abstractmethod
    def _seconds_to_compute(self, fetch: FetchT) -> float | None:
        """Return how long computing what is fetched is expected to take, None if that is unknown."""

    @abstractmethod
    def _path_of(self, fetch: FetchT) -> tuple[HashArray, bytes]:
        """Return the hashes of a request's path up to the end of a fetch, and those of the peer if they differ."""

    def _fetch_sent(self, task: PeerTask, fetch: FetchT, plan: TransferPlan) -> None:
        """Take note that a fetch travels with a plan."""

    def _due_holds(self) -> list[tuple[PeerSource, str]]:
        """Remove and return the transfers that prefill shall keep for a while, with the ids of their requests."""
        return []

    def _hold_sent(self, plan_id: int, request_id: str) -> None:
        """Take note of the number of a hold."""

    def _hold_ended(self, plan_id: int) -> None:
        """Take note that a hold has ended, if there is one of this number."""

    def _send_planned(self, number: int, send: SendT) -> None:
        """Take note of the number of a send."""

    def _send_ended(self, send: SendT) -> None:
        """Release the blocks of a send that every rank has reported."""

    # --- hooks of the manager ---------------------------------------------------------------------------------

    @property
    def held_blocks(self) -> int:
        """Slots of fetches that no request waits for any more."""
        return sum(len(each.slots) for each in self._fetches.values() if not each.is_waited_for)

    def attach(self, plan: TransferPlan | None, ledger: PlanLedger, now: float) -> TransferPlan | None:
        """Add the hand-overs to a plan, an empty one if there is none; return it."""
        sends, fetches = self._due_sends(), self._due_fetches()
        tasks = [
            *map(self._send_task, sends),
            *(self._fetch_task(each.source, each) for each in fetches),
            *(self._fetch_task(source) for source in self._declined),
        ]
        holds = self._due_holds()
        tasks += [msgspec.structs.replace(self._fetch_task(source), wanted=True) for source, _ in holds]
        cancelled, self._cancelled, self._declined = tuple(self._cancelled), [], []
        if not tasks and not cancelled:
            return plan
        numbered = ledger.send_peers(tasks, now)
        for task, sent in zip(numbered, sends, strict=False):
            self._sends[task.plan_id] = sent
            self._send_planned(task.plan_id, sent)
        plan = plan or ledger.send(OpenPlan(), now)
        for task, fetch in zip(numbered[len(sends) :], fetches, strict=False):
            self._fetches[task.plan_id] = fetch
            self._loads.send_part(task.plan_id, fetch.part)
            self._fetch_sent(task, fetch, plan)
        for task, (_, request_id) in zip(numbered[len(tasks) - len(holds) :], holds, strict=True):
            self._hold_sent(task.plan_id, request_id)
        return msgspec.structs.replace(plan, peers=numbered, cancelled=plan.cancelled + cancelled)

    def stash(self, flight: InFlightPlan) -> bool:
        """Return False: a fetch ends by itself."""
        return False

    def take_stashed(self, flight: InFlightPlan) -> list[InFlightPlan]:
        """Return nothing: no fetch waits for another plan."""
        return []

    def ended(self, flight: InFlightPlan) -> None:
        """End a hand-over that every rank has reported, and that is settled in the tier."""
        task = flight.plan
        if not isinstance(task, PeerTask):
            return
        if (sent := self._sends.pop(task.plan_id, None)) is not None:
            self._send_ended(sent)
            if self._named.get(sent.transfer) is sent:
                del self._named[sent.transfer]
        if self._fetches.pop(task.plan_id, None) is not None:
            self._loads.end(task.plan_id, flight.swaps[SwapPurpose.FETCH].flags, flight.errors)
        self._hold_ended(task.plan_id)

    def record(self, report: TransferReport) -> None:
        """Count the hand-over that a rank has reported, if the report is of one."""
        self._tally.record(report)

    def counts(self) -> list[HandoverCount]:
        """Return the hand-overs that have ended, by peer and result."""
        return self._tally.counts()

    # --- for subclasses ---------------------------------------------------------------------------------------

    def _require_new(self, transfer: str) -> None:
        """Raise ``RequestStateError`` for a name that another send has, or that no peer would read."""
        if (fault := unsendable(transfer)) is not None:
            raise RequestStateError(fault)
        if transfer in self._named:
            raise RequestStateError(
                f"transfer {transfer!r} is being sent already; give each request a name of its own"
            )

    def _timeout_of(self, fetch: FetchT | None) -> float:
        """Return how long a fetch may take: no longer than computing would, so that no peer costs more than that."""
        most, seconds = self._terms.settings.timeout, None
        if fetch is not None:
            seconds = self._seconds_to_compute(fetch)
        return most if seconds is None else min(most, max(seconds, LEAST_SECONDS))

    def _holds_too_much(self, num_device_blocks: int) -> bool:
        """Return True if nothing more is fetched, as reads that nobody waits for hold slots."""
        return self.held_blocks > self._terms.settings.held * num_device_blocks

    def _task_of_send(
        self, transfer: str, hashes: HashArray, slots: Sequence[int] | Int32Array, computed: int
    ) -> PeerTask:
        count = len(hashes)
        slots = np.ascontiguousarray(slots, np.int32)
        source = Blocks.of_path(hashes, 0, slots, np.zeros(count, np.uint32))
        positions = np.arange(count, dtype=np.int32)
        swap = make_swap(SwapPurpose.SEND, source, positions, np.zeros(count, np.uint32))
        return PeerTask(plan_id=0, swap=swap, transfer=transfer, timeout=self._terms.wait, computed=computed)

    def _fetch_task(self, source: PeerSource, fetch: FetchT | None = None) -> PeerTask:
        """Return the task of a fetch; without one, of a transfer that is not wanted."""
        hashes, first, peer_hashes = np.empty((0, 32), np.uint8), 0, b""
        slots, generations = np.empty(0, np.int32), np.empty(0, np.uint32)
        if fetch is not None:
            slots, generations, first = fetch.slots, fetch.generations, fetch.first
            hashes, peer_hashes = self._path_of(fetch)
        positions = np.arange(first, first + len(slots), dtype=np.int32)
        run = Blocks.of_path(hashes, first, positions, np.zeros(len(slots), np.uint32))
        return PeerTask(
            plan_id=0,
            swap=make_swap(SwapPurpose.FETCH, run, slots, generations),
            transfer=source.transfer,
            timeout=self._timeout_of(fetch),
            addresses=source.addresses,
            attempt=source.attempt,
            peer_hashes=peer_hashes,
            wanted=fetch is not None and fetch.is_waited_for and not fetch.given_up,
        )


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
