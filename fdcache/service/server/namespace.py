"""Namespace: the host-tier blocks of one model and rank count, and the shared memory that holds them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from fdcache._core import MemoryGuard, PresenceWriter
from fdcache.errors import HostMemoryError, UnsupportedLayoutError
from fdcache.layout import KVLayout
from fdcache.metadata import CacheLevel, HashArray, Int32Array, UInt32Array, UInt64Array
from fdcache.service.server.arena import MOST_EXTENTS, Arena
from fdcache.service.server.eviction_order import OrderFile
from fdcache.service.server.history import History
from fdcache.service.server.host_pool import HostPool
from fdcache.service.server.namespace_hints import NamespaceHints
from fdcache.service.server.namespace_memory import NamespaceMemory
from fdcache.service.server.router_feed import RouterFeed
from fdcache.service.server.tenants import Quotas, Tenants
from fdcache.service.wire.shared_memory import Geometry, create_shared, table_bytes
from fdcache.service.wire.views import MissReason
from fdcache.settings.cache import EvictionPolicy
from fdcache.settings.server import ServerSettings
from fdcache.tiers.pool import EVENT_REMOVED, EVENT_STORED, BlockPool
from fdcache.tiers.reuse import LearnedFile

log = logging.getLogger("fdcache.service.server")

STOCK_DIVISOR = 4
"""The clients of a namespace may together stock 1/4 of its slots to copy into."""


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
        self,
        arena: Arena,
        layout: KVLayout,
        settings: ServerSettings,
        quotas: Quotas,
        eviction: EvictionPolicy,
        feed: RouterFeed | None = None,
    ) -> None:
        self.layout = layout
        self._eviction = eviction
        self.id = layout.fingerprint.hex()[:16]
        self.ranks = layout.record_ranks
        self.feed = feed
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
                f"{self.geometry.extent_bytes} bytes; start the service with --host-memory of at least "
                f"{MOST_EXTENTS * self.geometry.slot_bytes}, and once with --no-recover: the extents of an earlier "
                "arena keep their size"
            )
        self._quota = settings.namespace_quota
        self._table_memory = self._make_table(self._table_bytes(self.max_extents))
        self.memory = NamespaceMemory(arena, layout, self.geometry)
        self._tier: HostPool | None = None
        self.history = History(settings.eviction_log)
        self.tenants = Tenants(quotas, Path(f"{self.geometry.directory}/{self.geometry.prefix}.tenants"))
        self.learned = LearnedFile(Path(f"{self.geometry.directory}/{self.geometry.prefix}.reuse"))
        self.order = OrderFile(Path(f"{self.geometry.directory}/{self.geometry.prefix}.order"))
        self.stored_in: BlockPool | None = None
        """The slots of its local storage, if it has any."""
        self.hints = NamespaceHints(self.pools, self._tenant_limit)
        self.history.totals.hints = self.hints.figures
        self.unverified: set[int] = set()
        """Slots recovered from an earlier service whose checksums no load has verified yet; see ``set_unverified``."""
        self._leaving: set[int] = set()
        """Slots in use whose blocks were to be forgotten; their headers are cleared once they are free."""
        self.pending_events: deque[tuple[np.ndarray, np.ndarray, np.ndarray]] = deque()
        self.on_evict: Callable[[HashArray], None] = lambda hashes: None
        """Called with the hashes of evicted blocks."""
        self.on_forget: Callable[[HashArray | None], None] = lambda hashes: None
        """Called with blocks that were to be forgotten, None for all, although their records may still be there."""
        self.take_runs: Callable[[], None] = lambda: None
        """Called before blocks may be removed: carries out what clients have pinned and unpinned by themselves."""
        self.last_used = time.monotonic()
        """When the last client left; meaningless while there are clients."""
        self.draining_until = 0.0
        """``time.monotonic`` until which look-ups find nothing, so that loads in flight can end before a reset."""

    @property
    def tier(self) -> HostPool | None:
        """Its blocks; None while the namespace has no memory."""
        return self._tier

    @tier.setter
    def tier(self, tier: HostPool | None) -> None:
        self._tier = tier
        if self.feed is not None:
            self.feed.attach(CacheLevel.HOST, tier)

    # --- size ---------------------------------------------------------------------------------------------

    @property
    def num_extents(self) -> int:
        """Extents of each rank."""
        return self.memory.num_extents

    @property
    def max_extents(self) -> int:
        """Extents of each rank that its quota allows."""
        return max(int(self._arena.manifest.extents * self._quota) // self.ranks, 1)

    @property
    def needed_extents(self) -> int:
        """Extents of each rank that its blocks would fill."""
        ready = self.tier.stats().ready if self.tier is not None else 0
        return -(-ready // self.geometry.records_per_extent)

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

    def grow(self) -> bool:
        """Take one more extent for every rank. Return False if none is free or the quota is reached.

        What the directory has no room for is logged, and counts as not free.
        """
        if self.at_quota or self._arena.num_free < self.ranks:
            return False
        try:
            self.memory.add_extent()
        except (OSError, HostMemoryError) as error:
            log.warning("namespace %s cannot grow: %s", self.id, error)
            return False
        self._resize()
        return True

    def adopt(self, num_extents: int) -> None:
        """Map extents that an earlier service left, even if they exceed the present quota."""
        if num_extents > self.max_extents:
            self._table_memory = self._make_table(self._table_bytes(num_extents))
        self.memory.map(num_extents)
        self._begin_again()

    def renew(self, num_extents: int) -> None:
        """Keep ``num_extents`` extents of each rank, and begin with an empty tier: their headers say what is there."""
        self.tier = None
        while self.num_extents > num_extents:
            self.memory.remove_extent()
        self.tenants.clear()
        self._table_memory = self._make_table(self._table_bytes(max(self.max_extents, num_extents)))
        self._begin_again()

    def _begin_again(self) -> None:
        self._resize()
        if self.tier is not None:
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
            self.memory.layout_path.unlink(missing_ok=True)
            self.tenants.remove()
            self.learned.remove()
            self.order.remove()
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
                self._eviction,
            )
            self.tier.set_states(self.layout.page_records, self.layout.num_states)
            self.tenants.set_limits(self.tier, self.storable_slots)
            self.tier.mirror(self._table_memory)
        else:
            self.tier.resize(self.num_slots)

    def _before_removal(self) -> None:
        self.take_runs()

    def _make_table(self, size: int) -> NDArray[np.uint8]:
        self.geometry = msgspec.structs.replace(self.geometry, table_bytes=size)
        try:
            memory = create_shared(Path(self.geometry.table_path), size)
        except OSError as error:
            raise HostMemoryError(
                f"{self.geometry.table_path}: no room for {size} bytes: {error}; enlarge the directory's file system"
            ) from error
        self._table_guard = MemoryGuard(memory)
        return memory

    def _table_bytes(self, extents: int) -> int:
        return table_bytes(extents * self.geometry.records_per_extent)

    def make_lost_files(self) -> bool:
        """Make the files anew that others removed or truncated. Return True if clients have to register again.

        Raises ``HostMemoryError`` if there is no room for them; the mapped memory stays in use then.
        """
        try:
            extents = self.memory.make_lost_files()
            self.tenants.keep_file()
        except OSError as error:
            raise HostMemoryError(
                f"namespace {self.id}: its files vanished from {self.geometry.directory}, which has no room for new "
                f"ones: {error}; its blocks stay usable until the service ends"
            ) from error
        is_table_lost = not self._has_whole_table()
        if is_table_lost:
            self._move_table()
        if extents or is_table_lost:
            lost = f"{extents} extents" + (" and the table" if is_table_lost else "")
            log.warning(
                "namespace %s: %s vanished from %s and were made anew", self.id, lost, self.geometry.directory
            )
        return is_table_lost

    def _has_whole_table(self) -> bool:
        try:
            return Path(self.geometry.table_path).stat().st_size >= self.geometry.table_bytes
        except OSError:
            return False

    def _move_table(self) -> None:
        self._table_memory = self._make_table(self.geometry.table_bytes)
        if self.tier is None:
            return
        self.tier.move_table(PresenceWriter(self._table_memory), self._table_memory)
        slots = np.array(sorted(self.unverified), np.int32)
        if len(slots):
            hashes = np.ascontiguousarray(self.memory.headers(0, slots)["hash"])
            self.tier.table.set_unverified(hashes, True)

    # --- blocks -------------------------------------------------------------------------------------------

    def match(self, hashes: HashArray, start: int) -> Run | None:
        """Pin the leading run of a path from block ``start`` on. Return None if there is none."""
        self.history.count_lookup(len(hashes) - start)
        if self.tier is None:
            self.history.count_missed(hashes, start)
            return None
        lease = self.tier.open_lease()
        run = self.tier.match(lease, hashes, start)
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
        self._leaving.difference_update(taken.slots.tolist())
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
        self.memory.clear(self.tier.free_among(np.ascontiguousarray(slots[status != 0])))
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
        known = self.tier.coldest(min(self.history.evictions.capacity, self.num_slots)).hashes
        self.tier.reset()
        self._clear_headers(np.arange(self.num_slots, dtype=np.int32))
        self.on_forget(None)
        self.history.count_reset(known)
        self.tenants.clear()
        self.unverified.clear()
        return forgotten

    def drop(self, hashes: HashArray, reason: MissReason = MissReason.RESET) -> int:
        """Forget these blocks and their descendants, and what is left of evicted ones. Return how many were there."""
        if self.tier is None:
            return 0
        self.collect_events()
        before = self.tier.stats().ready
        self._clear_headers(self.tier.drop(hashes))
        self.collect_events(reason)
        return before - self.tier.stats().ready

    def _clear_headers(self, forgotten: Int32Array) -> None:
        """Forget what these slots held, and all that are free: an evicted block may be one of a deleted prefix."""
        assert self.tier is not None
        self._leaving.update(forgotten.tolist())
        free = self.tier.free_among(np.arange(self.num_slots, dtype=np.int32))
        self.memory.clear(free)
        self._leaving.difference_update(free.tolist())

    def clear_left(self) -> None:
        """Forget what slots held whose users have ended since their blocks were to be forgotten."""
        if self._leaving and self.tier is not None:
            free = self.tier.free_among(np.fromiter(self._leaving, np.int32))
            self.memory.clear(free)
            self._leaving.difference_update(free.tolist())

    def collect_events(self, reason: MissReason = MissReason.EVICTED) -> None:
        """Move the tier's events to the eviction log, with ``reason``, and to the queue for clients."""
        if self.tier is None:
            return
        kinds, hashes, parents = self.tier.take_events()
        if not len(kinds):
            return
        if self.feed is not None:
            self.feed.tier_events(CacheLevel.HOST, kinds, hashes)
        removed = [hashes[i].tobytes() for i in np.flatnonzero(kinds == EVENT_REMOVED).tolist()]
        self.history.count_removed(removed, reason)
        self.history.evictions.forget(
            hashes[i].tobytes() for i in np.flatnonzero(kinds == EVENT_STORED).tolist()
        )
        self.tenants.remove_blocks(removed)
        if removed:
            tell = (
                self.on_evict if reason in (MissReason.EVICTED, MissReason.TENANT_QUOTA) else self.on_forget
            )
            tell(np.frombuffer(b"".join(removed), np.uint8).reshape(len(removed), 32))
        self.pending_events.append((kinds, hashes, parents))

    def forget_client(self, session: int) -> None:
        """Forget the open hints of a client that has gone, and what its device had."""
        self.hints.forget(session)
        if self.feed is not None:
            self.feed.forget_device(session)

    def deleting(self, hashes: HashArray) -> AbstractContextManager[None]:
        """Have what routers are told of these blocks, and of those that are removed meanwhile, forgotten."""
        return nullcontext() if self.feed is None else self.feed.deleting(hashes)

    def pools(self) -> list[BlockPool]:
        """Return its tiers that have slots: host, then local storage."""
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
        if self.tier is not None and time.monotonic() >= self.learned.due:
            self.learned.save_if_due(self.tier)

    def close(self) -> None:
        """Unmap the memory and remove the presence table. What the next service needs is kept in files."""
        if self.tier is not None:
            self.learned.save(self.tier)
            self.order.save(self.tier, self.num_slots)
        Path(self.geometry.table_path).unlink(missing_ok=True)
        self.memory.close()
        self.tenants.close()
