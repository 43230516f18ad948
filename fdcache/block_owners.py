"""Numbers of device blocks in plans, where some hold what all ranks have alike and others what each has of its own.

An engine gives all its ranks the same device blocks. With states of single ranks (``CacheGroup.rank``) one of them has
a record of each rank, and one of latents the same record on all. Plans tell them apart by numbers of their own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fdcache.layout import KVLayout
from fdcache.metadata import NO_BLOCK, Int32Array

EVERYONE = -1
"""The owner of what all ranks have alike."""


class BlockOwners:
    """Turns the device blocks of an engine into numbers of plans, and back.

    A number is that of the block times one more than there are ranks, plus one more than its owner. In a layout
    without states of single ranks it is that of the block.
    """

    def __init__(self, layout: KVLayout) -> None:
        owners = [layout.groups[at].rank for at in layout.state_groups]
        self.are_apart = any(owner is not None for owner in owners)
        """True if ranks have states of their own beside what they hold alike."""

        self._step = layout.replicas + 1 if self.are_apart else 1
        self._of_states = np.array([0 if owner is None else owner + 1 for owner in owners], np.int32)

    def shared(self, blocks: Int32Array) -> Int32Array:
        """Return the numbers of blocks that all ranks have alike; ``NO_BLOCK`` may be among them."""
        return (
            np.where(blocks < 0, NO_BLOCK, blocks * self._step).astype(np.int32) if self.are_apart else blocks
        )

    def path(self, blocks: Int32Array) -> Int32Array:
        """Return the numbers of the blocks of a path, the last of which hold the states at its end."""
        numbers, states = self.shared(blocks), len(self._of_states)
        if self.are_apart and len(numbers) >= states:
            numbers[-states:] += np.where(numbers[-states:] < 0, 0, self._of_states)
        return numbers

    def every(self, blocks: Int32Array) -> Int32Array:
        """Return all numbers of blocks."""
        if not self.are_apart:
            return blocks
        numbers = np.add.outer(blocks * self._step, np.arange(self._step, dtype=np.int32))
        return numbers.reshape(-1).astype(np.int32)

    def blocks(self, numbers: Int32Array) -> Int32Array:
        """Return the blocks of numbers."""
        return numbers // self._step if self.are_apart else numbers  # that of NO_BLOCK is NO_BLOCK

    def count(self, numbers: int) -> int:
        """Return how many blocks have the first numbers."""
        return -(-numbers // self._step)

    def owners(self, numbers: Int32Array) -> NDArray[np.int32]:
        """Return the owners of numbers."""
        return numbers % self._step - 1 if self.are_apart else np.full(len(numbers), EVERYONE, np.int32)
