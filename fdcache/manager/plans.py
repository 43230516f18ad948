"""Plans of one manager: the open plans of the step, and those in flight until the last rank's report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fdcache.layout import KVLayout
from fdcache.manager.requests import PlannedLoad, StepPlan
from fdcache.manager.results import LoadOutcome, LoadStatus
from fdcache.manager.tiers import LowerTiers
from fdcache.metadata import SwapPurpose, TransferPlan, TransferReport
from fdcache.plans.ledger import InFlightPlan, OpenPlan, PlanLedger
from fdcache.tiers.statistics import Counters


class Plans:
    """``open`` is the plan of the current step. Background copies have a plan and a report of their own."""

    def __init__(
        self,
        layout: KVLayout,
        timeout: float,
        tiers: LowerTiers,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._block_size = layout.block_size
        self._tiers = tiers
        self._counters = counters
        self._clock = clock
        self._ledger = PlanLedger(layout.tp_size, timeout)
        self._background = OpenPlan()
        self._loads: dict[int, list[PlannedLoad]] = {}  # by the number of the plan in flight
        self.open = StepPlan()

    def __contains__(self, plan_id: int) -> bool:
        return plan_id in self._ledger

    @property
    def in_flight(self) -> int:
        """Number of plans that some rank has not reported."""
        return len(self._ledger)

    @property
    def unfinished(self) -> int:
        """Number of plans in flight, and the open one unless it is empty."""
        storage = self._tiers.storage
        is_open = not self.open.is_empty or (storage is not None and not storage.orders.is_empty)
        return self.in_flight + is_open

    def blocks_in_flight(self, purpose: SwapPurpose) -> int:
        """Return the number of blocks being copied for this purpose."""
        return self._ledger.blocks_in_flight(purpose)

    def plan_background(self) -> None:
        """Plan the copies that no request waits for."""
        self._tiers.plan_background(self._background, self._ledger)

    def close(self, arena: str | None) -> list[TransferPlan]:
        """Close the step and return its plans; ``arena`` names the shared arena that host slots refer to."""
        step, background, storage = self.open, self._background, self._tiers.storage
        has_copies, orders = not background.is_empty, None
        if storage is not None and not storage.orders.is_empty:
            orders = storage.orders.take()
        elif step.is_empty and not has_copies:
            return []
        now, sent = self._clock(), []
        if not step.is_empty or not has_copies:
            plan = self._ledger.send(step, now, arena, orders)
            if step.loads:
                self._loads[plan.plan_id], step.loads = step.loads, []
            sent.append(plan)
            orders = None
        if has_copies:
            sent.append(self._ledger.send(background, now, arena, orders))
        return sent

    def apply(self, reports: Sequence[TransferReport]) -> list[LoadOutcome]:
        """Count reports; return the loads that ended. Raises ``PlanError`` before any report is counted."""
        for report in reports:
            self._ledger.check(report)
        outcomes: list[LoadOutcome] = []
        for report in reports:
            if not self._ledger.expects(report):
                self._counters.unexpected_reports += 1
                continue
            if self._tiers.host:
                self._tiers.host.traffic.record(report)
            not_cleared = report.refused and self._ledger.clears_storage(report)
            for flight in self._ledger.record(report):
                outcomes += self._complete(flight)
            if not_cleared and self._tiers.storage:
                self._tiers.storage.reset()  # the rank's file still has the blocks
        return outcomes

    def lose_rank(self, rank: int) -> list[LoadOutcome]:
        """Fail what this rank has not reported; return the loads that end. Raises ``PlanError`` for an unknown rank."""
        return [outcome for flight in self._ledger.lose_rank(rank) for outcome in self._complete(flight)]

    def expire(self) -> list[LoadOutcome]:
        """Return the loads of plans whose deadline has passed since the last call."""
        late = self._ledger.newly_overdue(self._clock())
        if self._tiers.storage:
            self._tiers.storage.overdue(late)
        loads = [load for flight in late for load in self._loads.get(flight.plan.plan_id, ())]
        return [self._overdue(load) for load in loads if load.is_waited_for]

    def _complete(self, flight: InFlightPlan) -> list[LoadOutcome]:
        self._tiers.complete(flight, self._counters)
        loads = self._loads.pop(flight.plan.plan_id, ())
        return [self._end_load(load, flight) for load in loads if load.is_waited_for]

    def _end_load(self, load: PlannedLoad, flight: InFlightPlan) -> LoadOutcome:
        """Confirm a load that every rank has reported, or fail it from the first block that a rank lacks."""
        copied = flight.swaps[SwapPurpose.LOAD].leading_copied(load.offset, load.count)
        copied = load.end(copied)
        if copied == load.count:
            self._counters.loads_confirmed += 1
            return self._outcome(load, LoadStatus.CONFIRMED, copied, None)
        self._counters.loads_failed += 1
        message = "; ".join(flight.errors) or "the cache was reset"
        return self._outcome(load, LoadStatus.FAILED, copied, message)

    def _overdue(self, load: PlannedLoad) -> LoadOutcome:
        """Give up waiting for a load; its slots stay held until the report."""
        self._counters.loads_overdue += 1
        load.overdue()
        return self._outcome(load, LoadStatus.OVERDUE, 0, "no report within the plan's deadline")

    def _outcome(
        self, load: PlannedLoad, status: LoadStatus, copied: int, message: str | None
    ) -> LoadOutcome:
        recompute_from = (load.first_block + copied) * self._block_size
        return LoadOutcome(load.request_id, status, recompute_from, message)
