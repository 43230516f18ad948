"""StorageTier: index, reads and writes of the storage tier, as one thing to the manager."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from fdcache.layout import KVLayout
from fdcache.metadata import StorageScan, SwapPurpose
from fdcache.plans.ledger import InFlightPlan, OpenPlan
from fdcache.settings.cache import CacheSettings, StorageTierSettings
from fdcache.storage.connector import StorageConnector
from fdcache.storage.slab_format import slots_for
from fdcache.tiers.completion import withdraw
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.statistics import Counters
from fdcache.tiers.storage_index import LocalIndex, RemoteIndex
from fdcache.tiers.storage_reads import StorageReads
from fdcache.tiers.storage_writes import StorePlanner


def make_index(
    settings: StorageTierSettings,
    layout: KVLayout,
    lookup: StorageConnector | None,
    clock: Callable[[], float] = time.monotonic,
) -> LocalIndex | RemoteIndex:
    """What is known of the storage; without ``lookup`` it is local: slots of every rank's slab file."""
    if lookup is None:
        return LocalIndex.make(slots_for(settings.size, layout), settings.retry_after, clock)
    return RemoteIndex(lookup, timeout=settings.timeout, clock=clock)


class StorageTier:
    """Storage over one host tier: which blocks are read and written, and what became of it."""

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
        self.reads = StorageReads(
            host,
            index,
            counters,
            clock,
            block_bytes=layout.record_bytes * layout.tp_size,
            timeout=storage_tier.timeout,
            make_room=make_room,
        )
        self.stores = StorePlanner(settings, storage_tier, host, index, counters, clock)
        self._is_clearing = False  # since a reset, until every rank has stored a block after it

    @property
    def pool(self) -> BlockPool | None:
        """The index as a tier, when it is one."""
        return self.index.pool if isinstance(self.index, LocalIndex) else None

    def restore(self, scans: Sequence[StorageScan], plan: OpenPlan) -> int:
        """Take up what the ranks' files hold; nothing of it where a reset may not have come to all of them."""
        if not isinstance(self.index, LocalIndex):
            return 0
        plan.clear_storage = plan.clear_storage or self._is_clearing
        return self.index.restore([] if self._is_clearing else scans)

    def plan_background(self, plan: OpenPlan, in_flight: int) -> None:
        """Writes that may be planned now, and reads that nobody wants any more."""
        self.stores.plan(plan, in_flight)
        self.reads.go_on(plan)
        plan.cancelled = self.reads.take_unwanted()

    def settled(self, flight: InFlightPlan) -> None:
        """A plan has ended on every rank and is settled in the tiers."""
        for swap in flight.plan.swaps():
            if swap.purpose is SwapPurpose.PREFETCH:
                self.reads.settled(flight)
            elif swap.purpose is SwapPurpose.STORE:
                # A rank writes in order, and what was planned before a reset arrives nowhere.
                self._is_clearing = self._is_clearing and not flight.copied[swap.purpose].any()
                self.stores.settled(flight)
            elif swap.purpose in (SwapPurpose.EVICT, SwapPurpose.BACKUP):
                self.reads.copies_ended(swap.hash_values)
                self.stores.on_arrival(swap.hash_values[flight.copied[swap.purpose]])

    def overdue(self, flights: Iterable[InFlightPlan]) -> None:
        """Nobody waits for these reads any more; their slots do."""
        for flight in flights:
            for swap in flight.plan.swaps():
                if swap.purpose is SwapPurpose.PREFETCH:
                    self.reads.overdue(swap)

    def reset(self, plan: OpenPlan) -> int:
        """Forget every block, in the files too; what is planned and not sent is taken back."""
        self._withdraw(plan)
        plan.clear_storage = self._is_clearing = True
        return self.index.reset()

    def rank_lost(self, plan: OpenPlan) -> None:
        """A rank is gone: a local index holds no more until the ranks' files are scanned again."""
        self._withdraw(plan)
        if isinstance(self.index, LocalIndex):
            self.index.close()

    def _withdraw(self, plan: OpenPlan) -> None:
        for order in plan.storage:
            withdraw(order, self.host, self.index)
            if order.swap.purpose is SwapPurpose.PREFETCH:
                self.reads.withdrawn(order)
        plan.storage.clear()
        self.reads.no_more_copies()
        self.stores.forget()
