"""What is counted of one layout."""

from __future__ import annotations

from dataclasses import dataclass, field

from fdcache.node.traffic import Traffic
from fdcache.server.departures import Reason


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
