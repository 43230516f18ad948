"""Block tables of vLLM's requests as tables of pages, in the order of a layout's records."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np

from fdcache.groups import CacheGroup, Reach, engine_groups, groups_of_rank
from fdcache.layout import KVLayout
from fdcache.manager import NO_BLOCK
from fdcache.metadata import Int32Array

_BLOCKS_OF_OFFER = 8
"""Blocks that a request generates are offered together: a plan, its copies and its report cost as much for one."""

_NULL_BLOCK = 0
"""vLLM's placeholder for a block that it does not keep."""

BlockIds = Sequence[Sequence[int]]
"""Of each group of layers its table, as vLLM has it."""


class RequestTable(Protocol):
    """The blocks of a request, of all groups of layers."""

    def __bool__(self) -> bool: ...

    def extend(self, blocks: BlockIds) -> None:
        """Append the blocks of each group."""

    @property
    def num_pages(self) -> int:
        """Number of pages that all groups have blocks of."""

    def page_ids(self, first: int, stop: int, computed: int = 0) -> Int32Array:
        """Return the blocks of pages, without those that vLLM may have given up before ``computed`` tokens."""

    def state_ids(self, num_tokens: int) -> Int32Array:
        """Return the blocks of the states after this many tokens."""

    def path_ids(self, num_tokens: int, first: int = 0) -> Int32Array:
        """Return the blocks for this many tokens, of pages from ``first`` on and of the states at their end."""

    def by_group(self, num_tokens: int) -> list[list[int]]:
        """Return the blocks for this many tokens of each group, without those given up."""

    @property
    def by_groups(self) -> Sequence[array[int]]:
        """The blocks of each group, placeholders too."""

    def goes_on(self, blocks: BlockIds) -> bool:
        """Append what these tables have beyond its own; False if they may be others."""


class PlainTable:
    """The table of the only group of layers."""

    __slots__ = ("_page", "blocks")

    def __init__(self, blocks: BlockIds, page: int) -> None:
        self.blocks = array("i", blocks[0] if blocks else ())
        self._page = page

    def __bool__(self) -> bool:
        return bool(self.blocks)

    def extend(self, blocks: BlockIds) -> None:
        """Append blocks."""
        self.blocks.extend(blocks[0])

    @property
    def num_pages(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def page_ids(self, first: int, stop: int, computed: int = 0) -> Int32Array:
        """Return blocks; vLLM gives up none."""
        return np.array(self.blocks[first:stop], np.int32)

    def state_ids(self, num_tokens: int) -> Int32Array:
        """Return none."""
        return np.empty(0, np.int32)

    def path_ids(self, num_tokens: int, first: int = 0) -> Int32Array:
        """Return blocks, the last of which need not be full."""
        return self.page_ids(first, -(-num_tokens // self._page))

    def by_group(self, num_tokens: int) -> list[list[int]]:
        """Return the blocks of the only group."""
        return [list(self.blocks[: -(-num_tokens // self._page)])]

    @property
    def by_groups(self) -> Sequence[array[int]]:
        """The blocks of the only group."""
        return (self.blocks,)

    def goes_on(self, blocks: BlockIds) -> bool:
        """Append the blocks beyond its own: those of a request that runs stay what they are."""
        mine, theirs = self.blocks, blocks[0]
        have = len(mine)
        if not 0 < have <= len(theirs) or (mine[0], mine[-1]) != (theirs[0], theirs[have - 1]):
            return False
        mine.extend(theirs[have:])
        return True


class GroupTables:
    """The tables of several groups, or of one that does not keep all its blocks."""

    __slots__ = ("_shape", "_tables")

    def __init__(self, shape: TableShape, blocks: BlockIds) -> None:
        self._shape = shape
        self._tables = [array("i", each) for each in blocks]

    def __bool__(self) -> bool:
        return any(self._tables)

    def extend(self, blocks: BlockIds) -> None:
        """Append the blocks of each group."""
        for table, more in zip(self._tables, blocks, strict=True):
            table.extend(more)

    @property
    def num_pages(self) -> int:
        """Number of pages that all groups have blocks of."""
        lengths = [len(self._tables[at]) // blocks for at, blocks, _ in self._shape.columns]
        return min(lengths, default=max(map(len, self._tables), default=0))

    def page_ids(self, first: int, stop: int, computed: int = 0) -> Int32Array:
        """Return the blocks of pages, ``NO_BLOCK`` for those given up."""
        rows = [np.empty((max(stop - first, 0), 0), np.int32)]
        for at, blocks, group in self._shape.columns:
            begin = first * blocks
            ids = np.array(self._tables[at][begin : stop * blocks], np.int32)
            ids[ids == _NULL_BLOCK] = NO_BLOCK
            ids[: max(group.blocks_beyond(computed) - begin, 0)] = NO_BLOCK
            missing = len(rows[0]) * blocks - len(ids)  # the last page need not be full
            rows.append(np.pad(ids, (0, missing), constant_values=NO_BLOCK).reshape(-1, blocks))
        return np.concatenate(rows, axis=1).reshape(-1)

    def state_ids(self, num_tokens: int) -> Int32Array:
        """Return the blocks of states."""
        ends = [(at, -(-num_tokens // tokens) - 1) for at, tokens in self._shape.states]
        ids = np.array([self._tables[at][end] for at, end in ends], np.int32)
        ids[ids == _NULL_BLOCK] = NO_BLOCK
        return ids

    def path_ids(self, num_tokens: int, first: int = 0) -> Int32Array:
        """Return blocks, ``NO_BLOCK`` for those given up."""
        pages = -(-num_tokens // self._shape.page)
        return np.concatenate((self.page_ids(first, pages), self.state_ids(num_tokens)))

    def by_group(self, num_tokens: int) -> list[list[int]]:
        """Return the blocks of each group, without placeholders."""
        each = zip(self._tables, self._shape.groups, strict=True)
        tables = [table[: -(-num_tokens // group.block_size)] for table, group in each]
        return [[block for block in table if block != _NULL_BLOCK] for table in tables]

    @property
    def by_groups(self) -> Sequence[array[int]]:
        """The blocks of each group, placeholders too."""
        return self._tables

    def goes_on(self, blocks: BlockIds) -> bool:
        """Return False: vLLM puts placeholders in place of blocks that it gives up."""
        return False


class TableShape:
    """Makes the tables of a layout.

    ``columns``: of each group that has blocks of every page its place among the groups, its blocks of a page, and what
    it needs; ``states``: the places of the others, and the tokens of their blocks, once for each rank that has its own.
    ``page``: the tokens of a page.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.page = layout.block_size
        self.groups = groups_of_rank(layout.groups, 0)
        self.columns: list[tuple[int, int, CacheGroup]] = [
            (at, layout.block_size // group.block_size, group)
            for at, group in enumerate(self.groups)
            if not group.is_state
        ]
        numbers = engine_groups(layout.groups)
        self.states = [(numbers[at], layout.groups[at].block_size) for at in layout.state_groups]

    def table(self, blocks: BlockIds = ()) -> RequestTable:
        """Return a table of these blocks."""
        if not self.groups:
            return PlainTable(blocks, self.page)
        return GroupTables(self, blocks or [()] * len(self.groups))

    def longer(self, table: RequestTable, blocks: BlockIds) -> RequestTable:
        """Return a table of these blocks: the same one, longer, if they go on with its own."""
        return table if table.goes_on(blocks) else self.table(blocks)

    def given(self, blocks: BlockIds, start: int) -> Sequence[int]:
        """Return the blocks for the tokens from ``start`` on."""
        if not self.groups:
            return blocks[0][start // self.page :]
        each = zip(blocks, self.groups, strict=True)
        return [
            block
            for table, group in each
            for block in table[start // group.block_size :]
            if block != _NULL_BLOCK
        ]

    def real(self, blocks: BlockIds) -> Sequence[int]:
        """Return the blocks of all groups, without placeholders."""
        return blocks[0] if not self.groups else self.given(blocks, 0)


def pages_of_offer(layout: KVLayout) -> int:
    """Return how many pages that a request generates are offered together: the first is still in every window then."""
    if layout.num_states or any(group.reach is Reach.CHUNK for group in layout.groups):
        return 1
    windows = (group.tokens - 1 for group in layout.groups if group.reach is Reach.LAST)
    shortest = min(windows, default=_BLOCKS_OF_OFFER * layout.block_size)
    return max(min(shortest // layout.block_size, _BLOCKS_OF_OFFER), 1)


def coldest_of(pool: Any, count: int) -> list[int]:
    """Return the blocks that vLLM's pool gives away next; none if there is no pool yet."""
    if pool is None:
        return []

    def walk() -> Iterator[int]:
        queue = pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        while block is not None and block is not queue.fake_free_list_tail:
            yield block.block_id
            block = block.next_free_block

    return list(islice(walk(), count))
