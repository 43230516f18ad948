"""Plans of one manager: the open plans of the step, and those in flight until the last rank's report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from fdcache._core import LoadForms, WholeReports
from fdcache.layout import KVLayout
from fdcache.manager import story
from fdcache.manager.handover import Handovers
from fdcache.manager.results import LoadOutcome, LoadStatus
from fdcache.manager.tiers import LowerTiers
from fdcache.metadata import SwapPurpose, TransferPlan, TransferReport
from fdcache.plans.ledger import InFlightPlan, OpenPlan, PlanLedger
from fdcache.tiers.host import LocalHostTier
from fdcache.tiers.statistics import Counters


class WaitingRequests(Protocol):
    """The requests that wait for loads: ``LiveRequests``, or those of an engine that owns its device cache."""

    def send_loads(self, plan: TransferPlan) -> None:
        """Let the loads planned in this step wait for this plan's reports."""

    def end_loads(self, flight: InFlightPlan) -> list[tuple[str, int, int, int]]:
        """End the loads of a plan that every rank has reported.

        Return (request id, first block, blocks copied, blocks planned) of each load that a request waits for.
        """

    def give_up_loads(self, plan: int) -> list[tuple[str, int]]:
        """Let the requests that wait for a plan's loads load nothing any more; return (request id, first block)."""

    def whole_reports(self, plans: PlanLedger, tells_arrivals: bool, forms: LoadForms) -> WholeReports | None:
        """Return the native side of reports without failures; None if all are counted here."""

    def whole_loads_ended(self, ended: list[Any]) -> list[LoadOutcome]:
        """Pass on what has followed from the ends of loads that ``WholeReports`` has counted; return the outcomes."""


class Plans:
    """``open`` is the plan of the current step, ``ahead`` that of loads that no step waits for.

    Background copies have a plan and a report of their own.
    """

    def __init__(
        self,
        layout: KVLayout,
        timeout: float,
        tiers: LowerTiers,
        requests: WaitingRequests,
        counters: Counters,
        clock: Callable[[], float],
        handovers: Handovers | None = None,
    ) -> None:
        self._block_size = layout.block_size
        self._tiers = tiers
        self._copies, self._storage = tiers.copies, tiers.storage
        self._requests = requests
        self._counters = counters
        self._clock = clock
        self._ledger = PlanLedger(layout.tp_size, timeout)
        self._background = OpenPlan()
        self.handovers = handovers
        self._whole = self._make_whole_reports()
        self.open, self.ahead = OpenPlan(), OpenPlan(is_ahead=True)

    def _make_whole_reports(self) -> WholeReports | None:
        tiers = self._tiers
        if tiers.host is None:
            return None
        tells_arrivals = tiers.storage is not None or not isinstance(tiers.host, LocalHostTier)
        forms = LoadForms(LoadOutcome, LoadStatus.CONFIRMED, LoadStatus.FAILED, self._block_size)
        return self._requests.whole_reports(self._ledger, tells_arrivals, forms)

    def count(self, counters: Counters) -> None:
        """Add what the native side has counted."""
        if self._whole is not None:
            copied = self._whole.copied
            counters.blocks_loaded += copied.loaded
            counters.blocks_evicted_to_host += copied.evicted
            counters.blocks_backed_up += copied.backed_up

    @property
    def ledger(self) -> PlanLedger:
        """The plans in flight."""
        return self._ledger

    @property
    def in_flight(self) -> int:
        """Number of plans that some rank has not reported."""
        return len(self._ledger)

    @property
    def unfinished(self) -> int:
        """Number of plans in flight, and the open one unless it is empty."""
        storage = self._tiers.storage
        is_open = not (self.open.is_empty and self.ahead.is_empty)
        is_open = is_open or (storage is not None and not storage.orders.is_empty)
        return self.in_flight + is_open

    def blocks_in_flight(self, purpose: SwapPurpose) -> int:
        """Return the number of blocks being copied for this purpose."""
        return self._ledger.blocks_in_flight(purpose)

    def plan_background(self) -> None:
        """Plan the copies that no request waits for, as far as those in flight leave room."""
        copies, storage, ledger = self._copies, self._storage, self._ledger
        self._tiers.complete_early(self._counters)
        if copies is not None:
            self._tiers.queue_awaited()
            copies.plan_background(self._background, ledger.blocks_in_flight(SwapPurpose.BACKUP))
        if storage is not None:
            storage.plan_work(ledger.blocks_in_flight(SwapPurpose.STORE))

    def close(self, arena: str | None) -> list[TransferPlan]:
        """Close the step and return its plans; ``arena`` names the shared arena that host slots refer to."""
        sent = self._close_copies(arena)
        if self.handovers is not None:
            plan = self.handovers.attach(sent.pop(0) if sent else None, self._ledger, self._clock())
            sent = sent if plan is None else [plan, *sent]
        if sent:
            story.plans_sent(sent)
        return sent

    def _close_copies(self, arena: str | None) -> list[TransferPlan]:
        step, storage, orders = self.open, self._storage, None
        others = [plan for plan in (self.ahead, self._background) if not plan.is_empty]
        is_empty = step.is_empty
        if storage is not None and not storage.orders.is_empty:
            orders = storage.orders.take()
        elif is_empty and not others:
            return []
        now, sent = self._clock(), []
        if not is_empty or not others:
            plan = self._ledger.send(step, now, arena, orders)
            self._requests.send_loads(plan)
            sent.append(plan)
            orders = None
        for other in others:
            plan = self._ledger.send(other, now, arena, orders)
            if plan.is_ahead:
                self._requests.send_loads(plan)
            sent.append(plan)
            orders = None
        return sent

    def apply(self, reports: list[TransferReport]) -> list[LoadOutcome]:
        """Count reports; return the loads that ended. Raises ``PlanError`` before any report is counted."""
        outcomes: list[LoadOutcome] = []
        if self._whole is not None and (ended := self._whole.count(reports)) is not None:
            loads, arrived = ended
            if loads:
                outcomes = self._requests.whole_loads_ended(loads)
            if arrived:
                self._tiers.blocks_arrived(arrived)
            self._tiers.complete_early(self._counters)
            return outcomes
        for report in reports:
            self._ledger.check(report)
        for report in reports:
            if not self._ledger.expects(report):
                self._counters.unexpected_reports += 1
                continue
            if self._tiers.host:
                self._tiers.host.traffic.record(report)
            not_cleared = report.refused and self._ledger.clears_storage(report)
            if self.handovers is not None:
                self.handovers.tally.record(report)
            for flight in self._ledger.record(report):
                outcomes += self._complete(flight)
            if not_cleared and self._tiers.storage:
                self._tiers.storage.reset()  # the rank's file still has the blocks
        self._tiers.complete_early(self._counters)
        return outcomes

    def require_rank(self, rank: int) -> None:
        """Raise ``PlanError`` for an unknown rank."""
        self._ledger.require_rank(rank)

    def lose_rank(self, rank: int) -> list[LoadOutcome]:
        """Fail what this rank has not reported, and copies that were not sent: they read or fill memory that is gone.

        Return the loads that end. Raises ``PlanError`` for an unknown rank.
        """
        ended = [outcome for flight in self._ledger.lose_rank(rank) for outcome in self._complete(flight)]
        for plan in (self.open, self.ahead, self._background):
            ended += self._drop(plan, rank)
        self._tiers.complete_early(self._counters)
        return ended

    def _drop(self, plan: OpenPlan, rank: int) -> list[LoadOutcome]:
        """Fail the copies of a plan that was not sent. The step still waits for what plans in flight read."""
        after = plan.take_after()
        dropped = None if plan.is_empty else self._ledger.send(plan, self._clock())
        plan.after = after
        if dropped is None:
            return []
        self._requests.send_loads(dropped)
        return [each for flight in self._ledger.drop(dropped, rank) for each in self._complete(flight)]

    def expire(self) -> list[LoadOutcome]:
        """Return the loads of plans whose deadline has passed since the last call."""
        late = self._ledger.newly_overdue(self._clock())
        if not late:
            return []
        if self._tiers.storage:
            self._tiers.storage.overdue(late)
        given_up = [load for flight in late for load in self._requests.give_up_loads(flight.plan.plan_id)]
        self._counters.loads_overdue += len(given_up)
        return [
            self._outcome(request_id, LoadStatus.OVERDUE, first, "no report within the plan's deadline")
            for request_id, first in given_up
        ]

    def _complete(self, flight: InFlightPlan) -> list[LoadOutcome]:
        if self.handovers is not None and self.handovers.stash(flight):
            return []
        self._tiers.complete(flight, self._counters)
        return self._end_loads(flight) + self._end_handovers(flight)

    def _end_loads(self, flight: InFlightPlan) -> list[LoadOutcome]:
        if SwapPurpose.LOAD not in flight.swaps:
            return []
        return [
            self._ended(request_id, first, copied, planned, flight)
            for request_id, first, copied, planned in self._requests.end_loads(flight)
        ]

    def _end_handovers(self, flight: InFlightPlan) -> list[LoadOutcome]:
        """End a fetch, or the fetches that ended before the load of the blocks below them."""
        if self.handovers is None:
            return []
        outcomes = []
        if (ended := self.handovers.ended(flight)) is not None:
            request_id, lacking, message = ended
            status = LoadStatus.CONFIRMED if message is None else LoadStatus.FAILED
            outcomes.append(self._outcome(request_id, status, lacking, message))
        for fetch in self.handovers.take_stashed(flight):
            outcomes += self._complete(fetch)
        return outcomes

    def _ended(
        self, request_id: str, first: int, copied: int, planned: int, flight: InFlightPlan
    ) -> LoadOutcome:
        """Confirm a load that every rank has reported, or fail it from the first block that a rank lacks."""
        if copied == planned:
            return self._outcome(request_id, LoadStatus.CONFIRMED, first + copied, None)
        message = "; ".join(flight.errors) or "the cache was reset"
        return self._outcome(request_id, LoadStatus.FAILED, first + copied, message)

    def _outcome(self, request_id: str, status: LoadStatus, block: int, message: str | None) -> LoadOutcome:
        return LoadOutcome(request_id, status, block * self._block_size, message)
