"""StorageTally: what came of a storage's batches, in figures."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdcache.storage.connector import Outcome, StorageState, StorageStats

_NAMES = {
    Outcome.MISS: "misses",
    Outcome.CORRUPT: "corrupt",
    Outcome.SOURCE_CHANGED: "errors",
    Outcome.ERROR: "errors",
    Outcome.TIMEOUT: "timeouts",
    Outcome.PEER_GONE: "peer_gone",
    Outcome.NO_ROOM: "no_room",
    Outcome.BAD_SLOT: "bad_slots",
}


class StorageTally:
    """Counts since the storage was opened; any thread may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("hits", "stored", "read_bytes", "written_bytes", *_NAMES.values()), 0)

    def add(self, outcomes: NDArray[np.uint8], moved_bytes: int, *, writing: bool) -> None:
        """Count a batch: an ``Outcome`` per block, and the bytes that were read or written."""
        found = np.bincount(outcomes, minlength=len(Outcome)).tolist()
        with self._lock:
            self._counts["stored" if writing else "hits"] += found[Outcome.OK]
            self._counts["written_bytes" if writing else "read_bytes"] += moved_bytes
            for outcome, name in _NAMES.items():
                self._counts[name] += found[outcome]

    def stats(self, name: str, state: StorageState, error: str | None, **more: Any) -> StorageStats:
        """A snapshot, with what else is known."""
        with self._lock:
            return StorageStats(name=name, state=state, error=error, **self._counts, **more)
