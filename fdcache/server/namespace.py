"""Namespace: the tier of one layout, its extents, and the headers in them."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache.errors import HostMemoryError, UnsupportedLayoutError
from fdcache.layout import KVLayout
from fdcache.metadata import CacheLevel, HashArray, Int32Array, UInt32Array, UInt64Array
from fdcache.node.extents import Extent, record_table
from fdcache.node.presence import create_table, table_bytes
from fdcache.node.protocol import Geometry
from fdcache.server.arena import Arena
from fdcache.server.counts import Counts, EvictionLog
from fdcache.tiers import BlockPool

_EVENTS = 65536
READY_HEADER = 2
_REMOVED, _CLEARED, _LOST = 1, 2, 3


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

    def __init__(self, arena: Arena, layout: KVLayout, quota: float, eviction_log: int) -> None:
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
        self._most_extents = max(int(arena.manifest.extents * quota) // self.ranks, 1)
        self._table = self._make_table()
        self._extents: list[list[Extent]] = [[] for _ in range(self.ranks)]
        self.tables: list[_core.RecordTable] = []
        self.tier: BlockPool | None = None
        self.counts = Counts()
        self.evictions = EvictionLog(eviction_log)
        self.unverified: set[int] = set()
        self.pending_events: deque[tuple[np.ndarray, np.ndarray, np.ndarray]] = deque()
        self.created = time.time()

    # --- extents ------------------------------------------------------------------------------------------

    @property
    def num_extents(self) -> int:
        """Extents of each rank."""
        return len(self._extents[0])

    @property
    def num_slots(self) -> int:
        """Slots of the tier."""
        return self.num_extents * self.geometry.records_per_extent

    @property
    def most_slots(self) -> int:
        """Slots that it could have now, with the free extents that its quota allows."""
        more = min(self._most_extents - self.num_extents, self._arena.num_free // self.ranks)
        return (self.num_extents + max(more, 0)) * self.geometry.records_per_extent

    @property
    def bytes_held(self) -> int:
        """Bytes of all its extents."""
        return self.num_extents * self.ranks * self.geometry.extent_bytes

    def _make_table(self) -> NDArray[np.uint8]:
        size = table_bytes(self._most_extents * self.geometry.records_per_extent)
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

    def grow(self) -> bool:
        """Take one more extent for every rank; False when there is none, or the quota is reached."""
        index = self.num_extents
        if index >= self._most_extents or self._arena.num_free < self.ranks:
            return False
        self.layout_path().write_text(self.layout.to_json())
        self._arena.assign([self.geometry.path(rank, index) for rank in range(self.ranks)])
        self._map(index)
        self._resize()
        return True

    def adopt(self, num_extents: int) -> None:
        """Map extents that are there already."""
        for index in range(num_extents):
            self._map(index)
        self._resize()

    def _map(self, index: int) -> None:
        for rank, extents in enumerate(self._extents):
            extents.append(Extent(self.geometry.path(rank, index), self.geometry.extent_bytes))

    def _resize(self) -> None:
        if self.tier is None:
            self.tier = BlockPool(CacheLevel.HOST, self.num_slots)
            self.tier.record_events(_EVENTS)
            self.tier.mirror(self._table)
        else:
            self.tier.resize(self.num_slots)
        self.tables = [record_table(self.geometry, extents) for extents in self._extents]

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
        index = self.num_extents - 1
        self.tables = []
        for extents in self._extents:
            extents.pop().headers(self.geometry)[:] = 0
        self._arena.take_back([self.geometry.path(rank, index) for rank in range(self.ranks)])
        if self.num_extents:
            self.tables = [record_table(self.geometry, extents) for extents in self._extents]
        else:
            self.tier = None
            self.layout_path().unlink(missing_ok=True)
        self.unverified = {slot for slot in self.unverified if slot < self.num_slots}
        return True

    def headers(self, rank: int, slots: Int32Array) -> np.ndarray:
        """The headers of slots on one rank, a copy, dtype ``HEADER``."""
        per_extent = self.geometry.records_per_extent
        views = [extent.headers(self.geometry) for extent in self._extents[rank]]
        out = np.empty(len(slots), views[0].dtype)
        for index in np.unique(slots // per_extent).tolist():
            chosen = slots // per_extent == index
            out[chosen] = views[index][slots[chosen] % per_extent]
        return out

    # --- blocks -------------------------------------------------------------------------------------------

    def count_absent(self, lookups: int, blocks: int) -> None:
        """A client has looked up paths and saw in the table that so many of their blocks are not there."""
        self.counts.lookups += lookups
        self.counts.looked_up_blocks += blocks

    def match(self, hashes: HashArray, start: int) -> Run | None:
        """Pin the leading run of a path from ``start`` on; None when there is nothing."""
        self.counts.lookups += 1
        self.counts.looked_up_blocks += len(hashes) - start
        if self.tier is None:
            return None
        lease = self.tier.open_lease()
        try:
            run = self.tier.match(lease, hashes, start)
        except ValueError:
            self.tier.release(lease)
            raise
        if not len(run):
            self.tier.release(lease)
            return None
        self.counts.hit_blocks += len(run)
        return Run(lease, run.slots, run.generations)

    def grant(self, lease: int, count: int) -> tuple[Int32Array, UInt32Array]:
        """Up to ``count`` slots to copy into, growing before evicting; marked as empty on every rank."""
        tier = self.tier
        assert tier is not None
        while tier.stats().free < count and self.grow():
            pass
        count = min(count, tier.available)
        taken = tier.reserve(lease, count)
        for slot, generation in zip(taken.slots.tolist(), taken.generations.tolist(), strict=True):
            empty = _core.SlotHeader(0, generation, bytes(32), bytes(32), self.layout.fingerprint, 0, 0)
            for table in self.tables:
                table.set_header(slot, empty)
        self.counts.granted += len(taken)
        self.unverified.difference_update(taken.slots.tolist())
        return taken.slots, taken.generations

    def arrived(self, slots: Int32Array, generations: UInt32Array, hashes: HashArray) -> np.ndarray:
        """Where every rank's header says that this block is there, whole."""
        there = np.ones(len(slots), np.bool_)
        for rank in range(self.ranks):
            headers = self.headers(rank, slots)
            there &= headers["state"] == READY_HEADER
            there &= headers["generation"] == generations
            there &= (headers["hash"] == hashes).all(axis=1)
        return there

    def publish(
        self,
        lease: int,
        slots: Int32Array,
        parents: HashArray,
        hashes: HashArray,
        copied: np.ndarray,
        checksums: UInt64Array,
    ) -> np.ndarray:
        """Make copied blocks findable below READY parents; the status of each. Slots not kept are free again."""
        assert self.tier is not None
        status = self.tier.publish(lease, parents, hashes, slots, copied.astype(np.uint8), checksums)
        stored, duplicates, orphans, dropped = np.bincount(status, minlength=4)[:4].tolist()
        self.counts.stored += stored
        self.counts.duplicates += duplicates
        self.counts.orphans += orphans
        self.counts.dropped += dropped
        return status

    def load_ended(self, slots: Int32Array, hashes: HashArray, copied: np.ndarray) -> None:
        """Blocks that were read are verified; of those that could not be read, the broken ones are dropped."""
        self.unverified.difference_update(slots[copied != 0].tolist())
        failed = np.flatnonzero(copied == 0)
        if not len(failed) or self.tier is None:
            return
        broken = [i for i in failed.tolist() if self._is_broken(int(slots[i]), hashes[i].tobytes())]
        if broken:
            self.counts.corrupt += len(broken)
            self.tier.drop(np.ascontiguousarray(hashes[broken]))

    def _is_broken(self, slot: int, key: bytes) -> bool:
        assert self.tier is not None
        if not 0 <= slot < self.num_slots:
            return False
        node = self.tier.node(slot)
        if not node.findable or node.hash != key:
            return False  # it was given to others meanwhile
        for table in self.tables:
            header = table.header(slot)
            if not header.is_valid or header.state != READY_HEADER or header.hash != key:
                return True
            planes = self.layout.planes
            checksum = _core.record_checksum(
                table.record(slot), [plane.offset for plane in planes], [plane.nbytes for plane in planes]
            )
            if checksum != header.payload_checksum:
                return True
        self.unverified.discard(slot)
        return False

    def reset(self) -> int:
        """Forget every block; how many."""
        if self.tier is None:
            return 0
        forgotten = self.tier.stats().ready
        self.tier.reset()
        self.unverified.clear()
        self.counts.resets += 1
        return forgotten

    def drop(self, hashes: HashArray) -> int:
        """Forget these blocks and all that continue them; how many."""
        return self.tier.drop(hashes) if self.tier is not None and len(hashes) else 0

    def collect_events(self) -> None:
        """Take the tier's events: for the eviction log, and for clients to be told."""
        if self.tier is None:
            return
        kinds, hashes, parents = self.tier.take_events()
        if not len(kinds):
            return
        now = time.time()
        for i in np.flatnonzero(kinds == _REMOVED).tolist():
            self.evictions.add(hashes[i].tobytes(), now)
            self.counts.evicted += 1
        self.pending_events.append((kinds, hashes, parents))

    def close(self) -> None:
        """Unmap everything, and take the table away."""
        Path(self.geometry.table_path).unlink(missing_ok=True)
        self.tables = []
        self._extents = [[] for _ in range(self.ranks)]
