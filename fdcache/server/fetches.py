"""ClientFetches: what is read from storage for the requests of one client."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from fdcache.manager.fetch import Fetch
from fdcache.metadata import HashArray
from fdcache.node.protocol import FETCHED, NOT_FETCHED, FetchTerms
from fdcache.server.layout_storage import LayoutStorage
from fdcache.settings.storage_tier import PrefetchPolicy

MOST_BLOCKS = 1 << 20
"""Hashes of fetches kept for one client at most; beyond them nothing more is read for it."""


class ClientFetches:
    """The fetches of one client's requests, by the numbers that it gave them.

    ``storage`` is None while there is none to read from.
    """

    def __init__(self, storage: Callable[[], LayoutStorage | None], terms: FetchTerms) -> None:
        self._storage = storage
        self._terms = terms
        self._fetches: dict[int, Fetch] = {}
        self._blocks = 0

    def __len__(self) -> int:
        return len(self._fetches)

    @property
    def num_leases(self) -> int:
        """Fetches that have pinned what came for them."""
        return sum(fetch.lease != 0 for fetch in self._fetches.values())

    def begin(self, number: int, hashes: HashArray, start: int) -> None:
        """Begin to read what is stored of a request's path, whose first ``start`` blocks are on its device."""
        storage = self._storage()
        reads = storage.reads if storage is not None else None
        if storage is None or reads is None or not reads.is_open or number in self._fetches:
            return
        if self._blocks + len(hashes) > MOST_BLOCKS:
            return
        fetch = reads.begin(
            hashes,
            lambda _: start,
            storage.plan,
            budget=self._terms.timeout,
            bandwidth=self._terms.bandwidth,
        )
        if not fetch.ended:
            self._fetches[number] = fetch
            self._blocks += len(hashes)

    def must_wait(self, number: int, hashes: HashArray, start: int) -> bool:
        """Whether the look-up of a request has to come again, by the client's policy."""
        if self._terms.policy is PrefetchPolicy.BEST_EFFORT:
            return False
        self.begin(number, hashes, start)
        fetch, storage = self._fetches.get(number), self._storage()
        if fetch is None or storage is None or storage.reads is None:
            return False
        return storage.reads.must_wait(fetch, self._terms.policy, storage.plan)

    def matched(self, number: int, start: int, count: int) -> tuple[range, int]:
        """The request has pinned blocks from ``start`` on: which of them were read for it, and what is kept for it."""
        fetch, storage = self._fetches.get(number), self._storage()
        if fetch is None or storage is None:
            return range(0), NOT_FETCHED
        if storage.reads is not None:
            storage.reads.let_go(fetch)
        fetched = fetch.part(start, count)
        storage.hit_blocks += len(fetched)
        return fetched, FETCHED

    def end(self, numbers: list[int]) -> None:
        """These requests have ended; those unknown here have nothing to end."""
        storage = self._storage()
        for number in numbers:
            with suppress(KeyError):
                fetch = self._fetches.pop(number)
                self._blocks -= len(fetch.hashes)
                if storage is not None and storage.reads is not None:
                    storage.reads.give_up(fetch)

    def end_all(self) -> None:
        """The client is gone, or silent: nothing is kept for it."""
        self.end(list(self._fetches))
