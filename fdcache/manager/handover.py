"""Hand-overs of requests: what the next plan sends to peers or fetches from them, and what is in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from fdcache.errors import RequestStateError
from fdcache.layout import KVLayout
from fdcache.manager.requests import LiveRequests, LoadRange, PeerSource, Request, StepPlan
from fdcache.metadata import PeerTask, SwapPurpose, TransferPlan
from fdcache.plans.blocks import Blocks
from fdcache.plans.ledger import PlanLedger, make_swap
from fdcache.settings.peers import PeerSettings
from fdcache.tiers.statistics import Counters


@dataclass(frozen=True, slots=True)
class PeerTerms:
    """Settings of hand-overs. ``wait``: seconds for which a send waits for a peer to ask."""

    settings: PeerSettings
    wait: float = 30.0


@dataclass(slots=True, eq=False)
class _Unsent:
    """A send that is not planned yet.

    One that was ``delayed`` by a load, whose end decides what lies below the blocks, is planned once all are committed.
    """

    request: Request
    transfer: str
    delayed: bool
    committed_tokens: int = 0


@dataclass(slots=True)
class _Fetching:
    """A fetch in flight, and the number of its slots."""

    load: LoadRange
    slots: int


class Handovers:
    """The hand-overs of one manager. Sends keep the blocks of their request; fetches hold slots until their report."""

    def __init__(
        self,
        terms: PeerTerms,
        layout: KVLayout,
        requests: LiveRequests,
        counters: Counters,
        num_device_blocks: Callable[[], int],
    ) -> None:
        self._terms = terms
        self._layout = layout
        self._requests = requests
        self._counters = counters
        self._num_device_blocks = num_device_blocks
        self._unsent: list[_Unsent] = []
        self._declined: list[PeerSource] = []
        self._cancelled: list[int] = []
        self._sends: dict[int, Request] = {}
        self._fetches: dict[int, _Fetching] = {}

    @property
    def is_idle(self) -> bool:
        """True if the next plan has no hand-over."""
        return not (self._unsent or self._declined or self._cancelled)

    @property
    def held_blocks(self) -> int:
        """Slots of fetches that no request waits for any more."""
        return sum(each.slots for each in self._fetches.values() if not each.load.is_waited_for)

    # --- prefill ----------------------------------------------------------------------------------------------

    def send(self, request: Request, transfer: str) -> None:
        """Hand over the full blocks of a request that has its device blocks, as they are computed."""
        count = len(request.block_hashes)
        if not request.is_live or request.num_blocks < count:
            raise RequestStateError(
                f"request {request.request_id!r} has {request.num_blocks} of the {count} blocks to hand over; allocate "
                "them first"
            )
        self._unsent.append(_Unsent(request, transfer, delayed=request.is_loading))
        self._requests.begin_send(request)

    def end(self, request: Request) -> None:
        """End the hand-overs of a request that will not be completed, and tell the peer."""
        for each in [each for each in self._unsent if each.request is request]:
            self._unsent.remove(each)
            self._requests.end_send(request)
        self._cancelled += [plan_id for plan_id, each in self._sends.items() if each is request]
        self.unwanted(request)

    # --- decode -----------------------------------------------------------------------------------------------

    def fetch(self, request: Request, source: PeerSource) -> int:
        """Let the allocation of a matched request fetch the blocks it lacks; return their number."""
        allowed = self._terms.settings.held * self._num_device_blocks()
        if self.held_blocks > allowed:
            self._counters.fetches_skipped += 1
            count = 0
        else:
            count = self._requests.expect_from_peer(request, source)
        if not count:
            self.decline(source)
        return count

    def decline(self, source: PeerSource) -> None:
        """Tell a peer that a transfer is not wanted."""
        self._declined.append(source)

    def unwanted(self, request: Request) -> None:
        """End the fetches that a request waits for; call it before the request is released."""
        for plan_id, each in self._fetches.items():
            if each.load.request is request and each.load.is_waited_for:
                self._cancelled.append(plan_id)

    # --- plans ------------------------------------------------------------------------------------------------

    def attach(
        self, plan: TransferPlan | None, step: StepPlan, ledger: PlanLedger, now: float
    ) -> tuple[TransferPlan | None, dict[int, LoadRange]]:
        """Add the hand-overs to a plan, an empty one if there is none; return it, and the loads by plan id."""
        sends = self._due_sends()
        fetches, step.fetches = step.fetches, []
        tasks = [
            *map(self._send_task, sends),
            *(self._fetch_task(each.source, each.run, each.slots, each.generations) for each in fetches),
            *(self._fetch_task(source, None) for source in self._declined),
        ]
        cancelled, self._cancelled, self._declined = tuple(self._cancelled), [], []
        if not tasks and not cancelled:
            return plan, {}
        numbered = ledger.send_peers(tasks, now)
        for task, sent in zip(numbered, sends, strict=False):
            self._sends[task.plan_id] = sent.request
        loads = {}
        for task, each in zip(numbered[len(sends) :], fetches, strict=False):
            self._fetches[task.plan_id] = _Fetching(each.load, len(each.slots))
            loads[task.plan_id] = each.load
        plan = plan or ledger.send(StepPlan(), now)
        return (
            msgspec.structs.replace(plan, peers=numbered, cancelled=plan.cancelled + cancelled),
            loads,
        )

    def ended(self, task: PeerTask) -> None:
        """Note that every rank has reported a hand-over."""
        self._fetches.pop(task.plan_id, None)
        if (request := self._sends.pop(task.plan_id, None)) is not None:
            self._requests.end_send(request)

    def committed(self, progress: Iterable[tuple[Request, int]]) -> None:
        """Note the tokens of requests that have their KV."""
        delayed = {each.request.request_id: each for each in self._unsent if each.delayed}
        if delayed:
            for request, num_tokens in progress:
                if (each := delayed.get(request.request_id)) is not None:
                    each.committed_tokens = num_tokens

    def _due_sends(self) -> list[_Unsent]:
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

    def _send_task(self, unsent: _Unsent) -> PeerTask:
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

    def _fetch_task(
        self,
        source: PeerSource,
        run: Blocks | None,
        slots: np.ndarray | None = None,
        generations: np.ndarray | None = None,
    ) -> PeerTask:
        nothing = np.empty(0, np.int32)
        if run is None:
            run = Blocks.of_path(np.empty((0, 32), np.uint8), 0, nothing, nothing.astype(np.uint32))
        swap = make_swap(
            SwapPurpose.FETCH,
            run,
            nothing if slots is None else np.ascontiguousarray(slots, np.int32),
            nothing.astype(np.uint32)
            if generations is None
            else np.ascontiguousarray(generations, np.uint32),
        )
        return PeerTask(
            plan_id=0,
            swap=swap,
            transfer=source.transfer,
            timeout=self._terms.settings.timeout,
            addresses=source.addresses,
            attempt=source.attempt,
            wanted=slots is not None,
        )
