"""History: what was done with the blocks of one layout, and why those that are not there are not."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fdcache.metadata import HashArray, Int32Array
from fdcache.server.counts import Counts
from fdcache.server.departures import Departures, Reason

_NOT_KEPT = {2: Reason.BROKEN_RUN, 3: Reason.NOT_COPIED, 4: Reason.TENANT_QUOTA}


class History:
    """Totals since the service started, and the log of the newest ``most`` departures."""

    def __init__(self, most: int) -> None:
        self.counts = Counts()
        self.departures = Departures(most)

    # --- look-ups -----------------------------------------------------------------------------------------

    def looked_for(self, blocks: int) -> None:
        """So many blocks of a path are looked for."""
        self.counts.lookups += 1
        self.counts.looked_up_blocks += blocks

    def missed(self, hashes: HashArray, first: int) -> None:
        """Count what was asked for from ``first`` on by why that one is not there."""
        if first < len(hashes):
            self.counts.missed[self.departures.reason(hashes[first].tobytes())] += len(hashes) - first

    def seen_absent(self, lookups: int, first: HashArray, blocks: Int32Array) -> None:
        """A client saw in the table that ``blocks[i]`` blocks of a path, from ``first[i]`` on, are not there."""
        self.counts.lookups += lookups
        self.counts.looked_up_blocks += int(blocks.sum())
        for row, count in zip(first, blocks.tolist(), strict=True):
            self.counts.missed[self.departures.reason(row.tobytes())] += count

    def turned_away(self, blocks: int, reason: Reason) -> None:
        """A path was not looked for."""
        self.looked_for(blocks)
        self.counts.missed[reason] += blocks

    # --- blocks that come and go --------------------------------------------------------------------------

    def published(self, hashes: HashArray, status: np.ndarray) -> None:
        """What became of copied blocks, by the tier's codes; those that were not kept are remembered."""
        stored, duplicates, orphans, dropped, over = np.bincount(status, minlength=5)[:5].tolist()
        self.counts.stored += stored
        self.counts.duplicates += duplicates
        self.counts.orphans += orphans
        self.counts.dropped += dropped
        self.counts.over_quota += over
        if orphans or dropped or over:
            for code, reason in _NOT_KEPT.items():
                self._add(hashes[status == code], reason)

    def left(self, gone: list[bytes], reason: Reason) -> None:
        """Blocks left the tier."""
        self.departures.add(gone, reason)
        self.counts.evicted += len(gone)

    def came(self, there: Iterable[bytes]) -> None:
        """Blocks entered it."""
        self.departures.forget(there)

    def corrupt(self, broken: HashArray) -> None:
        """Blocks left because their bytes were not what they should be."""
        self.counts.corrupt += len(broken)
        self._add(broken, Reason.CORRUPT)

    def reset(self, known: HashArray) -> None:
        """Everything left; ``known`` are as many as the log holds."""
        self.counts.resets += 1
        self._add(known, Reason.RESET)

    def _add(self, hashes: HashArray, reason: Reason) -> None:
        self.departures.add((row.tobytes() for row in hashes), reason)
