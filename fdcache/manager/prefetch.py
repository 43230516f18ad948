"""What requests read from storage, and how long they wait for it: in this process, or at a service."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from fdcache.manager.requests import Request
from fdcache.metadata import HashArray
from fdcache.plans.ledger import OpenPlan
from fdcache.settings.cache import PrefetchPolicy, StorageTierSettings
from fdcache.tiers.host import HostMatch
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.storage_reads import StorageReads, leading_ready

if TYPE_CHECKING:
    from fdcache.service.client.remote_tier import RemoteHostTier


class Prefetching(Protocol):
    """What becomes of requests in storage, in this process or at a service."""

    def prefetch(self, request: Request, hashes: HashArray, plan: OpenPlan) -> None:
        """Begin to read what a request that has arrived will need."""

    def must_wait(self, request: Request, hashes: HashArray, plan: OpenPlan) -> bool:
        """Whether the request's match has to come again later, by the policy, before anybody is asked."""

    def number(self, request: Request) -> int:
        """By which number the host tier knows the request's fetch; 0: not at all."""

    def fetched(self, request: Request, start: int, host: HostMatch) -> int:
        """How many of the host blocks from ``start`` on were read from storage for this request."""

    def is_reading(self, block_hash: bytes) -> bool:
        """Whether a block is on its way from storage."""

    def let_go(self, request: Request) -> None:
        """The request has pinned what it found, or wants it no more."""

    def release(self, request: Request) -> None:
        """The request has ended, or was preempted."""


class RemotePrefetcher:
    """Requests for which a service reads. How long they wait for it is the service's to say, with each look-up."""

    def __init__(self, device: BlockPool, host: RemoteHostTier) -> None:
        self._device = device
        self._fetches = host.fetches

    def prefetch(self, request: Request, hashes: HashArray, plan: OpenPlan) -> None:
        """Have it read in the background."""
        if not request._fetch_number and self.number(request):
            on_device = leading_ready(self._device, hashes)
            if on_device < len(hashes):
                self._fetches.begin(request._fetch_number, hashes, on_device)

    def must_wait(self, request: Request, hashes: HashArray, plan: OpenPlan) -> bool:
        """The look-up will tell."""
        return False

    def number(self, request: Request) -> int:
        """The same for every look-up of the request until it ends."""
        if not request._fetch_number:
            request._fetch_number = self._fetches.number()
        return request._fetch_number

    def fetched(self, request: Request, start: int, host: HostMatch) -> int:
        """As the service says."""
        return len(host.fetched)

    def is_reading(self, block_hash: bytes) -> bool:
        """Nothing that is pending is told of by a service."""
        return False

    def let_go(self, request: Request) -> None:
        """The service did so with the look-up."""

    def release(self, request: Request) -> None:
        """Have it forgotten."""
        if request._fetch_number:
            self._fetches.end(request._fetch_number)
            request._fetch_number = 0


class Prefetcher:
    """The fetch of each request that has arrived, by the policy of the settings."""

    def __init__(self, settings: StorageTierSettings, device: BlockPool, reads: StorageReads) -> None:
        self._settings = settings
        self._on_device = partial(leading_ready, device)
        self._reads = reads

    def prefetch(self, request: Request, hashes: HashArray, plan: OpenPlan) -> None:
        """Begin to read what a request that has arrived will need."""
        if request._fetch is None and self._reads.is_open:
            request._fetch = self._reads.begin(
                hashes,
                self._on_device,
                plan,
                budget=self._settings.prefetch_timeout,
                bandwidth=self._settings.prefetch_bandwidth,
            )

    def must_wait(self, request: Request, hashes: HashArray, plan: OpenPlan) -> bool:
        """Whether the request's match has to come again later, by the policy."""
        policy = self._settings.prefetch_policy
        if policy is PrefetchPolicy.BEST_EFFORT:
            return False
        self.prefetch(request, hashes, plan)
        return request._fetch is not None and self._reads.must_wait(request._fetch, policy, plan)

    def number(self, request: Request) -> int:
        """An own host tier knows of no fetches."""
        return 0

    def fetched(self, request: Request, start: int, host: HostMatch) -> int:
        """How many of the host blocks from ``start`` on were read from storage for this request."""
        return len(request._fetch.part(start, len(host))) if request._fetch is not None else 0

    def is_reading(self, block_hash: bytes) -> bool:
        """Whether a block is on its way from storage."""
        return self._reads.is_reading(block_hash)

    def let_go(self, request: Request) -> None:
        """The request has pinned what it found, or wants it no more."""
        if request._fetch is not None:
            self._reads.let_go(request._fetch)

    def release(self, request: Request) -> None:
        """The request has ended, or was preempted."""
        if request._fetch is not None:
            self._reads.give_up(request._fetch)
            request._fetch = None
