"""One rank's slab file as a storage, whose slots the scheduler assigns."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache.errors import StorageError
from fdcache.layout import KVLayout
from fdcache.metadata import HashArray, Int32Array, StorageScan, UInt32Array, UInt64Array
from fdcache.settings.cache import FsyncPolicy
from fdcache.storage.connector import BatchResult, Outcome, RecordBatch, StorageCounters, StorageStats
from fdcache.storage.slab_file import (
    UNWRITABLE,
    ScanProgress,
    SlabHandle,
    SlabLock,
    device_of,
    is_same_file,
    storage_error,
)
from fdcache.storage.slab_format import file_name, slots_for
from fdcache.storage.slab_health import DiskRoom, RecordFaults, SlabHealth

logger = logging.getLogger(__name__)

_Blocks = tuple[Int32Array, UInt32Array, UInt32Array, HashArray, HashArray, UInt64Array, UInt64Array]
"""Slots, generations, host generations, hashes, parents; addresses of records and headers."""

_Moved = tuple[NDArray[np.uint8], UInt64Array, Int32Array, int, int]
"""Outcomes, checksums, errno of each block; bytes moved; errno of the headers or of a sync."""


class SlabStore:
    """The slab file of ``layout`` and ``rank`` in ``folder``, at most ``size`` bytes; created if it does not exist.

        store = SlabStore(folder, layout, rank=0, size=64 << 30)
        result = store.put(batch, timeout=10.0)

    Moving blocks never raises for errors of the file system. A record that cannot be read or written costs its block
    and its slot; a full disk leaves the slots that have space. After any other failure the store turns read-only or
    off, tries again after ``retry_after`` seconds, and comes back without a restart.

    Raises ``StorageBusyError`` when another process has the file, ``StorageFormatError`` for a file of another layout
    or version, and the errors of ``storage_error`` when it cannot be opened.
    """

    name = "local"

    def __init__(
        self,
        folder: Path,
        layout: KVLayout,
        *,
        rank: int,
        size: int,
        fsync: FsyncPolicy = FsyncPolicy.INTERVAL,
        fsync_interval: float = 5.0,
        verify: bool = True,
        threads: int = 8,
        retry_after: float = 5.0,
        on_progress: ScanProgress | None = None,
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._fsync = fsync
        self._verify = verify
        self._threads = threads
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._in_use = 0
        self._counters = StorageCounters()
        self._closed = threading.Event()
        self.num_slots = slots_for(size, layout)
        self.path = folder / file_name(layout.fingerprint, rank)
        self.health = SlabHealth(self.path, retry_after)
        self._faults = RecordFaults()
        self._file_lock = SlabLock(self.path)
        try:
            self.file, self._room = self._open(on_progress)
            self._device = device_of(folder)
        except BaseException:
            self._file_lock.release()
            raise
        self._syncer: threading.Thread | None = None
        if fsync is FsyncPolicy.INTERVAL:
            self._syncer = threading.Thread(
                target=self._sync_each, args=(fsync_interval,), name="fdcache-fsync", daemon=True
            )
            self._syncer.start()

    def _open(
        self, on_progress: ScanProgress | None = None, *, probe: bool = False
    ) -> tuple[SlabHandle, DiskRoom]:
        file = SlabHandle(
            self._file_lock, self.path, self._layout, self._rank, self.num_slots, self._threads, on_progress
        )
        try:
            if probe and (number := file.probe()):
                raise storage_error(number, self.path)
            return file, DiskRoom(self.path, self.num_slots, file.core.entries()[0])
        except StorageError:
            file.close()
            raise

    def scan(self) -> StorageScan:
        """Return the blocks in the file, for the scheduler's index."""
        slots, generations, hashes, parents, checksums, times = self.file.core.entries()
        return StorageScan(
            rank=self._rank,
            capacity=self.num_slots,
            slots=slots,
            generations=generations,
            hashes=hashes,
            parents=parents,
            checksums=checksums,
            written_ms=times,
        )

    # --- blocks ---------------------------------------------------------------------------------------------

    def register(self, records: _core.RecordTable) -> None:
        """Do nothing: a file is read into any memory."""

    def unregister(self, records: _core.RecordTable) -> None:
        """Do nothing, as ``register``."""

    def get(self, batch: RecordBatch, timeout: float, cancel: _core.CancelFlag | None = None) -> BatchResult:
        """Read blocks from their slots; empty slots that are found corrupt or bad."""

        def read(file: _core.SlabFile, blocks: _Blocks) -> _Moved:
            return file.read(*blocks, timeout, self._verify, cancel)

        return self._move(batch, read, writing=False)

    def put(self, batch: RecordBatch, timeout: float, cancel: _core.CancelFlag | None = None) -> BatchResult:
        """Write blocks into their slots, replacing what the slots held."""
        sync = self._fsync is FsyncPolicy.ALWAYS

        def write(file: _core.SlabFile, blocks: _Blocks) -> _Moved:
            return file.write(*blocks, timeout, sync, time.time_ns() // 1_000_000, cancel)

        return self._move(batch, write, writing=True)

    def _move(
        self, batch: RecordBatch, move: Callable[[_core.SlabFile, _Blocks], _Moved], *, writing: bool
    ) -> BatchResult:
        blocks = _blocks_of(batch)
        if (reason := self._enter(writing=writing)) is not None:
            result = BatchResult.of(len(batch), Outcome.ERROR, reason)
            self._counters.add(result.outcomes, 0, writing=writing)
            return result
        try:
            outcomes, checksums, errors, moved_bytes, number = move(self.file.core, blocks)
            number = number or self._judge(blocks[0], outcomes, errors, writing=writing)
        finally:
            self._leave()
        self._counters.add(outcomes, moved_bytes, writing=writing)
        if number:
            self.health.failed(number)
        if writing:
            self._note_room(blocks[0], outcomes, errors)
        error = self.health.error if number else _failures(outcomes, self.path)
        return BatchResult(outcomes, checksums, moved_bytes, error)

    def _judge(
        self, slots: Int32Array, outcomes: NDArray[np.uint8], errors: Int32Array, *, writing: bool
    ) -> int:
        """Mark bad slots in ``outcomes``; return the errno of a file that fails as a whole, or 0."""
        moved = bool((outcomes == Outcome.OK).any())
        failed = np.flatnonzero(outcomes == Outcome.ERROR)
        if not len(failed):
            if moved:
                self._faults.succeeded(writing=writing)
            return 0
        unwritable = errors[np.isin(errors, list(UNWRITABLE))]
        if len(unwritable):
            return int(unwritable[0])
        verdict = self._faults.judge(set(slots[failed].tolist()), moved=moved, writing=writing)
        bad = failed[np.isin(slots[failed], list(verdict.bad))]
        outcomes[bad] = Outcome.BAD_SLOT
        number = int(errors[failed[0]]) if verdict.medium_fails else 0
        if len(bad):
            logger.warning(
                "%s: slots %s cannot be %s (%s); their blocks are lost, and the slots are not used again",
                self.path,
                ", ".join(map(str, sorted(verdict.bad))),
                "written" if writing else "read",
                os.strerror(int(errors[bad[0]])),
            )
            if not writing:  # a write empties the slot's header before it writes the record
                number = self.file.core.erase(slots[bad]) or number
        return number

    def _note_room(self, slots: Int32Array, outcomes: NDArray[np.uint8], errors: Int32Array) -> None:
        """Update the state after a write that found the disk full, or that shows that it has room again."""
        stored = slots[outcomes == Outcome.OK]
        refused = outcomes == Outcome.NO_ROOM
        grew = len(stored) > 0 and self._room.wrote(stored)
        if refused.any():
            self.health.no_room(int(errors[refused][0]))
            self._room.ran_out(int(refused.sum()))
        elif len(stored):
            self.health.wrote(grew=grew)

    def erase(self, slots: Int32Array) -> None:
        """Empty slots. Raises ``StorageError`` when the file cannot be written."""
        with self._use(writing=True) as file:
            self._check(file.core.erase(slots))

    def clear(self, timeout: float) -> int:
        """Empty every slot; return how many held a block. Raises ``StorageError`` when that fails."""
        with self._use(writing=True) as file:
            slots = file.core.entries()[0]
            self._check(file.core.erase(slots))
            if self._fsync is not FsyncPolicy.NEVER:
                self._check(file.core.sync())
            return len(slots)

    def _check(self, number: int) -> None:
        if number:
            self.health.failed(number)
            raise storage_error(number, self.path)

    # --- failure and recovery -------------------------------------------------------------------------------

    def _enter(self, *, writing: bool) -> str | None:
        """Begin a call that uses the file; return why that is not possible, or None."""
        with self._lock:
            if self._closed.is_set():
                return f"{self.path}: closed"
            if not self.health.refuses(writing=False) and self.health.check_is_due():
                self._check_name()
            if self.health.refuses(writing=writing) and not (self.health.retry_is_due() and self._reopen()):
                return self.health.error
            self._in_use += 1
            return None

    def _leave(self) -> None:
        with self._lock:
            self._in_use -= 1
            self._idle.notify_all()

    @contextmanager
    def _use(self, *, writing: bool) -> Iterator[SlabHandle]:
        """Keep the file open. Raises ``StorageError`` when it cannot be used."""
        if (reason := self._enter(writing=writing)) is not None:
            raise StorageError(reason)
        try:
            yield self.file
        finally:
            self._leave()

    def _check_name(self) -> None:
        """Turn off when ``path`` no longer names the open file; its mount may be gone."""
        try:
            same = is_same_file(self.file.header_fd, self.path)
        except OSError as error:
            self.health.failed(error.errno or errno.EIO)
            return
        if not same:
            self.health.failed(errno.ENOENT)

    def _reopen(self) -> bool:
        """Return True when a failed store may be used again; open the file anew if it was off."""
        if not self.health.refuses(writing=False):
            return True
        if self._in_use:
            return False
        try:
            # Never write into the empty folder that a vanished mount leaves behind.
            if not self.path.exists() and device_of(self.path.parent) != self._device:
                raise storage_error(errno.ENOENT, self.path)
            self._file_lock.renew()
            opened, room = self._open(probe=True)
        except (StorageError, OSError) as error:
            self.health.retry_failed(error)
            return False
        self.file.close()
        self.file, self._room = opened, room
        self._faults.recovered()
        self.health.recovered()
        return True

    def _sync_each(self, interval: float) -> None:
        while not self._closed.wait(interval):
            with self._lock:
                if self.health.refuses(writing=False):
                    continue  # the next batch opens the file anew
                self._in_use += 1
            try:
                if self.file.core.unsynced and (number := self.file.core.sync()):
                    self.health.failed(number)
            finally:
                self._leave()

    def stats(self) -> StorageStats:
        """Return counts and state."""
        return self._counters.stats(
            self.name,
            self.health.state,
            self.health.error,
            capacity_blocks=self.num_slots,
            blocks_found_on_start=self.file.found,
            corrupt_found_on_start=self.file.corrupt,
        )

    def close(self) -> None:
        """Wait for calls in progress, sync unless the policy is never, and release the file."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            self._idle.wait_for(lambda: self._in_use == 0)
        if self._syncer is not None:
            self._syncer.join()
        unsynced = self._fsync is not FsyncPolicy.NEVER and self.file.core.unsynced
        if unsynced and (number := self.file.core.sync()):
            logger.warning("%s: a power loss may lose the last blocks: %s", self.path, os.strerror(number))
        self.file.close()
        self._file_lock.release()


def _blocks_of(batch: RecordBatch) -> _Blocks:
    if batch.slots is None or batch.generations is None:
        raise ValueError("a slab file needs the slots and generations of a batch")
    records, headers = batch.records.addresses(batch.host_slots)
    return (
        batch.slots,
        batch.generations,
        batch.host_generations,
        batch.hashes,
        batch.parents,
        records,
        headers,
    )


def _failures(outcomes: NDArray[np.uint8], path: Path) -> str | None:
    """Return the failed outcomes with their counts, or None when there are none."""
    found = np.bincount(outcomes, minlength=len(Outcome)).tolist()
    failed = [
        f"{found[outcome]} {outcome.name.lower().replace('_', ' ')}"
        for outcome in Outcome
        if outcome is not Outcome.OK and found[outcome]
    ]
    return f"{path.name}: {', '.join(failed)}" if failed else None
