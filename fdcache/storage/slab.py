"""SlabStore: one rank's slab file, its slots handed out by whoever keeps the index.

It never raises for what the file system does: blocks fail, the store goes read-only or off by itself, tries again
later, and comes back without a restart.
"""

from __future__ import annotations

import errno
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache.errors import StorageError, StorageFullError, StorageReadOnlyError
from fdcache.layout import KVLayout
from fdcache.metadata import Int32Array, StorageScan, UInt32Array
from fdcache.settings.storage_tier import FsyncPolicy
from fdcache.storage.connector import BatchResult, Outcome, RecordBatch, StorageState, StorageStats
from fdcache.storage.slab_format import file_name, slots_for
from fdcache.storage.slab_handle import ScanProgress, SlabHandle, SlabLock, is_same_file, storage_error

_LOOK_SECONDS = 1.0


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
        self._retry_after = retry_after
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._using = 0
        self._state = StorageState.READY
        self._error: str | None = None
        self._retry_at = 0.0
        self._looked_at = 0.0
        self._counts = dict.fromkeys(("hits", "misses", "corrupt", "stored", "errors", "timeouts"), 0)
        self._bytes = {"read": 0, "written": 0}
        self._closed = threading.Event()
        self._slots = slots_for(size, layout)
        self.path = folder / file_name(layout.fingerprint, rank)
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
        if (closed := self._enter(batch, writing=False)) is not None:
            return closed
        try:
            addresses = batch.records.addresses(batch.host_slots)
            slots, generations = _places(batch)
            result = self._file.core.read(
                slots,
                generations,
                batch.host_generations,
                batch.hashes,
                batch.parents,
                *addresses,
                timeout,
                self._verify,
                cancel,
            )
        finally:
            self._leave()
        return self._result(*result, writing=False)

    def put(self, batch: RecordBatch, timeout: float, cancel: _core.CancelFlag | None = None) -> BatchResult:
        """Write blocks into their slots, whatever these held."""
        if (closed := self._enter(batch, writing=True)) is not None:
            return closed
        try:
            addresses = batch.records.addresses(batch.host_slots)
            slots, generations = _places(batch)
            result = self._file.core.write(
                slots,
                generations,
                batch.host_generations,
                batch.hashes,
                batch.parents,
                *addresses,
                timeout,
                self._fsync is FsyncPolicy.ALWAYS,
                time.time_ns() // 1_000_000,
                cancel,
            )
        finally:
            self._leave()
        return self._result(*result, writing=True)

    def erase(self, slots: Int32Array) -> None:
        """Empty slots. Raises a ``StorageError`` when the file cannot be written."""
        number = self._file.core.erase(slots)
        if number:
            self._fail(number)
            raise storage_error(number, self.path)

    def clear(self, timeout: float) -> int:
        """Empty every slot; returns how many held a block. Raises a ``StorageError`` when that fails."""
        slots = self._file.core.entries()[0]
        self.erase(slots)
        if self._fsync is not FsyncPolicy.NEVER:
            self._file.core.sync()
        return len(slots)

    # --- failing and coming back ----------------------------------------------------------------------------

    def _enter(self, batch: RecordBatch, *, writing: bool) -> BatchResult | None:
        """Begin a batch, or say why not."""
        with self._lock:
            if self._closed.is_set():
                return BatchResult.of(len(batch), Outcome.ERROR, f"{self.path}: closed")
            now = time.monotonic()
            if now >= self._looked_at:
                self._looked_at = now + min(_LOOK_SECONDS, self._retry_after)
                self._look()
            blocked = self._state is StorageState.OFF or (writing and self._state is StorageState.READ_ONLY)
            if blocked and (now < self._retry_at or not self._try_again()):
                self._counts["errors"] += len(batch)
                return BatchResult.of(len(batch), Outcome.ERROR, self._error)
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
            self._fail(error.errno or errno.EIO)
            return
        if not same:
            self._fail(errno.ENOENT)

    def _try_again(self) -> bool:
        """Whether the time has come to use a failed store again; one that was off is opened anew."""
        self._retry_at = time.monotonic() + self._retry_after
        if self._state is StorageState.READ_ONLY:
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
            self._error = f"{type(error).__name__}: {error}"
            return False
        self._file.close()
        self._file = opened
        self._recover()
        return True

    def _fail(self, number: int) -> None:
        with self._lock:
            error = storage_error(number, self.path)
            writable = isinstance(error, StorageFullError | StorageReadOnlyError)
            self._state = StorageState.READ_ONLY if writable else StorageState.OFF
            self._error = f"{type(error).__name__}: {error}"
            self._retry_at = time.monotonic() + self._retry_after

    def _recover(self) -> None:
        with self._lock:
            self._state, self._error = StorageState.READY, None

    def _result(
        self,
        outcomes: NDArray[np.uint8],
        checksums: NDArray[np.uint64],
        moved: int,
        number: int,
        *,
        writing: bool,
    ) -> BatchResult:
        counted = np.bincount(outcomes, minlength=len(Outcome)).tolist()
        with self._lock:
            self._counts["stored" if writing else "hits"] += counted[Outcome.OK]
            self._counts["misses"] += counted[Outcome.MISS]
            self._counts["corrupt"] += counted[Outcome.CORRUPT]
            self._counts["errors"] += counted[Outcome.ERROR] + counted[Outcome.SOURCE_CHANGED]
            self._counts["timeouts"] += counted[Outcome.TIMEOUT]
            self._bytes["written" if writing else "read"] += moved
            if number:
                self._fail(number)
            elif counted[Outcome.OK] and writing:
                self._recover()
            error = self._error if number else _in_words(counted, self.path)
        return BatchResult(outcomes, checksums, moved, error)

    def _sync_each(self, interval: float) -> None:
        while not self._closed.wait(interval):
            if self._file.core.unsynced and (number := self._file.core.sync()):
                self._fail(number)

    def stats(self) -> StorageStats:
        """Counts and state."""
        with self._lock:
            return StorageStats(
                name=self.name,
                state=self._state,
                error=self._error,
                capacity_blocks=self.num_slots,
                blocks_found_on_start=self._file.found,
                corrupt_found_on_start=self._file.corrupt,
                read_bytes=self._bytes["read"],
                written_bytes=self._bytes["written"],
                **self._counts,
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


def _places(batch: RecordBatch) -> tuple[Int32Array, UInt32Array]:
    if batch.slots is None or batch.generations is None:
        raise ValueError("a slab needs the slots and generations of a batch")
    return batch.slots, batch.generations


def _in_words(counted: list[int], path: Path) -> str | None:
    failed = [
        f"{counted[outcome]} {outcome.name.lower().replace('_', ' ')}"
        for outcome in Outcome
        if outcome is not Outcome.OK and counted[outcome]
    ]
    return f"{path.name}: {', '.join(failed)}" if failed else None
