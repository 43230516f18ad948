"""Reading blocks from storage into the host tier before their request needs them.

What is read becomes host entries in path order, so a read begins where the host's run of the path ends, even where
the device has more of it: then no block ever stands in the host without its parent, and the next request finds it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fdcache.layout import KVLayout
from fdcache.manager.blocks import Blocks, parents_of
from fdcache.manager.fetch import Fetch, Read
from fdcache.manager.ledger import InFlightPlan, OpenPlan
from fdcache.manager.orders import StorageOrder
from fdcache.manager.requests import Request
from fdcache.manager.stats import Counters
from fdcache.manager.storage_index import RESERVED, StorageIndex
from fdcache.metadata import CacheSwapMetadata, HashArray, SwapPurpose
from fdcache.settings.storage_tier import PrefetchPolicy, StorageTierSettings
from fdcache.tiers import BlockPool

_ABSENT, _READY = 0, 1


class Prefetcher:
    """Reads for requests, by the policy of ``settings``. Two requests for one block share its read."""

    def __init__(
        self,
        settings: StorageTierSettings,
        layout: KVLayout,
        device: BlockPool,
        host: BlockPool,
        index: StorageIndex,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._record_bytes = layout.record_bytes * layout.tp_size
        self._device = device
        self._host = host
        self._index = index
        self._counters = counters
        self._clock = clock
        # What is being read cannot be evicted: half of the host tier must stay free to move.
        self._most_in_flight = max(1, host.stats().slots // 2)
        self._in_flight = 0
        self._reading: dict[bytes, Read] = {}
        self._unwanted: list[Read] = []

    def prefetch(self, request: Request, hashes: HashArray, plan: OpenPlan) -> None:
        """Begin to read what a request that has arrived will need."""
        if request._fetch is None:
            self._advance(request, hashes, plan)

    def must_wait(self, request: Request, hashes: HashArray, plan: OpenPlan) -> bool:
        """Whether the request's match has to come again later, by the policy."""
        policy = self._settings.prefetch_policy
        if policy is PrefetchPolicy.BEST_EFFORT:
            return False
        self._advance(request, hashes, plan)
        fetch = request._fetch
        if fetch is None or fetch.ended:
            return False
        if policy is PrefetchPolicy.TIMEOUT and self._clock() > fetch.deadline:
            self._counters.prefetches_timed_out += 1
            self.give_up(request)
            return False
        return True

    def fetched(self, request: Request, start: int, count: int) -> int:
        """How many of the host blocks from ``start`` on were read from storage for this request."""
        fetch = request._fetch
        if fetch is None:
            return 0
        return max(0, min(start + count, fetch.stop) - max(start, fetch.first))

    def is_reading(self, block_hash: bytes) -> bool:
        """Whether a block is on its way from storage."""
        return block_hash in self._reading

    def give_up(self, request: Request) -> None:
        """The request waits no longer; reads that nobody else wants and that have not begun are taken back."""
        fetch = request._fetch
        if fetch is None:
            return
        fetch.ended = True
        for read in fetch.reads:
            read.waiters -= 1
            if read.waiters == 0:
                self._unwanted.append(read)
        fetch.reads.clear()

    def release(self, request: Request) -> None:
        """The request has ended, or was preempted."""
        self.give_up(request)
        request._fetch = None

    def take_unwanted(self) -> tuple[int, ...]:
        """The plans of reads that nobody wants any more."""
        plans = tuple(read.order.plan_id for read in self._unwanted if read.order.plan_id)
        self._unwanted = [read for read in self._unwanted if not read.order.plan_id]
        return plans

    def settled(self, flight: InFlightPlan) -> None:
        """A read has ended on every rank."""
        (swap,) = flight.plan.swaps()
        self._forget(swap, failed=not flight.copied[SwapPurpose.PREFETCH].all())

    def withdrawn(self, order: StorageOrder) -> None:
        """A read was taken back before any rank heard of it."""
        self._forget(order.build(0).swap, failed=True)

    def overdue(self, swap: CacheSwapMetadata) -> None:
        """A read has not ended in time: whoever waits for it goes on without."""
        for read in self._reads_of(swap):
            read.order.failed = True
            for block_hash in read.hashes:
                self._reading.pop(block_hash, None)

    def _forget(self, swap: CacheSwapMetadata, *, failed: bool) -> None:
        self._in_flight -= len(swap)
        for read in self._reads_of(swap):
            read.order.failed = read.order.failed or failed
            for block_hash in read.hashes:
                self._reading.pop(block_hash, None)
            if read in self._unwanted:
                self._unwanted.remove(read)

    def _reads_of(self, swap: CacheSwapMetadata) -> list[Read]:
        found = self._reading.get(swap.hash_values[0].tobytes())
        return [found] if found is not None else []

    def _advance(self, request: Request, hashes: HashArray, plan: OpenPlan) -> None:
        """Bring the request's fetch as far as it can come now."""
        fetch = request._fetch
        if (fetch is not None and fetch.ended) or not self._index.is_open:
            return
        if fetch is not None and fetch.reads:
            if any(self._reading.get(read.hashes[0]) is read for read in fetch.reads):
                return  # under way
            failed = any(read.order.failed for read in fetch.reads)
            fetch.reads.clear()
            if failed:
                fetch.ended = True  # what came before the failure is there; the rest is computed
                return
        presence = self._host.contains(hashes)
        on_host = _leading(presence == _READY)
        if fetch is None:
            budget = self._clock() + self._settings.prefetch_timeout
            fetch = request._fetch = Fetch(on_host, on_host, budget)
        if on_host < len(hashes) and presence[on_host] != _ABSENT:
            self._join(fetch, hashes, on_host, int(_leading(presence != _ABSENT)))
            return
        stored = self._index.run(hashes, on_host)
        if stored is None:
            return
        on_device = _leading(self._device.contains(hashes) == _READY)
        if on_host + stored <= on_device or not self._read(fetch, hashes, on_host, on_host + stored, plan):
            fetch.ended = True

    def _join(self, fetch: Fetch, hashes: HashArray, start: int, stop: int) -> None:
        """Wait for blocks that another request reads, or that are being copied from the device."""
        read = self._reading.get(hashes[start].tobytes())
        if read is None:
            return
        read.waiters += 1
        if read in self._unwanted and not read.order.plan_id:
            self._unwanted.remove(read)
        fetch.reads.append(read)
        fetch.stop = max(fetch.stop, stop)
        self._counters.prefetches_shared += 1

    def _read(self, fetch: Fetch, hashes: HashArray, start: int, stop: int, plan: OpenPlan) -> bool:
        """Reserve host blocks as far as there is room, and plan the read; whether there was anything to read."""
        stop = min(stop, start + self._most_in_flight - self._in_flight)
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
        order = plan.add_storage(SwapPurpose.PREFETCH, source, slots, generations, self._settings.timeout)
        read = Read([row.tobytes() for row in source.hashes], order, waiters=1)
        self._reading.update(dict.fromkeys(read.hashes, read))
        self._in_flight += count
        fetch.reads.append(read)
        fetch.stop = start + count
        fetch.deadline += count * self._record_bytes / self._settings.prefetch_bandwidth
        self._counters.blocks_requested_from_storage += count


def _leading(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """How many of the first elements are true."""
    return len(mask) if mask.all() else int(np.argmin(mask))
