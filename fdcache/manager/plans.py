"""Plans of one manager: the open plans of the step, and those in flight until the last rank's report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fdcache.layout import KVLayout
from fdcache.manager.handover import Handovers
from fdcache.manager.requests import LoadRange, StepPlan
from fdcache.manager.results import LoadOutcome, LoadStatus
from fdcache.manager.tiers import Tiers
from fdcache.metadata import PeerTask, SwapPurpose, TransferPlan, TransferReport
from fdcache.plans.ledger import InFlightPlan, OpenPlan, PlanLedger
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
        self._loads: dict[int, list[LoadRange]] = {}  # by the number of the plan in flight
        self._below: dict[int, int] = {}  # fetch to the load of the blocks below it, while that is in flight
        self._stashed: dict[int, list[InFlightPlan]] = {}  # fetches that ended before the load below them
        self._failed_below: dict[
            int, tuple[int, str | None]
        ] = {}  # lease to block and reason of a failed load
        self.handovers: Handovers | None = None
        self.open = StepPlan()

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
        sent = self._close_copies(arena)
        if self.handovers is None:
            return sent
        now = self._clock()
        plan, loads = self.handovers.attach(sent.pop(0) if sent else None, self.open, self._ledger, now)
        for plan_id, load in loads.items():
            self._loads[plan_id] = [load]
            if plan is not None:
                self._note_load_below(plan_id, load, plan.plan_id)
        return sent if plan is None else [plan, *sent]

    def _note_load_below(self, fetch_id: int, fetch: LoadRange, plan_id: int) -> None:
        """Let a fetch end after the load of its request's host blocks, without which its blocks have no parent."""
        for load in self._loads.get(plan_id, ()):
            if load.has_fetch and load.lease == fetch.lease:
                self._below[fetch_id] = plan_id

    def _close_copies(self, arena: str | None) -> list[TransferPlan]:
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
        plan_id = flight.plan.plan_id
        if (below := self._below.get(plan_id)) is not None:
            self._stashed.setdefault(below, []).append(flight)
            return []
        self._tiers.complete(flight, self._counters)
        loads = self._loads.pop(plan_id, ())
        outcomes = [self._end_load(load, flight) for load in loads if load.is_waited_for]
        ended = [outcome for outcome in outcomes if outcome is not None]
        if self.handovers is not None:
            if isinstance(flight.plan, PeerTask):
                self.handovers.ended(flight.plan)
            for fetch_id in [fetch for fetch, below in self._below.items() if below == plan_id]:
                del self._below[fetch_id]
            for fetch in self._stashed.pop(plan_id, ()):
                ended += self._complete(fetch)
        return ended

    def _end_load(self, load: LoadRange, flight: InFlightPlan) -> LoadOutcome | None:
        """Confirm a load that every rank has reported, or fail it from the first block that a rank lacks.

        The outcome of a load below a fetch comes with that of the fetch, whose slots may still be written.
        """
        purpose = SwapPurpose.FETCH if load.is_fetch else SwapPurpose.LOAD
        copied = flight.swaps[purpose].leading_copied(load.offset, load.count)
        load.end(copied)
        message = None if copied == load.count else "; ".join(flight.errors) or "the cache was reset"
        if load.has_fetch:
            if message is not None:
                self._failed_below[load.lease] = (load.first_block + copied, message)
            return None
        first, below = self._failed_below.pop(load.lease, (load.first_block + copied, None))
        recompute_from = min(first, load.first_block + copied) * self._block_size
        message = below or message
        if message is None:
            self._counters.loads_confirmed += 1
            return LoadOutcome(load.request.request_id, LoadStatus.CONFIRMED, recompute_from, None)
        self._counters.loads_failed += 1
        return LoadOutcome(load.request.request_id, LoadStatus.FAILED, recompute_from, message)

    def _overdue(self, load: LoadRange) -> LoadOutcome:
        """Give up waiting for a load; its slots stay held until the report."""
        self._counters.loads_overdue += 1
        load.request.device_only = True
        recompute_from = load.first_block * self._block_size
        reason = "no report within the plan's deadline"
        return LoadOutcome(load.request.request_id, LoadStatus.OVERDUE, recompute_from, reason)
