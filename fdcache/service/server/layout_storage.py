"""LayoutStorage: the storage of one layout, below the host tier that its clients share.

It runs in the service's thread and waits for nothing: every rank's storage has threads of its own, and what has ended
there is settled when the service comes by.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from fdcache._core import RecordTable
from fdcache.devices.execution import PlanExecution
from fdcache.metadata import Int32Array, SwapPurpose, TransferReport
from fdcache.plans.ledger import InFlightPlan, OpenPlan, PlanLedger
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.storage_opening import OpenedStorage
from fdcache.service.wire.shared_memory import Extent
from fdcache.settings.cache import CacheSettings, StorageTierSettings, WritePolicy
from fdcache.storage.connector import StorageState
from fdcache.storage.queue import StorageQueue
from fdcache.tiers.completion import settle_storage
from fdcache.tiers.statistics import Counters
from fdcache.tiers.storage import StorageTier
from fdcache.tiers.storage_index import LocalIndex
from fdcache.tiers.storage_reads import StorageReads


@dataclass(slots=True)
class RankRecords:
    """The host records of one rank, of as many extents as the layout has now."""

    table: RecordTable
    extents: list[tuple[Extent, RecordTable]] = field(default_factory=list)
    """Those known to the storage, each with a table of its own records."""

    @property
    def num_blocks(self) -> int:
        """Slots in the table."""
        return self.table.num_slots


@dataclass(slots=True)
class Moved:
    """What went one way, over all ranks."""

    bytes: int = 0
    seconds: float = 0.0


class LayoutStorage:
    """Reads and writes between the host tier of a layout and its storage.

    ``wake`` is called by other threads when something has ended and ``work`` is due. ``make_room`` lets the
    layout's host tier grow before blocks are read into it.
    """

    def __init__(
        self,
        opened: OpenedStorage,
        cache: CacheSettings,
        settings: StorageTierSettings,
        *,
        wake: Callable[[], None],
        make_room: Callable[[Namespace, int], None],
    ) -> None:
        self.layout = opened.layout
        self.id = opened.layout.fingerprint.hex()[:16]
        self.index = opened.index
        self.restored = opened.restored
        self.counters = Counters()
        self.moved = {purpose: Moved() for purpose in (SwapPurpose.PREFETCH, SwapPurpose.STORE)}
        self.hit_blocks = 0
        self.resets = 0
        self._cache = cache
        self._settings = settings
        self._make_room = make_room
        empty = RecordTable([], 1, self.layout.record_bytes, [], 0, ())
        self._records = [RankRecords(empty) for _ in opened.ranks]
        self.queues = [
            StorageQueue(storage, records, wake)
            for storage, records in zip(opened.ranks, self._records, strict=True)
        ]
        self._running: list[dict[int, PlanExecution]] = [{} for _ in opened.ranks]
        self._ledger = PlanLedger(len(opened.ranks), cache.plan_timeout)
        self._namespace: Namespace | None = None
        self._tier: StorageTier | None = None
        self._plan = OpenPlan()

    # --- the host tier above it -----------------------------------------------------------------------------

    def attach(self, namespace: Namespace | None) -> None:
        """Read into and write from this layout's host tier, which may have grown, shrunk, gone or come."""
        host = namespace.tier if namespace is not None else None
        if self._tier is None or self._tier.host is not host:
            self._namespace = namespace
            self._tier = None
            if host is not None:
                self._tier = StorageTier(
                    self._cache,
                    self._settings,
                    self.layout,
                    host,
                    self.index,
                    self.counters,
                    time.monotonic,
                    make_room=self._before_read,
                )
                assert namespace is not None
                namespace.on_evict = self._tier.stores.on_evict
                if self._cache.write_policy is not WritePolicy.WRITE_BACK:
                    self._tier.stores.catch_up()  # what was not stored when an earlier service ended
        self._learn_records()

    def _learn_records(self) -> None:
        """Let every rank's storage know the extents that the layout has now, and no others."""
        namespace = self._namespace
        for rank, (records, queue) in enumerate(zip(self._records, self.queues, strict=True)):
            extents = namespace.memory.extents(rank) if namespace is not None else []
            same = 0
            for (known, _), extent in zip(records.extents, extents, strict=False):
                if known is not extent:
                    break
                same += 1
            while len(records.extents) > same:
                queue.unregister(records.extents.pop()[1])
            for extent in extents[same:]:
                assert namespace is not None
                table = namespace.memory.table_of(extent)
                queue.register(table)
                records.extents.append((extent, table))
            if namespace is not None and namespace.memory.tables:
                records.table = namespace.memory.tables[rank]

    def _before_read(self, count: int) -> None:
        if self._namespace is not None:
            self._make_room(self._namespace, count)

    @property
    def reads(self) -> StorageReads | None:
        """What is read for clients; None while the layout has no host tier."""
        return self._tier.reads if self._tier is not None else None

    @property
    def plan(self) -> OpenPlan:
        """What is going to be handed to the ranks."""
        return self._plan

    def on_arrival(self, hashes: np.ndarray) -> None:
        """Clients copied these blocks to the host tier."""
        if self._tier is not None:
            self._tier.stores.on_arrival(hashes)

    # --- work -----------------------------------------------------------------------------------------------

    def work(self, *, may_read: bool, may_write: bool) -> None:
        """Settle what has ended, plan what may follow, and hand it out."""
        self._settle()
        if (tier := self._tier) is not None:
            tier.overdue(self._ledger.newly_overdue(time.monotonic()))
            if may_write:
                tier.stores.plan(self._plan, self.blocks_in_flight(SwapPurpose.STORE))
            if may_read:
                tier.reads.go_on(self._plan)
            self._plan.cancelled = tier.reads.take_unwanted()
        self.send()

    def send(self) -> None:
        """Hand out what is planned so far."""
        if self._plan.is_empty:
            return
        self._learn_records()
        plan, self._plan = self._plan, OpenPlan()
        sent = self._ledger.close(plan, time.monotonic())
        for rank, queue in enumerate(self.queues):
            self._ledger.record(TransferReport(plan_id=sent.plan_id, rank=rank, results=()))
            prepared = [queue.prepare(task) for task in sent.storage]
            for transfer in prepared:
                task = transfer.task
                self._running[rank][task.plan_id] = PlanExecution(task.plan_id, rank, [transfer])
            queue.submit(sent, prepared)

    def _settle(self) -> None:
        for queue, running in zip(self.queues, self._running, strict=True):
            ended = [each for each in running.values() if each.pending_event() is None]
            for execution in ended:
                del running[execution.plan_id]
                queue.forget(execution.plan_id)
                report = execution.result()
                for result in report.results:
                    moved = self.moved[result.purpose]
                    moved.bytes += result.copied_bytes
                    moved.seconds += result.seconds
                for flight in self._ledger.record(report):
                    self._end(flight)

    def _end(self, flight: InFlightPlan) -> None:
        tier, namespace = self._tier, self._namespace
        assert tier is not None and namespace is not None, "what is under way keeps its host tier"
        (swap,) = flight.plan.swaps()
        settle_storage(flight, tier.host, self.index, self.counters)
        tier.settled(flight)
        if swap.purpose is SwapPurpose.PREFETCH:
            namespace.unverified.difference_update(swap.dst_block_ids.tolist())

    def blocks_in_flight(self, purpose: SwapPurpose) -> int:
        """Blocks on their way."""
        return self._ledger.blocks_in_flight(purpose)

    # --- the end, and commands ------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write all that the host tier has and the storage lacks."""
        if self._tier is not None:
            self._tier.stores.resume()
            self._tier.stores.catch_up()

    @property
    def is_flushed(self) -> bool:
        """Whether nothing waits to be written, or is being written; what a storage refuses is not waited for."""
        erasing = any(queue.erasures_queued for queue in self.queues)
        waiting = self.queued and not self._refuses_writes
        return not (waiting or erasing or self.blocks_in_flight(SwapPurpose.STORE))

    @property
    def _refuses_writes(self) -> bool:
        """Whether it was tried, since ``flush`` if that was called, and is out of use."""
        usable = all(queue.stats.state in (StorageState.READY, StorageState.FULL) for queue in self.queues)
        return self._tier is not None and self._tier.stores.is_refused and not usable

    @property
    def queued(self) -> int:
        """Blocks that wait to be written."""
        return self._tier.stores.queued if self._tier is not None else 0

    def reset(self) -> int:
        """Forget every block, in the files too; how many were known."""
        self.resets += 1
        if self._tier is not None:
            forgotten = self._tier.reset(self._plan)
        else:
            forgotten = self.index.reset()
            self._plan.clear_storage = True
        self.send()
        return forgotten

    def idle_slots(self, seconds: float) -> Int32Array:
        """Slots of the blocks that nobody has used for so long, of a storage that has slots; coldest first."""
        assert isinstance(self.index, LocalIndex), "a store that others use too keeps no ages"
        pool = self.index.pool
        coldest = pool.coldest(pool.stats().ready).slots
        first, last = 0, len(coldest)
        while first < last:
            middle = (first + last) // 2
            if pool.node(int(coldest[middle])).idle_seconds >= seconds:
                first = middle + 1
            else:
                last = middle
        return coldest[:first]

    def forget(self, slots: Int32Array) -> int:
        """Forget blocks and all that continue them, in the files too; how many."""
        assert isinstance(self.index, LocalIndex)
        gone = self.index.pool.discard(slots).slots
        if len(gone):
            self.resets += 1
            for queue in self.queues:
                queue.erase(gone)
        return len(gone)

    def close(self) -> None:
        """Wait for what has begun, take back the rest, close files and connections."""
        for queue in self.queues:
            queue.close()
        self._settle()
        if not isinstance(self.index, LocalIndex):
            self.index.close()
