"""LocalConnector: a slab file addressed by hash, for tests without a scheduler that assigns slots."""

from __future__ import annotations

import threading
from dataclasses import replace

import msgspec
import numpy as np

from fdcache import _core
from fdcache.metadata import HashArray
from fdcache.storage.connector import BatchResult, Outcome, RecordBatch, RunResult, StorageStats
from fdcache.storage.slab import SlabStore
from fdcache.tiers.pool import IS_PENDING, IS_READY, READY, RESERVED
from fdcache.tiers.storage_index import StoragePool, restore


class LocalConnector:
    """A ``SlabStore`` with its own index: the least recently used blocks leave first, from the leaves on.

    A block is stored only below a stored parent. It owns ``store`` and closes it.
    """

    name = "local"

    def __init__(self, store: SlabStore) -> None:
        self.store = store
        self.pool = StoragePool(store.num_slots, retry_after=store.health.retry_after)
        self._lock = threading.Lock()
        scan = store.scan()
        restore(self.pool, [scan])
        self.pool.found(scan.slots)

    def register(self, records: _core.RecordTable) -> None:
        """Any memory will do."""
        self.store.register(records)

    def unregister(self, records: _core.RecordTable) -> None:
        """Nothing was kept of it."""
        self.store.unregister(records)

    def exists(self, hashes: HashArray, timeout: float) -> RunResult:
        """Return how many of the first blocks this rank stores; the other ranks' files are not visible."""
        absent = np.flatnonzero(self.pool.contains(hashes) != READY)
        return RunResult(int(absent[0]) if len(absent) else len(hashes))

    def get(self, batch: RecordBatch, timeout: float, cancel: _core.CancelFlag | None = None) -> BatchResult:
        """Read blocks; one that turns out corrupt, or cannot be read, leaves the index with all below it."""
        with self._lock:
            presence = self.pool.contains(batch.hashes) == READY
            found = self.pool.find(batch.hashes)
            self.pool.hold(found.slots)
        result = BatchResult.of(len(batch), Outcome.MISS)
        outcomes, checksums = result.outcomes, result.checksums
        placed = replace(batch.select(presence), slots=found.slots, generations=found.generations)
        read = self.store.get(placed, timeout, cancel)
        outcomes[presence], checksums[presence] = read.outcomes, read.checksums
        with self._lock:
            unusable = np.isin(read.outcomes, (Outcome.CORRUPT, Outcome.BAD_SLOT))
            self.pool.end_reads(found.slots, read.outcomes == Outcome.MISS, unusable)
        return BatchResult(outcomes, checksums, read.moved_bytes, read.error)

    def put(self, batch: RecordBatch, timeout: float, cancel: _core.CancelFlag | None = None) -> BatchResult:
        """Store blocks, parents first. What finds no room, or no stored parent, is an ERROR."""
        with self._lock:
            self.pool.grow_if_due()
            taken = self.pool.reserve_copies(0, batch.parents, batch.hashes)
            if taken.missing:
                return BatchResult.of(len(batch), Outcome.ERROR, f"{taken.missing} slots are missing")
        mine = taken.status == RESERVED
        placed = replace(batch.select(mine), slots=taken.slots, generations=taken.generations)
        written = self.store.put(placed, timeout, cancel)
        with self._lock:
            bad, no_room = (written.outcomes == each for each in (Outcome.BAD_SLOT, Outcome.NO_ROOM))
            self.pool.end_writes(taken.slots, written.ok, written.checksums, bad, no_room)
        if (
            taken.status == IS_PENDING
        ).any() and written.ok.all():  # orphans, which have joined their parents
            rest = self.put(batch, timeout, cancel)
            return replace(rest, moved_bytes=rest.moved_bytes + written.moved_bytes)
        outcomes = np.full(len(batch), Outcome.ERROR, np.uint8)
        outcomes[taken.status == IS_READY] = Outcome.OK
        outcomes[mine] = written.outcomes
        checksums = np.zeros(len(batch), np.uint64)
        checksums[mine] = written.checksums
        error = written.error
        if error is None and (outcomes == Outcome.ERROR).any():
            error = "a block has no stored parent"
        return BatchResult(outcomes, checksums, written.moved_bytes, error)

    def delete(self, hashes: HashArray, timeout: float) -> BatchResult:
        """Remove blocks, and with each what hangs below it. Raises ``StorageError`` on a file that is read-only."""
        with self._lock:
            present = self.pool.contains(hashes) == READY
            gone = self.pool.discard(self.pool.find(hashes).slots)
            self.store.erase(gone.slots)
        result = BatchResult.of(len(hashes), Outcome.MISS)
        result.outcomes[present] = Outcome.OK
        return result

    def clear(self, timeout: float) -> int:
        """Remove every block of this file; other layouts and ranks have files of their own."""
        with self._lock:
            self.pool.reset()
            return self.store.clear(timeout)

    def stats(self) -> StorageStats:
        """Counts and state."""
        return msgspec.structs.replace(self.store.stats(), blocks=self.pool.stats().ready)

    def close(self) -> None:
        """Close the file."""
        self.store.close()
