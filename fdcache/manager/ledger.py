"""Plans: the one being built, and those whose reports are still out."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import numpy as np

from fdcache.errors import PlanError
from fdcache.manager.blocks import Blocks
from fdcache.manager.requests import Request
from fdcache.metadata import (
    CacheLevel,
    CacheSwapMetadata,
    HashArray,
    Int32Array,
    SwapPurpose,
    TransferPlan,
    TransferReport,
    UInt32Array,
)

_DIRECTION = {
    SwapPurpose.EVICT: (CacheLevel.DEVICE, CacheLevel.HOST),
    SwapPurpose.BACKUP: (CacheLevel.DEVICE, CacheLevel.HOST),
    SwapPurpose.LOAD: (CacheLevel.HOST, CacheLevel.DEVICE),
}


@dataclass(slots=True)
class LoadRange:
    """The part of a plan's loads that one request waits for: blocks from ``first_block`` of its path on."""

    request: Request
    incarnation: int
    offset: int
    count: int
    first_block: int

    @property
    def is_current(self) -> bool:
        """Whether the request still is what it was when the load was planned."""
        return self.request._incarnation == self.incarnation


class _Swap:
    """One transfer under construction."""

    def __init__(self, purpose: SwapPurpose) -> None:
        self.purpose = purpose
        self.sources: list[Blocks] = []
        self.slots: list[Int32Array] = []
        self.generations: list[UInt32Array] = []
        self.unverified: list[HashArray | None] = []
        self.size = 0

    def add(
        self, source: Blocks, slots: Int32Array, generations: UInt32Array, unverified: HashArray | None
    ) -> int:
        offset = self.size
        self.sources.append(source)
        self.slots.append(slots)
        self.generations.append(generations)
        self.unverified.append(unverified)
        self.size += len(source)
        return offset

    def build(self) -> CacheSwapMetadata | None:
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


class OpenPlan:
    """What the present step has planned so far."""

    def __init__(self) -> None:
        self._swaps = {purpose: _Swap(purpose) for purpose in SwapPurpose}
        self.loads: list[LoadRange] = []

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

    def size(self, purpose: SwapPurpose) -> int:
        """Blocks planned so far for this purpose."""
        return self._swaps[purpose].size

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to copy."""
        return not any(swap.size for swap in self._swaps.values())

    def build(self, plan_id: int, arena: str | None) -> TransferPlan:
        """The plan as it goes to the workers."""
        return TransferPlan(
            plan_id=plan_id,
            arena=arena,
            evictions=self._swaps[SwapPurpose.EVICT].build(),
            loads=self._swaps[SwapPurpose.LOAD].build(),
            backups=self._swaps[SwapPurpose.BACKUP].build(),
        )


@dataclass(slots=True)
class InFlightPlan:
    """A plan and what its ranks have said so far; ``copied`` has one mask per transfer, over all ranks."""

    plan: TransferPlan
    loads: list[LoadRange]
    deadline: float
    waiting_for: set[int]
    copied: dict[SwapPurpose, np.ndarray]
    checksums: dict[SwapPurpose, np.ndarray] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    overdue: bool = False

    def fail(self, rank: int, reason: str) -> None:
        """Count a rank that will never report as one that copied nothing."""
        for mask in self.copied.values():
            mask[:] = False
        self.errors.append(f"rank {rank}: {reason}")
        self.waiting_for.discard(rank)

    def add(self, report: TransferReport) -> None:
        """Count one rank's report. Raises ``PlanError`` when it does not fit the plan."""
        expected = [(swap.purpose, len(swap)) for swap in self.plan.swaps()]
        if [result.purpose for result in report.results] != [purpose for purpose, _ in expected]:
            raise PlanError(
                f"report of plan {report.plan_id} by rank {report.rank} has other transfers than the plan"
            )
        for result, (_, size) in zip(report.results, expected, strict=True):
            if len(result.failed) and not 0 <= int(result.failed.min()) <= int(result.failed.max()) < size:
                raise PlanError(f"report of plan {report.plan_id}: failed positions must be below {size}")
            if len(result.checksums) not in (0, size):
                raise PlanError(
                    f"report of plan {report.plan_id}: {len(result.checksums)} checksums for {size} blocks"
                )
        for result in report.results:
            self.copied[result.purpose][result.failed] = False
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

    def __len__(self) -> int:
        return len(self._plans)

    def close(self, open_plan: OpenPlan, now: float, arena: str | None = None) -> TransferPlan:
        """Number the plan and wait for its reports; ``arena`` names the one that its host slots mean."""
        plan = open_plan.build(next(self._ids), arena)
        self._plans[plan.plan_id] = InFlightPlan(
            plan=plan,
            loads=open_plan.loads,
            deadline=now + self._timeout,
            waiting_for=set(self._ranks),
            copied={swap.purpose: np.ones(len(swap), np.bool_) for swap in plan.swaps()},
        )
        return plan

    def expects(self, report: TransferReport) -> bool:
        """Whether this rank's report of this plan is still out."""
        if report.rank not in self._ranks:
            raise PlanError(
                f"report of plan {report.plan_id}: rank {report.rank} is not below {len(self._ranks)}"
            )
        flight = self._plans.get(report.plan_id)
        return flight is not None and report.rank in flight.waiting_for

    def record(self, report: TransferReport) -> InFlightPlan | None:
        """Count an expected report; returns the plan when it was the last one."""
        flight = self._plans[report.plan_id]
        flight.add(report)
        return self._plans.pop(report.plan_id) if not flight.waiting_for else None

    def lose_rank(self, rank: int) -> list[InFlightPlan]:
        """The plans that nobody else reports, now that this rank's process is gone."""
        for flight in self._plans.values():
            if rank in flight.waiting_for:
                flight.fail(rank, "its process is gone")
        finished = [plan_id for plan_id, flight in self._plans.items() if not flight.waiting_for]
        return [self._plans.pop(plan_id) for plan_id in finished]

    def newly_overdue(self, now: float) -> list[InFlightPlan]:
        """Plans whose deadline has passed since the last call. They stay, for their reports free their slots."""
        late = [flight for flight in self._plans.values() if not flight.overdue and now > flight.deadline]
        for flight in late:
            flight.overdue = True
        return late

    def blocks_in_flight(self, purpose: SwapPurpose) -> int:
        """Blocks being copied for this purpose."""
        return sum(len(flight.copied[purpose]) for flight in self._plans.values() if purpose in flight.copied)
