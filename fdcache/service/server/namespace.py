"""Namespace: the tier of one layout in the service, with the memory under it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from fdcache.errors import HostMemoryError, UnsupportedLayoutError
from fdcache.layout import KVLayout
from fdcache.metadata import CacheLevel, HashArray, Int32Array, UInt32Array, UInt64Array
from fdcache.service.server.arena import Arena
from fdcache.service.server.history import History, Reason
from fdcache.service.server.layout_memory import LayoutMemory
from fdcache.service.server.tenants import Quotas, Tenants
from fdcache.service.wire.shared_memory import Geometry, create_table, table_bytes
from fdcache.settings.server import ServerSettings
from fdcache.tiers.pool import EVENT_REMOVED, EVENT_STORED, HOST_SPARE, BlockPool

_EVENTS = 65536
SHARE_OF_STOCK = 4
"""All clients of a layout together stock at most this part of its slots."""


@dataclass(frozen=True, slots=True)
class Run:
    """A pinned run of the tier."""

    lease: int
    slots: Int32Array
    generations: UInt32Array


class Namespace:
    """Blocks of one layout; equal fingerprints share it, unequal ones never meet.

    It grows by an extent on every rank at a time, as far as the arena has any and its quota allows, before it
    evicts.
    """

    def __init__(self, arena: Arena, layout: KVLayout, settings: ServerSettings, quotas: Quotas) -> None:
        self.layout = layout
        self.id = layout.fingerprint.hex()[:16]
        self.ranks = layout.tp_size
        self._arena = arena
        self.geometry = Geometry(
            directory=str(arena.directory),
            prefix=f"{arena.prefix}-{self.id}",
            incarnation=arena.manifest.incarnation,
            extent_bytes=arena.manifest.extent_bytes,
            record_bytes=layout.record_bytes,
            table_bytes=0,
        )
        if self.geometry.records_per_extent < 1:
            raise UnsupportedLayoutError(
                f"record_bytes {layout.record_bytes}: an extent of {self.geometry.extent_bytes} bytes holds no "
                "such record; start the service with a larger FDCACHE_EXTENT_SIZE or more --host-memory"
            )
        self._most_extents = max(int(arena.manifest.extents * settings.namespace_quota) // self.ranks, 1)
        self._table = self._make_table(self._most_extents)
        self.memory = LayoutMemory(arena, layout, self.geometry)
        self.tier: BlockPool | None = None
        self.history = History(settings.eviction_log)
        self.tenants = Tenants(quotas, Path(f"{self.geometry.directory}/{self.geometry.prefix}.tenants"))
        self.unverified: set[int] = set()
        self.pending_events: deque[tuple[np.ndarray, np.ndarray, np.ndarray]] = deque()
        self.on_evict: Callable[[HashArray], None] = lambda hashes: None
        """Told what left the tier for others."""
        self.used_until = time.monotonic()
        """When the last client left; of one that has clients it means nothing."""
        self.held_until = 0.0
        """On the clock of ``time.monotonic``: until then look-ups find nothing, so that what is in flight can end."""

    # --- size ---------------------------------------------------------------------------------------------

    @property
    def num_extents(self) -> int:
        """Extents of each rank."""
        return self.memory.num_extents

    @property
    def num_slots(self) -> int:
        """Slots of the tier."""
        return self.memory.num_slots

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, over all ranks."""
        return self.layout.record_bytes * self.ranks

    @property
    def most_slots(self) -> int:
        """Slots that it could have now, with the free extents that its quota allows."""
        more = min(self._most_extents - self.num_extents, self._arena.num_free // self.ranks)
        return (self.num_extents + max(more, 0)) * self.geometry.records_per_extent

    @property
    def storable_slots(self) -> int:
        """Slots that could hold blocks: all but those that clients stock to copy into."""
        return max(self.most_slots - self.most_slots // SHARE_OF_STOCK, 1)

    def _make_table(self, extents: int) -> NDArray[np.uint8]:
        size = table_bytes(extents * self.geometry.records_per_extent)
        self.geometry = msgspec.structs.replace(self.geometry, table_bytes=size)
        try:
            return create_table(Path(self.geometry.table_path), size)
        except OSError as error:
            raise HostMemoryError(
                f"{self.geometry.table_path}: no room for {size} bytes: {error}; give the folder more room"
            ) from error

    def layout_path(self) -> Path:
        """Where the layout is written down, for the service after this one."""
        return Path(f"{self.geometry.directory}/{self.geometry.prefix}.layout")

    @property
    def at_quota(self) -> bool:
        """Whether it has all the extents that it may have."""
        return self.num_extents >= self._most_extents

    def grow(self) -> bool:
        """Take one more extent for every rank; False when there is none, or the quota is reached."""
        if self.at_quota or self._arena.num_free < self.ranks:
            return False
        self.layout_path().write_text(self.layout.to_json())
        self.memory.take()
        self._resize()
        return True

    def adopt(self, num_extents: int) -> None:
        """Map extents that are there already; more, perhaps, than the quota allows now."""
        if num_extents > self._most_extents:
            self._table = self._make_table(num_extents)
        self.memory.map(num_extents)
        self._resize()

    def _resize(self) -> None:
        if self.tier is None:
            self.tier = BlockPool(
                CacheLevel.HOST, self.num_slots, extent=self.geometry.records_per_extent, spare=HOST_SPARE
            )
            self.tier.record_events(_EVENTS)
            self.tenants.limit(self.tier, self.storable_slots)
            self.tier.mirror(self._table)
        else:
            self.tier.resize(self.num_slots)

    def shrink(self) -> bool:
        """Give the last extent of every rank back; False while a slot in it is in use."""
        if not self.num_extents or self.tier is None:
            return False
        if self.num_extents == 1:
            figures = self.tier.stats()
            if figures.ready or figures.writing:
                return False
        elif self.tier.resize(self.num_slots - self.geometry.records_per_extent):
            return False
        self.memory.give_back()
        if not self.num_extents:
            self.tier = None
            self.layout_path().unlink(missing_ok=True)
            self.tenants.remove()
        self.unverified = {slot for slot in self.unverified if slot < self.num_slots}
        return True

    # --- blocks -------------------------------------------------------------------------------------------

    def match(self, hashes: HashArray, start: int) -> Run | None:
        """Pin the leading run of a path from ``start`` on; None when there is nothing."""
        self.history.looked_for(len(hashes) - start)
        if self.tier is None:
            self.history.missed(hashes, start)
            return None
        lease = self.tier.open_lease()
        try:
            run = self.tier.match(lease, hashes, start)
        except ValueError:
            self.tier.release(lease)
            raise
        if not len(run):
            self.tier.release(lease)
            self.history.missed(hashes, start)
            return None
        self.history.counts.hit_blocks += len(run)
        self.history.missed(hashes, start + len(run))
        return Run(lease, run.slots, run.generations)

    def grant(self, lease: int, count: int) -> tuple[Int32Array, UInt32Array]:
        """Up to ``count`` slots to copy into, growing before evicting; marked as empty on every rank."""
        tier = self.tier
        assert tier is not None
        while tier.stats().free < count and self.grow():
            pass
        count = min(count, tier.available)
        taken = tier.reserve(lease, count)
        self.memory.stamp_empty(taken.slots, taken.generations)
        self.history.counts.granted += len(taken)
        self.unverified.difference_update(taken.slots.tolist())
        return taken.slots, taken.generations

    def publish(
        self,
        lease: int,
        slots: Int32Array,
        parents: HashArray,
        hashes: HashArray,
        copied: np.ndarray,
        checksums: UInt64Array,
        tenants: UInt32Array,
    ) -> np.ndarray:
        """Make copied blocks findable below READY parents; the status of each. Slots not kept are free again."""
        assert self.tier is not None
        if self.tenants.limited:
            self.collect_events()
        status = self.tier.publish(lease, parents, hashes, slots, copied.astype(np.uint8), checksums, tenants)
        if self.tenants.limited:
            self.collect_events(Reason.TENANT_QUOTA)
        self.history.published(hashes, status)
        if (status >= 2).any():
            self.tenants.forget_absent(self.tier, hashes[status >= 2])
        return status

    def load_ended(self, slots: Int32Array, hashes: HashArray, copied: np.ndarray) -> None:
        """Blocks that were read are verified; of those that could not be read, the broken ones are dropped."""
        self.unverified.difference_update(slots[copied != 0].tolist())
        failed = np.flatnonzero(copied == 0)
        if not len(failed) or self.tier is None:
            return
        broken = [i for i in failed.tolist() if self._is_broken(int(slots[i]), hashes[i].tobytes())]
        if broken:
            lost = np.ascontiguousarray(hashes[broken])
            self.collect_events()
            self.tier.drop(lost)
            self.collect_events(Reason.BROKEN_RUN)
            self.history.corrupt(lost)

    def _is_broken(self, slot: int, key: bytes) -> bool:
        assert self.tier is not None
        if not 0 <= slot < self.num_slots:
            return False
        node = self.tier.node(slot)
        if not node.findable or node.hash != key:
            return False  # it was given to others meanwhile
        if not self.memory.is_whole(slot, key):
            return True
        self.unverified.discard(slot)
        return False

    def reset(self) -> int:
        """Forget every block; how many."""
        if self.tier is None:
            return 0
        forgotten = self.tier.stats().ready
        self.collect_events()
        known = self.tier.coldest(self.history.departures.most).hashes
        self.tier.reset()
        self.history.reset(known)
        self.tenants.clear()
        self.unverified.clear()
        return forgotten

    def drop(self, hashes: HashArray) -> int:
        """Forget these blocks and all that continue them; how many."""
        if self.tier is None or not len(hashes):
            return 0
        self.collect_events()
        dropped = self.tier.drop(hashes)
        self.collect_events(Reason.RESET)
        return dropped

    def collect_events(self, reason: Reason = Reason.EVICTED) -> None:
        """Take the tier's events: for the log of departures, whose ``reason`` this is, and for clients to be told."""
        if self.tier is None:
            return
        kinds, hashes, parents = self.tier.take_events()
        if not len(kinds):
            return
        gone = [hashes[i].tobytes() for i in np.flatnonzero(kinds == EVENT_REMOVED).tolist()]
        self.history.left(gone, reason)
        self.history.came(hashes[i].tobytes() for i in np.flatnonzero(kinds == EVENT_STORED).tolist())
        self.tenants.left(gone)
        if reason in (Reason.EVICTED, Reason.TENANT_QUOTA) and gone:
            self.on_evict(np.frombuffer(b"".join(gone), np.uint8).reshape(len(gone), 32))
        self.pending_events.append((kinds, hashes, parents))

    def close(self) -> None:
        """Unmap everything, and take the table away."""
        Path(self.geometry.table_path).unlink(missing_ok=True)
        self.memory.close()
        self.tenants.close()
