"""Paths of records that a match asks for, where states stand for the tokens before a position.

Attention needs every page of a prefix; a state is of use at its own position alone, and only some pages have one. The
longest prefix that can be used ends at the last page that has the states of all groups, and whose pages are all there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fdcache.groups import record_keys, state_keys
from fdcache.layout import KVLayout
from fdcache.metadata import HashArray
from fdcache.plans.ledger import Mask
from fdcache.tiers.host import HostTier
from fdcache.tiers.pool import ABSENT

StoredMask = Callable[[HashArray], Mask]
"""Returns which of these blocks the storage has."""


class StatePaths:
    """Paths of a layout with states. ``stored`` is None without a storage whose blocks are known here."""

    def __init__(self, layout: KVLayout, host: HostTier, stored: StoredMask | None) -> None:
        self._records, self._states = layout.page_records, layout.num_states
        self._host = host
        self._stored = stored

    def keys_below(self, hashes: HashArray, pages: int) -> HashArray:
        """Return the keys of the states at the end of this many pages."""
        return state_keys(hashes[pages - 1 : pages], self._records, self._states)

    def path(self, hashes: HashArray, pages: int) -> HashArray:
        """Return the keys of this many pages and of the states at their end."""
        of_pages = record_keys(hashes[:pages], self._records)
        return np.concatenate((of_pages, self.keys_below(hashes, pages)))

    def ends(self, hashes: HashArray, on_device: int) -> list[int]:
        """Return the numbers of pages beyond those on the device at whose end there are states, the largest first.

        A state counts that is being copied to the host, or is in storage.
        """
        last = state_keys(hashes[on_device:], self._records, self._states)[self._states - 1 :: self._states]
        if not len(last):
            return []
        is_there = np.asarray(self._host.index.contains(last) != ABSENT)
        if self._stored is not None:
            is_there |= self._stored(last)
        found: list[int] = (np.flatnonzero(is_there)[::-1] + on_device + 1).tolist()
        return found
