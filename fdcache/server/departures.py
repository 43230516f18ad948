"""Departures: which blocks are not in a tier any more, since when, and why."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


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
