"""Write policies for a device cache that the engine owns: which of its blocks are copied to the host, and when."""

from __future__ import annotations

from collections.abc import Callable

from fdcache import _core
from fdcache._core import DevicePath, HostIndex
from fdcache.metadata import HashArray, Int32Array, TransferPlan
from fdcache.plans.ledger import OpenPlan, PlanLedger
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.tiers.statistics import Counters


class CopyOut:
    """Plans copies of offered blocks to the host tier, by the write policy of ``settings``.

    The native object knows what lies in the device blocks, and which plans read them; it finds and reserves the blocks
    of one call. While ``is_patient``, a few blocks wait for more before they have a plan. ``on_displaced`` is called
    with the blocks that leave the host to make room.
    """

    def __init__(
        self,
        settings: CacheSettings,
        host: HostIndex,
        counters: Counters,
        clock: Callable[[], float],
        on_displaced: Callable[[HashArray], None] | None = None,
    ) -> None:
        self._clock = clock
        self._host = host
        self._on_displaced = on_displaced
        self._counters = counters
        selective = settings.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        self._writes_back = settings.write_policy is WritePolicy.WRITE_BACK
        self._native = _core.CopyOut(
            self._writes_back,
            settings.write_through_threshold if selective else 1,
            settings.clean_reserve,
        )
        self.is_patient = False

    @property
    def num_blocks(self) -> int:
        """Number of device blocks seen."""
        return self._native.num_blocks

    @property
    def num_known(self) -> int:
        """Number of device blocks whose content is known."""
        return self._native.num_known

    # --- what the engine tells ----------------------------------------------------------------------------

    def offered(self, path: DevicePath, start: int, counted: int) -> None:
        """Take an offer of the blocks of a path from ``start`` on. Offers are looked at together, once they matter."""
        self._native.offered(path, start, counted)

    def next_evicted(self, ids: Int32Array) -> None:
        """Take the blocks that the engine gives away next, for the clean reserve of write_back."""
        self._native.next_evicted(ids)

    def given_away(self, ids: Int32Array, plan: OpenPlan, plans: PlanLedger) -> bool:
        """Copy wanted blocks out in ``plan``, before their device blocks are overwritten, and forget them.

        Return True if that may have changed ``plan``.
        """
        planned = self._native.given_away(ids, self._host, plan.evictions, plans)
        if planned is None:
            return False
        if planned.after:
            plan.after = tuple(dict.fromkeys((*plan.after, *planned.after)))
        self._count(planned)
        return True

    def forget_blocks(self, ids: Int32Array) -> None:
        """Forget what is in these device blocks, without a copy."""
        self._native.forget_blocks(ids, self._host)

    def forget(self) -> None:
        """Forget every block and what is queued."""
        self._native.forget()

    # --- plans --------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Number of blocks that wait for a plan."""
        return self._native.queued(self._host)

    @property
    def has_queue(self) -> bool:
        """True if the next plan may copy blocks, or offers have not been looked at."""
        return self._native.has_queue

    @property
    def has_work(self) -> bool:
        """True if the next plan may copy queued blocks."""
        return self._native.has_work(self._host)

    def plan_background(self, plan: OpenPlan, in_flight: int) -> None:
        """Plan backups of queued blocks; ``in_flight``: number of blocks being backed up."""
        planned = self._native.plan(self._host, in_flight, self.is_patient, self._clock(), plan.backups)
        if planned is not None:
            self._count(planned)

    def sent(self, plan: TransferPlan) -> None:
        """Record the device blocks that a plan reads."""
        if plan.evictions is not None or plan.backups is not None:
            swaps = (plan.evictions, plan.backups)
            self._native.sent(plan.plan_id, [swap.src_block_ids for swap in swaps if swap is not None])

    def copies_ended(self) -> None:
        """Release the blocks whose parents were being copied."""
        self._native.copies_ended()

    def _count(self, planned: _core.PlannedCopies) -> None:
        self._counters.backups_dropped += planned.dropped
        if self._on_displaced is not None and planned.asked:
            self._on_displaced(planned.displaced.hashes)
