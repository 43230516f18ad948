"""Lists of blocks, and plans from the first transfer planned to the last rank's report.

A step collects its device transfers in an ``OpenPlan``; the storage tier collects its own in ``StorageOrders``.
``PlanLedger`` numbers both when they are sent, and keeps them until every rank has reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple, Self, overload

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from fdcache import _core
from fdcache._core import BlockCopies, BlockList, HostRun, InFlightPlan, PlanTable, take_transfers
from fdcache.metadata import (
    CacheSwapMetadata,
    ComparesArrays,
    HashArray,
    Int32Array,
    PeerTask,
    StorageTask,
    SwapPurpose,
    TransferPlan,
    UInt32Array,
    UInt64Array,
)

ROOT = bytes(32)
"""Parent hash of the first block of a path."""

UNKNOWN = b"\xff" * 32
"""Parent hash of the first block of a run of which nobody has told what precedes it."""

_MOST_SHOWN = 8
_ONES = np.uint64(2**64 - 1)


def have_parents(parents: HashArray) -> NDArray[np.bool_]:
    """Return a mask of the blocks below another one, whose parent is neither the root nor unknown."""
    words = parents.view(np.uint64)
    return np.asarray((words != 0).any(axis=1) & (words != _ONES).any(axis=1))


def parents_of(path: HashArray, start: int, stop: int) -> HashArray:
    """Return the parent hashes of blocks ``start`` to ``stop`` of a path, shape (stop - start, 32)."""
    if start > 0:
        return path[start - 1 : stop - 1]
    return _core.parents_from_root(path, stop) if stop > 0 else path[:0]


class Block(NamedTuple):
    """One block of a list."""

    slot: int
    generation: int
    hash: bytes
    parent: bytes


class Blocks(ComparesArrays, msgspec.Struct, eq=False, frozen=True):
    """Blocks of one tier. Element i of each array is one block: slot, slot generation, hash, parent's hash.

    ::

        blocks = Blocks.of(tier.find(hashes))
        plan.add(SwapPurpose.BACKUP, blocks.select(slice(8)), slots, generations)

    ``unverified`` is 1 for records that were recovered and not read since, None when there are none.
    """

    slots: Int32Array
    generations: UInt32Array
    hashes: HashArray
    parents: HashArray
    unverified: HashArray | None = None

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[Block]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice | NDArray[Any]) -> Blocks: ...
    def __getitem__(self, index: int | slice | NDArray[Any]) -> Block | Blocks:
        if isinstance(index, slice | np.ndarray):
            return self.select(index)
        return Block(
            int(self.slots[index]),
            int(self.generations[index]),
            self.hashes[index].tobytes(),
            self.parents[index].tobytes(),
        )

    def __repr__(self) -> str:
        shown = [str(slot) for slot in self.slots[:_MOST_SHOWN].tolist()]
        shown += ["..."] * (len(self) > _MOST_SHOWN)
        return f"Blocks({len(self)} blocks in slots [{', '.join(shown)}])"

    @classmethod
    def of(cls, found: BlockList) -> Self:
        """View the arrays of a native list."""
        return cls(found.slots, found.generations, found.hashes, found.parents)

    @classmethod
    def of_path(
        cls,
        path: HashArray,
        start: int,
        slots: Int32Array,
        generations: UInt32Array,
        unverified: HashArray | None = None,
    ) -> Self:
        """Return the run of a path that begins at block ``start`` and lies in these slots."""
        stop = start + len(slots)
        hashes = path if stop - start == len(path) else path[start:stop]
        return cls(slots, generations, hashes, parents_of(path, start, stop), unverified)

    def select(self, index: slice | np.ndarray) -> Blocks:
        """Return the blocks that a slice, a mask or an index array selects."""
        if isinstance(index, np.ndarray) and index.dtype == np.bool_ and index.all():
            return self
        return Blocks(
            self.slots[index],
            self.generations[index],
            self.hashes[index],
            self.parents[index],
            None if self.unverified is None else self.unverified[index],
        )


NO_BLOCKS = Blocks(
    np.empty(0, np.int32), np.empty(0, np.uint32), np.empty((0, 32), np.uint8), np.empty((0, 32), np.uint8)
)


def path_starts(blocks: Blocks) -> NDArray[np.bool_]:
    """Return a mask of the blocks that do not continue the block before them."""
    starts = np.ones(len(blocks), np.bool_)
    starts[1:] = (blocks.parents[1:] != blocks.hashes[:-1]).any(axis=1)
    return starts


_LEAST_QUEUED = 16384


class BlockQueue(_core.BlockQueue):
    """A first-in, first-out queue of block hashes of a tier of ``slots``. A full queue drops its oldest entries."""

    def __init__(self, slots: int) -> None:
        super().__init__(max(slots, _LEAST_QUEUED))


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

    def add(
        self, purpose: SwapPurpose, source: Blocks, slots: Int32Array, generations: UInt32Array | None
    ) -> int:
        """Plan copies from ``source`` into ``slots``; return their offset within the transfer.

        ``generations``: those of the slots, None for slots of an engine, which have none.
        """
        return self._by_purpose[purpose].append(
            source.slots,
            source.generations,
            source.hashes,
            source.parents,
            source.unverified,
            slots,
            generations,
        )

    def add_run(
        self,
        purpose: SwapPurpose,
        run: HostRun,
        path: HashArray,
        start: int,
        slots: Int32Array,
        generations: UInt32Array | None,
    ) -> int:
        """Do so with a run of the host, which has the blocks of a path from ``start`` on."""
        return self._by_purpose[purpose].append_run(run, path, start, slots, generations)

    def remove(self, purpose: SwapPurpose, offset: int, count: int) -> Int32Array:
        """Remove copies that were planned from ``offset`` on; return their source slots."""
        return self._by_purpose[purpose].remove(offset, count)

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


def _joined(first: CacheSwapMetadata, second: CacheSwapMetadata) -> CacheSwapMetadata:
    """Return two transfers of one purpose, of blocks that are all verified alike, as one."""
    columns = (
        "src_block_ids",
        "src_generations",
        "dst_block_ids",
        "dst_generations",
        "hash_values",
        "parent_hashes",
    )
    return replace(
        first, **{each: np.concatenate((getattr(first, each), getattr(second, each))) for each in columns}
    )


@dataclass(slots=True, eq=False)
class StorageOrder:
    """A transfer between host and storage. ``plan_id`` is 0 until it is sent; ``failed`` is set at its end.

    ``is_shared``: others may be added to it until it is sent.
    """

    swap: CacheSwapMetadata
    timeout: float
    is_shared: bool = False
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
        most_shared: int = 0,
    ) -> StorageOrder:
        """Plan a transfer that has ``timeout`` seconds once a rank has it.

        ``most_shared``: it may be one with others, of at most as many blocks.
        """
        swap, last = make_swap(purpose, source, slots, generations), self.orders[-1] if self.orders else None
        if last is not None and last.is_shared and len(last.swap) + len(swap) <= most_shared:
            last.swap = _joined(last.swap, swap)
            return last
        order = StorageOrder(swap, timeout, is_shared=most_shared > 0)
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


class PlanLedger(PlanTable):
    """The plans in flight: those that some rank has not reported yet; ``num_sharers`` as for ``PlanTable``."""

    def __init__(self, num_ranks: int, timeout: float, num_sharers: int = 1) -> None:
        super().__init__(num_ranks, num_sharers)
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

    def lose_rank(self, rank: int) -> list[InFlightPlan]:
        """Fail what a dead rank has not reported; return the plans that this completes. Raises ``PlanError``."""
        self.require_rank(rank)
        for flight in self.plans.values():
            if flight.waits_for(rank):
                flight.fail(rank, _IS_GONE)
        return self.take_finished()

    def drop(self, plan: TransferPlan, rank: int) -> list[InFlightPlan]:
        """Fail a plan that no rank gets, as a rank is dead; return it."""
        flight = self.plans[plan.plan_id]
        for each in range(self.num_ranks):
            flight.stop_waiting(each)
        flight.fail(rank, _IS_GONE)
        return self.take_finished()

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
