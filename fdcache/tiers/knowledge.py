"""What a client knows of a tier that is elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np

from fdcache.metadata import HashArray

ABSENT, READY, PENDING = range(3)
_MOST = 1 << 20


class Knowledge:
    """Hashes that were seen in the tier or are being copied there. Bounded: the oldest are forgotten first."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._state: dict[bytes, int] = {}

    def presence(self, hashes: HashArray) -> HashArray:
        """0 absent or unknown, 1 ready, 2 being copied, for each hash."""
        data = hashes.tobytes()
        get = self._state.get
        return np.fromiter(
            (get(data[i : i + 32], ABSENT) for i in range(0, len(data), 32)), np.uint8, len(data) // 32
        )

    def state(self, key: bytes) -> int:
        """0 absent or unknown, 1 ready, 2 being copied."""
        return self._state.get(key, ABSENT)

    def set(self, keys: Iterable[bytes], state: int) -> None:
        """Blocks are there, are coming, or are gone."""
        with self._lock:
            for key in keys:
                self._set(key, state)

    def _set(self, key: bytes, state: int) -> None:
        if state == ABSENT:
            self._state.pop(key, None)
            return
        self._state[key] = state
        if len(self._state) > self._most:
            self._state.pop(next(iter(self._state)))

    def found(self, hashes: HashArray, start: int, count: int) -> None:
        """A look-up found ``count`` blocks from ``start`` on, and not the one after them."""
        data = hashes[start : start + count + 1].tobytes()
        with self._lock:
            for i in range(count):
                key = data[32 * i : 32 * i + 32]
                if self._state.get(key) != READY:
                    self._set(key, READY)
            # What is there has all its ancestors there.
            for i in range(start - 1 if count else -1, -1, -1):
                key = hashes[i].tobytes()
                if self._state.get(key) == READY:
                    break
                self._set(key, READY)
            after = data[32 * count : 32 * count + 32]
            if after and self._state.get(after) == READY:
                self._set(after, ABSENT)

    def remove(self, data: bytes) -> None:
        """Blocks whose hashes these are, 32 bytes each, left the tier; those being copied are still coming."""
        with self._lock:
            for i in range(0, len(data), 32):
                key = data[i : i + 32]
                if self._state.get(key) == READY:
                    del self._state[key]

    def clear(self) -> None:
        """Nothing is known; what is being copied still comes."""
        with self._lock:
            self._state = {key: state for key, state in self._state.items() if state == PENDING}


def keys_of(hashes: HashArray) -> list[bytes]:
    """Each hash as bytes."""
    data = hashes.tobytes()
    return [data[i : i + 32] for i in range(0, len(data), 32)]
