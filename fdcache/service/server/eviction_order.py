"""The order in which a namespace evicts, in a file, so that the next service goes on with it."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fdcache.tiers.pool import BlockPool

log = logging.getLogger("fdcache.service.server")


class OrderFile:
    """For each slot the place of its block in the eviction order, uint32; blocks in use come last.

    It is a hint: a file that is missing, damaged or out of date costs no block.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, tier: BlockPool, slots: int) -> None:
        """Write the order of a tier with ``slots``. A full disk is logged."""
        try:
            places_of(tier, slots).astype("<u4").tofile(self._path)
        except OSError as error:
            log.warning("%s: the order of eviction is not kept: %s", self._path, error)

    def take(self, slots: int) -> NDArray[np.uint64]:
        """Return the place of each slot's block, and remove the file: it is out of date from now on."""
        places = np.zeros(slots, np.uint64)
        try:
            saved = np.fromfile(self._path, "<u4", slots)
        except OSError:
            return places
        places[: len(saved)] = saved
        self.remove()
        return places

    def remove(self) -> None:
        """Remove the file, if it is there."""
        self._path.unlink(missing_ok=True)


def places_of(tier: BlockPool, slots: int) -> NDArray[np.uint64]:
    """Return for each slot the place of its block in the eviction order."""
    order = tier.coldest(slots).slots
    places = np.full(slots, len(order), np.uint64)
    places[order] = np.arange(len(order))
    return places
