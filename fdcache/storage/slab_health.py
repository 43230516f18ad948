"""SlabHealth: whether a slab file is of use, what is wrong with it, and when it is tried again."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from fdcache.errors import StorageFullError, StorageReadOnlyError
from fdcache.storage.connector import StorageState
from fdcache.storage.slab_handle import storage_error

_LOOK_SECONDS = 1.0


class SlabHealth:
    """Ready until something fails: then full, read-only or off. The latter two are tried again, ``retry_after`` seconds
    later; what is full goes on, and is ready again when it has grown.
    """

    def __init__(self, path: Path, retry_after: float) -> None:
        self._path = path
        self._retry_after = retry_after
        self._lock = threading.Lock()
        self._retry_at = 0.0
        self._looked_at = 0.0
        self.state = StorageState.READY
        self.error: str | None = None

    def blocks(self, *, writing: bool) -> bool:
        """Whether reads, or writes, cannot be done in this state."""
        return self.state is StorageState.OFF or (writing and self.state is StorageState.READ_ONLY)

    def look_is_due(self) -> bool:
        """Whether it is time to see if the file is still there; once in a while."""
        now = time.monotonic()
        if now < self._looked_at:
            return False
        self._looked_at = now + min(_LOOK_SECONDS, self._retry_after)
        return True

    def try_is_due(self) -> bool:
        """Whether it is time to use a failed store again; at most once every ``retry_after`` seconds."""
        now = time.monotonic()
        if now < self._retry_at:
            return False
        self._retry_at = now + self._retry_after
        return True

    def failed(self, number: int) -> None:
        """A call ended with this errno."""
        error = storage_error(number, self._path)
        unwritable = isinstance(error, StorageFullError | StorageReadOnlyError)
        with self._lock:
            self.state = StorageState.READ_ONLY if unwritable else StorageState.OFF
            self.still_fails(error)
            self._retry_at = time.monotonic() + self._retry_after

    def filled(self, number: int) -> None:
        """The disk had no room for a record, as this errno says; what has its room already goes on."""
        with self._lock:
            if self.state is StorageState.READY:
                self.state = StorageState.FULL
                self.still_fails(storage_error(number, self._path))

    def wrote(self, *, grew: bool) -> None:
        """A write came through; ``grew``: of a record that had no room on the disk before."""
        with self._lock:
            if self.state is StorageState.READ_ONLY or (self.state is StorageState.FULL and grew):
                self.state, self.error = StorageState.READY, None

    def still_fails(self, error: Exception) -> None:
        """It was tried again in vain."""
        self.error = f"{type(error).__name__}: {error}"

    def recovered(self) -> None:
        """It was opened anew and answers."""
        with self._lock:
            self.state, self.error = StorageState.READY, None
