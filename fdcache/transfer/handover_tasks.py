"""Hand-overs as tasks of a manager's plans, from the call of the engine to the last rank's report."""

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
from fdcache.manager.requests import PeerSource
from fdcache.metadata import (
    HashArray,
    Int32Array,
    PeerTask,
    SwapPurpose,
    TransferPlan,
    TransferReport,
    UInt32Array,
)
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


LEAST_SECONDS = 0.5
"""A fetch has so long, however fast computing is: peers that are busy answer in less."""


class FetchedBlocks(Protocol):
    """Blocks of one request to fetch from a peer into these slots."""

    part: LoadPart
    slots: Int32Array
    generations: UInt32Array
    given_up: bool

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
        """Raise ``RequestStateError`` for a name that another send has."""
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
            slots, generations, first = fetch.slots, fetch.generations, fetch.part.first
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
