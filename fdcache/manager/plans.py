"""Plans of one manager: the open ones of the step, and those in flight until the last rank's report."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from fdcache import tracing
from fdcache._core import InFlightPlan, Loads, PlanReports
from fdcache.layout import KVLayout
from fdcache.manager import story
from fdcache.manager.hooks import PlanHooks
from fdcache.manager.tiers import Tiers
from fdcache.metadata import SwapPurpose, TransferPlan, TransferReport
from fdcache.plans.ledger import OpenPlan, PlanLedger
from fdcache.tiers.host import Deleted, HostService
from fdcache.tiers.statistics import Counters


class Plans:
    """``open`` is the plan of the current step, ``ahead`` that of loads that no step waits for.

    Background copies have a plan and a report of their own.
    """

    def __init__(
        self,
        layout: KVLayout,
        timeout: float,
        tiers: Tiers,
        loads: Loads,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._tiers = tiers
        self._copies, self._storage = tiers.copies, tiers.storage
        self._loads = loads
        self._counters = counters
        self._clock = clock
        self._ledger = PlanLedger(layout.tp_size, timeout, layout.replicas)
        self._background = OpenPlan()
        self.hooks: PlanHooks | None = None
        """Those of hand-overs, where there are some."""

        self._overdue: list[int] = []
        self._reports = self._make_reports()
        self.open, self.ahead = OpenPlan(), OpenPlan(is_ahead=True)

    def _make_reports(self) -> PlanReports:
        tiers, host = self._tiers, self._tiers.host
        index, traffic = (None, None) if host is None else (host.index, host.traffic)
        return PlanReports(self._ledger, self._loads, tiers.device, index, traffic, tiers.storage is not None)

    def count(self, counters: Counters) -> None:
        """Add what the native side has counted."""
        copied, loads = self._reports.copied, self._loads.totals
        counters.blocks_loaded += copied.loaded
        counters.blocks_evicted_to_host += copied.evicted
        counters.blocks_backed_up += copied.backed_up
        counters.loads_confirmed += loads.confirmed
        counters.loads_failed += loads.failed
        counters.loads_cut_short += loads.cut_short
        counters.loads_overdue += loads.overdue
        counters.unexpected_reports += self._reports.unexpected

    @property
    def ledger(self) -> PlanLedger:
        """The plans in flight."""
        return self._ledger

    @property
    def in_flight(self) -> int:
        """Number of plans that some rank has not reported."""
        return len(self._ledger)

    @property
    def has_overdue(self) -> bool:
        """True while a plan is in flight whose deadline had passed at the last ``expire``."""
        if self._overdue:
            self._overdue = [number for number in self._overdue if number in self._ledger]
        return bool(self._overdue)

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
        self._complete_early()
        if copies is not None:
            if storage is not None:
                self._tiers.queue_awaited()
            copies.plan_background(self._background, ledger.blocks_in_flight(SwapPurpose.BACKUP))
        if storage is not None:
            storage.plan_work(ledger.blocks_in_flight(SwapPurpose.STORE))

    def close(self, arena: str | None) -> list[TransferPlan]:
        """Close the step and return its plans; ``arena`` names the shared arena that host slots refer to."""
        sent = self._close_copies(arena)
        if self.hooks is not None:
            plan = self.hooks.attach(sent.pop(0) if sent else None, self._ledger, self._clock())
            sent = sent if plan is None else [plan, *sent]
        if sent and story.audience.ask():
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
            self._loads.send(plan.plan_id, is_ahead=False)
            sent.append(plan)
            orders = None
        for other in others:
            plan = self._ledger.send(other, now, arena, orders)
            if plan.is_ahead:
                self._loads.send(plan.plan_id, is_ahead=True)
            sent.append(plan)
            orders = None
        return sent

    def apply(self, reports: list[TransferReport]) -> None:
        """Count reports. Raises ``PlanError`` before any report is counted."""
        if tracing.spans is not None:
            reads = self._storage.reads if self._storage is not None else None
            for report in reports:
                tracing.spans.copied(report, reads.requests_of(report.plan_id) if reads is not None else ())
        if (counted := self._reports.count(reports)) is not None:
            if counted.arrived:
                self._tiers.blocks_arrived(counted.arrived)
            if self.hooks is not None:
                for report in counted.handovers:
                    self.hooks.record(report)
            for flight in counted.ended:
                self._complete(flight)
            if counted.not_cleared and self._tiers.storage:
                self._tiers.storage.reset()  # the rank's file still has the blocks
        self._complete_early()

    def require_rank(self, rank: int) -> None:
        """Raise ``PlanError`` for an unknown rank."""
        self._ledger.require_rank(rank)

    def lose_rank(self, rank: int) -> None:
        """Fail what this rank has not reported, and copies that were not sent: they read or fill memory that is gone.

        Raises ``PlanError`` for an unknown rank.
        """
        for flight in self._ledger.lose_rank(rank):
            self._complete(flight)
        for plan in (self.open, self.ahead, self._background):
            self._drop(plan, rank)
        self._complete_early()

    def _drop(self, plan: OpenPlan, rank: int) -> None:
        """Fail the copies of a plan that was not sent. The step still waits for what plans in flight read."""
        after = plan.take_after()
        dropped = None if plan.is_empty else self._ledger.send(plan, self._clock())
        plan.after = after
        if dropped is None:
            return
        self._loads.send(dropped.plan_id, plan.is_ahead)
        for flight in self._ledger.drop(dropped, rank):
            self._complete(flight)

    def expire(self) -> None:
        """End the loads of plans whose deadline has passed since the last call."""
        late = self._ledger.newly_overdue(self._clock())
        self._overdue += [flight.plan.plan_id for flight in late]
        if late and self._tiers.storage:
            self._tiers.storage.overdue(late)
        for flight in late:
            self._loads.give_up(flight.plan.plan_id)

    def _complete(self, flight: InFlightPlan) -> None:
        if self.hooks is not None and self.hooks.stash(flight):
            return
        self._tiers.complete(flight, self._counters)
        if SwapPurpose.LOAD in flight.swaps:
            loaded = flight.swaps[SwapPurpose.LOAD].flags
            self._loads.end(flight.plan.plan_id, loaded, flight.errors)
        if self.hooks is not None:
            self.hooks.ended(flight)
            for fetch in self.hooks.take_stashed(flight):
                self._complete(fetch)

    def _complete_early(self) -> None:
        if self._copies is not None and self._copies.has_early:
            self._tiers.complete_early(self._counters)


class Deletions:
    """Forgets on the device what was deleted in the service, and tells the service once no plan copies it any more.

    Copies that are planned or in flight then may be of such blocks: the service takes none of these until it hears that
    they have ended.
    """

    def __init__(self, service: HostService, plans: Plans, forget: Callable[[Deleted], None]) -> None:
        self._service = service
        self._plans = plans
        self._forget = forget
        self._new: int | None = None
        self._ending: deque[tuple[int, set[int]]] = deque()

    def take(self) -> None:
        """Forget what the service has named since the last call."""
        if (deleted := self._service.take_deleted()) is not None:
            self._forget(deleted)
            self._new = deleted.number

    def step_closed(self) -> None:
        """Take note of the plans that have to end, once those of this step are in flight, too."""
        if self._new is not None:
            self._ending.append((self._new, {*self._plans.ledger.plans}))
            self._new = None
        self.tell_ended()

    def tell_ended(self) -> None:
        """Tell the service of deletions of which nothing is being copied any more."""
        number = 0
        while self._ending:
            last, plans = self._ending[0]
            plans.intersection_update(self._plans.ledger.plans)
            if plans:
                break
            number = last
            self._ending.popleft()
        if number:
            self._service.forgot(number)
