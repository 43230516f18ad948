"""The storage tier below one host tier: index, reads and writes behind one interface."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from fdcache._core import InFlightPlan, SwapInFlight
from fdcache.layout import KVLayout
from fdcache.metadata import CacheLevel, CacheSwapMetadata, HashArray, StorageScan, StorageTask, SwapPurpose
from fdcache.plans.ledger import NO_BLOCKS, BlockQueue, Blocks, Mask, StorageOrders
from fdcache.settings.cache import CacheSettings, EvictionPolicy, StorageTierSettings, WritePolicy
from fdcache.storage.connector import StorageConnector
from fdcache.storage.slab_format import slots_for
from fdcache.tiers.host import discard_corrupt
from fdcache.tiers.pool import NO_PARENT, PENDING, READY, RESERVED, BlockPool, with_absent_ancestors
from fdcache.tiers.remote_index import RemoteIndex
from fdcache.tiers.statistics import Counters
from fdcache.tiers.storage_index import NO_ROOM, LocalIndex, StorageIndex
from fdcache.tiers.storage_reads import StorageReads

_MOST_PER_TASK = 64


class StorageWrites:
    """Copies from the host tier to storage.

    With write_back the coldest host blocks are written before they are evicted. With the other policies a block is
    written once it has come to the host, which with write_through_selective takes its hits.
    """

    def __init__(
        self,
        settings: CacheSettings,
        storage_tier: StorageTierSettings,
        host: BlockPool,
        index: StorageIndex,
        orders: StorageOrders,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writes_back = settings.write_policy is WritePolicy.WRITE_BACK
        self._clean_reserve = settings.clean_reserve
        self._timeout = storage_tier.timeout
        self._write_blocks = storage_tier.write_blocks
        self._retry_after = storage_tier.retry_after
        self._clock = clock
        self._refused_until: float | None = None
        self._host = host
        self._index = index
        self._orders = orders
        self._counters = counters
        self._queue = BlockQueue(host.stats().slots)
        self._backlog: HashArray = np.empty((0, 32), np.uint8)

    @property
    def queued(self) -> int:
        """Number of blocks that wait to be written."""
        return len(self._queue) + len(self._backlog)

    @property
    def has_work(self) -> bool:
        """True if queued blocks may be written now. A storage that took nothing is tried again later."""
        return bool(self.queued) and self._index.is_open and not self.is_refused

    def queue_all(self) -> None:
        """Queue every idle host block that is not stored, the hottest first, behind the queue; with any policy."""
        idle = self._host.coldest(self._host.stats().ready).hashes
        self._backlog = idle[self._index.is_absent(idle)]

    def on_arrival(self, hashes: HashArray) -> None:
        """Queue blocks that came to the host tier from the device."""
        if not self._writes_back:
            self._enqueue(hashes)

    def request(self, hashes: HashArray) -> None:
        """Queue blocks that someone asks to be stored, with any policy."""
        self._enqueue(hashes)

    def waiting(self, hashes: HashArray) -> Mask:
        """Return a mask of the blocks that wait to be written to a storage that takes blocks now."""
        if self.is_refused:
            return np.zeros(len(hashes), np.bool_)
        return self._queue.holds(hashes).view(np.bool_)

    def on_evict(self, hashes: HashArray) -> None:
        """Count blocks that left the host tier and, with write_back, were not written in time."""
        if self._writes_back and len(hashes):
            self._counters.stores_dropped += int(self._index.is_absent(hashes).sum())

    def plan(self, in_flight: int, awaited: HashArray = NO_BLOCKS.hashes) -> None:
        """Order the writes that may begin now; ``in_flight`` blocks are being written.

        ``awaited`` blocks, for which others in the storage wait, go first, as far as the host has them.
        """
        if not (self._writes_back or self._queue or len(self._backlog) or len(awaited)):
            return  # the usual case
        room = self._most_at_once() - in_flight
        if room <= 0 or not self._index.is_open:
            return
        lacking = self._awaited(awaited, room)
        queued = self._next_queued(room - len(lacking))
        wanted = self._coldest(room) if self._writes_back and not len(queued) else queued
        slots = np.concatenate((lacking.slots, wanted.slots))
        if not len(slots):
            return
        blocks = with_absent_ancestors(self._host, slots, self._index.is_absent)
        later = []
        if self.is_refused:
            # A write takes the place of another block: a storage that takes nothing is tried with one block.
            later.append(blocks.hashes[1:])
            blocks = blocks.select(slice(1))
        status, slots, generations = self._index.begin_writes(blocks)
        waiting = status == NO_PARENT  # their parents are being written
        no_room = status == NO_ROOM
        if self._index.is_trying:
            waiting |= no_room
        else:
            self._counters.stores_dropped += int(no_room.sum())
        later.append(blocks.hashes[waiting])
        if len(queued):  # the coldest are looked up each time
            self._enqueue(np.concatenate(later))
        source = blocks.select(status == RESERVED)
        self._host.hold(source.slots)
        for first in range(0, len(source), _MOST_PER_TASK):
            part = slice(first, first + _MOST_PER_TASK)
            self._orders.add(
                SwapPurpose.STORE, source.select(part), slots[part], generations[part], self._timeout
            )

    @property
    def is_refused(self) -> bool:
        """True if the storage took nothing of its last blocks."""
        return self._refused_until is not None

    def retry_now(self) -> None:
        """Write again at once to a storage that refused its last blocks."""
        self._refused_until = None

    def ended(self, result: SwapInFlight) -> None:
        """Record a write that every rank has reported and that is settled in the tiers."""
        swap, arrived = result.swap, result.copied
        bad, no_room = result.bad_slots.any(), result.no_room.any()
        explained = bad or no_room or result.corrupt.any()
        if swap.success or explained or arrived.any():
            self._refused_until = None
        else:
            self._refused_until = self._clock() + self._retry_after
        if bad or (no_room and self._index.has_room):  # in other slots
            self._enqueue(swap.hash_values[~arrived])
        elif no_room:
            # The disk takes nothing at all: queued blocks would be tried in vain, one after another.
            self._counters.stores_dropped += self.queued
            self.forget()

    def forget(self) -> None:
        """Drop the queue: its blocks are gone."""
        self._queue.clear()
        self._backlog = self._backlog[:0]

    def _most_at_once(self) -> int:
        """Return how many blocks may be in flight to storage."""
        if self._refused_until is not None:
            return int(self._clock() >= self._refused_until)
        # Blocks being written cannot be evicted: most of the host tier must stay evictable.
        return max(1, min(self._write_blocks, self._host.stats().slots // 4))

    def _enqueue(self, hashes: HashArray) -> None:
        if len(hashes):
            self._counters.stores_dropped += self._queue.add(hashes)

    def _awaited(self, awaited: HashArray, room: int) -> Blocks:
        if not len(awaited) or not self._index.has_room:
            return NO_BLOCKS
        return Blocks.of(self._host.find(awaited[self._index.is_absent(awaited)])).select(slice(room))

    def _next_queued(self, room: int) -> Blocks:
        """Return the next queued blocks that the host still has, at most ``room``, and drop those before them."""
        found = NO_BLOCKS
        while not len(found) and len(wanted := self._take_queued(room)):
            wanted = wanted[self._index.is_absent(wanted)]
            found = Blocks.of(self._host.find(wanted))
            if not self._writes_back:  # else they were counted when they left
                self._counters.stores_dropped += len(wanted) - len(found)
        return found

    def _take_queued(self, room: int) -> HashArray:
        wanted = self._queue.take(room)
        room -= len(wanted)
        if room > 0 and len(self._backlog):
            wanted = np.concatenate((wanted, self._backlog[-room:][::-1]))
            self._backlog = self._backlog[:-room]
        return wanted

    def _coldest(self, room: int) -> Blocks:
        cold = Blocks.of(self._host.coldest(min(room, self._clean_reserve)))
        return cold.select(self._index.is_absent(cold.hashes))


log = logging.getLogger(__name__)

_MOST_AWAITED = 64
"""Missing blocks that are looked for at once."""


def make_index(
    settings: StorageTierSettings,
    layout: KVLayout,
    lookup: StorageConnector | None,
    clock: Callable[[], float] = time.monotonic,
    eviction: EvictionPolicy = EvictionPolicy.LEARNED,
) -> LocalIndex | RemoteIndex:
    """Return an index that asks ``lookup``, or without one an index of local slab files."""
    if lookup is None:
        slots = slots_for(settings.size, layout)
        index = LocalIndex.make(slots, settings.retry_after, clock, eviction)
        index.pool.set_states(layout.page_records, layout.num_states)
        return index
    return RemoteIndex(lookup, timeout=settings.timeout, clock=clock)


class StorageTier:
    """Storage below one host tier, the same in an engine's scheduler and in a service.

    ::

        tier.plan_work(writing=ledger.blocks_in_flight(SwapPurpose.STORE))
        tasks = ledger.send_storage(tier.orders.take(), now)  # to the StorageQueue of every rank
        for report in reports:
            for flight in ledger.record(report):
                tier.complete(flight)

    ``orders`` has the transfers that were planned and not sent. ``make_room`` is called with the number of blocks that
    are about to be read into the host tier.
    """

    def __init__(
        self,
        settings: CacheSettings,
        storage_tier: StorageTierSettings,
        layout: KVLayout,
        host: BlockPool,
        index: LocalIndex | RemoteIndex,
        counters: Counters,
        clock: Callable[[], float],
        *,
        make_room: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.host = host
        self.index = index
        self.orders = StorageOrders()
        self.awaited: HashArray = NO_BLOCKS.hashes
        """Missing blocks that others in the storage wait for: some of them, others after each ``plan_work``."""
        self.reads = StorageReads(
            host,
            index,
            self.orders,
            counters,
            clock,
            block_bytes=layout.block_bytes,
            timeout=storage_tier.timeout,
            page_records=layout.page_records,
            num_states=layout.num_states,
            make_room=make_room,
        )
        self.writes = StorageWrites(settings, storage_tier, host, index, self.orders, counters, clock)
        self._counters = counters
        self._is_clearing = False  # from a reset until every rank has stored a block after it

    @property
    def pool(self) -> BlockPool | None:
        """The slots of local storage; None for a store of others."""
        return self.index.pool if isinstance(self.index, LocalIndex) else None

    def has(self, hashes: HashArray) -> Mask:
        """Return a mask of the blocks that are stored or being written, as far as this process knows."""
        return ~self.index.is_absent(hashes)

    def write(self, hashes: HashArray) -> None:
        """Queue those of these host blocks that are neither stored nor on their way, with any policy."""
        self.writes.request(hashes[self.index.is_absent(hashes) & ~self.writes.waiting(hashes)])

    def writes_ended(self, hashes: HashArray) -> tuple[Mask, Mask]:
        """Return which blocks wait for no write any more, and which of all are stored: others that ended were dropped.

        A store of others has a block as soon as it is being written.
        """
        stored = self.has(hashes)
        ended = ~self.writes.waiting(hashes)
        if self.pool is not None:
            presence = self.pool.contains(hashes)
            stored, ended = presence == READY, ended & (presence != PENDING)
        return ended, stored

    def restore(self, scans: Sequence[StorageScan]) -> int:
        """Enter the blocks of the ranks' files; none while a reset may not have reached every file."""
        if not isinstance(self.index, LocalIndex):
            return 0
        self.orders.clear = self.orders.clear or self._is_clearing
        restored = self.index.restore([] if self._is_clearing else scans)
        self._find_awaited()
        return restored

    def _find_awaited(self) -> None:
        self.awaited = self.index.awaited(_MOST_AWAITED)

    def plan_work(self, writing: int, *, may_read: bool = True, may_write: bool = True) -> None:
        """Order writes and reads that may begin now; ``writing`` blocks are in flight to storage."""
        self._find_awaited()
        if may_write:
            self.writes.plan(writing, self.awaited)
        if may_read:
            self.reads.advance()
        self.orders.cancelled += self.reads.take_unneeded()

    def on_arrival(self, hashes: HashArray) -> None:
        """Record that blocks came to the host tier from a device."""
        self.writes.on_arrival(hashes)

    def blocks_arrived(self, swap: CacheSwapMetadata, arrived: Mask) -> None:
        """Record a transfer between device and host that is settled in both tiers."""
        if swap.dst_type is CacheLevel.HOST:
            self.reads.copies_ended(swap.hash_values)
            self.writes.on_arrival(swap.hash_values[arrived])

    def complete(self, flight: InFlightPlan) -> None:
        """End a storage task that every rank has reported.

        Release the slots that it held, make the blocks that arrived findable, and let reads and writes go on.
        """
        assert isinstance(flight.plan, StorageTask)
        if log.isEnabledFor(logging.DEBUG):
            self._tell(flight)
        for purpose, result in flight.swaps.items():
            self._counters.count_copies(purpose, result.num_copied, len(result.swap))
            self._counters.bad_storage_slots += int(result.bad_slots.sum())
            if purpose is SwapPurpose.STORE:
                self._complete_write(result)
            else:
                self._complete_read(result)

    @staticmethod
    def _tell(flight: InFlightPlan) -> None:
        for purpose, result in flight.swaps.items():
            log.debug(
                "storage task %d: %s of %d of %d blocks; %d lost, %d corrupt, %d in bad slots, %d without room; %s",
                flight.plan.plan_id,
                purpose.value,
                result.num_copied,
                len(result.swap),
                *(
                    int(mask.sum())
                    for mask in (result.lost, result.corrupt, result.bad_slots, result.no_room)
                ),
                "; ".join(flight.errors) or "no error",
            )

    def _complete_write(self, result: SwapInFlight) -> None:
        swap = result.swap
        arrived = self.index.end_writes(
            swap, result.copied, result.checksums, result.bad_slots, result.no_room
        )
        result.settle(arrived.view(np.uint8))
        discard_corrupt(result, self.host, self._counters)
        self.host.unhold(swap.src_block_ids)
        # A rank writes in order, so a block that arrived is proof that the files were emptied before it.
        self._is_clearing = self._is_clearing and not result.copied.any()
        self.writes.ended(result)

    def _complete_read(self, result: SwapInFlight) -> None:
        swap = result.swap
        self._counters.blocks_corrupt_in_storage += int(result.corrupt.sum())
        arrived = self.host.complete(swap.dst_block_ids, result.flags, result.checksums)
        result.settle(arrived)
        unusable = result.corrupt | result.bad_slots
        self.index.end_reads(swap, result.lost, unusable)
        if result.lost.any() or unusable.any():
            self._find_awaited()
        self.reads.ended(swap, failed=not result.copied.all())

    def overdue(self, flights: Iterable[InFlightPlan]) -> None:
        """Continue requests without reads that have not ended in time; their slots stay held."""
        for flight in flights:
            for swap in flight.plan.swaps():
                if swap.purpose is SwapPurpose.PREFETCH:
                    self.reads.overdue(swap)

    def reset(self) -> int:
        """Forget every block, in the files too; take back what is planned and not sent. Return how many."""
        self._take_back_orders()
        self.orders.clear = self._is_clearing = True
        return self.index.reset()

    def change_layout(self) -> None:
        """Forget every block: they belong to the former weights. A store keeps them, for engines that have these."""
        if isinstance(self.index, LocalIndex):
            self.reset()
        else:
            self._take_back_orders()
            self.index.reset()

    def rank_lost(self) -> None:
        """Forget the files of local storage until ``restore``: a rank's process is gone."""
        self._take_back_orders()
        if isinstance(self.index, LocalIndex):
            self.index.close()

    def _take_back_orders(self) -> None:
        """Release the slots of transfers that were not sent, and forget what waits for copies to the host."""
        for order in self.orders.orders:
            order.failed = True
            self._take_back(order.swap)
        self.orders.orders.clear()
        self.reads.all_copies_ended()
        self.writes.forget()

    def _take_back(self, swap: CacheSwapMetadata) -> None:
        nothing, no_checksums = np.zeros(len(swap), np.bool_), np.empty(0, np.uint64)
        if swap.purpose is SwapPurpose.STORE:
            self.index.end_writes(swap, nothing, no_checksums, nothing, nothing)
            self.host.unhold(swap.src_block_ids)
        else:
            self.host.complete(swap.dst_block_ids, nothing.view(np.uint8), no_checksums)
            self.index.end_reads(swap, nothing, nothing)
            self.reads.ended(swap, failed=True)
