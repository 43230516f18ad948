"""Writes to storage: which host blocks are written, and when, by the write policy.

Storage is closed under prefixes, so a block is written with its ancestors that are not stored, parents first. Writes
never hold up a request: blocks that find no room in the queue, the host or the storage are dropped and counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from fdcache._core import SwapInFlight
from fdcache.metadata import HashArray, SwapPurpose
from fdcache.plans.blocks import NO_BLOCKS, BlockQueue, Blocks
from fdcache.plans.ledger import StorageOrders
from fdcache.settings.cache import CacheSettings, StorageTierSettings, WritePolicy
from fdcache.tiers.pool import NO_PARENT, RESERVED, BlockPool, with_absent_ancestors
from fdcache.tiers.statistics import Counters
from fdcache.tiers.storage_index import NO_ROOM, StorageIndex

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
        """Learn from a write that every rank has reported and that is settled in the tiers."""
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
        wanted = self._queue.take(room)
        room -= len(wanted)
        if room > 0 and len(self._backlog):
            wanted = np.concatenate((wanted, self._backlog[-room:][::-1]))
            self._backlog = self._backlog[:-room]
        wanted = wanted[self._index.is_absent(wanted)]
        found = Blocks.of(self._host.find(wanted))
        if not self._writes_back:  # else they were counted when they left
            self._counters.stores_dropped += len(wanted) - len(found)
        return found

    def _coldest(self, room: int) -> Blocks:
        cold = Blocks.of(self._host.coldest(min(room, self._clean_reserve)))
        return cold.select(self._index.is_absent(cold.hashes))
