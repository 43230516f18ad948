"""Counters of a namespace and of the service, and the log that says why a block is not in the host tier."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from fdcache.metadata import HashArray, Int32Array
from fdcache.service.server.known_blocks import KnownBlocks, SampledMisses
from fdcache.service.wire.views import MissReason, NamespaceTotals

_UNPUBLISHED = {2: MissReason.BROKEN_RUN, 3: MissReason.NOT_COPIED, 4: MissReason.TENANT_QUOTA}


@dataclass(slots=True)
class EvictionLog:
    """When and why blocks left the tier, or failed to enter it; the newest ``capacity`` of them."""

    capacity: int
    entries: OrderedDict[bytes, tuple[float, MissReason]] = field(default_factory=OrderedDict)

    def add(self, keys: Iterable[bytes], reason: MissReason) -> None:
        """Log blocks that left the tier or were not kept."""
        now = time.time()
        for key in keys:
            self.entries[key] = (now, reason)
            self.entries.move_to_end(key)
        while len(self.entries) > self.capacity:
            self.entries.popitem(last=False)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove the entries of blocks that are in the tier again."""
        for key in keys:
            self.entries.pop(key, None)

    def find(self, key: bytes) -> tuple[float | None, MissReason]:
        """Return when and why a block left; ``(None, NOT_STORED)`` for an unknown one."""
        return self.entries.get(key, (None, MissReason.NOT_STORED))

    def starting_with(self, prefix: str) -> list[tuple[bytes, float, MissReason]]:
        """Return the entries whose hash begins with ``prefix``, in hexadecimal."""
        return [(key, *entry) for key, entry in self.entries.items() if key.hex().startswith(prefix)]


class History:
    """Totals of a namespace since the service started, its eviction log, and the blocks that it knew before."""

    def __init__(self, capacity: int) -> None:
        self.totals = NamespaceTotals()
        self.evictions = EvictionLog(capacity)
        self.known = KnownBlocks()

    # --- look-ups -----------------------------------------------------------------------------------------

    def count_lookup(self, blocks: int) -> None:
        """Count a look-up of ``blocks`` blocks."""
        self.totals.lookups += 1
        self.totals.looked_up_blocks += blocks

    def count_missed(self, hashes: HashArray, first: int) -> None:
        """Count the blocks from ``first`` on as missed, for the reason that block ``first`` is absent."""
        if first < len(hashes):
            self._count_sample(self.known.add_missing(hashes[first:]))
            self.totals.missed[self._reason(hashes[first].tobytes())] += len(hashes) - first

    def count_client_misses(self, lookups: int, first: HashArray, blocks: Int32Array) -> None:
        """Count look-ups that a client answered itself from the presence table.

        ``blocks[i]`` blocks of a path are absent, beginning with the hash ``first[i]``.
        """
        self.totals.lookups += lookups
        self.totals.looked_up_blocks += int(blocks.sum())
        for row, count in zip(first, blocks.tolist(), strict=True):
            self.totals.missed[self._reason(row.tobytes())] += count

    def count_sample(self, sample: Iterable[int], below: int) -> None:
        """Count the missing blocks that a client noted, as ``KnownBlocks.add_missing_sample``."""
        self._count_sample(self.known.add_missing_sample(sample, below))

    def _count_sample(self, found: SampledMisses) -> None:
        self.totals.missed_sample += found.sample
        self.totals.missed_estimated += found.missed
        self.totals.missed_known += found.known

    def count_refused(self, blocks: int, reason: MissReason) -> None:
        """Count a look-up that was not carried out."""
        self.count_lookup(blocks)
        self.totals.missed[reason] += blocks

    def _reason(self, key: bytes) -> MissReason:
        return self.evictions.find(key)[1]

    # --- blocks -------------------------------------------------------------------------------------------

    def count_published(self, hashes: HashArray, status: np.ndarray) -> None:
        """Count copied blocks by status, and log those that were not kept."""
        self.known.add_stored(hashes)
        stored, duplicates, orphans, dropped, over_quota = np.bincount(status, minlength=5)[:5].tolist()
        self.totals.stored += stored
        self.totals.duplicates += duplicates
        self.totals.orphans += orphans
        self.totals.dropped += dropped
        self.totals.over_quota += over_quota
        if orphans or dropped or over_quota:
            for code, reason in _UNPUBLISHED.items():
                self._log(hashes[status == code], reason)

    def count_removed(self, keys: list[bytes], reason: MissReason) -> None:
        """Count and log blocks that left the tier."""
        self.evictions.add(keys, reason)
        self.totals.evicted += len(keys)

    def count_corrupt(self, hashes: HashArray) -> None:
        """Count and log blocks that were dropped because their bytes did not match their checksum."""
        self.totals.corrupt += len(hashes)
        self._log(hashes, MissReason.CORRUPT)

    def count_reset(self, hashes: HashArray) -> None:
        """Count a reset and log the blocks that it removed, as many as the log holds."""
        self.totals.resets += 1
        self._log(hashes, MissReason.RESET)

    def count_deleted(self, hashes: HashArray) -> None:
        """Log blocks of storage that a command deletes: the host tier may have lost them for another reason."""
        self._log(hashes, MissReason.DELETED)

    def _log(self, hashes: HashArray, reason: MissReason) -> None:
        self.evictions.add((row.tobytes() for row in hashes), reason)
