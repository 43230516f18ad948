"""Fetches that wait, by what they wait for, so that each is looked at when that has come and not before."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from itertools import chain

import numpy as np

from fdcache.errors import StaleLeaseError
from fdcache.metadata import CacheSwapMetadata, HashArray, SwapPurpose
from fdcache.plans.blocks import Blocks, parents_of
from fdcache.plans.ledger import InFlightPlan, OpenPlan, StorageOrder
from fdcache.settings.cache import PrefetchPolicy
from fdcache.tiers.fetches import Fetch, Read
from fdcache.tiers.pool import ABSENT, READY, RESERVED, BlockPool
from fdcache.tiers.statistics import Counters
from fdcache.tiers.storage_index import Question, StorageIndex, question


class WaitingFetches:
    """Fetches that go on at the next chance, and those that wait for room, an answer of the index, or a copy.

    A fetch that waits for reads is with them, in ``Read.waiters``.
    """

    def __init__(self) -> None:
        self._awake: dict[Fetch, None] = {}
        self._for_room: OrderedDict[Fetch, None] = OrderedDict()
        self._for_answer: defaultdict[Question, list[Fetch]] = defaultdict(list)
        self._for_copy: defaultdict[bytes, list[Fetch]] = defaultdict(list)

    def __len__(self) -> int:
        elsewhere = chain(self._for_answer.values(), self._for_copy.values())
        return len(self._awake) + len(self._for_room) + sum(map(len, elsewhere))

    def wake(self, fetches: Iterable[Fetch]) -> None:
        """Let them go on at the next chance."""
        self._awake.update(dict.fromkeys(fetches))

    def forget(self, fetch: Fetch) -> None:
        """Take out a fetch that goes on now, or has ended. One that has ended may still be woken once."""
        self._awake.pop(fetch, None)
        self._for_room.pop(fetch, None)

    def is_awake(self, fetch: Fetch) -> bool:
        """Whether it can go on."""
        return fetch in self._awake

    def take_awake(self) -> list[Fetch]:
        """All that can go on; from now on they do not wait."""
        awake, self._awake = list(self._awake), {}
        return awake

    # --- room ---------------------------------------------------------------------------------------------

    def wait_for_room(self, fetch: Fetch) -> None:
        """Others' reads come first."""
        self._for_room[fetch] = None

    def is_for_room(self, fetch: Fetch) -> bool:
        """Whether it waits for room."""
        return fetch in self._for_room

    def first_for_room(self) -> Fetch | None:
        """The one that has waited longest for room."""
        return next(iter(self._for_room), None)

    # --- what others do -----------------------------------------------------------------------------------

    def wait_for_answer(self, fetch: Fetch, question: Question) -> None:
        """The index has been asked."""
        self._for_answer[question].append(fetch)

    def answered(self, question: Question) -> None:
        """The index knows, or gave up."""
        self.wake(self._for_answer.pop(question, ()))

    def wait_for_copy(self, fetch: Fetch, block: bytes) -> None:
        """The block is on its way to the host from the device."""
        self._for_copy[block].append(fetch)

    def copies_ended(self, blocks: Iterable[bytes]) -> None:
        """Copies to the host have ended, well or not."""
        if self._for_copy:
            for block in blocks:
                self.wake(self._for_copy.pop(block, ()))

    def no_more_copies(self) -> None:
        """The copies under way will not arrive any more."""
        self.copies_ended(list(self._for_copy))


class StorageReads:
    """Reads for fetches, several of which share the read of a block that they all want.

    ``block_bytes`` are those of all ranks, ``timeout`` the seconds after which a read begins no further block.
    ``make_room`` is told how many blocks are about to come to the host.
    """

    def __init__(
        self,
        host: BlockPool,
        index: StorageIndex,
        counters: Counters,
        clock: Callable[[], float],
        *,
        block_bytes: int,
        timeout: float,
        make_room: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._host = host
        self._index = index
        self._counters = counters
        self._clock = clock
        self._block_bytes = block_bytes
        self._timeout = timeout
        self._make_room = make_room
        self._in_flight = 0
        self._kept = 0
        self._under_way: dict[int, Read] = {}  # by the first slot, which no other read can have meanwhile
        self._reading: dict[bytes, Read] = {}
        self._unwanted: dict[Read, None] = {}
        self._waiting = WaitingFetches()

    @property
    def is_open(self) -> bool:
        """Whether it is known what is stored."""
        return self._index.is_open

    @property
    def blocks_in_flight(self) -> int:
        """Blocks on their way from storage."""
        return self._in_flight

    @property
    def _most_in_flight(self) -> int:
        """What is being read, or waits for its request, cannot be evicted: half of the host must be free to move."""
        return max(1, self._host.stats().slots // 2)

    @property
    def _has_room(self) -> bool:
        """Whether a fetch that waits for room can go on; when nothing is on its way any more it goes on without."""
        return not self._in_flight or self._in_flight + self._kept < self._most_in_flight

    def begin(
        self,
        hashes: HashArray,
        on_device: Callable[[HashArray], int],
        plan: OpenPlan,
        *,
        budget: float,
        bandwidth: float,
    ) -> Fetch:
        """Begin to read what is stored of a path; it may be waited for ``budget`` seconds at first."""
        on_host = _leading(self._host.contains(hashes) == READY)
        fetch = Fetch(hashes, on_device, on_host, on_host, self._clock() + budget, bandwidth)
        self._advance(fetch, plan)
        return fetch

    def must_wait(self, fetch: Fetch, policy: PrefetchPolicy, plan: OpenPlan) -> bool:
        """Whether the request's match has to come again later, by the policy."""
        if policy is PrefetchPolicy.BEST_EFFORT:
            return False
        self._take_answers()
        if self._waiting.is_awake(fetch) or (self._waiting.is_for_room(fetch) and self._has_room):
            self._advance(fetch, plan)
        if fetch.ended:
            return False
        if policy is PrefetchPolicy.TIMEOUT and self._clock() > fetch.deadline:
            self._counters.prefetches_timed_out += 1
            self.give_up(fetch)
            return False
        return True

    def go_on(self, plan: OpenPlan) -> None:
        """Bring on the fetches for which something has come, and as many as there is room for."""
        self._take_answers()
        for fetch in self._waiting.take_awake():
            self._advance(fetch, plan)
        while (first := self._waiting.first_for_room()) is not None and self._has_room:
            self._advance(first, plan)

    def copies_ended(self, hashes: HashArray) -> None:
        """Blocks that were on their way to the host from the device have come, or have not."""
        self._waiting.copies_ended(row.tobytes() for row in hashes)

    def no_more_copies(self) -> None:
        """After a reset of the host: blocks on their way to it from the device will not be found there."""
        self._waiting.no_more_copies()

    def _take_answers(self) -> None:
        for each in self._index.take_answered():
            self._waiting.answered(each)

    def is_reading(self, block_hash: bytes) -> bool:
        """Whether a block is on its way from storage."""
        return block_hash in self._reading

    def give_up(self, fetch: Fetch) -> None:
        """Nobody waits any longer; reads that nobody else wants and that have not begun are taken back."""
        fetch.ended = True
        self._waiting.forget(fetch)
        self._leave(fetch)
        self.let_go(fetch)

    def _leave(self, fetch: Fetch) -> None:
        for read in fetch.reads:
            read.waiters.pop(fetch, None)
            if not read.waiters and self._is_under_way(read):
                self._unwanted[read] = None
        fetch.reads.clear()

    def let_go(self, fetch: Fetch) -> None:
        """The request has pinned what it found, or wants it no more."""
        if fetch.lease:
            self._host.release(fetch.lease)
            self._kept -= fetch.kept
            fetch.lease = fetch.kept = 0

    def _keep(self, fetch: Fetch) -> None:
        """Pin what has come so far, lest others' blocks drive it out before the request's turn."""
        if not fetch.lease:
            fetch.lease = self._host.open_lease()
        wanted = fetch.hashes[: fetch.stop]
        try:
            pinned = len(self._host.match(fetch.lease, wanted, fetch.first + fetch.kept))
        except StaleLeaseError:
            return  # a reset has taken away what came
        fetch.kept += pinned
        self._kept += pinned

    # --- the ends of reads ----------------------------------------------------------------------------------

    def take_unwanted(self) -> tuple[int, ...]:
        """The plans of reads that nobody wants any more."""
        plans = tuple(read.order.plan_id for read in self._unwanted if read.order.plan_id)
        self._unwanted = {read: None for read in self._unwanted if not read.order.plan_id}
        return plans

    def settled(self, flight: InFlightPlan) -> None:
        """A read has ended on every rank."""
        (swap,) = flight.plan.swaps()
        self._end(swap, failed=not flight.copied[SwapPurpose.PREFETCH].all())

    def withdrawn(self, order: StorageOrder) -> None:
        """A read was taken back before any rank heard of it."""
        self._end(order.build(0).swap, failed=True)

    def overdue(self, swap: CacheSwapMetadata) -> None:
        """A read has not ended in time: whoever waits for it, or would, goes on without."""
        read = self._under_way[int(swap.dst_block_ids[0])]
        read.order.failed = True
        self._waiting.wake(read.waiters)

    def _end(self, swap: CacheSwapMetadata, *, failed: bool) -> None:
        self._in_flight -= len(swap)
        self._host.loading_from_storage.difference_update(swap.dst_block_ids.tolist())
        read = self._under_way.pop(int(swap.dst_block_ids[0]))
        read.order.failed = read.order.failed or failed
        for fetch in read.waiters:
            if read.order.failed:
                fetch.stop = max(fetch.first, min(fetch.stop, leading_ready(self._host, fetch.hashes)))
            self._keep(fetch)
        self._waiting.wake(read.waiters)
        for block_hash in read.hashes:
            # After a reset of the host another read may have begun to bring the same block.
            if self._reading.get(block_hash) is read:
                del self._reading[block_hash]
        self._unwanted.pop(read, None)

    def _is_under_way(self, read: Read) -> bool:
        return self._under_way.get(read.slot) is read

    # --- one step of a fetch --------------------------------------------------------------------------------

    def _advance(self, fetch: Fetch, plan: OpenPlan) -> None:
        """Bring the fetch as far as it can come now, to its end or to something that will wake it."""
        self._waiting.forget(fetch)
        if not self._may_go_on(fetch):
            return
        hashes = fetch.hashes
        presence = self._host.contains(hashes)
        on_host = _leading(presence == READY)
        if on_host < fetch.stop:
            fetch.ended = True  # evicted again: the host tier is too busy to fight for
            return
        if on_host < len(hashes) and presence[on_host] != ABSENT:
            self._join(fetch, on_host, int(_leading(presence != ABSENT)))
        elif self._in_flight + self._kept >= self._most_in_flight:
            # Others' reads come first; what waits for its request may wait for this one in turn.
            fetch.ended = not self._in_flight
            if not fetch.ended:
                self._waiting.wait_for_room(fetch)
        elif (stored := self._index.run(hashes, on_host)) is None:
            self._waiting.wait_for_answer(fetch, question(hashes, on_host))
        else:
            stop = on_host + stored
            fetch.ended = not (stored and stop > fetch.on_device(hashes)) or not self._read(
                fetch, on_host, stop, plan
            )

    def _may_go_on(self, fetch: Fetch) -> bool:
        """Whether the reads so far have ended, all of them well."""
        if fetch.ended or any(self._is_under_way(read) and not read.order.failed for read in fetch.reads):
            return False
        # What came before a failure is there; the rest is computed.
        fetch.ended = any(read.order.failed for read in fetch.reads)
        self._leave(fetch)
        return not fetch.ended

    def _join(self, fetch: Fetch, start: int, stop: int) -> None:
        """Wait for blocks that another request reads, or that are being copied from the device."""
        block = fetch.hashes[start].tobytes()
        read = self._reading.get(block)
        if read is None:
            self._waiting.wait_for_copy(fetch, block)
            return
        if read.order.failed:
            fetch.ended = True  # it is overdue; when it ends, if ever, nobody can say
            return
        read.waiters[fetch] = None
        self._unwanted.pop(read, None)
        fetch.reads.append(read)
        fetch.stop = max(fetch.stop, stop)
        self._counters.prefetches_shared += 1

    def _read(self, fetch: Fetch, start: int, stop: int, plan: OpenPlan) -> bool:
        """Reserve host blocks as far as there is room, and plan the read; whether there was anything to read."""
        hashes = fetch.hashes
        stop = min(stop, start + self._most_in_flight - self._in_flight - self._kept)
        self._make_room(stop - start)
        while start < stop:
            parents = parents_of(hashes, start, stop)
            taken = self._host.reserve_copies(0, parents, hashes[start:stop])
            if not taken.missing:
                break
            stop -= taken.missing
        if start >= stop:
            return False
        if not (taken.status == RESERVED).all():
            self._host.complete(taken.slots, np.zeros(len(taken), np.uint8), np.empty(0, np.uint64))
            return False
        source = self._index.begin_reads(hashes[start:stop], parents)
        if len(source) < len(taken):
            # What left the storage since it was looked up is not read.
            rest = taken.slots[len(source) :]
            self._host.complete(rest, np.zeros(len(rest), np.uint8), np.empty(0, np.uint64))
        if not len(source):
            return False
        self._plan(fetch, source, start, taken.slots[: len(source)], taken.generations[: len(source)], plan)
        return True

    def _plan(
        self,
        fetch: Fetch,
        source: Blocks,
        start: int,
        slots: np.ndarray[tuple[int], np.dtype[np.int32]],
        generations: np.ndarray[tuple[int], np.dtype[np.uint32]],
        plan: OpenPlan,
    ) -> None:
        count = len(source)
        order = plan.add_storage(SwapPurpose.PREFETCH, source, slots, generations, self._timeout)
        read = Read([row.tobytes() for row in source.hashes], order, int(slots[0]), waiters={fetch: None})
        self._under_way[read.slot] = read
        self._reading.update(dict.fromkeys(read.hashes, read))
        self._in_flight += count
        self._host.loading_from_storage.update(slots.tolist())
        fetch.reads.append(read)
        fetch.stop = start + count
        fetch.deadline += count * self._block_bytes / fetch.bandwidth
        self._counters.blocks_requested_from_storage += count


def _leading(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """How many of the first elements are true."""
    return len(mask) if mask.all() else int(np.argmin(mask))


def leading_ready(pool: BlockPool, hashes: HashArray) -> int:
    """How many of the first blocks of a path a tier has."""
    return _leading(pool.contains(hashes) == READY)
