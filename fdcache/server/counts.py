"""What is counted: of one layout, and of the whole service."""

from __future__ import annotations

from dataclasses import dataclass, field

from fdcache.node.traffic import Traffic
from fdcache.server.departures import Reason
from fdcache.server.latency import Latencies


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
