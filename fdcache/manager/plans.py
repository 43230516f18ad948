"""Plans of one manager, from what a step plans first to what the last rank's report changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fdcache.manager.publishing import Publisher
from fdcache.manager.results import LoadOutcome
from fdcache.manager.tiers import Tiers
from fdcache.metadata import SwapPurpose, TransferPlan, TransferReport
from fdcache.plans.ledger import InFlightPlan, OpenPlan, PlanLedger
from fdcache.tiers.statistics import Counters


class Plans:
    """``open`` is the present step's; the others wait for their reports."""

    def __init__(
        self,
        num_ranks: int,
        timeout: float,
        tiers: Tiers,
        publisher: Publisher,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._tiers = tiers
        self._publisher = publisher
        self._counters = counters
        self._clock = clock
        self._ledger = PlanLedger(num_ranks, timeout)
        self._background = OpenPlan()
        self.open = OpenPlan()

    @property
    def in_flight(self) -> int:
        """Plans whose reports are still out."""
        return len(self._ledger)

    @property
    def under_way(self) -> int:
        """Those and the open one, if there is anything in it."""
        return self.in_flight + (not self.open.is_empty)

    def blocks_in_flight(self, purpose: SwapPurpose) -> int:
        """Blocks being copied for this purpose."""
        return self._ledger.blocks_in_flight(purpose)

    def plan_background(self) -> None:
        """Plan copies that nobody waits for, apart from the step's own."""
        self._tiers.plan_background(self._background, self._ledger)

    def close(self, arena: str | None) -> list[TransferPlan]:
        """What every rank has to copy; ``arena`` names the one that host slots mean."""
        plans = [self.open, self._background]
        self.open, self._background = OpenPlan(), OpenPlan()
        now = self._clock()
        return [self._ledger.close(plan, now, arena) for plan in plans if not plan.is_empty]

    def apply(self, reports: Sequence[TransferReport]) -> list[LoadOutcome]:
        """Take reports; returns the loads that ended with them. Raises ``PlanError`` before any is taken."""
        for report in reports:
            self._ledger.check(report)
        outcomes: list[LoadOutcome] = []
        for report in reports:
            if not self._ledger.expects(report):
                self._counters.unexpected_reports += 1
                continue
            if self._tiers.host:
                self._tiers.host.traffic.record(report)
            is_full = report.refused and self._ledger.asks_to_clear(report)
            for flight in self._ledger.record(report):
                outcomes += self._settle(flight)
            if is_full and self._tiers.storage:
                self._tiers.storage.reset(self.open)  # the files still have what was to go
        return outcomes

    def lose_rank(self, rank: int) -> list[LoadOutcome]:
        """The loads that end because this rank will never report. Raises ``PlanError`` for one that there is not."""
        return [outcome for flight in self._ledger.lose_rank(rank) for outcome in self._settle(flight)]

    def expire(self) -> list[LoadOutcome]:
        """The loads of plans whose deadline has passed since the last call."""
        late = self._ledger.newly_overdue(self._clock())
        if self._tiers.storage:
            self._tiers.storage.overdue(late)
        return [self._publisher.overdue(load) for flight in late for load in flight.loads if load.is_current]

    def _settle(self, flight: InFlightPlan) -> list[LoadOutcome]:
        self._tiers.settle(flight, self._counters)
        return [self._publisher.confirm(load, flight) for load in flight.loads if load.is_current]
