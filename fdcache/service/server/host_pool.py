"""HostPool: the tier of a namespace, whose blocks clients pin without asking."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from fdcache._core import BlockList, CopyReservation, PresenceWriter, Reservation
from fdcache.metadata import CacheLevel, HashArray, Int32Array, UInt32Array, UInt64Array
from fdcache.tiers.pool import HOST_SPARE, BlockPool

_EVENTS = 65536


def _nobody(root: HashArray) -> int:
    """Return the number of blocks without a tenant."""
    return 0


class HostPool(BlockPool):
    """A tier of ``num_blocks`` slots that clients see in ``table``.

    A client pins what it finds there by a record in its ring, if the table is open then. Every call that may remove
    blocks closes the table and lets ``take_runs`` read all rings, so that no block goes that a client has pinned.
    """

    def __init__(
        self,
        num_blocks: int,
        extent: int,
        table: PresenceWriter,
        take_runs: Callable[[], None],
        eviction: str = "lru",
    ) -> None:
        super().__init__(CacheLevel.HOST, num_blocks, eviction, extent=extent, spare=HOST_SPARE)
        self.record_events(_EVENTS)
        self.tenant_of: Callable[[HashArray], int] = _nobody
        self.table = table
        self._take_runs = take_runs
        self._is_open = True
        table.open()

    def open_table(self, is_open: bool) -> None:
        """Allow clients to pin blocks by themselves, or make them ask for every look-up."""
        if self._is_open != is_open:
            self._is_open = is_open
            (self.table.open if is_open else self.table.close)()

    def move_table(self, table: PresenceWriter, memory: NDArray[np.uint8]) -> None:
        """Keep the table in other memory. Readers of the former one have to ask for every look-up."""
        self.table.close()
        self.table = table
        self.mirror(memory)
        if self._is_open:
            table.open()

    @contextmanager
    def _closed(self) -> Iterator[None]:
        self.table.close()
        try:
            self._take_runs()
            yield
        finally:
            if self._is_open:
                self.table.open()

    def reserve(self, lease: int, count: int) -> Reservation:
        """See ``Tier.reserve``."""
        with self._closed():
            return super().reserve(lease, count)

    def evict_copied(self, count: int) -> BlockList | None:
        """See ``Tier.evict_copied``."""
        with self._closed():
            return super().evict_copied(count)

    def reserve_copies(
        self,
        lease: int,
        parents: HashArray,
        hashes: HashArray,
        below_pending: bool = False,
        tenant: int = 0,
    ) -> CopyReservation:
        """See ``Tier.reserve_copies``. The tenant of a path that begins here is asked of ``tenant_of``."""
        if len(parents) and not parents[0].any():
            tenant = self.tenant_of(hashes[:1])
        with self._closed():
            return super().reserve_copies(lease, parents, hashes, below_pending, tenant)

    def publish(
        self,
        lease: int,
        parents: HashArray,
        hashes: HashArray,
        slots: Int32Array,
        copied: HashArray,
        checksums: UInt64Array,
        tenants: UInt32Array | None = None,
    ) -> HashArray:
        """See ``Tier.publish``."""
        with self._closed():
            return super().publish(lease, parents, hashes, slots, copied, checksums, tenants)

    def drop(self, hashes: HashArray) -> Int32Array:
        """See ``Tier.drop``."""
        with self._closed():
            return super().drop(hashes)

    def discard(self, slots: Int32Array, quarantine: bool = False, keep_orphans: bool = False) -> BlockList:
        """See ``Tier.discard``."""
        with self._closed():
            return super().discard(slots, quarantine, keep_orphans)

    def end_load(
        self, slots: Int32Array, hashes: HashArray, copied: HashArray, bad: HashArray | None = None
    ) -> None:
        """See ``HostIndex.end_load``."""
        with self._closed():
            super().end_load(slots, hashes, copied, bad)

    def reset(self) -> None:
        """See ``Tier.reset``."""
        with self._closed():
            super().reset()

    def resize(self, slots: int) -> int:
        """See ``BlockPool.resize``."""
        with self._closed():
            return super().resize(slots)
