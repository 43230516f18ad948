"""Events: blocks that entered and left each tier, for routers that mirror this cache.

Every event names its tier. ``BlockStored`` events come parents first. After ``BlocksCleared`` or ``EventsLost`` a
mirror of the tier starts again from empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from fdcache.metadata import CacheLevel
from fdcache.plans.blocks import ROOT, UNKNOWN
from fdcache.tiers.pool import EVENT_CLEARED, EVENT_REMOVED, EVENT_STORED


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
            yield BlockStored(level, block_hash.tobytes(), above if above not in (ROOT, UNKNOWN) else None, block_size)
        elif kind == EVENT_REMOVED:
            yield BlockRemoved(level, block_hash.tobytes())
        elif kind == EVENT_CLEARED:
            yield BlocksCleared(level)
        else:
            yield EventsLost(level)
