"""BlockQueue: blocks that wait to be copied a tier further down."""

from __future__ import annotations

from collections import deque

import numpy as np

from fdcache.metadata import HashArray

_MOST_BLOCKS = 16384
_NONE: HashArray = np.empty((0, 32), np.uint8)


class BlockQueue:
    """Hashes in the order in which they came; when it is full the oldest make room."""

    def __init__(self) -> None:
        self._parts: deque[HashArray] = deque()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, hashes: HashArray) -> int:
        """Append; returns how many of the oldest went for it."""
        self._parts.append(hashes)
        self._size += len(hashes)
        gone = 0
        while self._size - gone > _MOST_BLOCKS:
            gone += len(self._parts.popleft())
        self._size -= gone
        return gone

    def put_back(self, hashes: HashArray) -> None:
        """What was taken and cannot be copied yet is first again."""
        if len(hashes):
            self._parts.appendleft(hashes)
            self._size += len(hashes)

    def take(self, count: int) -> HashArray:
        """The first ``count`` or as many as there are, shape (blocks, 32)."""
        parts: list[HashArray] = []
        while self._parts and count > 0:
            hashes = self._parts.popleft()
            if len(hashes) > count:
                self._parts.appendleft(hashes[count:])
                hashes = hashes[:count]
            self._size -= len(hashes)
            count -= len(hashes)
            parts.append(hashes)
        return np.concatenate(parts) if parts else _NONE

    def clear(self) -> None:
        """The blocks are gone."""
        self._parts.clear()
        self._size = 0
