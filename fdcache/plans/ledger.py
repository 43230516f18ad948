"""Transfers under construction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

import numpy as np

from fdcache.errors import PlanError
from fdcache.metadata import (
    CacheLevel,
    CacheSwapMetadata,
    HashArray,
    Int32Array,
    StorageTask,
    SwapPurpose,
    TransferPlan,
    TransferReport,
    UInt32Array,
)
from fdcache.plans.blocks import Blocks

_DIRECTION = {
    SwapPurpose.EVICT: (CacheLevel.DEVICE, CacheLevel.HOST),
    SwapPurpose.BACKUP: (CacheLevel.DEVICE, CacheLevel.HOST),
    SwapPurpose.LOAD: (CacheLevel.HOST, CacheLevel.DEVICE),
    SwapPurpose.STORE: (CacheLevel.HOST, CacheLevel.STORAGE),
    SwapPurpose.PREFETCH: (CacheLevel.STORAGE, CacheLevel.HOST),
}


class Swap:
    """One transfer under construction."""

    def __init__(self, purpose: SwapPurpose) -> None:
        self.purpose = purpose
        self.sources: list[Blocks] = []
        self.slots: list[Int32Array] = []
        self.generations: list[UInt32Array] = []
        self.unverified: list[HashArray | None] = []
        self.size = 0

    def add(
        self,
        source: Blocks,
        slots: Int32Array,
        generations: UInt32Array,
        unverified: HashArray | None = None,
    ) -> int:
        """Copy ``source`` into ``slots``; returns their offset within the transfer.

        ``unverified`` is 1 for blocks that nobody has read since they were recovered; None: there are none.
        """
        offset = self.size
        self.sources.append(source)
        self.slots.append(slots)
        self.generations.append(generations)
        self.unverified.append(unverified)
        self.size += len(source)
        return offset

    def build(self) -> CacheSwapMetadata | None:
        """The transfer, None when it has no blocks."""
        if not self.size:
            return None
        source = Blocks.concat(self.sources)
        src_type, dst_type = _DIRECTION[self.purpose]
        return CacheSwapMetadata(
            purpose=self.purpose,
            src_type=src_type,
            dst_type=dst_type,
            src_block_ids=source.slots,
            src_generations=source.generations,
            dst_block_ids=np.concatenate(self.slots),
            dst_generations=np.concatenate(self.generations),
            hash_values=source.hashes,
            parent_hashes=source.parents,
            unverified=self._marks(),
        )

    def _marks(self) -> HashArray | None:
        if all(marks is None for marks in self.unverified):
            return None
        parts = zip(self.unverified, self.sources, strict=True)
        return np.concatenate(
            [np.zeros(len(source), np.uint8) if marks is None else marks for marks, source in parts]
        )


@dataclass(slots=True, eq=False)
class StorageOrder:
    """A transfer between host and storage; ``plan_id`` is 0 until it is sent, ``failed`` is told at its end."""

    swap: Swap
    timeout: float
    plan_id: int = 0
    failed: bool = False

    def build(self, plan_id: int) -> StorageTask:
        """The task as it goes to the workers."""
        self.plan_id = plan_id
        swap = self.swap.build()
        assert swap is not None, "a storage order has blocks"
        return StorageTask(plan_id=plan_id, swap=swap, timeout=self.timeout)


_STORAGE_GRACE = 1.0
"""Seconds that a storage task may take longer than it may begin anything, and be reported in time."""

_ON_DEVICE = (SwapPurpose.EVICT, SwapPurpose.LOAD, SwapPurpose.BACKUP)


@dataclass(slots=True)
class LoadRange:
    """The part of a plan's loads that its ``owner`` waits for: blocks from ``first_block`` of a path on."""

    owner: Any
    offset: int
    count: int
    first_block: int


class OpenPlan:
    """What the present step has planned so far."""

    def __init__(self) -> None:
        self._swaps = {purpose: Swap(purpose) for purpose in _ON_DEVICE}
        self.loads: list[LoadRange] = []
        self.storage: list[StorageOrder] = []
        self.cancelled: tuple[int, ...] = ()
        self.clear_storage = False

    def add(
        self,
        purpose: SwapPurpose,
        source: Blocks,
        slots: Int32Array,
        generations: UInt32Array,
        *,
        unverified: HashArray | None = None,
    ) -> int:
        """Plan copies from ``source`` into ``slots``; returns their offset within the transfer."""
        return self._swaps[purpose].add(source, slots, generations, unverified)

    def add_storage(
        self,
        purpose: SwapPurpose,
        source: Blocks,
        slots: Int32Array,
        generations: UInt32Array,
        timeout: float,
    ) -> StorageOrder:
        """Plan a transfer between host and storage, a task by itself."""
        swap = Swap(purpose)
        swap.add(source, slots, generations)
        order = StorageOrder(swap, timeout)
        self.storage.append(order)
        return order

    def size(self, purpose: SwapPurpose) -> int:
        """Blocks planned so far for this purpose."""
        return self._swaps[purpose].size

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to copy."""
        nothing_asked = not (self.storage or self.cancelled or self.clear_storage)
        return nothing_asked and not any(swap.size for swap in self._swaps.values())

    def build(self, ids: Iterator[int], arena: str | None) -> TransferPlan:
        """The plan as it goes to the workers."""
        return TransferPlan(
            plan_id=next(ids),
            arena=arena,
            storage=tuple(order.build(next(ids)) for order in self.storage),
            cancelled=self.cancelled,
            clear_storage=self.clear_storage,
            evictions=self._swaps[SwapPurpose.EVICT].build(),
            loads=self._swaps[SwapPurpose.LOAD].build(),
            backups=self._swaps[SwapPurpose.BACKUP].build(),
        )


@dataclass(slots=True)
class InFlightPlan:
    """A plan and what its ranks have said so far; ``copied`` has one mask per transfer, over all ranks."""

    plan: TransferPlan | StorageTask
    loads: list[LoadRange]
    deadline: float
    waiting_for: set[int]
    copied: dict[SwapPurpose, np.ndarray]
    lost: dict[SwapPurpose, np.ndarray]
    corrupt: dict[SwapPurpose, np.ndarray]
    bad_slots: dict[SwapPurpose, np.ndarray]
    no_room: dict[SwapPurpose, np.ndarray]
    checksums: dict[SwapPurpose, np.ndarray] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def fail(self, rank: int, reason: str) -> None:
        """Count a rank that will never report as one that copied nothing."""
        for mask in self.copied.values():
            mask[:] = False
        self.errors.append(f"rank {rank}: {reason}")
        self.waiting_for.discard(rank)

    def check(self, report: TransferReport) -> None:
        """Raise ``PlanError`` for a report that does not fit the plan."""
        expected = [(swap.purpose, len(swap)) for swap in self.plan.swaps()]
        if [result.purpose for result in report.results] != [purpose for purpose, _ in expected]:
            raise PlanError(
                f"report of plan {report.plan_id} by rank {report.rank} has other transfers than the plan"
            )
        for result, (_, size) in zip(report.results, expected, strict=True):
            for positions in (result.failed, result.lost, result.corrupt, result.bad_slots, result.no_room):
                if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < size:
                    raise PlanError(f"report of plan {report.plan_id}: failed positions must be below {size}")
            if len(result.checksums) not in (0, size):
                raise PlanError(
                    f"report of plan {report.plan_id}: {len(result.checksums)} checksums for {size} blocks"
                )

    def add(self, report: TransferReport) -> None:
        """Count one rank's report, which was checked."""
        for result in report.results:
            self.copied[result.purpose][result.failed] = False
            self.lost[result.purpose][result.lost] = True
            self.corrupt[result.purpose][result.corrupt] = True
            self.bad_slots[result.purpose][result.bad_slots] = True
            self.no_room[result.purpose][result.no_room] = True
            if report.rank == 0:
                self.checksums[result.purpose] = result.checksums
            if result.error_message:
                self.errors.append(f"rank {report.rank}: {result.error_message}")
        self.waiting_for.discard(report.rank)


class PlanLedger:
    """The plans that some rank has not reported yet."""

    def __init__(self, num_ranks: int, timeout: float) -> None:
        self._ranks = frozenset(range(num_ranks))
        self._timeout = timeout
        self._ids = count(1)
        self._plans: dict[int, InFlightPlan] = {}
        self._blocks: Counter[SwapPurpose] = Counter()
        self._deadlines: list[tuple[float, int]] = []  # a heap; plans that have ended may still be in it

    def __len__(self) -> int:
        return len(self._plans)

    def close(self, open_plan: OpenPlan, now: float, arena: str | None = None) -> TransferPlan:
        """Number the plan and wait for its reports; ``arena`` names the one that its host slots mean."""
        plan = open_plan.build(self._ids, arena)
        self._expect(plan, open_plan.loads, now + self._timeout)
        for task in plan.storage:
            self._expect(task, [], now + task.timeout + _STORAGE_GRACE)
        return plan

    def _expect(self, plan: TransferPlan | StorageTask, loads: list[LoadRange], deadline: float) -> None:
        sizes = {swap.purpose: len(swap) for swap in plan.swaps()}
        self._plans[plan.plan_id] = InFlightPlan(
            plan=plan,
            loads=loads,
            deadline=deadline,
            waiting_for=set(self._ranks),
            copied={purpose: np.ones(size, np.bool_) for purpose, size in sizes.items()},
            lost={purpose: np.zeros(size, np.bool_) for purpose, size in sizes.items()},
            corrupt={purpose: np.zeros(size, np.bool_) for purpose, size in sizes.items()},
            bad_slots={purpose: np.zeros(size, np.bool_) for purpose, size in sizes.items()},
            no_room={purpose: np.zeros(size, np.bool_) for purpose, size in sizes.items()},
        )
        self._blocks.update(sizes)
        if len(self._deadlines) > 2 * len(self._plans) + 64:
            self._deadlines = [each for each in self._deadlines if each[1] in self._plans]
            heapify(self._deadlines)
        heappush(self._deadlines, (deadline, plan.plan_id))

    def _take(self, plan_id: int) -> InFlightPlan:
        """Every rank has reported it, or never will."""
        flight = self._plans.pop(plan_id)
        for purpose, copied in flight.copied.items():
            self._blocks[purpose] -= len(copied)
        return flight

    def check(self, report: TransferReport) -> None:
        """Raise ``PlanError`` for a report by no rank, or one that does not fit the plan it is expected for."""
        self._check_rank(report.rank)
        if self.expects(report):
            self._plans[report.plan_id].check(report)

    def _check_rank(self, rank: int) -> None:
        if rank not in self._ranks:
            raise PlanError(f"rank {rank} is not one of the {len(self._ranks)} ranks")

    def expects(self, report: TransferReport) -> bool:
        """Whether this rank's report of this plan is still out."""
        flight = self._plans.get(report.plan_id)
        return flight is not None and report.rank in flight.waiting_for

    def record(self, report: TransferReport) -> list[InFlightPlan]:
        """Count an expected report, which was checked; returns the plans, tasks too, for which it was the last one."""
        plan = self._plans[report.plan_id].plan
        self._plans[report.plan_id].add(report)
        concerned = [report.plan_id]
        if report.refused and isinstance(plan, TransferPlan):
            for task in plan.storage:
                if (flight := self._plans.get(task.plan_id)) and report.rank in flight.waiting_for:
                    flight.fail(report.rank, "the plan never got there")
                    concerned.append(task.plan_id)
        return [self._take(each) for each in concerned if not self._plans[each].waiting_for]

    def asks_to_clear(self, report: TransferReport) -> bool:
        """Whether an expected report's plan empties the storage."""
        plan = self._plans[report.plan_id].plan
        return isinstance(plan, TransferPlan) and plan.clear_storage

    def lose_rank(self, rank: int) -> list[InFlightPlan]:
        """The plans that nobody else reports, now that this rank's process is gone. Raises ``PlanError``."""
        self._check_rank(rank)
        for flight in self._plans.values():
            if rank in flight.waiting_for:
                flight.fail(rank, "its process is gone")
        finished = [plan_id for plan_id, flight in self._plans.items() if not flight.waiting_for]
        return [self._take(plan_id) for plan_id in finished]

    def newly_overdue(self, now: float) -> list[InFlightPlan]:
        """Plans whose deadline has passed since the last call. They stay, for their reports free their slots."""
        late = []
        while self._deadlines and now > self._deadlines[0][0]:
            flight = self._plans.get(heappop(self._deadlines)[1])
            if flight is not None:
                late.append(flight)
        return late

    def blocks_in_flight(self, purpose: SwapPurpose) -> int:
        """Blocks being copied for this purpose."""
        return self._blocks[purpose]
