"""StoragePool: the slots of slab files as a tier, which may lose some of them to the medium or to a full disk."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fdcache.metadata import CacheLevel, Int32Array, UInt64Array
from fdcache.tiers.block_pool import BlockPool

Mask = NDArray[np.bool_]


class StoragePool(BlockPool):
    """A tier of ``num_blocks`` slots. Where a slot is bad, it is never used again.

    Slab files are sparse. When the disk has no room for a record, the slots that never held one are withheld, and
    new blocks take the places of the coldest in the others. One withheld slot is tried again every ``retry_after``
    seconds; each one that can be written brings back twice as many as the one before.
    """

    def __init__(
        self, num_blocks: int, *, retry_after: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(CacheLevel.STORAGE, num_blocks)
        self._pause = retry_after
        self._clock = clock
        self._written = np.zeros(num_blocks, np.bool_)
        self._withheld = np.zeros(num_blocks, np.bool_)
        self._on_trial = np.zeros(num_blocks, np.bool_)
        self._step = 1
        self._try_at = 0.0
        self._wrote_since = True  # the last trial that failed; its block has had another slot

    @property
    def is_trying(self) -> bool:
        """Whether a slot is being tried that the disk had no room for."""
        return bool(self._on_trial.any())

    def found(self, slots: Int32Array) -> None:
        """These slots hold records in the files, so they have their room."""
        self._written[slots] = True

    def start_over(self) -> None:
        """Forget every block and what is known of the disk; bad slots stay out of use."""
        self.reset()
        self._give_back(len(self._withheld))
        self._on_trial[:] = self._written[:] = False

    def grow_if_due(self) -> None:
        """Before slots are taken: try one that the disk had no room for, now and then."""
        now = self._clock()
        may_try = self._wrote_since or not self.available
        if may_try and self._withheld.any() and now >= self._try_at and not self.is_trying:
            self._try_at = now + self._pause
            self._step = 1
            self._give_back(self._step)

    def end_reads(self, slots: Int32Array, lost: Mask, unusable: Mask) -> None:
        """Let the slots of a read go. What was lost is forgotten; what is unusable is not used again, either."""
        # While the slots are held still: nobody can have given them to other blocks.
        if unusable.any():
            self.discard(slots[unusable], True)
        if lost.any():
            self.discard(slots[lost])
        self.unhold(slots)

    def end_writes(
        self, slots: Int32Array, copied: Mask, checksums: UInt64Array, bad: Mask, no_room: Mask
    ) -> Mask:
        """The end of writes into reserved slots, parents first; says what is an entry now."""
        no_room = no_room & ~bad & ~copied
        self.quarantine(slots[bad])
        self.withhold(slots[no_room])
        arrived = self.complete(slots, copied.view(np.uint8), checksums).view(np.bool_)
        self._withheld[slots[no_room]] = True
        self._written[slots[no_room]] = False
        self._written[slots[copied]] = True
        worked = self._on_trial[slots[copied]].any()
        self._on_trial[slots] = False
        self._wrote_since = self._wrote_since or bool(copied.any())
        if no_room.any():
            self._shrink()
        elif worked:
            self._step *= 2
            self._give_back(self._step)
        return arrived

    def _shrink(self) -> None:
        """Withhold every free slot that has no room on the disk yet."""
        self._try_at = self._clock() + self._pause
        self._wrote_since = False
        self._on_trial[:] = False
        lease = self.open_lease()
        free = self.reserve(lease, self.stats().free).slots
        unwritten = free[~self._written[free]]
        self.withhold(unwritten)
        self.release(lease)
        self._withheld[unwritten] = True

    def _give_back(self, count: int) -> None:
        slots = np.flatnonzero(self._withheld)[:count].astype(np.int32)
        self._withheld[slots] = False
        self._on_trial[slots] = True
        self.give_back(slots)
