"""LayoutStorage: the storage of one layout, below the host tier that its clients share.

It runs in the service's thread and never waits: the queue of every rank's storage has threads of its own, and their
reports are taken when the service calls ``work``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from fdcache import tracing
from fdcache._core import InFlightPlan, RecordTable
from fdcache.metadata import CacheLevel, HashArray, Int32Array, SwapPurpose, TransferReport
from fdcache.plans.ledger import PlanLedger
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.router_feed import MOST_EVENTS, RouterFeed
from fdcache.service.server.storage_opening import OpenedStorage
from fdcache.service.server.stored_owners import StoredOwners
from fdcache.service.wire.shared_memory import Extent
from fdcache.settings.cache import CacheSettings, StorageTierSettings, WritePolicy
from fdcache.storage.connector import NodeStats, StorageState
from fdcache.storage.queue import StorageQueue
from fdcache.tasks import Execution
from fdcache.tiers.pool import READY
from fdcache.tiers.statistics import Counters, ReadTotals
from fdcache.tiers.storage import StorageTier
from fdcache.tiers.storage_index import LocalIndex
from fdcache.tiers.storage_reads import StorageReads

_SUMMED = ("hits", "read_bytes", "answers", "seconds")
"""Fields of ``NodeStats`` that are of one rank."""


@dataclass(slots=True)
class RankRecords:
    """Host records of one rank, in the extents that the layout has now.

    ``extents`` are those that the storage knows, each with a table of its own records.
    """

    table: RecordTable
    extents: list[tuple[Extent, RecordTable]] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        """Number of slots in the table."""
        return self.table.num_slots


@dataclass(slots=True)
class Moved:
    """Bytes and seconds of transfers in one direction, over all ranks."""

    bytes: int = 0
    seconds: float = 0.0


class LayoutStorage:
    """Reads and writes between the host tier of a layout and its storage.

    ``wake`` is called by other threads when something has ended and ``work`` is due. ``make_room`` lets the layout's
    host tier grow before blocks are read into it.
    """

    def __init__(
        self,
        opened: OpenedStorage,
        cache: CacheSettings,
        settings: StorageTierSettings,
        *,
        wake: Callable[[], None],
        make_room: Callable[[Namespace, int], None],
        feed: RouterFeed | None = None,
    ) -> None:
        self.layout = opened.layout
        self.id = opened.layout.fingerprint.hex()[:16]
        self.index = opened.index
        self.restored = opened.restored
        self.counters = Counters()
        self.moved = {purpose: Moved() for purpose in (SwapPurpose.PREFETCH, SwapPurpose.STORE)}
        self.read_totals = ReadTotals()
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
        self._executions: list[Execution] = []
        self._ledger = PlanLedger(len(opened.ranks), cache.plan_timeout)
        self._namespace: Namespace | None = None
        self._tier: StorageTier | None = None
        self.owners = StoredOwners(self.index, settings.directory / f"fdcache-{self.id}.owners")
        self.feed = feed
        if feed is not None and isinstance(self.index, LocalIndex):
            self.index.pool.record_events(MOST_EVENTS)
            feed.attach(CacheLevel.STORAGE, self.index.pool)

    # --- the host tier above it -----------------------------------------------------------------------------

    def attach(self, namespace: Namespace | None) -> None:
        """Follow the layout's host tier, which may have grown, shrunk, gone or come."""
        host = namespace.tier if namespace is not None else None
        if self._tier is None or self._tier.host is not host:
            self._namespace = namespace
            self._tier = None
            for queue in self.queues:
                queue.lend_from(host)
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
                host.tenant_of = self._tenant_of
                namespace.on_evict = self._tier.writes.on_evict
                namespace.on_forget = self._withdraw
                namespace.stored_in = self._tier.pool
                if self._cache.write_policy is not WritePolicy.WRITE_BACK:
                    self._tier.writes.queue_all()  # blocks that an earlier service did not store in time
        self._register_records()

    def _register_records(self) -> None:
        """Give every rank's storage the extents that the layout has now, and no others."""
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

    def _tenant_of(self, root: HashArray) -> int:
        """Return the number of the tenant whose path begins with a block that is about to be read."""
        namespace = self._namespace
        if namespace is None or namespace.tier is None:
            return 0
        key = self.owners.owner(root.tobytes())
        return namespace.tenants.reading(namespace.tier, root, key, namespace.storable_slots)

    def _withdraw(self, hashes: HashArray | None) -> None:
        for queue in self.queues:
            queue.withdraw(hashes)

    def _before_read(self, count: int) -> None:
        if self._namespace is not None:
            self._make_room(self._namespace, count)

    @property
    def reads(self) -> StorageReads | None:
        """Reads for clients; None while the layout has no host tier."""
        return self._tier.reads if self._tier is not None else None

    def on_arrival(self, hashes: HashArray) -> None:
        """Record that clients copied these blocks to the host tier."""
        if self._tier is not None:
            self._tier.on_arrival(hashes)

    # --- work -----------------------------------------------------------------------------------------------

    def work(self, *, may_read: bool, may_write: bool) -> None:
        """Take the reports of ended transfers, plan what may follow, and send it to the ranks' queues."""
        self._take_reports()
        if (tier := self._tier) is not None:
            tier.overdue(self._ledger.newly_overdue(time.monotonic()))
            tier.plan_work(self.blocks_in_flight(SwapPurpose.STORE), may_read=may_read, may_write=may_write)
        self.send()

    def send(self) -> None:
        """Send the orders of the storage tier to every rank's queue."""
        if self._tier is None or self._tier.orders.is_empty:
            return
        self._register_records()
        orders = self._tier.orders.take()
        if self._namespace is not None:
            writes = [each.swap for each in orders.orders if each.swap.purpose is SwapPurpose.STORE]
            self.owners.writing(writes, self._namespace.tenants.roots)
        tasks = self._ledger.send_storage(orders, time.monotonic())
        for rank, queue in enumerate(self.queues):
            transfers = [queue.prepare(task) for task in tasks]
            self._executions += [Execution(each.plan_id, rank, [each]) for each in transfers]
            queue.submit(transfers, cancelled=orders.cancelled, clear=orders.clear)

    def _take_reports(self) -> None:
        ended: list[Execution] = []
        running: list[Execution] = []
        for execution in self._executions:
            (running if execution.pending_event() else ended).append(execution)
        self._executions = running
        for execution in ended:
            report = execution.result()
            self._count(report)
            for flight in self._ledger.record(report):
                self._complete(flight)

    def _count(self, report: TransferReport) -> None:
        if tracing.spans is not None:
            reads = self.reads
            tracing.spans.copied(report, reads.requests_of(report.plan_id) if reads is not None else ())
        for result in report.results:
            moved = self.moved[result.purpose]
            moved.bytes += result.copied_bytes
            moved.seconds += result.seconds
            if result.purpose is SwapPurpose.PREFETCH and result.copied_bytes:
                self.read_totals = self.read_totals.plus(result.copied_bytes, result.seconds)

    def _complete(self, flight: InFlightPlan) -> None:
        tier, namespace = self._tier, self._namespace
        assert tier is not None and namespace is not None, "a transfer in flight keeps its host tier"
        tier.complete(flight)
        (swap,) = flight.plan.swaps()
        if swap.purpose is SwapPurpose.PREFETCH:
            namespace.unverified.difference_update(swap.dst_block_ids.tolist())

    def blocks_in_flight(self, purpose: SwapPurpose) -> int:
        """Return the number of blocks being read or written."""
        return self._ledger.blocks_in_flight(purpose)

    def name_source(self, hashes: HashArray, address: str) -> None:
        """Ask one node first for these blocks. Raises ``StorageError`` where no node has this address."""
        self.index.name_source(hashes, address)

    @property
    def reads_from_nodes(self) -> bool:
        """True if what is stored is what other nodes have."""
        return not isinstance(self.index, LocalIndex) and self.index.nodes is not None

    def seen(self, hashes: HashArray) -> list[str | None]:
        """Return the node that had each block when it was last asked for, and ask again, without waiting."""
        if isinstance(self.index, LocalIndex) or self.index.nodes is None:
            return [None] * len(hashes)
        self.index.run(hashes, 0)
        return self.index.nodes.seen(hashes)

    def nodes(self) -> list[NodeStats]:
        """Return what all ranks have read from each other node, and how that is now."""
        if isinstance(self.index, LocalIndex) or self.index.nodes is None:
            return []
        read = [each for queue in self.queues for each in queue.stats.nodes]
        found = []
        for node in self.index.nodes.stats().nodes:
            its = [each for each in read if each.address == node.address]
            sums = {name: sum(getattr(each, name) for each in its) for name in _SUMMED}
            found.append(msgspec.structs.replace(node, **sums))
        return found

    # --- the end, and commands ------------------------------------------------------------------------------

    def flush(self) -> None:
        """Begin to write every block of the host tier that the storage lacks."""
        if self._tier is not None:
            self._tier.writes.retry_now()
            self._tier.writes.queue_all()

    @property
    def is_flushed(self) -> bool:
        """True if nothing is queued or being written; blocks that the storage refuses do not count."""
        erasing = any(queue.erasures_queued for queue in self.queues)
        waiting = self.queued and not self._refuses_writes
        return not (waiting or erasing or self.blocks_in_flight(SwapPurpose.STORE))

    @property
    def _refuses_writes(self) -> bool:
        """True if the storage was tried, since ``flush`` if that was called, and is out of use."""
        usable = all(queue.stats.state in (StorageState.READY, StorageState.FULL) for queue in self.queues)
        return self._tier is not None and self._tier.writes.is_refused and not usable

    @property
    def queued(self) -> int:
        """Number of blocks that wait to be written."""
        return self._tier.writes.queued if self._tier is not None else 0

    def reset(self) -> int:
        """Forget every block, in the files too; return how many were known."""
        self.resets += 1
        if self._tier is not None:
            forgotten = self._tier.reset()
            self.send()
            return forgotten
        for queue in self.queues:
            queue.submit((), clear=True)
        return self.index.reset()

    def idle_slots(self, seconds: float) -> Int32Array:
        """Return the slots of blocks that were not used for ``seconds``, coldest first; of local storage only."""
        assert isinstance(self.index, LocalIndex), "a store of others keeps no ages"
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
        """Forget blocks and all that continue them, and the orphans, in the files too; return how many."""
        assert isinstance(self.index, LocalIndex)
        pool = self.index.pool
        gone = np.concatenate((pool.discard(slots).slots, pool.drop_orphans()))
        if len(gone):
            self.resets += 1
            for queue in self.queues:
                queue.erase(gone)
        return len(gone)

    def store(self, hashes: HashArray) -> None:
        """Queue blocks of the host tier that the storage lacks, with any write policy."""
        if self._tier is not None:
            self._tier.writes.request(hashes[self.index.is_absent(hashes)])

    def has_stored(self, hashes: HashArray) -> bool:
        """Return True if all of these blocks are stored and none is still being written."""
        if isinstance(self.index, LocalIndex):
            return bool((self.index.pool.contains(hashes) == READY).all())
        return not self.index.is_absent(hashes).any()

    def delete(self, hashes: HashArray) -> int:
        """Forget these blocks and all that continue them, in the files too; return how many were stored.

        Those that are being written are forgotten as well: their slots are emptied behind the writes.
        """
        assert isinstance(self.index, LocalIndex), "a store of others keeps its blocks"
        self.send()
        pool = self.index.pool
        before = pool.stats().ready
        gone = pool.drop(hashes)
        if len(gone):
            for queue in self.queues:
                queue.erase(gone)
        return before - pool.stats().ready

    def close(self) -> None:
        """Wait for transfers that have begun, cancel the others, close files and connections."""
        for queue in self.queues:
            queue.close()
        self.owners.close()
        self._take_reports()
        if not isinstance(self.index, LocalIndex):
            self.index.close()
