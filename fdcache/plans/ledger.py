"""Plans from the first transfer planned to the last rank's report.

A step collects its device transfers in an ``OpenPlan``; the storage tier collects its own in ``StorageOrders``.
``PlanLedger`` numbers both when they are sent, and keeps them until every rank has reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from operator import attrgetter

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from fdcache._core import BlockCopies, PlanInFlight, PlanTable, take_transfers
from fdcache.errors import PlanError
from fdcache.metadata import (
    CacheSwapMetadata,
    HashArray,
    Int32Array,
    PeerTask,
    StorageTask,
    SwapPurpose,
    TransferPlan,
    TransferReport,
    TransferResult,
    UInt32Array,
    UInt64Array,
)
from fdcache.plans.blocks import Blocks

Mask = NDArray[np.bool_]


def make_swap(
    purpose: SwapPurpose, source: Blocks, slots: Int32Array, generations: UInt32Array
) -> CacheSwapMetadata:
    """Return the transfer of ``source`` into ``slots`` of the purpose's target tier."""
    return CacheSwapMetadata(
        purpose=purpose,
        src_type=purpose.source,
        dst_type=purpose.target,
        src_block_ids=source.slots,
        src_generations=source.generations,
        dst_block_ids=slots,
        dst_generations=generations,
        hash_values=source.hashes,
        parent_hashes=source.parents,
        unverified=source.unverified,
    )


_SWAPS = {
    purpose: (CacheSwapMetadata, purpose, purpose.source, purpose.target)
    for purpose in (SwapPurpose.EVICT, SwapPurpose.LOAD, SwapPurpose.BACKUP)
}
_FORMS = tuple(_SWAPS.values())


class OpenPlan:
    """Transfers between device and host that were planned and not sent. Sending it empties it for the next step.

    ``after``: ids of plans in flight whose reads of the device the plan waits for, and ``is_ahead``: see
    ``TransferPlan``.
    """

    __slots__ = ("_by_purpose", "_lists", "after", "backups", "evictions", "is_ahead", "loads")

    def __init__(self, *, is_ahead: bool = False) -> None:
        self.is_ahead = is_ahead
        self.after: tuple[int, ...] = ()
        self.evictions, self.loads, self.backups = BlockCopies(), BlockCopies(), BlockCopies()
        self._lists = [self.evictions, self.loads, self.backups]
        self._by_purpose = dict(zip(_SWAPS, self._lists, strict=True))

    def add(self, purpose: SwapPurpose, source: Blocks, slots: Int32Array, generations: UInt32Array) -> int:
        """Plan copies from ``source`` into ``slots``; return their offset within the transfer."""
        return self._by_purpose[purpose].append(
            source.slots,
            source.generations,
            source.hashes,
            source.parents,
            source.unverified,
            slots,
            generations,
        )

    @property
    def is_empty(self) -> bool:
        """True while there is nothing to send."""
        return not (self.loads or self.evictions or self.backups or self.after)

    def take_after(self) -> tuple[int, ...]:
        """Remove the plans to wait for and return them."""
        after, self.after = self.after, ()
        return after

    def swap(self, purpose: SwapPurpose) -> CacheSwapMetadata | None:
        """Remove the transfer for this purpose and return it, None when it has no blocks."""
        transfer: CacheSwapMetadata | None
        (transfer,) = take_transfers([self._by_purpose[purpose]], [_SWAPS[purpose]])
        return transfer

    def take(self) -> list[CacheSwapMetadata | None]:
        """Remove the transfers and return them in order of execution: evictions, loads, backups."""
        return take_transfers(self._lists, _FORMS)


@dataclass(slots=True, eq=False)
class StorageOrder:
    """A transfer between host and storage. ``plan_id`` is 0 until it is sent; ``failed`` is set at its end."""

    swap: CacheSwapMetadata
    timeout: float
    plan_id: int = 0
    failed: bool = False


@dataclass(slots=True)
class StorageOrders:
    """Storage transfers that were planned and not sent.

    ``cancelled``: plan ids of earlier transfers that are not needed any more. ``clear``: empty the storage first.
    """

    orders: list[StorageOrder] = field(default_factory=list)
    cancelled: tuple[int, ...] = ()
    clear: bool = False

    @property
    def is_empty(self) -> bool:
        """True while there is nothing to send."""
        return not (self.orders or self.cancelled or self.clear)

    def add(
        self,
        purpose: SwapPurpose,
        source: Blocks,
        slots: Int32Array,
        generations: UInt32Array,
        timeout: float,
    ) -> StorageOrder:
        """Plan a transfer that has ``timeout`` seconds once a rank has it."""
        order = StorageOrder(make_swap(purpose, source, slots, generations), timeout)
        self.orders.append(order)
        return order

    def take(self) -> StorageOrders:
        """Remove everything and return it."""
        taken = StorageOrders(self.orders, self.cancelled, self.clear)
        self.orders, self.cancelled, self.clear = [], (), False
        return taken


NO_CHECKSUMS: UInt64Array = np.empty(0, np.uint64)
_STORAGE_GRACE = 1.0
"""Seconds after a storage task's timeout in which its report is in time."""
_PEER_GRACE = 1.0
"""Seconds after a fetch's timeout in which its report is in time."""
_IS_GONE = "its process is gone"


class SwapInFlight:
    """One transfer of a plan, with the result of each block over all ranks that have reported."""

    __slots__ = ("_causes", "_copied", "checksums", "size", "swap")

    def __init__(self, swap: CacheSwapMetadata) -> None:
        self.swap = swap
        self.size = len(swap)
        self.checksums = NO_CHECKSUMS
        self._copied: Mask | None = None  # None: every block
        self._causes: dict[str, Mask] | None = None

    def check(self, report: TransferReport, result: TransferResult) -> None:
        """Raise ``PlanError`` for a result of other blocks."""
        size = self.size
        if len(result.failed):
            for positions in (result.failed, result.lost, result.corrupt, result.bad_slots, result.no_room):
                if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < size:
                    raise PlanError(f"report of plan {report.plan_id}: failed positions must be below {size}")
        if len(result.checksums) not in (0, size):
            raise PlanError(
                f"report of plan {report.plan_id}: {len(result.checksums)} checksums for {size} blocks"
            )

    def add(self, result: TransferResult, rank: int) -> None:
        """Count one rank's result."""
        if rank == 0:
            self.checksums = result.checksums
        if len(result.failed):
            if self._copied is None:
                self._copied = np.ones(self.size, np.bool_)
            self._copied[result.failed] = False
            self._mark("lost", result.lost)
            self._mark("corrupt", result.corrupt)
            self._mark("bad_slots", result.bad_slots)
            self._mark("no_room", result.no_room)

    def fail(self) -> None:
        """Count a rank that copied nothing."""
        self._copied = np.zeros(self.size, np.bool_)

    def settle(self, arrived: HashArray) -> None:
        """Set which blocks the target tier has; ``arrived`` is 1 for these."""
        self._copied = arrived.view(np.bool_) if 0 in arrived.tobytes() else None

    def part(self, chosen: Mask) -> SwapInFlight:
        """Return the transfer of the chosen blocks alone."""
        swap = self.swap
        part = SwapInFlight(
            replace(
                swap,
                src_block_ids=swap.src_block_ids[chosen],
                src_generations=swap.src_generations[chosen],
                dst_block_ids=swap.dst_block_ids[chosen],
                dst_generations=swap.dst_generations[chosen],
                hash_values=swap.hash_values[chosen],
                parent_hashes=swap.parent_hashes[chosen],
            )
        )
        part.settle(self.flags[chosen])
        part.checksums = self.checksums[chosen] if len(self.checksums) else self.checksums
        return part

    @property
    def copied(self) -> Mask:
        """Blocks that every rank has copied and, once the transfer is settled, the target tier has."""
        return all_of(self.size).view(np.bool_) if self._copied is None else self._copied

    @property
    def flags(self) -> HashArray:
        """1 for each block that is ``copied``, else 0."""
        return all_of(self.size) if self._copied is None else self._copied.view(np.uint8)

    @property
    def is_whole(self) -> bool:
        """True if every block is ``copied``."""
        return self._copied is None or bool(self._copied.all())

    @property
    def num_copied(self) -> int:
        """Number of blocks that are ``copied``."""
        return self.size if self._copied is None else int(np.count_nonzero(self._copied))

    def leading_copied(self, offset: int, count: int) -> int:
        """Return how many of ``count`` blocks from ``offset`` on are ``copied``, up to the first that is not."""
        first = -1 if self._copied is None else self._copied.tobytes().find(0, offset, offset + count)
        return count if first < 0 else first - offset

    def _mark(self, cause: str, positions: Int32Array) -> None:
        if len(positions):
            if self._causes is None:
                self._causes = {}
            self._causes.setdefault(cause, np.zeros(self.size, np.bool_))[positions] = True

    @property
    def lost(self) -> Mask:
        """Blocks that some rank did not find in the source."""
        return self._cause("lost")

    @property
    def corrupt(self) -> Mask:
        """Blocks whose source record some rank found wrong."""
        return self._cause("corrupt")

    @property
    def any_corrupt(self) -> bool:
        """True if some rank found a source record wrong."""
        return self._causes is not None and "corrupt" in self._causes

    @property
    def bad_slots(self) -> Mask:
        """Blocks whose storage slot some rank cannot read or write."""
        return self._cause("bad_slots")

    @property
    def no_room(self) -> Mask:
        """Blocks for which some rank's disk has no room."""
        return self._cause("no_room")

    def _cause(self, cause: str) -> Mask:
        mask = None if self._causes is None else self._causes.get(cause)
        return np.zeros(self.size, np.bool_) if mask is None else mask


_ONES: HashArray = np.ones(4096, np.uint8)
_ONES.flags.writeable = False


def all_of(count: int) -> HashArray:
    """Return the flags of blocks that were all copied, read-only."""
    return _ONES[:count] if count <= len(_ONES) else np.ones(count, np.uint8)


class InFlightPlan(PlanInFlight):
    """A plan that some rank has not reported yet. ``errors`` has one message per failed rank and transfer.

    Reports of whole copies are counted natively (``WholeReports``). ``swaps`` are made for the first other one.
    """

    _swaps: dict[SwapPurpose, SwapInFlight] | None = None
    _errors: list[str] | None = None

    @property
    def swaps(self) -> dict[SwapPurpose, SwapInFlight]:
        """Return the transfers by purpose, with what the ranks have reported."""
        if self._swaps is None:
            swaps = [SwapInFlight(swap) for swap in self.plan.swaps()]
            for swap, checksums in zip(swaps, self.count_in_python(), strict=True):
                if checksums is not None:
                    swap.checksums = checksums
            self._swaps = {each.swap.purpose: each for each in swaps}
        return self._swaps

    @property
    def errors(self) -> list[str]:
        """Return the messages of failures so far."""
        if self._errors is None:
            self._errors = []
        return self._errors

    def fail(self, rank: int, reason: str) -> None:
        """Count a rank that will never report as one that copied nothing."""
        for swap in self.swaps.values():
            swap.fail()
        self.errors.append(f"rank {rank}: {reason}")
        self.stop_waiting(rank)

    def check(self, report: TransferReport) -> None:
        """Raise ``PlanError`` for a report that does not fit the plan."""
        swaps = iter(self.swaps.items())
        for result in report.results:
            purpose, swap = next(swaps, (None, None))
            if swap is None or result.purpose is not purpose:
                raise self._other_transfers(report)
            swap.check(report, result)
        if next(swaps, None) is not None:
            raise self._other_transfers(report)

    def _other_transfers(self, report: TransferReport) -> PlanError:
        return PlanError(
            f"report of plan {report.plan_id} by rank {report.rank} has other transfers than the plan"
        )

    def add(self, report: TransferReport) -> None:
        """Count one rank's report, which was checked."""
        rank = report.rank
        for result in report.results:
            self.swaps[result.purpose].add(result, rank)
            if result.error_message:
                self.errors.append(f"rank {rank}: {result.error_message}")
        self.stop_waiting(rank)

    def finish(self) -> None:
        """Set success and error message of every transfer, once the last rank has reported."""
        for each in self.swaps.values():
            swap = each.swap
            swap.success = each.is_whole
            swap.error_message = None if swap.success else "; ".join(self.errors)


class PlanLedger(PlanTable):
    """The plans in flight: those that some rank has not reported yet."""

    def __init__(self, num_ranks: int, timeout: float) -> None:
        super().__init__(num_ranks)
        self._timeout = timeout
        self._ids = count(1)

    def __contains__(self, plan_id: int) -> bool:
        return plan_id in self.plans

    def send(
        self, plan: OpenPlan, now: float, arena: str | None = None, storage: StorageOrders | None = None
    ) -> TransferPlan:
        """Number a plan, and the storage orders that travel with it, and expect their reports.

        ``arena`` names the shared arena whose slots the plan uses.
        """
        plan_id = next(self._ids)
        evictions, loads, backups = plan.take()
        after = plan.take_after()
        if storage is None:
            sent = TransferPlan(
                plan_id=plan_id,
                arena=arena,
                evictions=evictions,
                loads=loads,
                backups=backups,
                after=after,
                is_ahead=plan.is_ahead,
            )
            self.expect(InFlightPlan(sent, now + self._timeout, self.num_ranks))
            return sent
        tasks = self._number(storage)
        sent = TransferPlan(
            plan_id=plan_id,
            arena=arena,
            storage=tasks,
            cancelled=storage.cancelled,
            clear_storage=storage.clear,
            evictions=evictions,
            loads=loads,
            backups=backups,
            after=after,
            is_ahead=plan.is_ahead,
        )
        self.expect(InFlightPlan(sent, now + self._timeout, self.num_ranks))
        self._expect_tasks(tasks, now)
        return sent

    def send_storage(self, storage: StorageOrders, now: float) -> tuple[StorageTask, ...]:
        """Number storage orders that travel without a plan, and expect their reports."""
        tasks = self._number(storage)
        self._expect_tasks(tasks, now)
        return tasks

    def send_peers(self, tasks: Sequence[PeerTask], now: float) -> tuple[PeerTask, ...]:
        """Number hand-overs, and expect their reports. A fetch is overdue when its time is over."""
        numbered = tuple(replace(task, plan_id=next(self._ids)) for task in tasks)
        for task in numbered:
            is_fetch = task.swap.purpose is SwapPurpose.FETCH
            deadline = now + task.timeout + _PEER_GRACE if is_fetch else inf
            self.expect(InFlightPlan(task, deadline, self.num_ranks))
        return numbered

    def _number(self, storage: StorageOrders) -> tuple[StorageTask, ...]:
        for order in storage.orders:
            order.plan_id = next(self._ids)
        return tuple(
            StorageTask(plan_id=order.plan_id, swap=order.swap, timeout=order.timeout)
            for order in storage.orders
        )

    def _expect_tasks(self, tasks: Sequence[StorageTask], now: float) -> None:
        for task in tasks:
            self.expect(InFlightPlan(task, now + task.timeout + _STORAGE_GRACE, self.num_ranks))

    def _take_if_finished(self, flight: InFlightPlan) -> list[InFlightPlan]:
        """Remove a plan and return it, unless it waits for a rank."""
        if not flight.is_finished:
            return []
        self.remove(flight)
        flight.finish()
        return [flight]

    def check(self, report: TransferReport) -> None:
        """Raise ``PlanError`` for a report of an unknown rank, or one that does not fit its plan."""
        if not isinstance(report, TransferReport):
            raise PlanError(
                f"reports: {type(report).__name__} is not a TransferReport of CacheController.poll"
            )
        self.require_rank(report.rank)
        flight = self.plans.get(report.plan_id)
        if flight is not None and flight.waits_for(report.rank):
            flight.check(report)

    def require_rank(self, rank: int) -> None:
        """Raise ``PlanError`` for an unknown rank."""
        if rank not in range(self.num_ranks):
            raise PlanError(f"rank {rank!r} is not one of the {self.num_ranks} ranks")

    def expects(self, report: TransferReport) -> bool:
        """Return True if this rank has not reported this plan yet."""
        flight = self.plans.get(report.plan_id)
        return flight is not None and flight.waits_for(report.rank)

    def record(self, report: TransferReport) -> list[InFlightPlan]:
        """Count an expected and checked report; return the plans, storage tasks included, that it completes."""
        flight = self.plans[report.plan_id]
        flight.add(report)
        finished = self._take_if_finished(flight)
        if report.refused and isinstance(flight.plan, TransferPlan):
            for task in flight.plan.tasks:
                if (other := self.plans.get(task.plan_id)) and other.waits_for(report.rank):
                    other.fail(report.rank, "the plan did not reach the rank")
                    finished += self._take_if_finished(other)
        return finished

    def clears_storage(self, report: TransferReport) -> bool:
        """Return True if the plan of an expected report empties the storage."""
        plan = self.plans[report.plan_id].plan
        return isinstance(plan, TransferPlan) and plan.clear_storage

    def lose_rank(self, rank: int) -> list[InFlightPlan]:
        """Fail what a dead rank has not reported; return the plans that this completes. Raises ``PlanError``."""
        self.require_rank(rank)
        for flight in self.plans.values():
            if flight.waits_for(rank):
                flight.fail(rank, _IS_GONE)
        return [ended for flight in list(self.plans.values()) for ended in self._take_if_finished(flight)]

    def drop(self, plan: TransferPlan, rank: int) -> list[InFlightPlan]:
        """Fail a plan that no rank gets, as a rank is dead; return it."""
        flight = self.plans[plan.plan_id]
        for each in range(self.num_ranks):
            flight.stop_waiting(each)
        flight.fail(rank, _IS_GONE)
        return self._take_if_finished(flight)

    def newly_overdue(self, now: float) -> list[InFlightPlan]:
        """Return plans whose deadline has passed since the last call. They stay in flight: reports free their slots."""
        if now <= self.next_deadline:
            return []
        waiting = [flight for flight in self.plans.values() if not flight.is_overdue]
        late = sorted((flight for flight in waiting if now > flight.deadline), key=attrgetter("deadline"))
        for flight in late:
            flight.is_overdue = True
        self.next_deadline = min(
            (flight.deadline for flight in waiting if not flight.is_overdue), default=inf
        )
        return late
