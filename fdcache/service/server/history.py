"""How long requests take."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from fdcache.metadata import HashArray, Int32Array
from fdcache.tiers.traffic import Histogram, Traffic


@dataclass(slots=True)
class Latencies:
    """A histogram for each kind of request."""

    kinds: dict[str, Histogram] = field(default_factory=dict)

    def observe(self, kind: str, seconds: float) -> None:
        """Count one request."""
        self.kinds.setdefault(kind, Histogram()).observe(seconds)


class Reason(StrEnum):
    """Why a block was not found."""

    NOT_STORED = "not_stored"
    """Never heard of, or forgotten by the log."""
    EVICTED = "evicted"
    BROKEN_RUN = "broken_run"
    """A block above it was missing, so it was not kept."""
    TENANT_QUOTA = "tenant_quota"
    """Its tenant had all it may have."""
    CORRUPT = "corrupt"
    NOT_COPIED = "not_copied"
    """Its copy to the host failed on some rank."""
    RESET = "reset"
    PAUSED = "paused"
    TOO_MANY_RUNS = "too_many_runs"


@dataclass(slots=True)
class Departures:
    """When blocks left the tier or failed to enter it, and why; the newest ``most`` of them."""

    most: int
    known: OrderedDict[bytes, tuple[float, Reason]] = field(default_factory=OrderedDict)

    def add(self, keys: Iterable[bytes], reason: Reason) -> None:
        """Blocks left, or were not kept."""
        now = time.time()
        for key in keys:
            self.known[key] = (now, reason)
            self.known.move_to_end(key)
        while len(self.known) > self.most:
            self.known.popitem(last=False)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Blocks are there again."""
        for key in keys:
            self.known.pop(key, None)

    def reason(self, key: bytes) -> Reason:
        """Why a block that was not found is not there."""
        found = self.known.get(key)
        return found[1] if found else Reason.NOT_STORED


@dataclass(slots=True)
class Counts:
    """Totals of one layout since the service started.

    ``missed`` are blocks asked for and not found, by why the first of them in its path was not there.
    """

    lookups: int = 0
    looked_up_blocks: int = 0
    hit_blocks: int = 0
    missed: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    in_flight_misses: int = 0
    granted: int = 0
    stored: int = 0
    duplicates: int = 0
    orphans: int = 0
    dropped: int = 0
    over_quota: int = 0
    evicted: int = 0
    corrupt: int = 0
    recovered: int = 0
    resets: int = 0
    traffic: Traffic = field(default_factory=Traffic)


@dataclass(slots=True)
class Totals:
    """Totals of the service since it started."""

    requests: int = 0
    refused: int = 0
    undelivered: int = 0
    clients_registered: int = 0
    clients_lost: int = 0
    slots_taken_back: int = 0
    runs_given_up: int = 0
    latencies: Latencies = field(default_factory=Latencies)


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
