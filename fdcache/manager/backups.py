"""Write policies: which device blocks are copied to the host, and when.

The host tier is closed under prefixes, so a block is copied after its uncovered ancestors. No request waits for a
backup: blocks that find no room in the host tier are dropped and counted. A block that is being copied cannot be
evicted, and neither can its ancestors. Backups in flight are therefore limited to a share of the pool, and none begin
while a request is short of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fdcache._core import BlockList
from fdcache.metadata import HashArray, Int32Array, SwapPurpose
from fdcache.plans.blocks import BlockQueue, Blocks, path_starts
from fdcache.plans.ledger import OpenPlan
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.tiers.host import HostTier
from fdcache.tiers.pool import ABSENT, NO_PARENT, RESERVED, BlockPool, with_absent_ancestors
from fdcache.tiers.statistics import Counters

_MOST_IN_FLIGHT = 1024
_SHARE = 4
"""Backups in flight, and the blocks that they keep from eviction, are at most 1/4 of the pool.

A step commits about 1/8 of a default pool (8,192 tokens are 128 of 1,024 blocks) and is reported one or two steps
later. A quarter keeps up with that and leaves three quarters of the evictable blocks to requests.
"""


class BackupPlanner:
    """Plans copies from the device tier to the host tier, by the write policy of ``settings``."""

    def __init__(
        self, settings: CacheSettings, device: BlockPool, host: HostTier, counters: Counters
    ) -> None:
        self._device = device
        self._host = host
        self._counters = counters
        self._writes_back = settings.write_policy is WritePolicy.WRITE_BACK
        selective = settings.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        self._threshold = settings.write_through_threshold if selective else 1
        self._clean_reserve = settings.clean_reserve
        self._queue = BlockQueue()
        self._withheld = 0  # blocks that backups in flight keep from eviction, as of their planning
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

    def enqueue(self, hashes: HashArray) -> None:
        """Queue blocks for a backup."""
        self._counters.backups_dropped += self._queue.add(hashes)

    def on_evict(self, evicted: Sequence[BlockList], plan: OpenPlan) -> None:
        """Plan copies of evicted blocks that the host lacks, before their slots are overwritten.

        Pass all lists of one allocation together, in the order of eviction: a later one may have the parents of an
        earlier one.
        """
        evicted = [dropped for dropped in evicted if len(dropped)]
        if not evicted:
            return
        hashes = evicted[0].hashes if len(evicted) == 1 else np.concatenate([each.hashes for each in evicted])
        self._credit += len(hashes)
        presence = self._host.contains(hashes)
        if ABSENT not in presence.tobytes():
            return  # the usual case
        hits = np.concatenate([dropped.hits for dropped in evicted])
        dirty = (presence == ABSENT) & (hits >= (0 if self._writes_back else self._threshold))
        if dirty.any():
            blocks = _paths_from_root(Blocks.concat(map(Blocks.of, evicted)).select(np.flatnonzero(dirty)))
            orphans = self._copy(self._with_uncovered_ancestors(blocks), SwapPurpose.EVICT, plan)
            self._counters.backups_dropped += len(orphans)

    def give_way(self) -> None:
        """Begin no backup in this step while some are in flight: a request did not get its blocks."""
        self._is_short = True

    def plan_background(self, plan: OpenPlan, in_flight: int) -> None:
        """Plan the backups of this step. ``in_flight``: number of blocks being backed up."""
        is_short, self._is_short = self._is_short, False
        if is_short and in_flight:
            return
        if not in_flight:
            self._withheld = 0
        if self._writes_back:
            self._refill_clean_reserve(plan, in_flight)
        else:
            self._flush_queue(plan, in_flight)

    def forget(self) -> None:
        """Clear the queue, as after a reset."""
        self._queue.clear()

    @property
    def queued(self) -> int:
        """Number of blocks that wait for a plan."""
        return len(self._queue)

    def _flush_queue(self, plan: OpenPlan, in_flight: int) -> None:
        wanted = self._queue.take(min(self._room(in_flight), self._host.copy_room))
        if not len(wanted):
            return
        blocks = Blocks.of(self._device.find(wanted[self._host.contains(wanted) == ABSENT]))
        if len(blocks):
            self._queue.put_back(self._back_up(blocks, plan, in_flight))

    def _refill_clean_reserve(self, plan: OpenPlan, in_flight: int) -> None:
        wanted = min(self._clean_reserve - in_flight, self._credit)
        if wanted <= 0:
            return
        cold = Blocks.of(self._device.coldest(wanted))
        coldest = np.flatnonzero(self._host.contains(cold.hashes) == ABSENT)[: self._room(in_flight)]
        if len(coldest):
            self._back_up(_paths_from_root(cold.select(coldest)), plan, in_flight)
        self._credit -= plan.size(SwapPurpose.BACKUP)

    def _room(self, in_flight: int) -> int:
        """Return how many blocks may join those in flight."""
        return max(0, max(1, min(_MOST_IN_FLIGHT, self._device.stats().slots // _SHARE)) - in_flight)

    def _back_up(self, blocks: Blocks, plan: OpenPlan, in_flight: int) -> HashArray:
        """Plan backups of ``blocks`` as far as the pool can spare them; return the hashes of the rest."""
        blocks = self._with_uncovered_ancestors(blocks)
        count = self._spared(blocks.slots[: self._room(in_flight)], in_flight)
        rest, dropped = blocks.hashes[count:], self._counters.backups_dropped
        later = self._copy(blocks.select(slice(0, count)), SwapPurpose.BACKUP, plan)
        if self._counters.backups_dropped > dropped:
            # The host has no room: descendants of dropped blocks would retry in every step.
            self._counters.backups_dropped += len(rest)
            rest = rest[:0]
        return np.concatenate((later, rest))

    def _spared(self, slots: Int32Array, in_flight: int) -> int:
        """Return how many of the first slots may be held without keeping too many blocks from eviction.

        At least 1 if no backup is in flight: it may be the end of a path as long as the pool.
        """
        spare = max(0, self._device.stats().slots // _SHARE - self._withheld)
        count = len(slots)
        while count:
            withheld = self._withheld_by(slots[:count])
            if withheld <= spare or (count == 1 and not in_flight):
                self._withheld += withheld
                break
            count //= 2
        return count

    def _withheld_by(self, slots: Int32Array) -> int:
        """Return how many blocks become unevictable if these slots are held."""
        before = self._device.available
        self._device.hold(slots)
        withheld = before - self._device.available
        self._device.unhold(slots)
        return withheld

    def _copy(self, blocks: Blocks, purpose: SwapPurpose, plan: OpenPlan) -> HashArray:
        """Reserve host slots for ``blocks``, parents first, as far as there is room, and plan the copies.

        Return the hashes of blocks that have to wait for the copy of an ancestor.
        """
        while len(blocks):
            taken = self._host.reserve_copies(0, blocks.parents, blocks.hashes)
            if taken.missing:
                self._counters.backups_dropped += min(taken.missing, len(blocks))
                blocks = blocks.select(slice(0, max(0, len(blocks) - taken.missing)))
                continue
            source = blocks.select(taken.status == RESERVED)
            if len(source):
                self._device.hold(source.slots)
                plan.add(purpose, source, taken.slots, taken.generations)
            return np.asarray(blocks.hashes[taken.status == NO_PARENT])
        return blocks.hashes

    def _is_absent(self, hashes: HashArray) -> NDArray[np.bool_]:
        return np.asarray(self._host.contains(hashes) == ABSENT)

    def _with_uncovered_ancestors(self, blocks: Blocks) -> Blocks:
        uncovered = blocks.parents[path_starts(blocks)]
        uncovered = uncovered[uncovered.any(axis=1)]
        uncovered = uncovered[self._is_absent(uncovered)] if len(uncovered) else uncovered
        own = {row.tobytes() for row in blocks.hashes} if len(uncovered) else set()
        missing = [i for i, parent in enumerate(uncovered) if parent.tobytes() not in own]
        if not missing:
            return blocks
        parents = self._device.find(uncovered[missing])
        if not len(parents):
            return blocks
        above = with_absent_ancestors(self._device, parents.slots, self._is_absent)
        above = above.select(np.array([row.tobytes() not in own for row in above.hashes], np.bool_))
        # Path by path: if ancestors of several paths came first, these could evict each other for ever in a small host.
        return _paths_from_root(Blocks.concat((blocks, above))) if len(above) else blocks


def _paths_from_root(blocks: Blocks) -> Blocks:
    """Return blocks as paths, each from its root, in the order of the first block of each path."""
    position = {row.tobytes(): i for i, row in enumerate(blocks.hashes)}
    parent = [position.get(row.tobytes(), -1) for row in blocks.parents]
    turn: dict[int, None] = {}
    for start in range(len(parent)):
        path, at = [], start
        while at >= 0 and at not in turn:
            path.append(at)
            at = parent[at]
        turn.update(dict.fromkeys(reversed(path)))
    return blocks.select(np.fromiter(turn, np.intp, len(turn)))
