"""Reads from storage into the host tier, shared by the requests that need the same blocks.

A ``Fetch`` is one request's wish for blocks; a ``Read`` is a transfer in flight. A fetch that cannot go on waits for
something, and is looked at again when that has come and not before: a step costs nothing for fetches that wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import accumulate

import numpy as np

from fdcache.errors import StaleLeaseError
from fdcache.groups import record_keys, state_keys
from fdcache.metadata import CacheSwapMetadata, HashArray, Int32Array, SwapPurpose, UInt32Array
from fdcache.plans.ledger import NO_CHECKSUMS, ROOT, UNKNOWN, Blocks, Mask, StorageOrders, parents_of
from fdcache.settings.cache import PrefetchPolicy
from fdcache.tiers.pool import ABSENT, READY, RESERVED, BlockPool
from fdcache.tiers.statistics import Counters
from fdcache.tiers.storage_index import StorageIndex, question
from fdcache.tiers.waiting_fetches import Fetch, PursuedReads, Read, ReadJudge, Wait, WaitingFetches

log = logging.getLogger(__name__)

MOST_GROUP_BYTES = 128 << 20
_FIRST_GROUP_BYTES = 32 << 20
GROUP_SECONDS = 0.016
"""Seconds that one read should take. Between two reads the disk is idle for a moment: about 2% of this time."""

_MOST_ENDS = 8
"""About as many ends of reads are compared for a request that waits."""

_MOST_GROUPS = 64
_KEPT = 0.75
"""Weight of the speed so far against that of the last read."""


class GroupSize:
    """Bytes of one read on all ranks: blocks can be found when their own read has ended, not when all have.

    ``speed``: bytes a second as observed, 0.0 until a read has ended.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = 0.0
        self.speed = 0.0

    def begin(self) -> None:
        """Record that a read begins and no other is in flight."""
        self._since = self._clock()

    def end(self, nbytes: int) -> None:
        """Record that a read has ended, and that the next in flight begins. One that failed has no bytes."""
        now = self._clock()
        if nbytes and now > self._since:
            speed = nbytes / (now - self._since)
            self.speed = _KEPT * self.speed + (1 - _KEPT) * speed if self.speed else speed
        self._since = now

    def of(self, nbytes: int) -> int:
        """Return the size for a fetch of that many bytes."""
        size = self.speed * GROUP_SECONDS if self.speed else _FIRST_GROUP_BYTES
        return min(max(int(size), -(-nbytes // _MOST_GROUPS)), MOST_GROUP_BYTES)


class StorageReads:
    """Reads for fetches. Fetches of the same blocks share their reads.

    ``block_bytes`` are those of all ranks. A read begins no further block after ``timeout`` seconds. A page has
    ``page_records`` blocks, and ``num_states`` at its end. ``make_room`` is called with the number of blocks that are
    about to come to the host.
    """

    def __init__(
        self,
        host: BlockPool,
        index: StorageIndex,
        orders: StorageOrders,
        counters: Counters,
        clock: Callable[[], float],
        *,
        block_bytes: int,
        timeout: float,
        page_records: int = 1,
        num_states: int = 0,
        make_room: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._host = host
        self._index = index
        self._orders = orders
        self._counters = counters
        self._clock = clock
        self._block_bytes = block_bytes
        self._timeout = timeout
        self._records, self._states = page_records, num_states
        self._make_room = make_room
        self._blocks_in_flight = 0
        self._blocks_pinned = 0
        self._reads: dict[int, Read] = {}  # by the first slot, which no other read can have meanwhile
        self._by_block: dict[bytes, Read] = {}
        self._unneeded: dict[Read, None] = {}
        self._waiting = WaitingFetches()
        self.pursued = PursuedReads(self, page_records, num_states)
        self._group = GroupSize(clock)

    @property
    def is_open(self) -> bool:
        """True once the contents of the storage are known."""
        return self._index.is_open

    @property
    def blocks_in_flight(self) -> int:
        """Number of blocks that are being read."""
        return self._blocks_in_flight

    @property
    def num_waiting(self) -> int:
        """Number of fetches that wait for something other than a read."""
        return len(self._waiting) + len(self.pursued)

    @property
    def is_idle(self) -> bool:
        """True if nothing is in flight, pinned, waited for or to be taken back."""
        blocks = self._blocks_in_flight or self._blocks_pinned
        return not (blocks or self._reads or self._by_block or self._unneeded or self._waiting)

    @property
    def _most_in_flight(self) -> int:
        """Half of the host tier: blocks being read, or pinned for their requests, cannot be evicted."""
        return max(1, self._host.stats().slots // 2)

    @property
    def _has_room(self) -> bool:
        """True if a fetch that waits for room can go on. Without reads in flight it goes on, and ends if it must."""
        taken = self._blocks_in_flight + self._blocks_pinned
        return not self._blocks_in_flight or taken < self._most_in_flight

    # --- fetches --------------------------------------------------------------------------------------------

    def begin(
        self,
        hashes: HashArray,
        on_device: Callable[[HashArray], int],
        *,
        budget: float,
        bandwidth: float,
        judge: ReadJudge | None = None,
        request_id: str = "",
    ) -> Fetch:
        """Begin to read what is stored of a path; its request waits for ``budget`` seconds and the reads' bytes."""
        on_host = _leading(self._host.contains(hashes) == READY)
        deadline = self._clock() + budget
        fetch = Fetch(hashes, on_device, on_host, on_host, deadline, bandwidth, judge, request_id)
        self._advance(fetch)
        return fetch

    def wait(self, fetch: Fetch, policy: PrefetchPolicy) -> Wait | None:
        """Return what the request has to wait for, by the policy; None if it goes on."""
        if policy is PrefetchPolicy.BEST_EFFORT:
            return None
        self._take_answers()
        if self._waiting.is_ready(fetch) or (self._waiting.waits_for_room(fetch) and self._has_room):
            self._advance(fetch)
        if fetch.done:
            return None
        if policy is PrefetchPolicy.TIMEOUT and self._clock() > fetch.deadline:
            self._counters.prefetches_timed_out += 1
            self.cancel(fetch)
            return None
        return Wait(
            fetch.first,
            fetch.first + fetch.pinned,
            fetch.stop,
            fetch.since,
            self._ends(fetch),
            fetch.ahead,
            fetch.judge.on_device if fetch.judge is not None else 0,
            fetch.is_final,
        )

    def _ends(self, fetch: Fetch) -> tuple[int, ...]:
        """Return where the reads in flight of a fetch end, of many reads some."""
        if fetch.judge is None:
            return ()
        if self._waiting.waits_for_room(fetch):  # at best all of its path is read then
            return (len(fetch.hashes),)
        in_flight = [len(read.hashes) for read in fetch.reads if self._is_in_flight(read)]
        ends = [min(end, fetch.stop) for end in accumulate(in_flight, initial=fetch.first + fetch.pinned)]
        others = ends[:1:-1][:: max(len(ends) // _MOST_ENDS, 1)]
        return (*ends[1:2], *reversed(others))

    def leave(self, fetch: Fetch) -> None:
        """End a fetch whose reads go on, for requests to come."""
        fetch.done = True
        self._waiting.forget(fetch)
        for read in fetch.reads:
            read.waiters.pop(fetch, None)
            read.is_kept = True
        fetch.reads.clear()

    def advance(self) -> None:
        """Continue the fetches that can go on, and as many as there is room for."""
        self._take_answers()
        self.pursued.advance()
        for fetch in self._waiting.take_ready():
            self._advance(fetch)
        while (first := self._waiting.first_for_room()) is not None and self._has_room:
            self._advance(first)

    def cancel(self, fetch: Fetch) -> None:
        """End a fetch; reads that no other fetch needs and that have not begun are taken back."""
        fetch.done = True
        self._waiting.forget(fetch)
        self._leave(fetch)
        self.unpin(fetch)

    def unpin(self, fetch: Fetch) -> None:
        """Unpin the blocks that have come: the request has pinned those it uses, or needs none."""
        if fetch.lease:
            self._host.release(fetch.lease)
            self._blocks_pinned -= fetch.pinned
            fetch.lease = fetch.pinned = 0

    def stored(self, hashes: HashArray) -> Mask:
        """Return which of these blocks the storage has or is writing; none before its contents are known."""
        return ~self._index.is_absent(hashes) if self.is_open else np.zeros(len(hashes), np.bool_)

    def last_end(self, hashes: HashArray, first: int) -> int | None:
        """Return the most of these pages, more than ``first``, that can be had and have stored states at their end.

        0 for none; None while a store is asked: how many pages it has, then for states from the last one downwards.
        """
        keys, pages = record_keys(hashes, self._records), len(hashes)
        on_host = _leading(self._host.contains(keys) != ABSENT)
        if not self.is_open:
            return 0
        if on_host < len(keys):
            stored = self._index.run(keys, on_host)
            if stored is None:
                return None
            pages = (on_host + stored) // self._records
        if pages <= first:
            return 0
        states = state_keys(hashes[first:pages], self._records, self._states)
        ends = self._index.last(states, self._states)
        return first + ends if ends else ends

    def is_reading(self, block_hash: bytes) -> bool:
        """Return True for a block that is being read."""
        return block_hash in self._by_block

    def requests_of(self, plan_id: int) -> list[str]:
        """Return the ids of the requests that a read in flight is for, as far as they are known."""
        reads = (read for read in self._reads.values() if read.order.plan_id == plan_id)
        return [name for read in reads for name in read.requests]

    def _leave(self, fetch: Fetch) -> None:
        for read in fetch.reads:
            read.waiters.pop(fetch, None)
            if not (read.waiters or read.is_kept) and self._is_in_flight(read):
                self._unneeded[read] = None
        fetch.reads.clear()

    def _pin(self, fetch: Fetch) -> None:
        """Pin blocks that have come, so that they are not evicted before the request's match."""
        if not fetch.lease:
            fetch.lease = self._host.open_lease()
        wanted = fetch.hashes[: fetch.stop]
        try:
            pinned = len(self._host.match(fetch.lease, wanted, fetch.first + fetch.pinned))
        except StaleLeaseError:
            return  # a reset has removed the blocks
        fetch.pinned += pinned
        self._blocks_pinned += pinned

    def _take_answers(self) -> None:
        for each in self._index.take_answered():
            self._waiting.answered(each)

    # --- ends of copies and reads ---------------------------------------------------------------------------

    def copies_ended(self, hashes: HashArray) -> None:
        """Continue fetches that wait for copies of these blocks to the host, which have arrived or failed."""
        self._waiting.copies_ended(row.tobytes() for row in hashes)

    def all_copies_ended(self) -> None:
        """Continue fetches that wait for copies to the host: after its reset none will arrive."""
        self._waiting.all_copies_ended()

    def take_unneeded(self) -> tuple[int, ...]:
        """Return the plan ids of sent reads that no fetch needs any more, each once."""
        if not self._unneeded:
            return ()
        orders = {read.order: None for read in self._unneeded if read.order.plan_id}
        ended = [each for each in orders if all(read in self._unneeded for read in self._of(each.swap))]
        self._unneeded = {read: None for read in self._unneeded if read.order not in ended}
        return tuple(order.plan_id for order in ended)

    def overdue(self, swap: CacheSwapMetadata) -> None:
        """Continue fetches without a read that has not ended in time."""
        for read in self._of(swap):
            read.order.failed = True
            self._waiting.wake(read.waiters)

    def _of(self, swap: CacheSwapMetadata) -> list[Read]:
        """Return the reads of a transfer: blocks that are wanted by themselves are read together."""
        return [self._reads[slot] for slot in swap.dst_block_ids.tolist() if slot in self._reads]

    def ended(self, swap: CacheSwapMetadata, *, failed: bool) -> None:
        """End a read whose blocks are settled in the host: every rank has reported it, or it was never sent."""
        self._blocks_in_flight -= len(swap)
        self._group.end(0 if failed else len(swap) * self._block_bytes)
        self._host.loading_from_storage.difference_update(swap.dst_block_ids.tolist())
        for read in self._of(swap):
            del self._reads[read.slot]
            read.order.failed = read.order.failed or failed
            self._ended(read)

    def _ended(self, read: Read) -> None:
        for fetch in read.waiters:
            fetch.since, fetch.ahead = self._clock(), 0
            if read.order.failed:
                fetch.stop = max(fetch.first, min(fetch.stop, leading_ready(self._host, fetch.hashes)))
            self._pin(fetch)
        self._waiting.wake(read.waiters)
        for block_hash in read.hashes:
            # After a reset of the host another read may have begun to bring the same block.
            if self._by_block.get(block_hash) is read:
                del self._by_block[block_hash]
        self._unneeded.pop(read, None)

    def _is_in_flight(self, read: Read) -> bool:
        return self._reads.get(read.slot) is read

    # --- one step of a fetch --------------------------------------------------------------------------------

    def _advance(self, fetch: Fetch) -> None:
        """Continue a fetch until it is done or waits for something."""
        self._waiting.forget(fetch)
        if not self._may_go_on(fetch):
            return
        hashes = fetch.hashes
        presence = self._host.contains(hashes)
        on_host = _leading(presence == READY)
        if on_host < fetch.stop:
            fetch.done = True  # evicted again: the host tier is too busy
            return
        if on_host < len(hashes) and presence[on_host] != ABSENT:
            self._join(fetch, on_host, int(_leading(presence != ABSENT)))
        elif self._blocks_in_flight + self._blocks_pinned >= self._most_in_flight:
            # Blocks pinned for a request may stay until this one is matched: wait for reads in flight only.
            fetch.done = not self._blocks_in_flight
            if not fetch.done:
                fetch.since, fetch.ahead = self._clock(), self._blocks_in_flight
                if fetch.judge is not None:
                    fetch.judge.on_device = fetch.on_device(hashes)
                self._waiting.wait_for_room(fetch)
        elif (stored := self._index.run(hashes, on_host)) is None:
            self._waiting.wait_for_answer(fetch, question(hashes, on_host))
        else:
            stop = on_host + stored
            on_device, waits = fetch.on_device(hashes), True
            if fetch.judge is not None and stop > max(on_host, on_device):
                stop, waits = fetch.judge.worth_reading(on_device, on_host, stop, self._blocks_in_flight)
            useful = stop > max(on_host, on_device)
            fetch.done = not useful or not self._read(fetch, on_host, stop)
            if not waits:
                self.leave(fetch)

    def _may_go_on(self, fetch: Fetch) -> bool:
        """Return True once the reads so far have ended, all of them well."""
        # Blocks before a failed one have come; the others are computed.
        has_failed = any(read.order.failed for read in fetch.reads)
        if fetch.done or (not has_failed and any(map(self._is_in_flight, fetch.reads))):
            return False
        fetch.done = has_failed
        self._leave(fetch)
        return not fetch.done

    def _join(self, fetch: Fetch, start: int, stop: int) -> None:
        """Wait for blocks that other fetches read, or that are being copied from the device."""
        hashes = fetch.hashes
        block = hashes[start].tobytes()
        read = self._by_block.get(block)
        if read is None:
            self._waiting.wait_for_copy(fetch, block)
            return
        if read.order.failed:
            fetch.done = True  # it is overdue, and may never end
            return
        reads, end = [], start
        while read is not None and not read.order.failed:
            reads.append((end, read))
            end = min(stop, end + len(read.hashes) - read.hashes.index(hashes[end].tobytes()))
            read = self._by_block.get(hashes[end].tobytes()) if end < stop else None
        on_device = fetch.on_device(hashes)
        worth = end
        if fetch.judge is not None and end > max(start, on_device):
            worth = fetch.judge.worth_joining(on_device, start, end)
        if worth <= start:
            fetch.done = True
            return
        for first, read in reads:
            if first < worth:
                self._unneeded.pop(read, None)
                _wait_for(read, fetch)
        start = min(end, worth)
        fetch.stop = max(fetch.stop, start)
        fetch.is_final = start == len(hashes) or self._index.run(hashes, start) == 0
        fetch.since, fetch.ahead = self._clock(), 0
        self._counters.prefetches_shared += 1

    def _read(self, fetch: Fetch, start: int, stop: int) -> bool:
        """Reserve host blocks as far as there is room, and order the read; return False for nothing to read."""
        hashes, wanted = fetch.hashes, stop
        stop = min(stop, start + self._most_in_flight - self._blocks_in_flight - self._blocks_pinned)
        absent = self._host.contains(hashes[start:stop]) == ABSENT  # others may have come as a run
        stop = start + _leading(absent)
        self._make_room(stop - start)
        while start < stop:
            parents = self._parents_of(hashes, start, stop)
            taken = self._host.reserve_copies(0, parents, hashes[start:stop])
            if not taken.missing:
                break
            stop -= taken.missing
        if start >= stop:
            return False
        if not (taken.status == RESERVED).all():
            self._give_back(taken.slots)
            return False
        source = self._index.begin_reads(hashes[start:stop], parents)
        if len(source) < len(taken):
            self._give_back(taken.slots[len(source) :])  # these have left the storage since the look-up
        if not len(source):
            return False
        self._order(fetch, source, start, taken.slots[: len(source)], taken.generations[: len(source)])
        fetch.is_final = fetch.stop == wanted
        return True

    def _parents_of(self, hashes: HashArray, start: int, stop: int) -> HashArray:
        """Return the parents of blocks of a path. That of the first one is told by the storage."""
        if start or not stop:
            return parents_of(hashes, start, stop)
        parent = self._index.parent_of(hashes[:1])
        is_there = parent in (ROOT, UNKNOWN) or self._host.contains(_row(parent))[0] == READY
        return np.concatenate((_row(parent if is_there else UNKNOWN), hashes[: stop - 1]))

    def _give_back(self, slots: Int32Array) -> None:
        self._host.complete(slots, np.zeros(len(slots), np.uint8), NO_CHECKSUMS)

    def _order(
        self, fetch: Fetch, source: Blocks, start: int, slots: Int32Array, generations: UInt32Array
    ) -> None:
        """Order reads of groups of blocks, in path order."""
        fetch.since, fetch.ahead = self._clock(), self._blocks_in_flight
        if not self._blocks_in_flight:
            self._group.begin()
        size = max(self._group.of(len(source) * self._block_bytes) // self._block_bytes, 1)
        for first in range(0, len(source), size):
            group = slice(first, first + size)
            blocks = source.select(group)
            order = self._orders.add(
                *(SwapPurpose.PREFETCH, blocks, slots[group], generations[group], self._timeout),
                most_shared=size if len(fetch.hashes) == 1 and blocks.unverified is None else 0,
            )
            read = Read([row.tobytes() for row in blocks.hashes], order, int(slots[first]))
            self._reads[read.slot] = read
            self._by_block.update(dict.fromkeys(read.hashes, read))
            _wait_for(read, fetch)
        self._blocks_in_flight += (count := len(source))
        self._host.loading_from_storage.update(slots.tolist())
        fetch.stop = start + count
        fetch.deadline += count * self._block_bytes / fetch.bandwidth
        self._counters.blocks_requested_from_storage += count
        log.debug("read of %d blocks ordered, behind %d blocks in flight", count, fetch.ahead)


def _wait_for(read: Read, fetch: Fetch) -> None:
    read.waiters[fetch] = None
    fetch.reads.append(read)
    if fetch.request_id:
        read.requests.append(fetch.request_id)


def _row(key: bytes) -> HashArray:
    return np.frombuffer(key, np.uint8).reshape(1, 32)


def _leading(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """Return how many of the first elements are true."""
    return len(mask) if mask.all() else int(np.argmin(mask))


def leading_ready(pool: BlockPool, hashes: HashArray) -> int:
    """Return how many leading blocks of a path a tier has."""
    return _leading(pool.contains(hashes) == READY)
