"""Events: blocks that entered and left each tier, for routers that mirror this cache.

Every event names its tier. ``BlockStored`` events come parents first. After ``BlocksCleared`` or ``EventsLost`` a
mirror of the tier starts again from empty. ``DeviceEvents`` has two readers: the engine, and a service that tells
routers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from fdcache.metadata import CacheLevel, HashArray
from fdcache.plans.ledger import ROOT, UNKNOWN
from fdcache.tiers.host import SharedNotes
from fdcache.tiers.pool import EVENT_CLEARED, EVENT_LOST, EVENT_REMOVED, EVENT_STORED, BlockPool, EventKinds


class BlockStored(msgspec.Struct, frozen=True, tag="stored"):
    """A block is in ``tier`` from now on. ``parent_hash`` is None for the first block of a path."""

    tier: CacheLevel
    block_hash: bytes
    parent_hash: bytes | None
    block_size: int


class BlockRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """A block left ``tier``."""

    tier: CacheLevel
    block_hash: bytes


class BlocksCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """``tier`` was reset."""

    tier: CacheLevel


class EventsLost(msgspec.Struct, frozen=True, tag="lost"):
    """The event buffer overflowed: start again from an empty mirror of ``tier``."""

    tier: CacheLevel


CacheEvent = BlockStored | BlockRemoved | BlocksCleared | EventsLost


class EventSource(Protocol):
    """What has events of a tier."""

    def take_events(self) -> tuple[Any, Any, Any]:
        """Return kinds, hashes and parents of the events since the last call."""


def events_of(source: EventSource, level: CacheLevel, block_size: int) -> Iterator[CacheEvent]:
    """Return the tier's events since the last call, oldest first."""
    kinds, hashes, parents = source.take_events()
    for kind, block_hash, parent in zip(kinds.tolist(), hashes, parents, strict=True):
        if kind == EVENT_STORED:
            above = parent.tobytes()
            yield BlockStored(
                level, block_hash.tobytes(), above if above not in (ROOT, UNKNOWN) else None, block_size
            )
        elif kind == EVENT_REMOVED:
            yield BlockRemoved(level, block_hash.tobytes())
        elif kind == EVENT_CLEARED:
            yield BlocksCleared(level)
        else:
            yield EventsLost(level)


_MOST_TOLD = 1 << 16
"""Events between two steps; of more, all blocks are told anew."""


_NO_HASH: HashArray = np.zeros((1, 32), np.uint8)
_LOST = bytes([EVENT_LOST])


class _Batch(NamedTuple):
    kinds: EventKinds
    hashes: HashArray
    parents: HashArray


class DeviceEvents:
    """Events of the device tier for two readers. ``capacity``: of what is kept for the engine; 0: nothing is."""

    def __init__(self, pool: BlockPool, capacity: int) -> None:
        self._pool = pool
        self._capacity = capacity
        self._kept: deque[_Batch] = deque()
        self._num_kept = 0
        self._untold: deque[tuple[bytes, bytes]] = deque()
        self._is_telling = False

    def take_events(self) -> tuple[EventKinds, HashArray, HashArray]:
        """Return kinds, hashes and parents of what the engine has not taken yet."""
        if self._is_telling:
            self._move()
        if not self._kept:
            return _Batch(*self._pool.take_events())
        kinds, hashes, parents = zip(*self._kept, strict=True)
        self._kept.clear()
        self._num_kept = 0
        return np.concatenate(kinds), np.concatenate(hashes), np.concatenate(parents)

    def tell(self, notes: SharedNotes) -> None:
        """Tell the service what is new, and a session of it that has just begun all blocks."""
        if not self._is_telling:
            self._keep(_Batch(*self._pool.take_events()))
            self._pool.record_events(max(self._capacity, _MOST_TOLD))
            self._is_telling = True
        self._move()
        if not self._untold and notes.has_device:
            return
        is_lost = any(_LOST in kinds for kinds, _ in self._untold)
        if is_lost or not notes.has_device:
            self._untold.clear()
            every = self._pool.ancestry(self._pool.starting_with(b"").slots).hashes
            kinds = bytes([EVENT_CLEARED]) + bytes([EVENT_STORED]) * len(every)
            notes.tell_device(kinds, bytes(32) + every.tobytes())
        while self._untold:
            notes.tell_device(*self._untold.popleft())

    def _move(self) -> None:
        """Take the events of the tier for both readers."""
        kinds, hashes, parents = self._pool.take_event_bytes()
        if kinds:
            self._untold.append((kinds, hashes))
            if self._capacity:
                paths = (np.frombuffer(each, np.uint8).reshape(-1, 32) for each in (hashes, parents))
                self._keep(_Batch(np.frombuffer(kinds, np.uint8), *paths))

    def _keep(self, batch: _Batch) -> None:
        """Keep events for the engine; of too many it is told that they are lost."""
        if not self._capacity or not len(batch.kinds):
            return
        self._kept.append(batch)
        self._num_kept += len(batch.kinds)
        if self._num_kept > self._capacity:
            self._kept = deque([_Batch(np.array([EVENT_LOST], np.uint8), _NO_HASH, _NO_HASH)])
            self._num_kept = 1
