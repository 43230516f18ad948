"""Namespace: the host-tier blocks of one model and rank count, and the shared memory that holds them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache._core import PresenceWriter
from fdcache.errors import HostMemoryError, UnsupportedLayoutError
from fdcache.layout import KVLayout
from fdcache.metadata import HashArray, Int32Array, UInt32Array, UInt64Array
from fdcache.service.server.arena import Arena
from fdcache.service.server.hints import NamespaceHints
from fdcache.service.server.history import History
from fdcache.service.server.host_pool import HostPool
from fdcache.service.server.tenants import Quotas, Tenants
from fdcache.service.wire.shared_memory import Extent, Geometry, create_shared, record_table, table_bytes
from fdcache.service.wire.views import MissReason
from fdcache.settings.cache import Eviction
from fdcache.settings.server import ServerSettings
from fdcache.tiers.learned_file import LearnedFile
from fdcache.tiers.pool import EVENT_REMOVED, EVENT_STORED, BlockPool

READY_HEADER = 2
STOCK_DIVISOR = 4
"""The clients of a namespace may together stock 1/4 of its slots to copy into."""


class NamespaceMemory:
    """The extents of a namespace: equally many on each rank, with one slot at the same place on every rank.

    ``tables`` gives access to the records and headers, one table per rank.
    """

    def __init__(self, arena: Arena, layout: KVLayout, geometry: Geometry) -> None:
        self._arena = arena
        self._layout = layout
        self._geometry = geometry
        self._ranks = range(layout.tp_size)
        self._padding = _padding(layout)
        self._extents: list[list[Extent]] = [[] for _ in self._ranks]
        self.tables: list[_core.RecordTable] = []

    @property
    def num_extents(self) -> int:
        """Extents of each rank."""
        return len(self._extents[0])

    @property
    def num_slots(self) -> int:
        """Slots in these extents."""
        return self.num_extents * self._geometry.records_per_extent

    @property
    def nbytes(self) -> int:
        """Bytes of the extents of all ranks."""
        return self.num_extents * len(self._ranks) * self._geometry.extent_bytes

    def extents(self, rank: int) -> list[Extent]:
        """Return the extents of a rank, in order."""
        return self._extents[rank]

    def table_of(self, extent: Extent) -> _core.RecordTable:
        """Return a table of the records and headers of one extent."""
        return record_table(self._geometry, [extent])

    def map(self, count: int) -> None:
        """Map ``count`` more extents of each rank. Their files must exist."""
        first = self.num_extents
        for rank, extents in enumerate(self._extents):
            for index in range(first, first + count):
                extents.append(Extent(self._geometry.path(rank, index), self._geometry.extent_bytes))
        self._renew_tables()

    def add_extent(self) -> None:
        """Take one free extent of the arena for each rank; the arena must have that many."""
        self._arena.assign(self._paths(self.num_extents))
        self.map(1)
        for extents in self._extents:
            records = extents[-1].records(self._geometry)
            for first, last in self._padding:
                records[:, first:last] = 0  # bytes of a former owner must not travel with a record

    def remove_extent(self) -> None:
        """Return the last extent of each rank to the arena. None of its slots may be in use."""
        self.tables = []
        for extents in self._extents:
            extents.pop().headers(self._geometry)[:] = 0
        self._arena.take_back(self._paths(self.num_extents))
        self._renew_tables()

    def close(self) -> None:
        """Unmap all extents; their files stay."""
        self.tables = []
        self._extents = [[] for _ in self._ranks]

    def headers(self, rank: int, slots: Int32Array) -> np.ndarray:
        """Return a copy of the headers of ``slots`` on one rank, dtype ``HEADER``."""
        per_extent = self._geometry.records_per_extent
        views = [extent.headers(self._geometry) for extent in self._extents[rank]]
        out = np.empty(len(slots), views[0].dtype)
        for index in np.unique(slots // per_extent).tolist():
            chosen = slots // per_extent == index
            out[chosen] = views[index][slots[chosen] % per_extent]
        return out

    def stamp_empty(self, slots: Int32Array, generations: UInt32Array) -> None:
        """Mark slots as empty on every rank, so that a reader of the former record fails its check."""
        for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
            empty = _core.SlotHeader(0, generation, bytes(32), bytes(32), self._layout.fingerprint, 0, 0)
            for table in self.tables:
                table.set_header(slot, empty)

    def are_complete(
        self, slots: Int32Array, generations: UInt32Array, hashes: HashArray
    ) -> NDArray[np.bool_]:
        """Return for each slot True where the header on every rank names this complete block."""
        complete = np.ones(len(slots), np.bool_)
        for rank in self._ranks:
            headers = self.headers(rank, slots)
            complete &= headers["state"] == READY_HEADER
            complete &= headers["generation"] == generations
            complete &= (headers["hash"] == hashes).all(axis=1)
        return complete

    def is_intact(self, slot: int, key: bytes) -> bool:
        """Return True if every rank has this block in the slot and its bytes match their checksum."""
        offsets = [plane.offset for plane in self._layout.planes]
        sizes = [plane.nbytes for plane in self._layout.planes]
        for table in self.tables:
            header = table.header(slot)
            if not header.is_valid or header.state != READY_HEADER or header.hash != key:
                return False
            if _core.record_checksum(table.record(slot), offsets, sizes) != header.payload_checksum:
                return False
        return True

    def _paths(self, index: int) -> list[str]:
        return [self._geometry.path(rank, index) for rank in self._ranks]

    def _renew_tables(self) -> None:
        self.tables = [record_table(self._geometry, extents) for extents in self._extents if extents]


def _padding(layout: KVLayout) -> list[tuple[int, int]]:
    """Return the byte ranges of a record that belong to no plane."""
    ends = [0, *(plane.offset + plane.nbytes for plane in layout.planes)]
    starts = [*(plane.offset for plane in layout.planes), layout.record_bytes]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of a path, pinned under ``lease``."""

    lease: int
    slots: Int32Array
    generations: UInt32Array


class Namespace:
    """The blocks of one layout fingerprint. All clients with that fingerprint share it.

    It grows by one extent per rank at a time, before it evicts, while the arena has free extents and its quota allows.
    """

    def __init__(
        self, arena: Arena, layout: KVLayout, settings: ServerSettings, quotas: Quotas, eviction: Eviction
    ) -> None:
        self.layout = layout
        self._eviction = eviction
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
                f"record_bytes {layout.record_bytes}: a record does not fit into an extent of "
                f"{self.geometry.extent_bytes} bytes; start the service with a larger FDCACHE_EXTENT_SIZE or more "
                "--host-memory"
            )
        self.max_extents = max(int(arena.manifest.extents * settings.namespace_quota) // self.ranks, 1)
        self._table_memory = self._make_table(self.max_extents)
        self.memory = NamespaceMemory(arena, layout, self.geometry)
        self.tier: HostPool | None = None
        """None while the namespace has no memory."""
        self.history = History(settings.eviction_log)
        self.tenants = Tenants(quotas, Path(f"{self.geometry.directory}/{self.geometry.prefix}.tenants"))
        self.learned = LearnedFile(Path(f"{self.geometry.directory}/{self.geometry.prefix}.reuse"))
        self.stored_in: BlockPool | None = None
        """The slots of its local storage, if it has any."""
        self.hints = NamespaceHints(self._pools, self._tenant_limit)
        self.history.totals.hints = self.hints.figures
        self.unverified: set[int] = set()
        """Slots recovered from an earlier service whose checksums no load has verified yet; see ``set_unverified``."""
        self.pending_events: deque[tuple[np.ndarray, np.ndarray, np.ndarray]] = deque()
        self.on_evict: Callable[[HashArray], None] = lambda hashes: None
        """Called with the hashes of evicted blocks."""
        self.take_runs: Callable[[], None] = lambda: None
        """Called before blocks may be removed: carries out what clients have pinned and unpinned by themselves."""
        self.last_used = time.monotonic()
        """When the last client left; meaningless while there are clients."""
        self.draining_until = 0.0
        """``time.monotonic`` until which look-ups find nothing, so that loads in flight can end before a reset."""

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
    def max_slots(self) -> int:
        """Slots that the namespace could have now, with the free extents that its quota allows."""
        more = min(self.max_extents - self.num_extents, self._arena.num_free // self.ranks)
        return (self.num_extents + max(more, 0)) * self.geometry.records_per_extent

    @property
    def storable_slots(self) -> int:
        """Slots that can hold blocks: all but those that clients may stock to copy into."""
        return max(self.max_slots - self.max_slots // STOCK_DIVISOR, 1)

    @property
    def at_quota(self) -> bool:
        """Return True if it has all the extents that its quota allows."""
        return self.num_extents >= self.max_extents

    @property
    def layout_path(self) -> Path:
        """File with the layout, which lets the next service recover the blocks."""
        return Path(f"{self.geometry.directory}/{self.geometry.prefix}.layout")

    def grow(self) -> bool:
        """Take one more extent for every rank. Return False if none is free or the quota is reached."""
        if self.at_quota or self._arena.num_free < self.ranks:
            return False
        self.layout_path.write_text(self.layout.to_json())
        self.memory.add_extent()
        self._resize()
        return True

    def adopt(self, num_extents: int) -> None:
        """Map extents that an earlier service left, even if they exceed the present quota."""
        if num_extents > self.max_extents:
            self._table_memory = self._make_table(num_extents)
        self.memory.map(num_extents)
        self._resize()
        assert self.tier is not None
        self.learned.load(self.tier)

    def shrink(self) -> bool:
        """Return the last extent of every rank to the arena. Return False if one of its slots is in use."""
        if not self.num_extents or self.tier is None:
            return False
        if self.num_extents == 1:
            stats = self.tier.stats()
            if stats.ready or stats.writing:
                return False
        elif self.tier.resize(self.num_slots - self.geometry.records_per_extent):
            return False
        self.memory.remove_extent()
        if not self.num_extents:
            self.tier = None
            self.layout_path.unlink(missing_ok=True)
            self.tenants.remove()
            self.learned.remove()
        self.unverified = {slot for slot in self.unverified if slot < self.num_slots}
        return True

    def _resize(self) -> None:
        if self.tier is None:
            table = PresenceWriter(self._table_memory)
            per_extent = self.geometry.records_per_extent
            self.tier = HostPool(
                self.num_slots,
                per_extent,
                table,
                self._before_removal,
                self._eviction.policy,
                self._eviction.depth_value(self.layout.block_size),
            )
            self.tenants.set_limits(self.tier, self.storable_slots)
            self.tier.mirror(self._table_memory)
        else:
            self.tier.resize(self.num_slots)

    def _before_removal(self) -> None:
        self.take_runs()

    def _make_table(self, extents: int) -> NDArray[np.uint8]:
        size = table_bytes(extents * self.geometry.records_per_extent)
        self.geometry = msgspec.structs.replace(self.geometry, table_bytes=size)
        try:
            return create_shared(Path(self.geometry.table_path), size)
        except OSError as error:
            raise HostMemoryError(
                f"{self.geometry.table_path}: no room for {size} bytes: {error}; enlarge the directory's file system"
            ) from error

    # --- blocks -------------------------------------------------------------------------------------------

    def match(self, hashes: HashArray, start: int) -> Run | None:
        """Pin the leading run of a path from block ``start`` on. Return None if there is none."""
        self.history.count_lookup(len(hashes) - start)
        if self.tier is None:
            self.history.count_missed(hashes, start)
            return None
        lease = self.tier.open_lease()
        try:
            run = self.tier.match(lease, hashes, start)
        except ValueError:
            self.tier.release(lease)
            raise
        if not len(run):
            self.tier.release(lease)
            self.history.count_missed(hashes, start)
            return None
        self.history.totals.hit_blocks += len(run)
        self.history.count_missed(hashes, start + len(run))
        return Run(lease, run.slots, run.generations)

    def grant(self, lease: int, count: int) -> tuple[Int32Array, UInt32Array]:
        """Reserve up to ``count`` slots to copy into, growing before evicting, and mark them empty on every rank.

        Return slots and generations.
        """
        tier = self.tier
        assert tier is not None
        while tier.stats().free < count and self.grow():
            pass
        count = min(count, tier.available)
        taken = tier.reserve(lease, count)
        self.memory.stamp_empty(taken.slots, taken.generations)
        self.history.totals.granted += len(taken)
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
        """Make copied blocks findable below READY parents and free the slots that are not kept.

        Return the status of each block, in the codes of ``Published``.
        """
        assert self.tier is not None
        if self.tenants.limited:
            self.collect_events()
        status = self.tier.publish(lease, parents, hashes, slots, copied.astype(np.uint8), checksums, tenants)
        if self.tenants.limited:
            self.collect_events(MissReason.TENANT_QUOTA)
        self.history.count_published(hashes, status)
        if (status >= 2).any():
            self.tenants.forget_absent(self.tier, hashes[status >= 2])
        return status

    def finish_loads(self, slots: Int32Array, hashes: HashArray, copied: np.ndarray) -> None:
        """Mark loaded blocks as verified. Check the blocks whose load failed and drop those that are corrupt."""
        self._set_verified(slots, hashes, copied != 0)
        failed = np.flatnonzero(copied == 0)
        if not len(failed) or self.tier is None:
            return
        broken = [i for i in failed.tolist() if self._is_corrupt(int(slots[i]), hashes[i].tobytes())]
        if broken:
            lost = np.ascontiguousarray(hashes[broken])
            self.collect_events()
            self.tier.drop(lost)
            self.collect_events(MissReason.BROKEN_RUN)
            self.history.count_corrupt(lost)

    def _is_corrupt(self, slot: int, key: bytes) -> bool:
        assert self.tier is not None
        if not 0 <= slot < self.num_slots:
            return False
        node = self.tier.node(slot)
        if not node.findable or node.hash != key:
            return False  # the slot holds another block by now
        if not self.memory.is_intact(slot, key):
            return True
        self.unverified.discard(slot)
        self.tier.table.set_unverified(np.frombuffer(key, np.uint8)[np.newaxis], False)
        return False

    def set_unverified(self, slots: Iterable[int], hashes: HashArray) -> None:
        """Mark recovered blocks: the loads of clients verify their checksums."""
        assert self.tier is not None
        self.unverified = set(slots)
        self.tier.table.set_unverified(hashes, True)

    def _set_verified(self, slots: Int32Array, hashes: HashArray, chosen: NDArray[np.bool_]) -> None:
        if self.unverified and self.tier is not None:
            self.unverified.difference_update(slots[chosen].tolist())
            self.tier.table.set_unverified(np.ascontiguousarray(hashes[chosen]), False)

    def reset(self) -> int:
        """Forget every block. Return how many there were."""
        if self.tier is None:
            return 0
        forgotten = self.tier.stats().ready
        self.collect_events()
        known = self.tier.coldest(self.history.evictions.capacity).hashes
        self.tier.reset()
        self.history.count_reset(known)
        self.tenants.clear()
        self.unverified.clear()
        return forgotten

    def drop(self, hashes: HashArray) -> int:
        """Forget these blocks and their descendants. Return how many that were."""
        if self.tier is None or not len(hashes):
            return 0
        self.collect_events()
        dropped = self.tier.drop(hashes)
        self.collect_events(MissReason.RESET)
        return dropped

    def collect_events(self, reason: MissReason = MissReason.EVICTED) -> None:
        """Move the tier's events to the eviction log, with ``reason``, and to the queue for clients."""
        if self.tier is None:
            return
        kinds, hashes, parents = self.tier.take_events()
        if not len(kinds):
            return
        removed = [hashes[i].tobytes() for i in np.flatnonzero(kinds == EVENT_REMOVED).tolist()]
        self.history.count_removed(removed, reason)
        self.history.evictions.forget(
            hashes[i].tobytes() for i in np.flatnonzero(kinds == EVENT_STORED).tolist()
        )
        self.tenants.remove_blocks(removed)
        if reason in (MissReason.EVICTED, MissReason.TENANT_QUOTA) and removed:
            self.on_evict(np.frombuffer(b"".join(removed), np.uint8).reshape(len(removed), 32))
        self.pending_events.append((kinds, hashes, parents))

    def _pools(self) -> list[BlockPool]:
        return [pool for pool in (self.tier, self.stored_in) if pool is not None]

    def _tenant_limit(self, hashes: HashArray) -> tuple[int, int] | None:
        """Return the number of the tenant whose blocks these are, and its limit; None without one."""
        if self.tier is None or not self.tenants.limited:
            return None
        slots = self.tier.find(hashes[:1]).slots
        if not len(slots):
            return None
        return self.tenants.limit(self.tier.node(int(slots[0])).tenant)

    def save_learned(self) -> None:
        """Keep what eviction has learned for the next service, from time to time."""
        if self.tier is not None:
            self.learned.save_if_due(self.tier)

    def close(self) -> None:
        """Unmap the memory and remove the presence table."""
        Path(self.geometry.table_path).unlink(missing_ok=True)
        self.memory.close()
        self.tenants.close()
