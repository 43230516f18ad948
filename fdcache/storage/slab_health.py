"""Condition of a slab file: its state, its bad records, and its room on the disk."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fdcache.errors import StorageFullError, StorageReadOnlyError
from fdcache.metadata import Int32Array
from fdcache.settings.kinds import readable_size
from fdcache.storage.connector import StorageState
from fdcache.storage.slab_file import storage_error
from fdcache.storage.slab_format import SUFFIX

logger = logging.getLogger(__name__)

IN_A_ROW = 4
"""Distinct records that fail, with no success between them, before the medium counts as failing."""
MOST_BAD = 16
"""Distinct bad records within ``WINDOW`` seconds before the medium counts as failing, successes or not."""
WINDOW = 60.0

_CHECK_SECONDS = 1.0
_WARN_AGAIN = 10
"""A disk that fills up again is reported once the file has grown by a tenth."""


class SlabHealth:
    """State of a slab file: ready until something fails, then full, read-only or off.

    A read-only file or one that is off is tried again after ``retry_after`` seconds. A full one stays in use and is
    ready again once it has grown.
    """

    def __init__(self, path: Path, retry_after: float) -> None:
        self.retry_after = retry_after
        self.retry_at = 0.0
        self.state = StorageState.READY
        self.error: str | None = None
        self._path = path
        self._lock = threading.Lock()
        self._check_at = 0.0

    def refuses(self, *, writing: bool) -> bool:
        """Return True when reads, or writes, are not possible in this state."""
        return self.state is StorageState.OFF or (writing and self.state is StorageState.READ_ONLY)

    def check_is_due(self) -> bool:
        """Return True, at most once a second, when the caller should check that the file is still there."""
        now = time.monotonic()
        if now < self._check_at:
            return False
        self._check_at = now + min(_CHECK_SECONDS, self.retry_after)
        return True

    def retry_is_due(self) -> bool:
        """Return True, at most once every ``retry_after`` seconds, when a failed file should be tried again."""
        now = time.monotonic()
        if now < self.retry_at:
            return False
        self.retry_at = now + self.retry_after
        return True

    def failed(self, number: int) -> None:
        """Record a call that failed with this errno: the file is read-only or off."""
        error = storage_error(number, self._path)
        unwritable = isinstance(error, StorageFullError | StorageReadOnlyError)
        with self._lock:
            self.state = StorageState.READ_ONLY if unwritable else StorageState.OFF
            self.error = _message(error)
            self.retry_at = time.monotonic() + self.retry_after

    def no_room(self, number: int) -> None:
        """Record that the disk had no room for a record, with this errno."""
        with self._lock:
            if self.state is StorageState.READY:
                self.state = StorageState.FULL
                self.error = _message(storage_error(number, self._path))

    def wrote(self, *, grew: bool) -> None:
        """Record a successful write; ``grew``: of a record that had no room on the disk before."""
        with self._lock:
            if self.state is StorageState.READ_ONLY or (self.state is StorageState.FULL and grew):
                self.state, self.error = StorageState.READY, None

    def retry_failed(self, error: Exception) -> None:
        """Record why the file could not be opened again."""
        self.error = _message(error)

    def recovered(self) -> None:
        """Record that the file was opened again and answers."""
        with self._lock:
            self.state, self.error = StorageState.READY, None


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Slots that are ``bad`` for good; ``medium_fails``: the whole file must be left alone for a while."""

    bad: frozenset[int]
    medium_fails: bool


class RecordFaults:
    """Tells bad records from a medium that fails as a whole.

    A record that fails is bad, unless ``IN_A_ROW`` records have failed in a row. Then the medium fails, and its
    records are only suspects: they are bad once they fail again after the medium has recovered. Reads and writes are
    counted apart, because a medium may fail at one of them only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rows: dict[bool, set[int]] = {False: set(), True: set()}
        self._suspects: dict[bool, set[int]] = {False: set(), True: set()}
        self._bad: deque[tuple[float, int]] = deque()

    def judge(self, failed: Set[int], *, moved: bool, writing: bool) -> Verdict:
        """Judge a batch with failures: the slots that failed; ``moved``: another record of the batch succeeded."""
        with self._lock:
            row, suspects = self._rows[writing], self._suspects[writing]
            fresh = failed - suspects
            if moved:
                row.clear()
            else:
                row |= fresh
            in_a_row = len(row) >= IN_A_ROW
            bad = frozenset(failed & suspects if in_a_row else failed)
            if in_a_row:
                suspects |= fresh
            suspects -= bad
            return Verdict(bad, self._too_many(bad) or in_a_row)

    def succeeded(self, *, writing: bool) -> None:
        """Record a batch without failures."""
        with self._lock:
            self._rows[writing].clear()

    def recovered(self) -> None:
        """Record that the medium was left alone and answers again."""
        with self._lock:
            self._rows = {False: set(), True: set()}
            self._bad.clear()

    def _too_many(self, bad: Set[int]) -> bool:
        now = self._clock()
        self._bad.extend((now, slot) for slot in bad)
        while self._bad and now - self._bad[0][0] > WINDOW:
            self._bad.popleft()
        return len({slot for _, slot in self._bad}) >= MOST_BAD


class DiskRoom:
    """Slots of a file that have space on the disk. Slab files are sparse: space is taken as slots are written.

    Logs a warning when the files of this layout may grow to more than the disk has free. Raises the errors of
    ``storage_error``.
    """

    def __init__(self, path: Path, slots: int, stored: Int32Array) -> None:
        self._path = path
        self._taken = np.zeros(slots, np.bool_)
        self._taken[stored] = True
        self._warned_at: int | None = None
        try:
            self._warn_of_shortage()
        except OSError as error:
            raise storage_error(error.errno or errno.EIO, path) from error

    def wrote(self, slots: Int32Array) -> bool:
        """Count written slots; return True when one of them had no space before."""
        grew = not self._taken[slots].all()
        self._taken[slots] = True
        return bool(grew)

    def ran_out(self, refused: int) -> None:
        """Log once that the disk had no room for ``refused`` records."""
        taken = int(self._taken.sum())
        if self._warned_at is not None and taken - self._warned_at <= len(self._taken) // _WARN_AGAIN:
            return
        self._warned_at = taken
        try:
            free = readable_size(_free_bytes(self._path.parent))
        except OSError as error:
            free = f"an unknown amount ({error.strerror})"
        logger.warning(
            "%s: the disk has no room for %d more blocks (%s free); storage continues in the %d of %d slots that "
            "have space, and grows when there is room; free space or lower FDCACHE_STORAGE_SIZE",
            self._path,
            refused,
            free,
            taken,
            len(self._taken),
        )

    def _warn_of_shortage(self) -> None:
        prefix = self._path.name.rsplit("-", 1)[0]
        missing, count = 0, 0
        for file in self._path.parent.glob(f"{prefix}-rank*{SUFFIX}"):
            status = file.stat()
            missing += max(0, status.st_size - status.st_blocks * 512)
            count += 1
        free = _free_bytes(self._path.parent)
        if missing > free:
            logger.warning(
                "%s: FDCACHE_STORAGE_SIZE promises %s more than the %d file%s of this layout take%s now, and the disk "
                "has %s free; storage will be as large as the disk allows; free space or lower FDCACHE_STORAGE_SIZE",
                self._path,
                readable_size(missing),
                count,
                "" if count == 1 else "s",
                "s" if count == 1 else "",
                readable_size(free),
            )


def _free_bytes(folder: Path) -> int:
    """Bytes that may be written to the folder's file system. Raises ``OSError``."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
