"""SlabStore: one rank's slab file, its slots handed out by whoever keeps the index.

Moving blocks never raises for what the file system does. A record that cannot be read or written costs its block
and its slot; a full disk leaves the slots that have their room already. For anything worse the store goes read-only or
off by itself, tries again later, and comes back without a restart.
"""

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
from fdcache.storage.connector import BatchResult, Outcome, RecordBatch, StorageStats
from fdcache.storage.slab_faults import RecordFaults
from fdcache.storage.slab_format import file_name, slots_for
from fdcache.storage.slab_handle import (
    UNWRITABLE,
    ScanProgress,
    SlabHandle,
    SlabLock,
    is_same_file,
    storage_error,
)
from fdcache.storage.slab_health import SlabHealth
from fdcache.storage.slab_room import SlabRoom
from fdcache.storage.tally import StorageTally

logger = logging.getLogger("fdcache.storage")


class SlabStore:
    """The slab file of ``layout`` and ``rank`` in ``folder``, made when it is not there, of at most ``size`` bytes.

    Raises ``StorageBusyError`` when another process has it, ``StorageFormatError`` for a file that is none of this
    layout and version, and the errors of ``storage_error`` when it cannot be opened. ``retry_after``: seconds until
    a failed store is tried again.
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
        self._using = 0
        self._tally = StorageTally()
        self._closed = threading.Event()
        self._slots = slots_for(size, layout)
        self.path = folder / file_name(layout.fingerprint, rank)
        self.retry_after = retry_after
        self._health = SlabHealth(self.path, retry_after)
        self._faults = RecordFaults()
        self._file_lock = SlabLock(self.path)
        try:
            self._file = self._open(on_progress)
            self._room = self._look_for_room()
            self._device = folder.stat().st_dev
        except BaseException:
            self._file_lock.release()
            raise
        self._syncer: threading.Thread | None = None
        if fsync is FsyncPolicy.INTERVAL:
            self._syncer = threading.Thread(
                target=self._sync_each, args=(fsync_interval,), name="fdcache-fsync", daemon=True
            )
            self._syncer.start()

    def _open(self, on_progress: ScanProgress | None) -> SlabHandle:
        return SlabHandle(self.path, self._layout, self._rank, self._slots, self._threads, on_progress)

    def _look_for_room(self) -> SlabRoom:
        room = SlabRoom(self.path, self._slots)
        try:
            room.check_promise()
        except OSError as error:
            self._file.close()
            raise storage_error(error.errno or errno.EIO, self.path) from error
        room.found(self._file.core.entries()[0])
        return room

    @property
    def num_slots(self) -> int:
        """Slots of the file."""
        return self._slots

    def scan(self) -> StorageScan:
        """What the file holds now, for the scheduler's index."""
        slots, generations, hashes, parents, checksums, times = self._file.core.entries()
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

    # --- moving blocks ------------------------------------------------------------------------------------

    def register(self, records: _core.RecordTable) -> None:
        """Any memory will do."""

    def unregister(self, records: _core.RecordTable) -> None:
        """Nothing was kept of it."""

    def get(self, batch: RecordBatch, timeout: float, cancel: _core.CancelFlag | None = None) -> BatchResult:
        """Read blocks from their slots. A slot found corrupt or bad is emptied."""

        def read(file: _core.SlabFile, blocks: _Blocks) -> _Moved:
            return file.read(*blocks, timeout, self._verify, cancel)

        return self._move(batch, read, writing=False)

    def put(self, batch: RecordBatch, timeout: float, cancel: _core.CancelFlag | None = None) -> BatchResult:
        """Write blocks into their slots, whatever these held."""
        every_batch = self._fsync is FsyncPolicy.ALWAYS

        def write(file: _core.SlabFile, blocks: _Blocks) -> _Moved:
            return file.write(*blocks, timeout, every_batch, time.time_ns() // 1_000_000, cancel)

        return self._move(batch, write, writing=True)

    def _move(
        self, batch: RecordBatch, move: Callable[[_core.SlabFile, _Blocks], _Moved], *, writing: bool
    ) -> BatchResult:
        blocks = _blocks(batch)
        if (reason := self._enter(writing=writing)) is not None:
            result = BatchResult.of(len(batch), Outcome.ERROR, reason)
            self._tally.add(result.outcomes, 0, writing=writing)
            return result
        try:
            outcomes, checksums, errors, moved_bytes, number = move(self._file.core, blocks)
            number = number or self._judge(blocks[0], outcomes, errors, writing=writing)
        finally:
            self._leave()
        self._tally.add(outcomes, moved_bytes, writing=writing)
        if number:
            self._health.failed(number)
        if writing:
            self._note_room(blocks[0], outcomes, errors)
        error = self._health.error if number else _in_words(outcomes, self.path)
        return BatchResult(outcomes, checksums, moved_bytes, error)

    def _judge(
        self, slots: Int32Array, outcomes: NDArray[np.uint8], errors: Int32Array, *, writing: bool
    ) -> int:
        """Tell bad slots in ``outcomes`` from a file that fails; returns the errno of the latter, or 0."""
        moved = bool((outcomes == Outcome.OK).any())
        failed = np.flatnonzero(outcomes == Outcome.ERROR)
        if not len(failed):
            if moved:
                self._faults.moved(writing=writing)
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
                "%s: slots %s cannot be %s (%s); their blocks are lost and they are not used again",
                self.path,
                ", ".join(map(str, sorted(verdict.bad))),
                "written" if writing else "read",
                os.strerror(int(errors[bad[0]])),
            )
            if not writing:  # what is to be written was emptied first
                number = self._file.core.erase(slots[bad]) or number
        return number

    def _note_room(self, slots: Int32Array, outcomes: NDArray[np.uint8], errors: Int32Array) -> None:
        """See whether a write found the disk full, or that it has room again."""
        stored = slots[outcomes == Outcome.OK]
        refused = outcomes == Outcome.NO_ROOM
        grew = len(stored) > 0 and self._room.placed(stored)
        if refused.any():
            self._health.filled(int(errors[refused][0]))
            self._room.ran_out(int(refused.sum()))
        elif len(stored):
            self._health.wrote(grew=grew)

    def erase(self, slots: Int32Array) -> None:
        """Empty slots. Raises a ``StorageError`` when the file cannot be written."""
        with self._use(writing=True) as file:
            self._check(file.core.erase(slots))

    def clear(self, timeout: float) -> int:
        """Empty every slot; returns how many held a block. Raises a ``StorageError`` when that fails."""
        with self._use(writing=True) as file:
            slots = file.core.entries()[0]
            self._check(file.core.erase(slots))
            if self._fsync is not FsyncPolicy.NEVER:
                self._check(file.core.sync())
            return len(slots)

    def _check(self, number: int) -> None:
        if number:
            self._health.failed(number)
            raise storage_error(number, self.path)

    # --- failing and coming back ----------------------------------------------------------------------------

    def _enter(self, *, writing: bool) -> str | None:
        """Begin a batch, or say why not."""
        with self._lock:
            if self._closed.is_set():
                return f"{self.path}: closed"
            if self._health.look_is_due():
                self._look()
            if self._health.blocks(writing=writing) and not (self._health.try_is_due() and self._try_again()):
                return self._health.error
            self._using += 1
            return None

    @contextmanager
    def _use(self, *, writing: bool) -> Iterator[SlabHandle]:
        """The open file, which nobody closes meanwhile. Raises a ``StorageError`` when it is of no use."""
        if (reason := self._enter(writing=writing)) is not None:
            raise StorageError(reason)
        try:
            yield self._file
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._using -= 1
            self._idle.notify_all()

    def _look(self) -> None:
        """Turn off when the file that is open is not the one of that name any more: its mount may be gone."""
        try:
            same = is_same_file(self._file.header_fd, self.path)
        except OSError as error:
            self._health.failed(error.errno or errno.EIO)
            return
        if not same:
            self._health.failed(errno.ENOENT)

    def _try_again(self) -> bool:
        """Whether a failed store may be used; one that was off is opened anew."""
        if not self._health.blocks(writing=False):
            return True
        if self._using:
            return False
        try:
            # Never into the empty folder that a vanished mount leaves behind.
            if not self.path.exists() and self.path.parent.stat().st_dev != self._device:
                raise storage_error(errno.ENOENT, self.path)
            self._file_lock.renew()
            opened = self._open(None)
        except (StorageError, OSError) as error:
            self._health.still_fails(error)
            return False
        if number := opened.probe():
            opened.close()
            self._health.still_fails(storage_error(number, self.path))
            return False
        self._file.close()
        self._file = opened
        self._faults.answered()
        self._health.recovered()
        return True

    def _sync_each(self, interval: float) -> None:
        while not self._closed.wait(interval):
            with self._lock:
                if self._health.blocks(writing=False):
                    continue  # a batch opens it anew
                self._using += 1
            try:
                if self._file.core.unsynced and (number := self._file.core.sync()):
                    self._health.failed(number)
            finally:
                self._leave()

    def stats(self) -> StorageStats:
        """Counts and state."""
        return self._tally.stats(
            self.name,
            self._health.state,
            self._health.error,
            capacity_blocks=self.num_slots,
            blocks_found_on_start=self._file.found,
            corrupt_found_on_start=self._file.corrupt,
        )

    def close(self) -> None:
        """Wait for the batches under way, sync unless told never to, give the file back."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            self._idle.wait_for(lambda: self._using == 0)
        if self._syncer is not None:
            self._syncer.join()
        unsynced = self._fsync is not FsyncPolicy.NEVER and self._file.core.unsynced
        if unsynced and (number := self._file.core.sync()):
            logger.warning(
                "%s: the last blocks may not outlive a power loss: %s", self.path, os.strerror(number)
            )
        self._file.close()
        self._file_lock.release()


_Blocks = tuple[Int32Array, UInt32Array, UInt32Array, HashArray, HashArray, UInt64Array, UInt64Array]
"""Slots, generations, host generations, hashes, parents; where records and headers lie."""

_Moved = tuple[NDArray[np.uint8], UInt64Array, Int32Array, int, int]
"""Outcomes, checksums, errno by block, bytes moved, errno of headers or a sync."""


def _blocks(batch: RecordBatch) -> _Blocks:
    if batch.slots is None or batch.generations is None:
        raise ValueError("a slab needs the slots and generations of a batch")
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


def _in_words(outcomes: NDArray[np.uint8], path: Path) -> str | None:
    found = np.bincount(outcomes, minlength=len(Outcome)).tolist()
    failed = [
        f"{found[outcome]} {outcome.name.lower().replace('_', ' ')}"
        for outcome in Outcome
        if outcome is not Outcome.OK and found[outcome]
    ]
    return f"{path.name}: {', '.join(failed)}" if failed else None
