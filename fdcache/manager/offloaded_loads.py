"""Loads into the device cache of an engine: whole, or in parts while their later blocks are read from storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from fdcache.layout import KVLayout
from fdcache.manager.device_contents import NO_BLOCK
from fdcache.manager.keyed import OffloadRequest
from fdcache.manager.results import LoadOutcome, LoadStatus
from fdcache.metadata import HashArray, Int32Array, SwapPurpose, TransferPlan
from fdcache.plans.ledger import InFlightPlan, OpenPlan
from fdcache.tiers.host import HostMatch, HostTier
from fdcache.tiers.statistics import Counters


@dataclass(slots=True, eq=False)
class OffloadedLoad:
    """One request's load of its blocks ``first`` to ``stop`` into the device blocks ``ids``, in one part or more.

    Of blocks without a device block nothing is copied. Without all the others such a load is worth nothing, since the
    engine would need what was left out below the first block that failed.

    Blocks up to ``planned`` are part of plans, of which ``in_flight`` have not ended; those up to ``whole`` have
    arrived unless their plan is in flight. ``after``: plans that copy out what the device blocks held. ``cut``: why no
    other part is planned. The load ends with an outcome even if its request has ended before.
    """

    request: OffloadRequest
    first: int
    ids: Int32Array
    planned: int
    whole: int
    after: tuple[int, ...] = ()
    in_flight: int = 0
    cut: str | None = None
    errors: list[str] = field(default_factory=list)
    is_over: bool = False

    @property
    def stop(self) -> int:
        """The block after the last one."""
        return self.first + len(self.ids)

    @property
    def is_open(self) -> bool:
        """True if another part will be planned."""
        return self.cut is None and self.planned < self.stop

    def cut_off(self, reason: str) -> None:
        """Plan no other part; blocks that no plan has do not arrive."""
        if self.is_open:
            self.cut, self.whole = reason, min(self.whole, self.planned)
            self.errors.append(reason)

    def revoke(self, reason: str) -> None:
        """Let nothing count that has been loaded: it is gone."""
        self.cut = self.cut or reason
        self.errors.append(reason)
        self.whole = self.first


@dataclass(slots=True, eq=False)
class _Part:
    """Blocks ``first`` to ``stop`` of a load, ``count`` of which are copied from ``offset`` of a plan's transfer on."""

    load: OffloadedLoad
    first: int
    stop: int
    offset: int
    count: int

    def ended(self, copied: HashArray, errors: Sequence[str]) -> None:
        """Count which blocks of the plan have arrived."""
        load = self.load
        load.in_flight -= 1
        missing = copied.tobytes().find(0, self.offset, self.offset + self.count)
        if missing >= 0:
            is_all_copied = self.count == self.stop - self.first
            load.whole = min(load.whole, self.first + missing - self.offset if is_all_copied else load.first)
            load.errors += errors
            load.cut_off("an earlier part was not loaded")


Look = Callable[[OffloadedLoad], tuple[HostMatch, bool]]
"""Pins the blocks of a load that have been read since its last part; False if no others are waited for."""


class OffloadedLoads:
    """The loads that have not ended.

    ``on_end`` is called with each load that ends, and True if all of it has arrived; see ``take_outcomes``.
    """

    def __init__(
        self,
        layout: KVLayout,
        host: HostTier,
        counters: Counters,
        on_end: Callable[[OffloadedLoad, bool], None],
    ) -> None:
        self._block_size, self._groups = layout.block_size, layout.num_groups
        self._host = host
        self._counters = counters
        self._on_end = on_end
        self._planned: list[_Part] = []  # of the step's plan
        self._ahead: list[_Part] = []  # of the plan of loads that no step waits for
        self._parts: dict[int, list[_Part]] = {}  # by plan in flight
        self._open: list[OffloadedLoad] = []
        self._outcomes: list[LoadOutcome] = []

    @property
    def has_work(self) -> bool:
        """True while loads wait for blocks that are being read, or ends have not been told."""
        return bool(self._open or self._outcomes)

    @property
    def has_open(self) -> bool:
        """True while loads wait for blocks that are being read."""
        return bool(self._open)

    def take_outcomes(self) -> list[LoadOutcome]:
        """Return the loads that have ended since the last call."""
        taken = self._outcomes
        if taken:
            self._outcomes = []
        return taken

    def requests_of(self, plan: int) -> dict[str, bool]:
        """Return the requests whose blocks a plan in flight loads; True: the last of them."""
        return {
            part.load.request.request_id: part.stop == part.load.stop for part in self._parts.get(plan, ())
        }

    # --- plans --------------------------------------------------------------------------------------------

    def plan(
        self, request: OffloadRequest, first: int, ids: Int32Array, run: HostMatch, plan: OpenPlan
    ) -> OffloadedLoad:
        """Plan a load into ``ids`` of the ``run`` on the host, and of what follows it once that has been read."""
        load = OffloadedLoad(request, first, ids, first, first + len(ids), plan.after)
        self._add_part(load, run, plan, self._planned)
        if load.is_open:
            self._open.append(load)
        return load

    def advance(self, plan: OpenPlan, look: Look) -> None:
        """Plan to load what has been read since."""
        for load in self._open:
            found, waits = look(load)
            if len(found):
                plan.after = tuple(dict.fromkeys((*plan.after, *load.after)))
                self._add_part(load, found, plan, self._ahead)
                self._counters.storage_hit_tokens += len(found) // self._groups * self._block_size
            if found.lease:
                self._host.release(found.lease)
            if not waits:
                load.cut_off("blocks did not come from storage in time")
            self._end_if_over(load)
        self._open = [load for load in self._open if load.is_open]

    def _add_part(self, load: OffloadedLoad, run: HostMatch, plan: OpenPlan, parts: list[_Part]) -> None:
        start, stop = load.planned, load.planned + len(run)
        ids = load.ids[start - load.first : stop - load.first]
        is_wanted = ids != NO_BLOCK
        blocks, ids = run.blocks.select(is_wanted), ids[is_wanted]
        self._host.begin_load(run.lease, blocks.slots)
        offset = plan.add(SwapPurpose.LOAD, blocks, ids, np.zeros(len(ids), np.uint32))
        parts.append(_Part(load, start, stop, offset, len(ids)))
        load.planned, load.in_flight = stop, load.in_flight + 1
        if load.is_open:
            self._counters.blocks_loaded_ahead += len(ids)

    def sent(self, plan: TransferPlan) -> None:
        """Let the parts planned in this step wait for this plan's reports."""
        if plan.is_ahead:
            parts, self._ahead = self._ahead, []
        else:
            parts, self._planned = self._planned, []
        if parts:
            self._parts[plan.plan_id] = parts
        for part in parts:
            if part.load.is_open and not plan.is_ahead:
                part.load.after = (*part.load.after, plan.plan_id)

    # --- ends ---------------------------------------------------------------------------------------------

    def end_loads(self, flight: InFlightPlan) -> None:
        """Count the blocks of a plan that have arrived."""
        copied = flight.swaps[SwapPurpose.LOAD].flags
        for part in self._parts.pop(flight.plan.plan_id, ()):
            part.ended(copied, flight.errors)
            self._end_if_over(part.load)

    def end_whole(self, plan: int) -> None:
        """Count that all blocks of a plan have arrived."""
        for part in self._parts.pop(plan, ()):
            part.load.in_flight -= 1
            self._end_if_over(part.load)

    def give_up(self, plan: int) -> None:
        """End the loads that wait for a plan, which is overdue; its report makes no second outcome."""
        for part in self._parts.get(plan, ()):
            if not part.load.is_over:
                part.load.cut_off("no report within the plan's deadline")
                self._counters.loads_overdue += 1
                self._end(part.load, LoadStatus.OVERDUE, part.load.first)

    def cut_off(self, request: OffloadRequest, reason: str) -> None:
        """Load nothing more for a request."""
        for load in self._open:
            if load.request is request:
                load.cut_off(reason)
                self._end_if_over(load)

    def revoke(self, reason: str) -> None:
        """Let no block count that has been loaded or is: it is gone."""
        loads = [
            *self._open,
            *(part.load for part in chain(self._planned, self._ahead, *self._parts.values())),
        ]
        for load in dict.fromkeys(loads):
            load.revoke(reason)
            self._end_if_over(load)

    def _end_if_over(self, load: OffloadedLoad) -> None:
        if load.is_over or load.is_open or load.in_flight:
            return
        if load.whole == load.stop:
            self._counters.loads_confirmed += 1
            self._end(load, LoadStatus.CONFIRMED, load.stop)
        else:
            if load.cut is not None and load.whole == load.planned:
                self._counters.loads_cut_short += 1
            else:
                self._counters.loads_failed += 1
            self._end(load, LoadStatus.FAILED, load.whole)

    def _end(self, load: OffloadedLoad, status: LoadStatus, block: int) -> None:
        load.is_over = True
        message = None if status is LoadStatus.CONFIRMED else "; ".join(load.errors)
        unplanned = tuple(load.ids[load.planned - load.first :].tolist())
        self._outcomes.append(
            LoadOutcome(
                load.request.request_id, status, block // self._groups * self._block_size, message, unplanned
            )
        )
        self._on_end(load, status is LoadStatus.CONFIRMED)
