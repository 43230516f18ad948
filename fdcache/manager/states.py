"""Layers in groups: which of them ended a match, and the paths to ask for where states stand for tokens before them.

Attention needs every page of a prefix; a state is of use at its own position alone, and only some pages have one. The
longest prefix that can be used ends at the last page that has the states of all groups, and whose pages are all there.
"""

from __future__ import annotations

import numpy as np

from fdcache.groups import record_keys, state_keys
from fdcache.layout import KVLayout
from fdcache.metadata import HashArray
from fdcache.plans.ledger import Mask
from fdcache.tiers.host import HostTier
from fdcache.tiers.pool import ABSENT


class MatchEnds:
    """Tells which group ended a match of a layout with groups."""

    def __init__(self, layout: KVLayout, host: HostTier) -> None:
        self._layout = layout
        self._host = host

    def group_after(self, hashes: HashArray, pages: int) -> int | None:
        """Return the group that has nothing of the page after the first ``pages``, or of the state after it.

        None if there is no such page, or all of it: then the match was cut, as where loading it would take too long.
        """
        layout, page = self._layout, hashes[pages : pages + 1]
        if not len(page):
            return None
        keys = [
            record_keys(page, layout.page_records),
            state_keys(page, layout.page_records, layout.num_states),
        ]
        groups = (*layout.page_groups, *layout.state_groups)
        there = is_there(np.concatenate(keys), self._host)
        return None if there.all() else groups[int(there.argmin())]


def is_there(keys: HashArray, host: HostTier) -> Mask:
    """Return which records the host tier has, or gets, or the storage has, be it that of a service."""
    there = np.asarray(host.index.contains(keys) != ABSENT)
    if host.fetches is not None and host.fetches.is_on and not there.all():
        there[~there] = host.fetches.stored(keys[~there])
    return there


class StatePaths:
    """Paths of a layout with states."""

    def __init__(self, layout: KVLayout, host: HostTier) -> None:
        self._records, self._states = layout.page_records, layout.num_states
        self._host = host

    def keys_below(self, hashes: HashArray, pages: int) -> HashArray:
        """Return the keys of the states at the end of this many pages."""
        return state_keys(hashes[pages - 1 : pages], self._records, self._states)

    def path(self, hashes: HashArray, pages: int) -> HashArray:
        """Return the keys of this many pages and of the states at their end."""
        of_pages = record_keys(hashes[:pages], self._records)
        return np.concatenate((of_pages, self.keys_below(hashes, pages)))

    def end(self, hashes: HashArray, on_device: int, *, waits: bool = True) -> int | None:
        """Return the most pages, beyond those on the device, at whose end there are states; 0 for none.

        States count that are being copied to the host, or are in storage. None while a store is asked; unless
        ``waits``, it has nothing until it has answered.
        """
        last = state_keys(hashes[on_device:], self._records, self._states)[self._states - 1 :: self._states]
        there = np.flatnonzero(self._host.index.contains(last) != ABSENT)
        found = on_device + int(there[-1]) + 1 if len(there) else 0
        fetches = self._host.fetches
        if fetches is None or not fetches.is_on or max(found, on_device) >= len(hashes):
            return found
        stored = fetches.last_end(hashes, max(found, on_device))
        return None if stored is None and waits else max(found, stored or 0)
