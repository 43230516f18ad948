"""SlabStore: one rank's slab file, its slots handed out by whoever keeps the index.

It never raises for what the file system does: blocks fail, the store goes read-only or off by itself, tries again
later, and comes back without a restart.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache.errors import StorageError
from fdcache.layout import KVLayout
from fdcache.metadata import HashArray, Int32Array, StorageScan, UInt32Array, UInt64Array
from fdcache.settings.storage_tier import FsyncPolicy
from fdcache.storage.connector import BatchResult, Outcome, RecordBatch, StorageStats
from fdcache.storage.slab_format import file_name, slots_for
from fdcache.storage.slab_handle import ScanProgress, SlabHandle, SlabLock, is_same_file, storage_error
from fdcache.storage.slab_health import SlabHealth
from fdcache.storage.tally import StorageTally


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
        self._health = SlabHealth(self.path, retry_after)
        self._file_lock = SlabLock(self.path)
        try:
            self._file = self._open(on_progress)
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
        """Read blocks from their slots. A slot found corrupt is emptied."""

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
            outcomes, checksums, moved_bytes, number = move(self._file.core, blocks)
        finally:
            self._leave()
        self._tally.add(outcomes, moved_bytes, writing=writing)
        if number:
            self._health.failed(number)
        elif writing and (outcomes == Outcome.OK).any():
            self._health.recovered()
        error = self._health.error if number else _in_words(outcomes, self.path)
        return BatchResult(outcomes, checksums, moved_bytes, error)

    def erase(self, slots: Int32Array) -> None:
        """Empty slots. Raises a ``StorageError`` when the file cannot be written."""
        number = self._file.core.erase(slots)
        if number:
            self._health.failed(number)
            raise storage_error(number, self.path)

    def clear(self, timeout: float) -> int:
        """Empty every slot; returns how many held a block. Raises a ``StorageError`` when that fails."""
        slots = self._file.core.entries()[0]
        self.erase(slots)
        if self._fsync is not FsyncPolicy.NEVER:
            self._file.core.sync()
        return len(slots)

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
        self._file.close()
        self._file = opened
        self._health.recovered()
        return True

    def _sync_each(self, interval: float) -> None:
        while not self._closed.wait(interval):
            if self._file.core.unsynced and (number := self._file.core.sync()):
                self._health.failed(number)

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
        if self._fsync is not FsyncPolicy.NEVER and self._file.core.unsynced:
            with suppress(OSError):
                self._file.core.sync()
        self._file.close()
        self._file_lock.release()


_Blocks = tuple[Int32Array, UInt32Array, UInt32Array, HashArray, HashArray, UInt64Array, UInt64Array]
"""Slots, generations, host generations, hashes, parents; where records and headers lie."""

_Moved = tuple[NDArray[np.uint8], UInt64Array, int, int]
"""Outcomes, checksums, bytes moved, errno."""


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
