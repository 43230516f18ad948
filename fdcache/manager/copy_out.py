"""The way out: which blocks of a device cache are copied to the host, when, and how the copies end.

The host tier is closed under prefixes, so a block is copied after its uncovered ancestors. No request waits for a
backup: blocks that find no room in the host tier are dropped and counted. Where the device cache is the manager's, the
slot of a block that is being copied cannot be given to another. Backups in flight are therefore limited to half of the
pool, and none begin while a request is short of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from msgspec.structs import replace

from fdcache import _core
from fdcache._core import BlockList, DeviceContents, HostIndex, SwapInFlight
from fdcache.metadata import HashArray, Int32Array
from fdcache.plans.ledger import Mask, OpenPlan, PlanLedger
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.statistics import Counters


class CopyOut:
    """Copies from a device cache to the host tier, by the write policy of ``settings``.

    ``device``: the manager's own tier, or what an engine has told of its cache. The native planner finds, orders and
    reserves the blocks of one call. While ``is_patient``, a few blocks wait for more before they have a plan.
    ``on_displaced`` is called with the blocks that leave the host to make room.
    """

    def __init__(
        self,
        settings: CacheSettings,
        device: BlockPool | DeviceContents,
        host: HostIndex,
        counters: Counters,
        clock: Callable[[], float],
        on_displaced: Callable[[HashArray], None] | None = None,
    ) -> None:
        self._device, self._host = device, host
        self._on_displaced = on_displaced
        self._counters = counters
        self._clock = clock
        writes_back = settings.write_policy is WritePolicy.WRITE_BACK
        selective = settings.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        least_hits = settings.write_through_threshold if selective else 1
        self.follows_commits = not writes_back and least_hits == 1
        """True if every block that is new on the device is backed up."""
        self.follows_hits = 0 if writes_back or self.follows_commits else least_hits
        """The hits at which a block is backed up; 0 if hits do not matter."""
        self._native = _core.CopyOut(
            device, writes_back, 0 if writes_back else least_hits, settings.clean_reserve
        )
        self._is_short = False
        self._early: list[SwapInFlight] = []
        self.has_early = False
        """True if copies that were reported wait for the end of others."""
        self.is_patient = False

    # --- what is wanted -----------------------------------------------------------------------------------

    def enqueue(self, slots: Int32Array) -> None:
        """Queue the blocks in these device slots for a backup."""
        self._native.enqueue(slots)

    def enqueue_awaited(self, slots: Int32Array) -> None:
        """Queue blocks that others in the storage wait for, ahead of all and whatever the write policy."""
        self._native.enqueue_awaited(slots)

    def enqueue_from(self, blocks: _core.BlockManager) -> None:
        """Queue the blocks that requests have published, or have hit often enough."""
        blocks.queue_followed(self._native)

    def forget(self) -> None:
        """Forget what is queued, and what an engine has told, as after a reset."""
        self._native.clear()

    def drop(self, hashes: HashArray) -> None:
        """Forget blocks of the device cache and all below them, without a copy."""
        self._device.drop(hashes)

    @property
    def queued(self) -> int:
        """Number of blocks that wait for a plan."""
        return self._native.queued(self._host)

    @property
    def has_queue(self) -> bool:
        """True if the next plan may copy blocks, or copies that were reported wait for the end of others."""
        return self._native.has_queue or self.has_early

    @property
    def has_work(self) -> bool:
        """True if the next plan may copy queued blocks: there is a host to copy them to."""
        return self._native.has_work(self._host)

    def ended_of(self, path: _core.DevicePath, start: int, stop: int) -> tuple[int, int]:
        """Return how many of an offered path's blocks have ended, up to the first that waits, and are on the host."""
        return self._native.ended_of(path, start, stop, self._host)

    # --- plans --------------------------------------------------------------------------------------------

    def evict(self, evicted: BlockList, plan: OpenPlan) -> None:
        """Plan copies of evicted blocks that the host lacks, before their slots are overwritten.

        Pass all blocks of one allocation together, in the order of eviction.
        """
        if len(evicted):
            self._count(self._native.evict(evicted, self._host, plan.evictions))

    def give_away(self, ids: Int32Array, contents: DeviceContents, plan: OpenPlan, plans: PlanLedger) -> bool:
        """Do the same for device blocks that an engine gives away, and let ``plan`` wait for plans that read them.

        Return True if that may have changed ``plan``.
        """
        planned = contents.give_away(ids, self._native, self._host, plan.evictions, plans)
        if planned is None:
            return False
        if planned.after:
            plan.after = tuple(dict.fromkeys((*plan.after, *planned.after)))
        self._count(planned)
        return True

    def give_way(self) -> None:
        """Begin no backup in this step while some are in flight: a request did not get its blocks."""
        self._is_short = True

    def plan_background(self, plan: OpenPlan, in_flight: int) -> None:
        """Plan the backups of this step. ``in_flight``: number of blocks being backed up."""
        is_short, self._is_short = self._is_short, False
        if not (is_short and in_flight):
            now = self._clock()
            self._count(self._native.plan(self._host, in_flight, self.is_patient, now, plan.backups))

    def _count(self, planned: _core.PlannedCopies | None) -> None:
        if planned is not None:
            self._counters.backups_dropped += planned.dropped
            if self._on_displaced is not None and planned.asked:
                self._on_displaced(planned.displaced.hashes)

    # --- ends ---------------------------------------------------------------------------------------------

    def ended(self, result: SwapInFlight) -> Iterator[SwapInFlight]:
        """Yield the part of a reported transfer that may end now; the rest waits for copies above it.

        A tier takes a block below a parent that it has. A copy below one in flight, on another stream, may be reported
        first; neither order of the reports costs a block.
        """
        self._native.ended(result.swap.src_block_ids)
        yield from self._part_that_may_end(result)

    def ended_early(self) -> Iterator[SwapInFlight]:
        """Yield parts that wait for nothing any more; each has to end before the next is asked for."""
        while self._early:
            waiting, self._early, self.has_early = self._early, [], False
            parts = [part for result in waiting for part in self._part_that_may_end(result)]
            if not parts:
                return
            yield from parts

    def _part_that_may_end(self, result: SwapInFlight) -> Iterator[SwapInFlight]:
        swap = result.swap
        may_end = _core.copies_that_may_end(swap.hash_values, swap.parent_hashes, self._host).view(np.bool_)
        if may_end.all():
            yield result
            return
        self._early.append(_part(result, ~may_end))
        self.has_early = True
        if may_end.any():
            yield _part(result, may_end)


def _part(result: SwapInFlight, chosen: Mask) -> SwapInFlight:
    """Return the transfer of the chosen blocks alone."""
    swap = result.swap
    part = SwapInFlight(
        replace(
            swap,
            src_block_ids=swap.src_block_ids[chosen],
            src_generations=swap.src_generations[chosen],
            dst_block_ids=swap.dst_block_ids[chosen],
            dst_generations=swap.dst_generations[chosen],
            hash_values=swap.hash_values[chosen],
            parent_hashes=swap.parent_hashes[chosen],
        )
    )
    part.settle(result.flags[chosen])
    part.checksums = result.checksums[chosen] if len(result.checksums) else result.checksums
    return part
