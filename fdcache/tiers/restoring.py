"""Filling a tier with what storage held when it was opened."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fdcache.metadata import StorageScan
from fdcache.tiers.block_pool import BlockPool


def restore(pool: BlockPool, scans: Sequence[StorageScan]) -> int:
    """Make entries of the blocks that every rank holds in the same slot and generation; returns how many.

    A block without its parent cannot be found and does not count.
    """
    if not scans:
        return 0
    first = scans[0]
    common = np.ones(len(first.slots), np.bool_)
    for other in scans[1:]:
        common &= _same(first, other)
    ready = pool.restore(
        first.slots[common],
        first.generations[common],
        first.hashes[common],
        first.parents[common],
        first.checksums[common],
        first.written_ms[common],
    )
    return int(ready.sum())


def _same(first: StorageScan, other: StorageScan) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which blocks of ``first`` stand in the same slot of ``other``. Slots ascend in both."""
    if not len(other.slots):
        return np.zeros(len(first.slots), np.bool_)
    at = np.minimum(np.searchsorted(other.slots, first.slots), len(other.slots) - 1)
    same = other.slots[at] == first.slots
    same &= other.generations[at] == first.generations
    same &= (other.hashes[at] == first.hashes).all(axis=1)
    same &= (other.parents[at] == first.parents).all(axis=1)
    return np.asarray(same)
