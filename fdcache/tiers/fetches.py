"""Fetches: blocks that are read from storage for requests, by number.

``FetchTable`` has the fetches of this process's storage: those of a manager's requests, or in the service those of one
client's. ``RemoteFetches`` of ``fdcache.service.client`` has the numbers that a service knows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Annotated, Protocol

import msgspec
import numpy as np

from fdcache.metadata import HashArray
from fdcache.plans.ledger import Mask
from fdcache.settings.cache import PrefetchPolicy, StorageTierSettings
from fdcache.tiers.storage_reads import StorageReads
from fdcache.tiers.waiting_fetches import Fetch, ReadJudge, Wait

_MOST_NAMES, _LONGEST_NAME = 65536, 1024

OnDevice = Callable[[HashArray], int]
"""Returns how many leading blocks of a path the device has."""


class FetchTerms(msgspec.Struct, frozen=True):
    """Limits on how long requests wait for blocks that are read from storage.

    With the policy timeout: ``timeout`` seconds, and one more for every ``bandwidth`` bytes.
    """

    policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    timeout: Annotated[float, msgspec.Meta(ge=0)] = 0.5
    bandwidth: Annotated[float, msgspec.Meta(gt=0)] = float(256 << 20)

    @classmethod
    def of(cls, settings: StorageTierSettings) -> FetchTerms:
        """Return the terms that the settings ask for."""
        return cls(settings.prefetch_policy, settings.prefetch_timeout, float(settings.prefetch_bandwidth))


class Fetches(Protocol):
    """Fetches by number, of this process or a service. Number 0 has no fetch."""

    @property
    def is_on(self) -> bool:
        """True while there is a storage to read from."""

    def number(self, request_id: str = "") -> int:
        """Return a new number, or 0 where there is no storage. ``request_id``: whose spans the reads are to be."""

    def stored(self, hashes: HashArray) -> Mask:
        """Return which of these blocks, one path or not, the storage has as far as is known without asking a store."""

    def last_end(self, hashes: HashArray, first: int) -> int | None:
        """Return the most of these pages, more than ``first``, after which the storage has states; 0 for none.

        None as long as a request has to wait for the answer of a store.
        """

    def begin(
        self, number: int, hashes: HashArray, on_device: OnDevice, judge: ReadJudge | None = None
    ) -> None:
        """Begin to read what is stored of a request's path, unless that has begun.

        ``judge`` tells how much is worth reading; a service reads all.
        """

    def storage_use(self, number: int) -> int:
        """Return how reads concern a look-up at a service: 0 not, 1 unless everything is found, 2 in any case."""

    def leave(self, number: int, *, keep: bool) -> None:
        """Wait for the fetch no longer, and begin no other; ``keep``: what is being read is read to its end."""

    def end(self, number: int) -> None:
        """Forget the fetch; take back reads that no other request needs."""


class FetchTable:
    """Fetches of one manager, or of one client of a service.

    ::

        fetches = FetchTable(lambda: tier.reads, FetchTerms())
        number = fetches.number()
        while fetches.wait(number, hashes, on_device) is not None:
            ...  # a scheduler step
        fetches.end(number)

    ``reads`` returns None while there is no storage to read from. At most ``most_blocks`` hashes are kept: further
    requests get nothing read. ``keep_done``: keep fetches that found nothing to read, so that they are not tried again.
    """

    def __init__(
        self,
        reads: Callable[[], StorageReads | None],
        terms: FetchTerms,
        *,
        most_blocks: int | None = None,
        keep_done: bool = True,
    ) -> None:
        self.terms = terms
        self._reads = reads
        self._most_blocks = most_blocks
        self._keep_done = keep_done
        self._numbers = count(1)
        self._fetches: dict[int, Fetch] = {}
        self._names: dict[int, str] = {}
        self._blocks = 0

    def __contains__(self, number: int) -> bool:
        return number in self._fetches

    def storage_use(self, number: int) -> int:
        """Return 0: the host tier of this process has what was read."""
        return 0

    @property
    def is_on(self) -> bool:
        """True while there is a storage to read from."""
        return self._reads() is not None

    def stored(self, hashes: HashArray) -> Mask:
        """Return which of these blocks the storage has."""
        reads = self._reads()
        return np.zeros(len(hashes), np.bool_) if reads is None else reads.stored(hashes)

    def last_end(self, hashes: HashArray, first: int) -> int | None:
        """Return after how many of these pages the storage has states.

        With best effort nothing is waited for: what the store has is read for later requests.
        """
        reads = self._reads()
        found = 0 if reads is None else reads.last_end(hashes, first)
        if reads is None or found is not None or self.terms.policy is not PrefetchPolicy.BEST_EFFORT:
            return found
        reads.pursued.add(hashes, first)
        return 0

    @property
    def num_leases(self) -> int:
        """Number of fetches that pin blocks."""
        return sum(fetch.lease != 0 for fetch in self._fetches.values())

    def number(self, request_id: str = "") -> int:
        """Return a new number. A client of a service chooses its own."""
        number = next(self._numbers)
        self.name(number, request_id)
        return number

    def name(self, number: int, request_id: str) -> None:
        """Set whose spans the reads of a number are to be, before it begins; of too many the oldest are forgotten."""
        if 0 < len(request_id) <= _LONGEST_NAME and number not in self._fetches:
            self._names[number] = request_id
            if len(self._names) > _MOST_NAMES:
                del self._names[next(iter(self._names))]

    def begin(
        self, number: int, hashes: HashArray, on_device: OnDevice, judge: ReadJudge | None = None
    ) -> None:
        """Begin to read what is stored of a request's path."""
        reads = self._reads()
        if reads is None or not reads.is_open or number in self._fetches:
            return
        if self._most_blocks is not None and self._blocks + len(hashes) > self._most_blocks:
            return
        terms = self.terms
        fetch = reads.begin(
            hashes,
            on_device,
            budget=terms.timeout,
            bandwidth=terms.bandwidth,
            judge=judge,
            request_id=self._names.pop(number, ""),
        )
        if self._keep_done or not fetch.done:
            self._fetches[number] = fetch
            self._blocks += len(hashes)

    def wait(
        self, number: int, hashes: HashArray, on_device: OnDevice, judge: ReadJudge | None = None
    ) -> Wait | None:
        """Begin to read and return what the request has to wait for, by the policy; None if it goes on."""
        if self.terms.policy is PrefetchPolicy.BEST_EFFORT:
            return None
        self.begin(number, hashes, on_device, judge)
        fetch, reads = self._fetches.get(number), self._reads()
        return None if fetch is None or reads is None else reads.wait(fetch, self.terms.policy)

    def go_on(self, number: int) -> None:
        """Continue the request with the blocks that have come; the others are read to their end."""
        fetch, reads = self._fetches.get(number), self._reads()
        if fetch is not None and reads is not None:
            reads.leave(fetch)

    def fetched(self, number: int, start: int, size: int) -> range:
        """Return which of ``size`` blocks from ``start`` on were read for the request, counted from ``start``."""
        fetch = self._fetches.get(number)
        return range(0) if fetch is None else fetch.part(start, size)

    def is_reading(self, block_hash: bytes) -> bool:
        """Return True for a block that is being read."""
        reads = self._reads()
        return reads is not None and reads.is_reading(block_hash)

    def unpin(self, number: int) -> None:
        """Unpin blocks that were read: the request has pinned those it uses."""
        fetch, reads = self._fetches.get(number), self._reads()
        if fetch is not None and reads is not None:
            reads.unpin(fetch)

    def leave(self, number: int, *, keep: bool) -> None:
        """Wait for the fetch no longer; ``keep``: what is being read is read to its end."""
        fetch, reads = self._fetches.get(number), self._reads()
        if keep and fetch is not None and reads is not None:
            reads.leave(fetch)
        self.end(number)

    def end(self, number: int) -> None:
        """Forget the fetch; take back reads that no other request needs."""
        self._names.pop(number, None)
        fetch = self._fetches.pop(number, None)
        if fetch is None:
            return
        self._blocks -= len(fetch.hashes)
        if (reads := self._reads()) is not None:
            reads.cancel(fetch)

    def end_all(self) -> None:
        """End every fetch."""
        for number in list(self._fetches):
            self.end(number)
