"""Plans of one manager: the open plans of the step, and those in flight until the last rank's report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fdcache.layout import KVLayout
from fdcache.manager.requests import LiveRequest
from fdcache.manager.results import LoadOutcome, LoadStatus
from fdcache.manager.tiers import Tiers
from fdcache.metadata import SwapPurpose, TransferPlan, TransferReport
from fdcache.plans.ledger import InFlightPlan, LoadRange, OpenPlan, PlanLedger
from fdcache.tiers.statistics import Counters


class Plans:
    """``open`` is the plan of the current step. Background copies have a plan and a report of their own."""

    def __init__(
        self, layout: KVLayout, timeout: float, tiers: Tiers, counters: Counters, clock: Callable[[], float]
    ) -> None:
        self._block_size = layout.block_size
        self._tiers = tiers
        self._counters = counters
        self._clock = clock
        self._ledger = PlanLedger(layout.tp_size, timeout)
        self._background = OpenPlan()
        self.open = OpenPlan()

    @property
    def in_flight(self) -> int:
        """Number of plans that some rank has not reported."""
        return len(self._ledger)

    @property
    def unfinished(self) -> int:
        """Number of plans in flight, and the open one unless it is empty."""
        return self.in_flight + (not self.open.is_empty)

    def blocks_in_flight(self, purpose: SwapPurpose) -> int:
        """Return the number of blocks being copied for this purpose."""
        return self._ledger.blocks_in_flight(purpose)

    def plan_background(self) -> None:
        """Plan the copies that no request waits for."""
        self._tiers.plan_background(self._background, self._ledger)

    def close(self, arena: str | None) -> list[TransferPlan]:
        """Close the step and return its plans; ``arena`` names the shared arena that host slots refer to."""
        plans = [self.open, self._background]
        self.open, self._background = OpenPlan(), OpenPlan()
        now = self._clock()
        return [self._ledger.close(plan, now, arena) for plan in plans if not plan.is_empty]

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
            not_cleared = report.refused and self._ledger.asks_to_clear(report)
            for flight in self._ledger.record(report):
                outcomes += self._settle(flight)
            if not_cleared and self._tiers.storage:
                self._tiers.storage.reset(self.open)  # the rank's file still has the blocks
        return outcomes

    def lose_rank(self, rank: int) -> list[LoadOutcome]:
        """Fail what this rank has not reported; return the loads that end. Raises ``PlanError`` for an unknown rank."""
        return [outcome for flight in self._ledger.lose_rank(rank) for outcome in self._settle(flight)]

    def expire(self) -> list[LoadOutcome]:
        """Return the loads of plans whose deadline has passed since the last call."""
        late = self._ledger.newly_overdue(self._clock())
        if self._tiers.storage:
            self._tiers.storage.overdue(late)
        return [self._overdue(load) for flight in late for load in flight.loads if load.owner.is_live]

    def _settle(self, flight: InFlightPlan) -> list[LoadOutcome]:
        self._tiers.settle(flight, self._counters)
        return [self._end_load(load, flight) for load in flight.loads if load.owner.is_live]

    def _end_load(self, load: LoadRange, flight: InFlightPlan) -> LoadOutcome:
        """Confirm a load that every rank has reported, or fail it from the first block that a rank lacks."""
        mask = flight.copied[SwapPurpose.LOAD][load.offset : load.offset + load.count]
        copied = load.count if mask.all() else int(np.argmin(mask))
        load.owner.end_load(copied, load.count)
        if copied == load.count:
            self._counters.loads_confirmed += 1
            return self._outcome(load, LoadStatus.CONFIRMED, copied, None)
        self._counters.loads_failed += 1
        message = "; ".join(flight.errors) or "the cache was reset"
        return self._outcome(load, LoadStatus.FAILED, copied, message)

    def _overdue(self, load: LoadRange) -> LoadOutcome:
        """Give up waiting for a load; its slots stay held until the report."""
        self._counters.loads_overdue += 1
        load.owner.request.device_only = True
        return self._outcome(load, LoadStatus.OVERDUE, 0, "no report within the plan's deadline")

    def _outcome(self, load: LoadRange, status: LoadStatus, copied: int, message: str | None) -> LoadOutcome:
        owner: LiveRequest = load.owner
        recompute_from = (load.first_block + copied) * self._block_size
        return LoadOutcome(owner.request.request_id, status, recompute_from, message)
