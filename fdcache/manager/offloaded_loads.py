"""Loads into the device cache of an engine: whole, or in parts while their later blocks are read from storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, count

import numpy as np

from fdcache.layout import KVLayout
from fdcache.manager.device_contents import NO_BLOCK
from fdcache.manager.keyed import OffloadRequest
from fdcache.manager.results import LoadOutcome, LoadStatus
from fdcache.metadata import HashArray, Int32Array, SwapPurpose, TransferPlan
from fdcache.plans.ledger import InFlightPlan, OpenPlan
from fdcache.tiers.host import Found, HostTier
from fdcache.tiers.statistics import Counters


@dataclass(slots=True, eq=False)
class OffloadedLoad:
    """One request's load of its blocks ``first`` to ``stop`` into the device blocks ``ids``, in one part or more.

    ``number`` names it in its outcome: a request that begins anew may load again before its former load has ended.

    Of blocks without a device block nothing is copied. Without all the others such a load is worth nothing, since the
    engine would need what was left out below the first block that failed.

    Blocks up to ``planned`` are part of plans, of which ``in_flight`` have not ended; those up to ``whole`` have
    arrived unless their plan is in flight. ``after``: plans that copy out what the device blocks held. ``cut``: why no
    other part is planned. ``is_revoked``: what was loaded is gone, through no fault of the load. ``status`` is set at
    the end, which comes even if the request has ended before.
    """

    number: int
    request: OffloadRequest
    first: int
    ids: Int32Array
    planned: int
    whole: int
    after: tuple[int, ...] = ()
    in_flight: int = 0
    cut: str | None = None
    errors: list[str] = field(default_factory=list)
    is_revoked: bool = False
    status: LoadStatus | None = None

    @property
    def stop(self) -> int:
        """The block after the last one."""
        return self.first + len(self.ids)

    @property
    def arrived(self) -> int:
        """The block after the last one that counts: none does of a load whose plan is overdue."""
        return self.first if self.status is LoadStatus.OVERDUE else self.whole

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
        """Revoke the load: its blocks are gone. An outcome that was not returned yet says so."""
        self.cut = self.cut or reason
        self.errors.append(reason)
        self.whole, self.is_revoked = self.first, True
        if self.status is LoadStatus.CONFIRMED:
            self.status = LoadStatus.FAILED


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


Look = Callable[[OffloadedLoad], tuple[Found, bool]]
"""Pins the blocks of a load that have been read since its last part; False if no others are waited for."""


class OffloadedLoads:
    """The loads that have not ended.

    ``on_end`` is called with each load that ends; see ``take_outcomes``.
    """

    def __init__(
        self,
        layout: KVLayout,
        host: HostTier,
        counters: Counters,
        on_end: Callable[[OffloadedLoad], None],
    ) -> None:
        self._block_size, self._groups = layout.block_size, layout.num_groups
        self._host = host
        self._counters = counters
        self._on_end = on_end
        self._numbers = count(1)
        self._planned: list[_Part] = []  # of the step's plan
        self._ahead: list[_Part] = []  # of the plan of loads that no step waits for
        self._parts: dict[int, list[_Part]] = {}  # by plan in flight
        self._open: list[OffloadedLoad] = []
        self._ended: list[OffloadedLoad] = []  # and not told

    @property
    def has_work(self) -> bool:
        """True while loads wait for blocks that are being read, or ends have not been told."""
        return bool(self._ended) or self.has_open

    @property
    def has_open(self) -> bool:
        """True while loads wait for blocks that are being read."""
        return any(load.is_open for load in self._open)

    def take_outcomes(self) -> list[LoadOutcome]:
        """Return the loads that have ended since the last call."""
        if not self._ended:
            return []
        taken, self._ended = self._ended, []
        return list(map(self._outcome, taken))

    def loads_of(self, plan: int) -> dict[tuple[str, int], bool]:
        """Return (request id, number) of the loads of which a plan in flight has blocks; True: their last."""
        return {
            (part.load.request.request_id, part.load.number): part.stop == part.load.stop
            for part in self._parts.get(plan, ())
        }

    # --- plans --------------------------------------------------------------------------------------------

    def plan(
        self, request: OffloadRequest, first: int, ids: Int32Array, run: Found, plan: OpenPlan
    ) -> OffloadedLoad:
        """Plan a load into ``ids`` of the ``run`` on the host, and of what follows it once that has been read."""
        load = OffloadedLoad(next(self._numbers), request, first, ids, first, first + len(ids), plan.after)
        self._add_part(load, run, plan, self._planned)
        if load.is_open:
            self._open.append(load)
        return load

    def advance(self, plan: OpenPlan, look: Look) -> None:
        """Plan to load what has been read since.

        The device blocks of a load that was cut off since, or is over, may belong to others by now.
        """
        for load in self._open:
            if load.is_open:
                self._load_more(load, plan, look)
        self._open = [load for load in self._open if load.is_open]

    def _load_more(self, load: OffloadedLoad, plan: OpenPlan, look: Look) -> None:
        found, waits = look(load)
        if len(found):
            plan.after = tuple(dict.fromkeys((*plan.after, *load.after)))
            self._add_part(load, found, plan, self._ahead)
            self._counters.storage_hit_tokens += len(found) // self._groups * self._block_size
        if found.lease:
            self._host.index.release(found.lease)
        if not waits:
            load.cut_off("blocks did not come from storage in time")
        self._end_if_over(load)

    def _add_part(self, load: OffloadedLoad, run: Found, plan: OpenPlan, parts: list[_Part]) -> None:
        start, stop = load.planned, load.planned + len(run)
        ids = load.ids[start - load.first : stop - load.first]
        is_wanted = ids != NO_BLOCK
        blocks, ids = run.blocks.select(is_wanted), ids[is_wanted]
        self._host.index.begin_load(run.lease, blocks.slots)
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
            load = part.load
            if load.status is None:
                load.cut_off("no report within the plan's deadline")
                self._counters.loads_overdue += 1
                self._end(load, LoadStatus.OVERDUE)

    def cut_off(self, load: OffloadedLoad, reason: str) -> None:
        """Plan no other part of a load."""
        load.cut_off(reason)
        self._end_if_over(load)

    def revoke(self, reason: str) -> None:
        """Revoke every load, in flight or finished and not returned yet."""
        loads = [
            *self._open,
            *self._ended,
            *(part.load for part in chain(self._planned, self._ahead, *self._parts.values())),
        ]
        for load in dict.fromkeys(loads):
            load.revoke(reason)
            self._end_if_over(load)

    def _end_if_over(self, load: OffloadedLoad) -> None:
        if load.status is not None or load.is_open or load.in_flight:
            return
        if load.whole == load.stop:
            self._counters.loads_confirmed += 1
            self._end(load, LoadStatus.CONFIRMED)
        else:
            if load.cut is not None and load.whole == load.planned:
                self._counters.loads_cut_short += 1
            else:
                self._counters.loads_failed += 1
            self._end(load, LoadStatus.FAILED)

    def _end(self, load: OffloadedLoad, status: LoadStatus) -> None:
        load.status = status
        self._ended.append(load)
        self._on_end(load)

    def _outcome(self, load: OffloadedLoad) -> LoadOutcome:
        assert load.status is not None
        return LoadOutcome(
            request_id=load.request.request_id,
            status=load.status,
            recompute_from=load.arrived // self._groups * self._block_size,
            error_message=None if load.status is LoadStatus.CONFIRMED else "; ".join(load.errors),
            unplanned=tuple(load.ids[load.planned - load.first :].tolist()),
            load=load.number,
        )
