"""Fetches that wait, by what they wait for, so that each is looked at when that has come and not before."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from itertools import chain

from fdcache.manager.fetch import Fetch
from fdcache.manager.storage_index import Question


class WaitingFetches:
    """Fetches that go on at the next chance, and those that wait for room, an answer of the index, or a copy.

    A fetch that waits for reads is with them, in ``Read.waiters``.
    """

    def __init__(self) -> None:
        self._awake: dict[Fetch, None] = {}
        self._for_room: OrderedDict[Fetch, None] = OrderedDict()
        self._for_answer: defaultdict[Question, list[Fetch]] = defaultdict(list)
        self._for_copy: defaultdict[bytes, list[Fetch]] = defaultdict(list)

    def __len__(self) -> int:
        elsewhere = chain(self._for_answer.values(), self._for_copy.values())
        return len(self._awake) + len(self._for_room) + sum(map(len, elsewhere))

    def wake(self, fetches: Iterable[Fetch]) -> None:
        """Let them go on at the next chance."""
        self._awake.update(dict.fromkeys(fetches))

    def forget(self, fetch: Fetch) -> None:
        """Take out a fetch that goes on now, or has ended. One that has ended may still be woken once."""
        self._awake.pop(fetch, None)
        self._for_room.pop(fetch, None)

    def is_awake(self, fetch: Fetch) -> bool:
        """Whether it can go on."""
        return fetch in self._awake

    def take_awake(self) -> list[Fetch]:
        """All that can go on; from now on they do not wait."""
        awake, self._awake = list(self._awake), {}
        return awake

    # --- room ---------------------------------------------------------------------------------------------

    def wait_for_room(self, fetch: Fetch) -> None:
        """Others' reads come first."""
        self._for_room[fetch] = None

    def is_for_room(self, fetch: Fetch) -> bool:
        """Whether it waits for room."""
        return fetch in self._for_room

    def first_for_room(self) -> Fetch | None:
        """The one that has waited longest for room."""
        return next(iter(self._for_room), None)

    # --- what others do -----------------------------------------------------------------------------------

    def wait_for_answer(self, fetch: Fetch, question: Question) -> None:
        """The index has been asked."""
        self._for_answer[question].append(fetch)

    def answered(self, question: Question) -> None:
        """The index knows, or gave up."""
        self.wake(self._for_answer.pop(question, ()))

    def wait_for_copy(self, fetch: Fetch, block: bytes) -> None:
        """The block is on its way to the host from the device."""
        self._for_copy[block].append(fetch)

    def copies_ended(self, blocks: Iterable[bytes]) -> None:
        """Copies to the host have ended, well or not."""
        if self._for_copy:
            for block in blocks:
                self.wake(self._for_copy.pop(block, ()))

    def no_more_copies(self) -> None:
        """The copies under way will not arrive any more."""
        self.copies_ended(list(self._for_copy))
