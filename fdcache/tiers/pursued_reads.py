"""Reads of states for requests that wait for nothing: they begin once the store has said where it has states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from fdcache.groups import record_keys, state_keys
from fdcache.metadata import HashArray
from fdcache.tiers.waiting_fetches import Fetch

_MOST = 64
"""Paths at once; states of further ones are not looked for."""


class Reads(Protocol):
    """What this needs of the reads from storage."""

    def last_end(self, hashes: HashArray, first: int) -> int | None:
        """Return after how many pages there are stored states; None while a store is asked."""

    def begin(
        self, hashes: HashArray, on_device: Callable[[HashArray], int], *, budget: float, bandwidth: float
    ) -> Fetch:
        """Begin to read what is stored of a path."""

    def cancel(self, fetch: Fetch) -> None:
        """End a fetch."""


class PursuedReads:
    """Paths whose states are looked for and read, though their requests have gone on: later ones find them.

    A page has ``page_records`` blocks, and ``num_states`` at its end.
    """

    def __init__(self, reads: Reads, page_records: int, num_states: int) -> None:
        self._reads = reads
        self._records, self._states = page_records, num_states
        self._asked: dict[bytes, tuple[HashArray, int]] = {}  # by the last page
        self._fetches: list[Fetch] = []

    def __len__(self) -> int:
        return len(self._asked) + len(self._fetches)

    @property
    def num_leases(self) -> int:
        """Number of reads that pin blocks."""
        return sum(fetch.lease != 0 for fetch in self._fetches)

    def add(self, hashes: HashArray, first: int) -> None:
        """Look for the last states after more than ``first`` pages, about which the store is asked already."""
        if len(self) < _MOST:
            self._asked.setdefault(hashes[-1].tobytes(), (hashes.copy(), first))

    def advance(self) -> None:
        """Begin to read where the store has answered, and end what has come."""
        for key, (hashes, first) in list(self._asked.items()):
            pages = self._reads.last_end(hashes, first)
            if pages is None:
                continue
            del self._asked[key]
            if pages:
                self._begin(hashes, pages)
        for fetch in [each for each in self._fetches if each.done]:
            self._fetches.remove(fetch)
            self._reads.cancel(fetch)

    def _begin(self, hashes: HashArray, pages: int) -> None:
        of_pages = record_keys(hashes[:pages], self._records)
        states = state_keys(hashes[pages - 1 : pages], self._records, self._states)
        path = np.concatenate((of_pages, states))
        self._fetches.append(self._reads.begin(path, _none, budget=0.0, bandwidth=float("inf")))


def _none(hashes: HashArray) -> int:
    """Return how many blocks the device of nobody has."""
    return 0
