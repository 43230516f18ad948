"""Groups of a model's layers, what each needs of the tokens before, and the keys of their records.

Layers of a group share block tables. The engine takes the blocks of all groups from one pool of device blocks, so that
they have the same bytes; in tokens their sizes may differ. A page is a number of tokens that is a multiple of them all.
It has a record for each of its blocks: those of the first group, in order, then those of the next. A prefix of pages is
one path of records: those of the first page, then those of the next.

A state is what a layer keeps instead of tokens, as state-space layers do: it stands for all tokens before a position,
and is useless at any other. Only some pages have states at their end. Those of a page, one record for each group of
such layers, are a path of their own below the page's last record: they come and go without the pages after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fdcache.errors import LayoutError, UnsupportedLayoutError
from fdcache.metadata import HashArray


class Reach(StrEnum):
    """What a layer needs of the tokens before the one that it computes."""

    ALL = "all"
    LAST = "last"
    """The last ones: a sliding window, itself included."""
    CHUNK = "chunk"
    """Those since the last multiple of a number of tokens: chunked local attention."""
    STATE = "state"
    """A state that stands for all of them."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share block tables: ``block_size`` tokens of a block, and what they need of the tokens before.

    ``tokens``: of a window or a chunk, 0 for other reaches. ``rank``: of states that each rank has of its own, where
    ranks hold the rest alike (``KVLayout.replicas``), the one of these whose states they are: see
    ``groups_of_ranks``.
    """

    block_size: int
    reach: Reach = Reach.ALL
    tokens: int = 0
    rank: int | None = None

    @property
    def is_state(self) -> bool:
        """True for layers that keep states."""
        return self.reach is Reach.STATE

    @property
    def is_limited(self) -> bool:
        """True for layers whose blocks the engine gives up when tokens are beyond their reach."""
        return self.reach in (Reach.LAST, Reach.CHUNK)

    def blocks_beyond(self, num_tokens: int) -> int:
        """Return how many leading blocks are of no use for the token after ``num_tokens``."""
        if self.reach is Reach.LAST:
            return max(num_tokens - self.tokens + 1, 0) // self.block_size
        return num_tokens // self.tokens * self.tokens // self.block_size if self.reach is Reach.CHUNK else 0


def groups_of_ranks(groups: Sequence[CacheGroup], ranks: int) -> tuple[CacheGroup, ...]:
    """Return the groups of a layout that ``ranks`` share, but for states: of these each rank has a group of its own."""
    return tuple(
        replace(group, rank=rank) if group.is_state else group
        for group in groups
        for rank in (range(ranks) if group.is_state and ranks > 1 else (None,))
    )


def groups_of_rank(groups: Sequence[CacheGroup], rank: int) -> tuple[CacheGroup, ...]:
    """Return the groups that a rank has by itself."""
    return tuple(replace(group, rank=None) for group in groups if group.rank in (None, rank))


def check_ranks(groups: Sequence[CacheGroup], ranks: int) -> None:
    """Raise ``LayoutError`` unless states are those of all ranks together, or listed once for each of ``ranks``."""
    made = [
        replace(group, rank=rank)
        for group in groups
        if not group.rank
        for rank in ((None,) if group.rank is None else range(ranks))
    ]
    owned = [group for group in groups if group.rank is not None]
    if made != list(groups) or not all(group.is_state and type(group.rank) is int for group in owned):
        raise LayoutError(
            f"groups: ranks {[group.rank for group in groups]}; only states are those of single ranks, and are listed "
            f"once for each of the {ranks} that hold the rest alike, in order"
        )


def engine_groups(groups: Sequence[CacheGroup]) -> tuple[int, ...]:
    """Return the number that each group has in the engine: groups of single ranks have one block table."""
    return tuple(accumulate((int(not group.rank) for group in groups[1:]), initial=0))


class PageColumns:
    """The records of a page and then its states as columns of a table, a row for each page of a prefix.

    ``columns``: of each column its group, and the position of its block in the page among those of its group.
    """

    def __init__(self, groups: Sequence[CacheGroup], page: int) -> None:
        kept = [(at, each) for at, each in enumerate(groups or (CacheGroup(page),)) if not each.is_state]
        states = [(at, each) for at, each in enumerate(groups) if each.is_state]
        self.columns = [(at, part) for at, each in kept for part in range(page // each.block_size)] + [
            (at, 0) for at, _ in states
        ]
        self.num_states = len(states)
        self._groups = dict(kept + states)
        self._page = page

    def __len__(self) -> int:
        return len(self.columns)

    def needed(self, pages: int) -> NDArray[np.bool_]:
        """Return which entries are needed to go on after this many pages."""
        firsts = np.array([self._first(column, pages) for column in range(len(self))], np.int64)
        mask: NDArray[np.bool_] = np.arange(pages)[:, np.newaxis] >= firsts
        return mask

    def usable(self, there: NDArray[np.bool_]) -> int:
        """Return the most pages, at most the rows of ``there``, after which one can go on with the entries there."""
        missing = np.zeros((len(there) + 1, len(self)), np.int64)
        np.cumsum(~there, axis=0, out=missing[1:])
        for pages in range(len(there), 0, -1):
            firsts = [self._first(column, pages) for column in range(len(self))]
            if (missing[pages] == missing[firsts, range(len(self))]).all():
                return pages
        return 0

    def _first(self, column: int, pages: int) -> int:
        """Return the first page whose entry in a column is needed after this many pages."""
        at, part = self.columns[column]
        group = self._groups[at]
        if group.is_state:
            return max(pages - 1, 0)
        beyond = group.blocks_beyond(pages * self._page)
        return min(max(-(-(beyond - part) // (self._page // group.block_size)), 0), pages)


_DENSE = 3
"""Binary digits of a distance in pages that a spaced position may have."""


def is_spaced(pages: int, prompt_pages: int) -> bool:
    """Return True for a position that is kept whatever comes after it: its distance is a round number.

    The distance is that from the beginning of the prompt, or behind it from its end. The first eight are round, then
    every second up to 16, every fourth up to 32, and so on: four for each doubling.
    """
    distance = pages if pages <= prompt_pages else pages - prompt_pages
    return distance % (1 << max(distance.bit_length() - _DENSE, 0)) == 0


def page_of(groups: Sequence[CacheGroup]) -> int:
    """Return the tokens of the smallest page of these groups."""
    return lcm(*(group.block_size for group in groups))


def record_keys(hashes: HashArray, num_records: int) -> HashArray:
    """Return the keys of the records of these pages: ``num_records`` for each, the last of which is the page's hash.

    Since a host tier is closed under prefixes, a page whose hash is found is there in all groups.
    """
    return hashes if num_records == 1 else _marked(hashes, np.arange(num_records - 1, -1, -1, dtype=np.uint8))


def state_keys(hashes: HashArray, num_records: int, num_states: int) -> HashArray:
    """Return the keys of the states at the end of these pages, of ``num_records`` each: ``num_states`` for each."""
    first = num_records + num_states - 1
    return _marked(hashes, np.arange(first, num_records - 1, -1, dtype=np.int64).astype(np.uint8))


def pages_of(keys: HashArray, marks: int) -> int:
    """Return to how many pages records belong whose keys have ``marks`` marks."""
    mask = np.uint8((1 << (marks - 1).bit_length()) - 1)
    return len(np.unique(keys ^ (keys[:, :1] & mask), axis=0))


class PathEnd(NamedTuple):
    """The records that a request needs at its end: keys of its whole path, and which of these it needs.

    A path has the records of all its pages, then those of the states at its end.
    """

    keys: HashArray
    needed: NDArray[np.bool_]


def path_end(groups: Sequence[CacheGroup], hashes: HashArray, num_tokens: int) -> PathEnd:
    """Return what is needed after the first ``num_tokens`` tokens, whose pages, the last not full, have ``hashes``."""
    page, states = page_of(groups), sum(group.is_state for group in groups)
    columns = [np.empty((len(hashes), 0), np.bool_)]
    for group in groups:
        if not group.is_state:
            blocks = np.arange(len(hashes) * page // group.block_size).reshape(len(hashes), -1)
            has_tokens = blocks * group.block_size < num_tokens
            columns.append(has_tokens & (blocks >= group.blocks_beyond(num_tokens)))
    of_pages = np.concatenate(columns, axis=1)
    records = of_pages.shape[1]
    keys = record_keys(hashes, records), state_keys(hashes[-1:], records, states)
    return PathEnd(np.concatenate(keys), np.concatenate((of_pages.reshape(-1), np.ones(states, np.bool_))))


def _marked(hashes: HashArray, marks: HashArray) -> HashArray:
    keys = np.repeat(hashes, len(marks), axis=0)
    keys ^= np.tile(marks, len(hashes))[:, np.newaxis]
    return keys


def require_served(kinds: Sequence[tuple[str, CacheGroup | None]]) -> None:
    """Raise ``UnsupportedLayoutError`` that names the groups of a model if one is of a kind that is not served.

    ``kinds``: of each group the engine's words for it, and None for a kind that fdcache does not know.
    """
    if kinds and all(group is not None for _, group in kinds):
        return
    listed = "; ".join(kind for kind, _ in kinds)
    raise UnsupportedLayoutError(
        f"the model's cache has {len(kinds)} groups ({listed or 'no layers'}), and fdcache knows attention to all "
        "tokens, to a window or a chunk of them, and states that are kept at the ends of blocks; serve this model "
        "without fdcache"
    )
