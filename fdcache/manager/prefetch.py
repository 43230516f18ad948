"""What requests read from storage, and how long they wait for it: in this process, or at a service."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Protocol

from fdcache.metadata import HashArray
from fdcache.plans.ledger import OpenPlan
from fdcache.settings.cache import PrefetchPolicy, StorageTierSettings
from fdcache.tiers.fetches import Fetch
from fdcache.tiers.host import HostMatch
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.storage_reads import StorageReads, leading_ready

if TYPE_CHECKING:
    from fdcache.service.client.remote_tier import RemoteHostTier


class Prefetching(Protocol):
    """Fetches of requests from storage, by number, in this process or at a service."""

    def number(self) -> int:
        """Return a new number, for one request."""

    def looked_up(self, number: int) -> int:
        """Return the number under which the host tier is to look up the fetch, 0 for none."""

    def prefetch(self, number: int, hashes: HashArray, plan: OpenPlan) -> None:
        """Begin to read what a request that has arrived will need."""

    def must_wait(self, number: int, hashes: HashArray, plan: OpenPlan) -> bool:
        """Return True if the policy lets the request's match wait for its reads."""

    def fetched(self, number: int, start: int, host: HostMatch) -> int:
        """Return how many of the host blocks from ``start`` on were read from storage for this request."""

    def is_reading(self, block_hash: bytes) -> bool:
        """Return True for a block on its way from storage."""

    def let_go(self, number: int) -> None:
        """Unpin what was read: the request has pinned what it found."""

    def release(self, number: int) -> None:
        """End the fetch."""


class RemotePrefetcher:
    """Fetches of a service, which says with each look-up if the request has to wait."""

    def __init__(self, device: BlockPool, host: RemoteHostTier) -> None:
        self._device = device
        self._fetches = host.fetches
        self._known: set[int] = set()  # to the service

    def number(self) -> int:
        """Return a new number."""
        return self._fetches.number()

    def looked_up(self, number: int) -> int:
        """Return the number: the service reads what the look-up does not find."""
        self._known.add(number)
        return number

    def prefetch(self, number: int, hashes: HashArray, plan: OpenPlan) -> None:
        """Let the service begin to read."""
        if number not in self._known:
            self._known.add(number)
            on_device = leading_ready(self._device, hashes)
            if on_device < len(hashes):
                self._fetches.begin(number, hashes, on_device)

    def must_wait(self, number: int, hashes: HashArray, plan: OpenPlan) -> bool:
        """Return False: the look-up's answer will say."""
        return False

    def fetched(self, number: int, start: int, host: HostMatch) -> int:
        """Return what the service said."""
        return len(host.fetched)

    def is_reading(self, block_hash: bytes) -> bool:
        """Return False: a service does not tell pending blocks apart."""
        return False

    def let_go(self, number: int) -> None:
        """Do nothing: the service unpinned with the look-up."""

    def release(self, number: int) -> None:
        """End the service's fetch, if it knows of it."""
        if number in self._known:
            self._known.discard(number)
            self._fetches.end(number)


class Prefetcher:
    """Fetches of this process, by the policy of the settings."""

    def __init__(self, settings: StorageTierSettings, device: BlockPool, reads: StorageReads) -> None:
        self._settings = settings
        self._on_device = partial(leading_ready, device)
        self._reads = reads
        self._numbers = count(1)
        self._fetches: dict[int, Fetch] = {}

    def number(self) -> int:
        """Return a new number."""
        return next(self._numbers)

    def looked_up(self, number: int) -> int:
        """Return 0: a host tier of this process only finds what is there."""
        return 0

    def prefetch(self, number: int, hashes: HashArray, plan: OpenPlan) -> None:
        """Begin to read, once the index of the storage is open."""
        if number not in self._fetches and self._reads.is_open:
            self._fetches[number] = self._reads.begin(
                hashes,
                self._on_device,
                plan,
                budget=self._settings.prefetch_timeout,
                bandwidth=self._settings.prefetch_bandwidth,
            )

    def must_wait(self, number: int, hashes: HashArray, plan: OpenPlan) -> bool:
        """Return True if the policy lets the request's match wait for its reads."""
        policy = self._settings.prefetch_policy
        if policy is PrefetchPolicy.BEST_EFFORT:
            return False
        self.prefetch(number, hashes, plan)
        fetch = self._fetches.get(number)
        return fetch is not None and self._reads.must_wait(fetch, policy, plan)

    def fetched(self, number: int, start: int, host: HostMatch) -> int:
        """Return how many of the host blocks from ``start`` on were read for this request."""
        fetch = self._fetches.get(number)
        return len(fetch.part(start, len(host))) if fetch is not None else 0

    def is_reading(self, block_hash: bytes) -> bool:
        """Return True for a block on its way from storage."""
        return self._reads.is_reading(block_hash)

    def let_go(self, number: int) -> None:
        """Unpin what was read: the request has pinned what it found."""
        if (fetch := self._fetches.get(number)) is not None:
            self._reads.let_go(fetch)

    def release(self, number: int) -> None:
        """End the fetch and unpin what was read."""
        if (fetch := self._fetches.pop(number, None)) is not None:
            self._reads.give_up(fetch)
