"""What the manager counts, and what its tiers hold."""

from __future__ import annotations

import msgspec

from fdcache.tiers.host import HostTier
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.traffic import Traffic


class TierUsage(msgspec.Struct, frozen=True):
    """One tier at one moment. ``writing`` includes ``pending`` and ``quarantined``; ``evictable`` is part of ``ready``.

    ``quarantined`` slots held a record that turned out corrupt, or cannot be read or written, and are not used again.
    ``withheld`` slots have no room on the disk for now. ``writing`` includes both.
    """

    blocks: int
    free: int
    writing: int
    pending: int
    ready: int
    evictable: int
    quarantined: int
    withheld: int
    pins: int
    holds: int
    leases: int
    epoch: int
    evictions: int

    @classmethod
    def of(cls, pool: BlockPool | HostTier) -> TierUsage:
        """The present state of a tier."""
        stats = pool.stats()
        return cls(
            blocks=stats.slots,
            free=stats.free,
            writing=stats.writing,
            pending=stats.pending,
            ready=stats.ready,
            evictable=stats.evictable,
            quarantined=stats.quarantined,
            withheld=stats.withheld,
            pins=stats.pins,
            holds=stats.holds,
            leases=stats.leases,
            epoch=stats.epoch,
            evictions=stats.evictions,
        )


class MemoryUsage(msgspec.Struct, frozen=True):
    """Bytes of one tier on one rank; used = not free."""

    total_bytes: int
    used_bytes: int
    free_bytes: int

    @classmethod
    def of(cls, pool: BlockPool | HostTier, block_bytes: int) -> MemoryUsage:
        """The tier's blocks times ``block_bytes``."""
        stats = pool.stats()
        free = stats.free * block_bytes
        total = stats.slots * block_bytes
        return cls(total_bytes=total, used_bytes=total - free, free_bytes=free)

    @property
    def usage(self) -> float:
        """Used share, 0 to 1."""
        return self.used_bytes / self.total_bytes if self.total_bytes else 0.0


class Counters(msgspec.Struct):
    """Totals since the manager was made."""

    lookups: int = 0
    lookup_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    deferred_lookups: int = 0
    allocation_failures: int = 0
    loads_confirmed: int = 0
    loads_failed: int = 0
    loads_overdue: int = 0
    blocks_loaded: int = 0
    blocks_evicted_to_host: int = 0
    blocks_backed_up: int = 0
    copies_failed: int = 0
    backups_dropped: int = 0
    blocks_stored: int = 0
    blocks_prefetched: int = 0
    blocks_requested_from_storage: int = 0
    blocks_corrupt_in_storage: int = 0
    bad_storage_slots: int = 0
    blocks_corrupt_in_host: int = 0
    stores_dropped: int = 0
    prefetches_shared: int = 0
    prefetches_timed_out: int = 0
    unexpected_reports: int = 0


class CacheStats(msgspec.Struct, frozen=True):
    """A snapshot of the manager. A tier that is not there is None, as is the index of a store that others keep.

    ``queued_stores`` blocks wait to be written to storage, ``storing_blocks`` are on their way there and
    ``reading_blocks`` on their way from it. A rank's controller has the state and the errors of its storage.
    """

    device: TierUsage
    host: TierUsage | None
    counters: Counters
    live_requests: int
    plans_in_flight: int
    queued_backups: int
    queued_stores: int = 0
    storing_blocks: int = 0
    reading_blocks: int = 0
    storage: TierUsage | None = None
    traffic: Traffic = msgspec.field(default_factory=Traffic)
