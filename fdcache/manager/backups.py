"""Write policies: which device blocks are copied to the host, and when.

The host tier is closed under prefixes, so a block is copied after its uncovered ancestors. No request waits for a
backup: blocks that find no room in the host tier are dropped and counted. The slot of a block that is being copied
cannot be given to another. Backups in flight are therefore limited to a share of the pool, and none begin while a
request is short of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fdcache import _core
from fdcache._core import BlockList, HostIndex
from fdcache.metadata import HashArray, Int32Array
from fdcache.plans.ledger import OpenPlan
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.statistics import Counters

_MOST_IN_FLIGHT = 1024
_SHARE = 2
"""Backups in flight are at most 1/2 of the pool: requests have the other half, and a pool is copied in two steps."""


class BackupPlanner:
    """Plans copies from the device tier to the host tier, by the write policy of ``settings``.

    ``on_displaced`` is called with the blocks that leave the host to make room.

    The native planner finds and reserves the blocks of one call; this class decides which and how many.
    """

    def __init__(
        self,
        settings: CacheSettings,
        device: BlockPool,
        host: HostIndex,
        counters: Counters,
        on_displaced: Callable[[HashArray], None] | None = None,
    ) -> None:
        self._host = host
        self._on_displaced = on_displaced
        self._counters = counters
        self._writes_back = settings.write_policy is WritePolicy.WRITE_BACK
        selective = settings.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        self._threshold = settings.write_through_threshold if selective else 1
        self._clean_reserve = settings.clean_reserve
        self._planner = _core.BackupPlanner(device, 0 if self._writes_back else self._threshold)
        self._queue = _core.SlotQueue()
        self._planner_of_awaited = _core.BackupPlanner(device, 0)
        self._awaited = _core.SlotQueue()
        self._is_short = False
        # write_back: evictions pay for copies ahead of need, so that a host tier smaller than the device tier is not
        # filled with the same blocks over and over.
        self._credit = settings.device_blocks

    @property
    def follows_commits(self) -> bool:
        """True if every block that is new in the device tier is backed up."""
        return not self._writes_back and self._threshold == 1

    @property
    def follows_hits(self) -> int:
        """The hits at which a block is backed up; 0 if hits do not matter."""
        return self._threshold if not self._writes_back and self._threshold > 1 else 0

    def enqueue(self, slots: Int32Array) -> None:
        """Queue the blocks in these device slots for a backup."""
        self._queue.add(slots)

    def enqueue_awaited(self, slots: Int32Array) -> None:
        """Queue blocks that others in the storage wait for, ahead of all and whatever the write policy."""
        self._awaited.add(slots)

    def enqueue_from(self, blocks: _core.BlockManager) -> None:
        """Queue the blocks that requests have published, or have hit often enough."""
        blocks.queue_followed(self._queue)

    def on_evict(self, evicted: Sequence[BlockList], plan: OpenPlan) -> None:
        """Plan copies of evicted blocks that the host lacks, before their slots are overwritten.

        Pass all lists of one allocation together, in the order of eviction: a later one may have the parents of an
        earlier one.
        """
        count = sum(map(len, evicted))
        if count:
            self._credit += count
            self._count(self._planner.evict(evicted, self._host, plan.evictions))

    def give_way(self) -> None:
        """Begin no backup in this step while some are in flight: a request did not get its blocks."""
        self._is_short = True

    def plan_background(self, plan: OpenPlan, in_flight: int) -> None:
        """Plan the backups of this step. ``in_flight``: number of blocks being backed up."""
        is_short, self._is_short = self._is_short, False
        if is_short and in_flight:
            return
        if self._awaited:
            most = self._most(in_flight)
            planned = self._planner_of_awaited.flush(self._awaited, self._host, most, plan.backups)
            in_flight += planned.planned
            self._count(planned)
        if self._writes_back:
            self._refill_clean_reserve(plan, in_flight)
        elif self._queue:
            self._count(self._planner.flush(self._queue, self._host, self._most(in_flight), plan.backups))

    def forget(self) -> None:
        """Clear the queue, as after a reset."""
        self._queue.clear()
        self._awaited.clear()

    @property
    def queued(self) -> int:
        """Number of blocks that wait for a plan."""
        return len(self._queue)

    def _refill_clean_reserve(self, plan: OpenPlan, in_flight: int) -> None:
        wanted = min(self._clean_reserve - in_flight, self._credit)
        if wanted > 0:
            planned = self._planner.clean(wanted, self._host, self._most(in_flight), plan.backups)
            self._credit -= planned.planned
            self._count(planned)

    def _most(self, in_flight: int) -> int:
        """Return how many backups may join those in flight."""
        most = max(1, min(_MOST_IN_FLIGHT, self._planner.device_slots // _SHARE))
        return max(0, most - in_flight)

    def _count(self, planned: _core.PlannedBackups) -> None:
        self._counters.backups_dropped += planned.dropped
        if self._on_displaced is not None and planned.asked:
            self._on_displaced(planned.displaced.hashes)
