"""Which host blocks are written to storage, and when: the write policies, one tier further down.

Storage is closed under prefixes, so what is written takes its uncovered ancestors along, parents first. Stores never
make anybody wait: what finds no room in the queue, the host or the storage is dropped and counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from fdcache.metadata import HashArray, SwapPurpose
from fdcache.plans.blocks import BlockQueue, Blocks, with_absent_above
from fdcache.plans.ledger import InFlightPlan, OpenPlan
from fdcache.settings.cache import CacheSettings, StorageTierSettings, WritePolicy
from fdcache.tiers.pool import NO_PARENT, RESERVED, BlockPool
from fdcache.tiers.statistics import Counters
from fdcache.tiers.storage_index import NO_ROOM, StorageIndex

_MOST_PER_TASK = 64


class StorePlanner:
    """Copies from the host tier to storage, by the write policy of ``settings``.

    With write_back the coldest host blocks are written before they have to go; else every block is written once
    it has come to the host, which with write_through_selective takes its hits.
    """

    def __init__(
        self,
        settings: CacheSettings,
        storage_tier: StorageTierSettings,
        host: BlockPool,
        index: StorageIndex,
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
        self._counters = counters
        self._queue = BlockQueue()
        self._backlog: HashArray = np.empty((0, 32), np.uint8)

    @property
    def queued(self) -> int:
        """Blocks that wait for a later plan."""
        return len(self._queue) + len(self._backlog)

    def catch_up(self) -> None:
        """Whatever the policy, write every idle host block that is not stored, the hottest first, after the queue."""
        idle = self._host.coldest(self._host.stats().ready).hashes
        self._backlog = idle[self._index.is_absent(idle)]

    def on_arrival(self, hashes: HashArray) -> None:
        """Blocks came to the host tier from the device."""
        if not self._writes_back:
            self._enqueue(hashes)

    def on_evict(self, hashes: HashArray) -> None:
        """Blocks left the host tier; with write_back those that were not written in time are lost."""
        if self._writes_back and len(hashes):
            self._counters.stores_dropped += int(self._index.is_absent(hashes).sum())

    def plan(self, plan: OpenPlan, in_flight: int) -> None:
        """Plan what may be written now; ``in_flight``: blocks on their way to storage."""
        room = self._most_at_once() - in_flight
        if room <= 0 or not self._index.is_open:
            return
        queued = self._next_queued(room)
        wanted = self._coldest(room) if self._writes_back and not len(queued) else queued
        if not len(wanted):
            return
        blocks = with_absent_above(self._host, wanted.slots, self._index.is_absent)
        later = []
        if self.is_refused:
            # Each takes the place of another: what takes nothing is tried with one.
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
        if len(queued):  # else they are looked up each time
            self._enqueue(np.concatenate(later))
        source = blocks.select(status == RESERVED)
        self._host.hold(source.slots)
        for first in range(0, len(source), _MOST_PER_TASK):
            part = slice(first, first + _MOST_PER_TASK)
            plan.add_storage(
                SwapPurpose.STORE, source.select(part), slots[part], generations[part], self._timeout
            )

    @property
    def is_refused(self) -> bool:
        """Whether the storage took nothing of what it was given last."""
        return self._refused_until is not None

    def resume(self) -> None:
        """Try it again at once, if it was refused."""
        self._refused_until = None

    def settled(self, flight: InFlightPlan) -> None:
        """A write has ended on every rank and is settled in the tiers."""
        (swap,) = flight.plan.swaps()
        arrived = flight.copied[swap.purpose]
        bad, no_room = flight.bad_slots[swap.purpose].any(), flight.no_room[swap.purpose].any()
        explained = bad or no_room or flight.corrupt[swap.purpose].any()
        if swap.success or explained or arrived.any():
            self._refused_until = None
        else:
            self._refused_until = self._clock() + self._retry_after
        if bad or (no_room and self._index.has_room):  # in other slots
            self._enqueue(swap.hash_values[~arrived])
        elif no_room:
            # The disk takes nothing at all: what waits would be tried in vain, one block after another.
            self._counters.stores_dropped += self.queued
            self.forget()

    def _most_at_once(self) -> int:
        """Blocks that may be on their way to storage together."""
        if self._refused_until is not None:
            return int(self._clock() >= self._refused_until)
        # What is being written cannot be evicted: most of the host tier must stay free to move.
        return max(1, min(self._write_blocks, self._host.stats().slots // 4))

    def forget(self) -> None:
        """Drop the queue: its blocks are gone."""
        self._queue.clear()
        self._backlog = self._backlog[:0]

    def _enqueue(self, hashes: HashArray) -> None:
        if len(hashes):
            self._counters.stores_dropped += self._queue.add(hashes)

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
