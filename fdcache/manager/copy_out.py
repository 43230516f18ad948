"""Write policies for a device cache that the engine owns: which of its blocks are copied to the host, and when.

No device block is held. A backup is part of a later plan, so that the order of the compute stream puts it behind the
step that computed the block. A block that is given away before is copied by the plan of that very step, which its
compute waits for. The host tier is closed under prefixes: a block is copied after its uncovered ancestors.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fdcache.manager.device_contents import DeviceContents, DevicePath, Offer
from fdcache.metadata import Int32Array, SwapPurpose, TransferPlan
from fdcache.plans.blocks import Blocks
from fdcache.plans.ledger import OpenPlan
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.tiers.host import HostTier
from fdcache.tiers.pool import ABSENT, NO_PARENT, PENDING, RESERVED
from fdcache.tiers.statistics import Counters

_MOST_IN_FLIGHT = 1024
"""Most blocks being backed up: a block that is given away meanwhile makes its next owner wait."""

_PATIENCE = 1.0
"""Seconds that blocks wait for slots of a service, which grants them in the background."""

_NONE = np.empty(0, np.int32)


class CopyOut:
    """Plans copies of offered blocks to the host tier, by the write policy of ``settings``."""

    def __init__(
        self, settings: CacheSettings, host: HostTier, counters: Counters, clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self.contents = DeviceContents()
        self._host = host
        self._counters = counters
        self._writes_back = settings.write_policy is WritePolicy.WRITE_BACK
        selective = settings.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        self._least_hits = settings.write_through_threshold if selective else 1
        self._clean_reserve = settings.clean_reserve
        self._offers: list[Offer] = []
        self._queue: list[Int32Array] = []
        self._waiting: list[Int32Array] = []  # for copies of their parents
        self._coldest: Int32Array = _NONE
        self._may_retry = False
        self._starved_since: float | None = None  # the service has had no slot

    # --- what the engine tells ----------------------------------------------------------------------------

    def offered(self, path: DevicePath, start: int, counted: int) -> None:
        """Take an offer of the blocks of a path from ``start`` on. Offers are looked at together, once they matter."""
        if path.parent is None:
            start = max(start, 1)
        if start < len(path):
            self._offers.append(Offer(path, start, len(path), counted))

    def _take_offers(self) -> None:
        """Enter what was offered, and queue what the policy wants on the host now."""
        if not self._offers:
            return
        offers, self._offers = self._offers, []
        ids = self.contents.add(offers)
        if not self._writes_back:
            self._enqueue(ids[~self.contents.queued[ids] & self._is_wanted(ids)])

    def next_evicted(self, ids: Int32Array) -> None:
        """Learn which blocks the engine gives away next, for the clean reserve of write_back."""
        if self._writes_back:
            self._coldest = ids

    def given_away(self, ids: Int32Array, plan: OpenPlan, is_in_flight: Callable[[int], bool]) -> None:
        """Copy wanted blocks out in ``plan``, before their device blocks are overwritten, and forget them."""
        self._take_offers()
        contents = self.contents
        reads = [each for each in contents.reads(ids) if is_in_flight(each) and each not in plan.after]
        if reads:
            plan.after = (*plan.after, *reads)
        known = contents.known_of(ids)
        if len(known):
            wanted = known[self._is_wanted(known)]
            if len(wanted):
                self._copy(self._with_ancestors(wanted), SwapPurpose.EVICT, plan)
            contents.forget(known)

    def forget_blocks(self, ids: Int32Array) -> None:
        """Forget what is in these device blocks, without a copy."""
        self._take_offers()
        self.contents.forget(ids)

    def forget(self) -> None:
        """Forget every block and what is queued."""
        self._offers.clear()
        self.contents.forget_all()
        self._queue.clear()
        self._waiting.clear()
        self._coldest = _NONE

    # --- plans --------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Number of blocks that wait for a plan."""
        self._take_offers()
        return sum(int(np.count_nonzero(self.contents.queued[ids])) for ids in (*self._queue, *self._waiting))

    @property
    def has_work(self) -> bool:
        """True if the next plan may copy queued blocks."""
        self._take_offers()
        return bool(self._queue) or (self._may_retry and bool(self._waiting))

    def plan_background(self, plan: OpenPlan, in_flight: int) -> None:
        """Plan backups of queued blocks; ``in_flight``: number of blocks being backed up."""
        self._take_offers()
        if self._may_retry:
            self._queue[:0], self._waiting, self._may_retry = self._waiting, [], False
        most = max(min(_MOST_IN_FLIGHT, self._host.num_blocks // 4), 1) - in_flight
        if self._queue and most > 0:
            self._back_up(most, plan)
        if len(self._coldest):
            self._clean(min(most, self._clean_reserve - in_flight), plan)

    def sent(self, plan: TransferPlan) -> None:
        """Note which device blocks a plan reads."""
        for swap in (plan.evictions, plan.backups):
            if swap is not None:
                self.contents.read_in(swap.src_block_ids, plan.plan_id)

    def copies_ended(self) -> None:
        """Let blocks go on whose parents were being copied."""
        self._may_retry = True

    def _enqueue(self, ids: Int32Array) -> None:
        if len(ids):
            self.contents.queued[ids] = True
            self._queue.append(ids)

    def _is_wanted(self, ids: Int32Array) -> NDArray[np.bool_]:
        """Return a mask of the blocks that have enough hits and that the host lacks."""
        wanted = self.contents.hits[ids] >= self._least_hits
        if wanted.any():
            absent = self._host.contains(np.ascontiguousarray(self.contents.hashes[ids])) == ABSENT
            wanted &= absent
        return wanted

    def _back_up(self, most: int, plan: OpenPlan) -> None:
        """Plan backups of up to ``most`` queued blocks."""
        queue, self._queue = np.concatenate(self._queue), []
        queue = queue[self.contents.queued[queue]]
        ids, rest = queue[:most], queue[most:]
        if len(rest):
            self._queue.append(rest)
        self.contents.queued[ids] = False
        waits = self._copy(self._with_ancestors(ids), SwapPurpose.BACKUP, plan)
        if len(waits):
            self.contents.queued[waits] = True
            self._waiting.append(waits)

    def _clean(self, most: int, plan: OpenPlan) -> None:
        coldest, self._coldest = self._coldest, _NONE
        known = self.contents.known_of(coldest)[: self._clean_reserve]
        dirty = known[self._is_wanted(known)][: max(most, 0)]
        if len(dirty):
            self._copy(self._with_ancestors(dirty), SwapPurpose.BACKUP, plan)

    def _with_ancestors(self, ids: Int32Array) -> Int32Array:
        """Return blocks after those ancestors that the host lacks, as far as they are on the device."""
        contents = self.contents
        parents, hashes = contents.parents[ids], contents.hashes[ids]
        starts: NDArray[np.bool_] = np.asarray(parents.any(axis=1))
        starts[1:] &= (parents[1:] != hashes[:-1]).any(axis=1)
        starts[starts] = self._host.contains(parents[starts]) == ABSENT
        orphans = np.flatnonzero(starts).tolist()
        if not orphans:
            return ids
        found: list[Int32Array] = []
        for i in orphans:
            above = contents.ancestors(int(ids[i]))
            if len(above):
                found.append(
                    above[self._host.contains(np.ascontiguousarray(contents.hashes[above])) == ABSENT]
                )
        return np.concatenate((*found, ids)) if found else ids

    def _copy(self, ids: Int32Array, purpose: SwapPurpose, plan: OpenPlan) -> Int32Array:
        """Plan copies of blocks, parents first; return those that wait for copies of their parents.

        What is given away cannot wait for these: it is copied below them, and dropped if one fails.
        """
        contents = self.contents
        hashes, parents = contents.hashes[ids], contents.parents[ids]
        count, taken = len(ids), None
        while count:
            taken = self._host.take_slots(
                parents[:count], hashes[:count], below_pending=purpose is SwapPurpose.EVICT
            )
            if taken is None or not taken.missing:
                break
            count = max(count - taken.missing, 0)
        self._no_room(ids[count:] if taken is not None else ids, purpose, taken is not None)
        if taken is None or not count:
            return _NONE
        self._starved_since = None
        chosen = np.flatnonzero(taken.status == RESERVED)
        if len(chosen):
            none = np.zeros(len(chosen), np.uint32)
            source = Blocks(ids[chosen], none, hashes[chosen], parents[chosen])
            plan.add(purpose, source, taken.slots, taken.generations)
            contents.queued[ids[chosen]] = False
        return self._waiting_of(ids[:count][taken.status == NO_PARENT], purpose)

    def _no_room(self, ids: Int32Array, purpose: SwapPurpose, may_wait: bool) -> None:
        """Drop blocks, or queue them again while a service may grant slots."""
        if not len(ids):
            return
        now, is_granted_slots = self._clock(), self._host.copy_room < self._host.num_blocks
        since = now if self._starved_since is None else self._starved_since
        if purpose is SwapPurpose.BACKUP and may_wait and is_granted_slots and now - since < _PATIENCE:
            self._starved_since = since
            self.contents.queued[ids] = True
            self._queue.insert(0, ids)
        else:
            self._counters.backups_dropped += len(ids)

    def _waiting_of(self, ids: Int32Array, purpose: SwapPurpose) -> Int32Array:
        """Return the blocks whose parent is being copied, or waits itself; drop the others."""
        if not len(ids):
            return _NONE
        contents = self.contents
        on_its_way = self._host.contains(contents.parents[ids]) == PENDING
        waits: list[int] = []
        expected: set[bytes] = set()
        for i, device_id in enumerate(ids.tolist()):
            if purpose is SwapPurpose.BACKUP and (
                on_its_way[i] or contents.parents[device_id].tobytes() in expected
            ):
                waits.append(device_id)
                expected.add(contents.hashes[device_id].tobytes())
        self._counters.backups_dropped += len(ids) - len(waits)
        return np.array(waits, np.int32)
