"""ClientFetches: what is read from storage for the requests of one client."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from fdcache.metadata import HashArray
from fdcache.service.server.layout_storage import LayoutStorage
from fdcache.service.server.namespace import Namespace
from fdcache.service.wire.liveness import Live, Watch
from fdcache.service.wire.protocol import FETCHED, NOT_FETCHED, FetchTerms, Heartbeat
from fdcache.settings.cache import PrefetchPolicy
from fdcache.tiers.fetches import Fetch
from fdcache.tiers.traffic import Traffic

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


@dataclass(eq=False, slots=True)
class Client:
    """One session. ``stock`` has the generation of each slot it may copy into, ``runs`` its pinned look-ups.

    ``former`` has, by lease, those slots of the stock that were granted before a reset.

    What is in ``stock`` is given back by the client, or when every one of its processes is proved gone.
    """

    session: int
    identity: bytes
    namespace: Namespace
    live: Live
    name: str
    wants_events: bool
    watches: list[Watch]
    stock_lease: int
    fetches: ClientFetches
    stock: dict[int, int] = field(default_factory=dict)
    former: dict[int, set[int]] = field(default_factory=dict)
    runs: set[int] = field(default_factory=set)
    figures: bytes = b"{}"
    since: float = field(default_factory=time.time)
    seen: float = field(default_factory=time.monotonic)
    silent: bool = False
    ranks: dict[str, int] = field(default_factory=dict)
    device_resets: int = 0
    device_resets_applied: int = 0
    lookups: int = 0
    stored: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    in_flight_misses: int = 0

    def watch(self, live: Live, rank: int) -> None:
        """Another of its processes copies."""
        if live.path not in self.ranks:
            self.watches.append(Watch(live))
        self.ranks[live.path] = rank

    def count(self, heartbeat: Heartbeat) -> None:
        """What it did since it told last, for the totals of its layout."""
        totals = self.namespace.history.counts
        totals.traffic.add(heartbeat.traffic.since(self.traffic))
        totals.in_flight_misses += max(heartbeat.in_flight_misses - self.in_flight_misses, 0)
        self.traffic, self.in_flight_misses = heartbeat.traffic, heartbeat.in_flight_misses

    def is_gone(self) -> bool:
        """Whether none of its processes is left; those that are gone are watched no more."""
        alive = []
        for watch in self.watches:
            if watch.is_gone():
                watch.remove_file()
                self.ranks.pop(watch.live.path, None)
            else:
                alive.append(watch)
        self.watches = alive
        return not alive

    def renew_stock(self) -> None:
        """After a reset: what is copied into slots granted before it is not kept, whenever its end is told."""
        tier = self.namespace.tier
        if tier is not None:
            earlier = set(self.stock).difference(*self.former.values())
            self.former[self.stock_lease] = earlier
            self.stock_lease = tier.open_lease()
            self._release_former()

    def by_lease(self, slots: list[int]) -> dict[int, list[int]]:
        """The positions of these slots of its stock, by the lease that they stand under."""
        groups: dict[int, list[int]] = {}
        for position, slot in enumerate(slots):
            lease = next((each for each, held in self.former.items() if slot in held), self.stock_lease)
            groups.setdefault(lease, []).append(position)
        return groups

    def ended(self, slots: list[int]) -> None:
        """These slots are its own no more."""
        for slot in slots:
            del self.stock[slot]
        for held in self.former.values():
            held.difference_update(slots)
        self._release_former()

    def _release_former(self) -> None:
        tier = self.namespace.tier
        for lease in [each for each, held in self.former.items() if not held]:
            del self.former[lease]
            if tier is not None:
                tier.release(lease)

    def give_up_runs(self) -> int:
        """Unpin what it looked up; a load that still reads there finds the slot's header changed, and fails."""
        tier = self.namespace.tier
        if tier is not None:
            for lease in self.runs:
                tier.release(lease)
        count = len(self.runs)
        self.runs.clear()
        return count

    def take_everything_back(self) -> None:
        """Its slots, pins and reads: it has said that it is done with them, or is proved gone."""
        self.fetches.end_all()
        self.give_up_runs()
        if self.namespace.tier is not None:
            for lease in (self.stock_lease, *self.former):
                self.namespace.tier.release(lease)
        self.former.clear()
        self.stock.clear()
        for watch in self.watches:
            watch.close()
        self.watches = []
