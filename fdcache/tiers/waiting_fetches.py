"""Fetches from storage: one request's wish for blocks, the reads that it shares with others, and what it waits for."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np

from fdcache.groups import record_keys, state_keys
from fdcache.metadata import HashArray
from fdcache.plans.ledger import StorageOrder
from fdcache.tiers.storage_index import Question

_MOST_PURSUED = 64
"""Paths at once; states of further ones are not looked for."""


@dataclass(frozen=True, slots=True)
class Wait:
    """What a request waits for: blocks of its path that are read from storage for it. They count from its start.

    Those from ``first`` on are read for the request; ``arrived`` of the path have come, and the reads in flight bring
    those up to ``stop``. ``ends``: where each of these reads ends, nothing while the request waits for something else.
    The first of them began at ``since``, behind ``ahead`` blocks of others; the request had ``on_device`` blocks then.
    ``is_last``: no other reads follow.
    """

    first: int
    arrived: int
    stop: int
    since: float
    ends: tuple[int, ...] = ()
    ahead: int = 0
    on_device: int = 0
    is_last: bool = False


class ReadJudge(Protocol):
    """Judges the reads of one request, which had ``on_device`` blocks when it was asked last.

    Blocks count from the start of its path.
    """

    on_device: int

    def worth_reading(self, on_device: int, first: int, stop: int, ahead: int) -> tuple[int, bool]:
        """Return up to which of the stored blocks ``first`` to ``stop`` to read, and if the request waits for them.

        ``on_device`` leading blocks are on the device, and ``ahead`` blocks are read before these.
        """

    def worth_joining(self, on_device: int, first: int, stop: int) -> int:
        """Return up to which of the blocks ``first`` to ``stop``, which others read, the request waits for them."""


@dataclass(slots=True, eq=False)
class Read:
    """A transfer of blocks into the host, the first of them into ``slot``, and the fetches that wait for it.

    ``is_kept``: it goes on to its end, whoever waits for it. ``requests``: ids of those that have waited for it.
    """

    hashes: list[bytes]
    order: StorageOrder
    slot: int
    waiters: dict[Fetch, None] = field(default_factory=dict)
    is_kept: bool = False
    requests: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Fetch:
    """Reads for one request: blocks ``first`` to ``stop`` of its path ``hashes``.

    ``on_device`` returns how many leading blocks its device has; a read that ends there is not worth it. A wait for
    the fetch ends at ``deadline``, one second later for every ``bandwidth`` bytes that are read. Blocks that have come
    are pinned under ``lease`` until the request's match: ``pinned`` of them. ``is_final``: no others follow the reads
    in flight. ``judge`` decides how much is read. ``request_id``: for spans. The reads in flight began at ``since``,
    behind ``ahead`` blocks of others.
    """

    hashes: HashArray
    on_device: Callable[[HashArray], int]
    first: int
    stop: int
    deadline: float
    bandwidth: float
    judge: ReadJudge | None = None
    request_id: str = ""
    since: float = 0.0
    ahead: int = 0
    reads: list[Read] = field(default_factory=list)
    done: bool = False
    is_final: bool = False
    lease: int = 0
    pinned: int = 0

    def part(self, start: int, size: int) -> range:
        """Return which of ``size`` blocks from ``start`` on were read for this, counted from ``start``."""
        first = min(max(self.first - start, 0), size)
        return range(first, max(min(self.stop - start, size), first))


class WaitingFetches:
    """Fetches by what they wait for: room, an answer of the index, or a copy to the host; and those to go on.

    A fetch that waits for a read is in ``Read.waiters``.
    """

    def __init__(self) -> None:
        self._ready: dict[Fetch, None] = {}
        self._for_room: OrderedDict[Fetch, None] = OrderedDict()
        self._for_answer: defaultdict[Question, list[Fetch]] = defaultdict(list)
        self._for_copy: defaultdict[bytes, list[Fetch]] = defaultdict(list)

    def __len__(self) -> int:
        others = chain(self._for_answer.values(), self._for_copy.values())
        return len(self._ready) + len(self._for_room) + sum(map(len, others))

    def wake(self, fetches: Iterable[Fetch]) -> None:
        """Continue fetches at the next ``advance``."""
        self._ready.update(dict.fromkeys(fetches))

    def forget(self, fetch: Fetch) -> None:
        """Remove a fetch that goes on now, or is done. One that is done may still be woken once."""
        self._ready.pop(fetch, None)
        self._for_room.pop(fetch, None)

    def is_ready(self, fetch: Fetch) -> bool:
        """Return True for a fetch that can go on."""
        return fetch in self._ready

    def take_ready(self) -> list[Fetch]:
        """Remove and return the fetches that can go on."""
        ready, self._ready = list(self._ready), {}
        return ready

    def wait_for_room(self, fetch: Fetch) -> None:
        """Wait until other reads have ended, in the order of arrival."""
        self._for_room[fetch] = None

    def waits_for_room(self, fetch: Fetch) -> bool:
        """Return True for a fetch that waits for room."""
        return fetch in self._for_room

    def first_for_room(self) -> Fetch | None:
        """Return the fetch that has waited longest for room."""
        return next(iter(self._for_room), None)

    def wait_for_answer(self, fetch: Fetch, question: Question) -> None:
        """Wait for the index to answer."""
        self._for_answer[question].append(fetch)

    def answered(self, question: Question) -> None:
        """Wake the fetches that wait for an answer, which the index has or will never have."""
        self.wake(self._for_answer.pop(question, ()))

    def wait_for_copy(self, fetch: Fetch, block: bytes) -> None:
        """Wait for a block that is being copied from the device to the host."""
        self._for_copy[block].append(fetch)

    def copies_ended(self, blocks: Iterable[bytes]) -> None:
        """Wake the fetches that wait for copies of these blocks, which have arrived or failed."""
        if self._for_copy:
            for block in blocks:
                self.wake(self._for_copy.pop(block, ()))

    def all_copies_ended(self) -> None:
        """Wake the fetches that wait for any copy."""
        self.copies_ended(list(self._for_copy))


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
        if len(self) < _MOST_PURSUED:
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
        self._fetches.append(self._reads.begin(path, _nothing_on_device, budget=0.0, bandwidth=float("inf")))


def _nothing_on_device(hashes: HashArray) -> int:
    """Return how many blocks the device of nobody has."""
    return 0
