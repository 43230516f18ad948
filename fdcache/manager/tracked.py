"""Tracked: what an ``OffloadManager`` knows of a request between its arrival and its end."""

from __future__ import annotations

import numpy as np

from fdcache._core import DevicePath
from fdcache.groups import record_keys
from fdcache.layout import KVLayout
from fdcache.manager.keyed import KeyedRequest, OffloadRequest
from fdcache.manager.loads import EngineLoad, PeerRun
from fdcache.metadata import HashArray
from fdcache.plans.ledger import ROOT, UNKNOWN
from fdcache.tiers.host import Found
from fdcache.tiers.statistics import Counters


class Tracked:
    """A request between its arrival and its end.

    ``found`` is the kept answer of the host tier, for blocks from ``start`` on; ``arena`` names the memory that its
    slots refer to. ``coming`` blocks after them, or with nothing found after the device's, are being read from storage.
    ``device_blocks`` is the number that the engine had when it asked last, ``load`` the load whose outcome was not
    taken. ``peer`` has what is neither on the device nor below it, until that is fetched or declined. Everything here
    counts records, of which a page has some for each group of layers. ``end``: in a layout with states, the pages at
    whose end are those that were found, or that are read from storage; 0 for none. ``ended_by``: the group of layers
    that ended the last match.
    """

    __slots__ = (
        "_keys",
        "arena",
        "asked_at",
        "coming",
        "counted_blocks",
        "deferred_since",
        "device_blocks",
        "device_pages",
        "end",
        "ended_by",
        "fetch",
        "found",
        "found_at",
        "is_counted",
        "is_stale",
        "limit",
        "load",
        "path",
        "peer",
        "request",
        "start",
    )

    def __init__(self, request: OffloadRequest) -> None:
        self.request = request
        self._keys: HashArray = np.empty((0, 32), np.uint8)
        self.found: Found | None = None
        self.start = 0
        self.coming = 0
        self.limit = 0
        self.arena: str | None = None
        self.asked_at = self.found_at = 0.0
        self.device_blocks = self.device_pages = self.end = 0
        self.deferred_since: float | None = None
        self.ended_by: int | None = None
        self.fetch = 0
        self.path: DevicePath | None = None
        self.load: EngineLoad | None = None
        self.peer: PeerRun | None = None
        self.counted_blocks = 0
        self.is_counted = False
        self.is_stale = False

    @property
    def parent(self) -> bytes:
        """The key of the block before the first one."""
        if not isinstance(self.request, KeyedRequest):
            return ROOT
        return UNKNOWN if self.request.parent is None else self.request.parent

    def keys_of_pages(self, records: int) -> HashArray:
        """Return the keys of the records of the request's pages, each of which has ``records``."""
        hashes = self.request.block_hashes
        if records == 1:
            return hashes
        have = len(self._keys) // records if records else len(hashes)
        if have < len(hashes):
            self._keys = np.concatenate((self._keys, record_keys(hashes[have:], records)))
        return self._keys

    @property
    def lease(self) -> int:
        """The lease of ``found``, 0 without one."""
        return self.found.lease if self.found is not None else 0

    @property
    def remaining(self) -> int:
        """Number of blocks beyond those on the device that were found or are coming."""
        if self.found is None:
            return 0
        return max(self.start + len(self.found.slots) + self.coming - self.device_blocks, 0)

    @property
    def from_peer(self) -> int:
        """Number of blocks after the remaining ones that a peer has."""
        if self.found is None or self.peer is None or self.device_pages >= self.peer.most_pages:
            return 0
        return max(len(self.peer.keys) - self.device_blocks - self.remaining, 0)

    @property
    def from_storage(self) -> int:
        """How many of the remaining blocks that were found were read from storage for the request."""
        if self.found is None:
            return 0
        first = self.device_blocks - self.start
        return max(self.found.fetched.stop - max(self.found.fetched.start, first), 0)

    def take(self, count: int) -> Found:
        """Return the first ``count`` of the remaining blocks, as far as they were found."""
        found = self.found
        assert found is not None
        first = self.device_blocks - self.start
        return found if not first and count == len(found.slots) else found.part(first, first + count)

    def count_lookup(self, counters: Counters, layout: KVLayout) -> None:
        """Count the request as looked up, once."""
        if not self.is_counted:
            self.is_counted = True
            counters.lookups += 1
            counters.lookup_tokens += self.request.num_tokens
            counters.device_hit_tokens += self.device_pages * layout.block_size
            if self.ended_by is not None:
                counters.count_end(layout.groups[self.ended_by].reach)

    def deferred_for(self, now: float) -> float:
        """Return the seconds since the request was first deferred, which is now if it was not."""
        if self.deferred_since is None:
            self.deferred_since = now
        return now - self.deferred_since
