"""Belady's optimum of a workload: the most blocks that any order of eviction could have found.

A block that request i uses is found by request j, the next one to use it, if it is kept from i to j. So the optimum
keeps as many of these intervals as possible, where at each request the intervals that pass over it and the blocks of
the request itself fit the capacity. Whenever they do not, the interval that ends last is dropped, which is optimal for
intervals of equal weight under any capacity over time. A block's next use is never earlier than that of the block
before it in the prompt, and among equals the later block is dropped: leaves go first, and what is kept is a prefix.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fdcache.hashing import hash_blocks, root_hash
from fdcache.replay.config import ReplayConfig
from fdcache.replay.workloads import WorkItem

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockStream:
    """The blocks that each request of a workload uses.

    Attributes:
        block_size: tokens of a block.
        blocks: numbers of all requests' full blocks, in path order, one request after the other; equal prefixes have
            equal numbers.
        lengths: full blocks of each request, outputs included.
        findable: leading blocks of each request that a match may find: full blocks of the prompt without its last
            token.
        needed: blocks that each request holds at its end, the incomplete one included.
        prompt_tokens: length of each prompt.
    """

    block_size: int
    blocks: Int64Array
    lengths: Int64Array
    findable: Int64Array
    needed: Int64Array
    prompt_tokens: Int64Array

    @classmethod
    def of(
        cls,
        items: Iterable[WorkItem],
        config: ReplayConfig,
        on_progress: Callable[[int], None] = lambda done: None,
    ) -> BlockStream:
        """Hash the blocks of a workload, as the manager does."""
        size, root = config.layout.block_size, root_hash(config.layout.fingerprint)
        lookahead = config.cache.lookahead_tokens
        keys, rows = [np.empty(0, np.uint64)], []
        for index, item in enumerate(items, start=1):
            tokens = item.tokens(config.seed)[: item.computed_length]
            hashes = hash_blocks(tokens, size, parent=root, lookahead=lookahead)
            # 8 of 32 bytes tell a workload's blocks apart.
            keys.append(np.ascontiguousarray(hashes[:, :8]).view(np.uint64).ravel())
            prompt = item.prompt_length
            findable = min((prompt - 1) // size, len(hashes))
            rows.append((len(hashes), findable, config.blocks_for(item.computed_length), prompt))
            on_progress(index)
        numbers = np.unique(np.concatenate(keys), return_inverse=True)[1].astype(np.int64)
        lengths, findable_blocks, needed, prompts = np.array(rows, np.int64).reshape(-1, 4).T
        return cls(size, numbers, lengths, findable_blocks, needed, prompts)

    def admitted(self, device_blocks: int) -> BlockStream:
        """Return the stream without requests that need more than ``device_blocks``."""
        fits = self.needed <= device_blocks
        return BlockStream(
            self.block_size,
            self.blocks[np.repeat(fits, self.lengths)],
            self.lengths[fits],
            self.findable[fits],
            self.needed[fits],
            self.prompt_tokens[fits],
        )


def optimal_hit_rate(stream: BlockStream, device_blocks: int, capacity: int) -> float:
    """Return the largest share of prompt tokens that a cache of ``capacity`` blocks can find.

    Requests that need more than ``device_blocks`` are left out, as a replay rejects them. No order of eviction, no
    number of requests in flight and no division of ``capacity`` between tiers finds more, if the requests come in the
    order of the stream.
    """
    stream = stream.admitted(device_blocks)
    total = int(stream.prompt_tokens.sum())
    return optimal_hits(stream, capacity) * stream.block_size / total if total else 0.0


def optimal_hits(stream: BlockStream, capacity: int) -> int:
    """Return the largest number of blocks found in a cache of ``capacity`` blocks, each request's own included."""
    starts = _intervals(stream)
    room = (capacity - stream.needed).tolist()
    ending = [0] * len(room)  # by request: kept blocks that it will find
    farthest: list[tuple[int, int, int]] = []
    kept = hits = 0
    for request, free in enumerate(room):
        hits += ending[request]
        kept -= ending[request]
        while kept > free:
            last, depth, blocks = heapq.heappop(farthest)
            dropped = min(blocks, kept - free)
            if dropped < blocks:
                heapq.heappush(farthest, (last, depth, blocks - dropped))
            ending[-last] -= dropped
            kept -= dropped
        for depth, until, blocks in starts[request]:
            heapq.heappush(farthest, (-until, -depth, blocks))
            ending[until] += blocks
            kept += blocks
    return hits


def _intervals(stream: BlockStream) -> list[list[tuple[int, int, int]]]:
    """Return the runs of blocks that each request leaves to a later one: position, that request, number of blocks.

    Blocks that no later match can find are left out.
    """
    lengths, count = stream.lengths, len(stream.lengths)
    owner = np.repeat(np.arange(count), lengths)
    depth = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    order = np.argsort(stream.blocks, kind="stable")
    again = np.flatnonzero(stream.blocks[order[1:]] == stream.blocks[order[:-1]])
    here, later = order[again], owner[order[again + 1]]
    found = depth[here] < stream.findable[later]
    here, later = here[found], later[found]
    by_place = np.argsort(here, kind="stable")
    here, later = here[by_place], later[by_place]
    fresh = np.ones(len(here), np.bool_)
    fresh[1:] = (later[1:] != later[:-1]) | (here[1:] != here[:-1] + 1) | (depth[here[1:]] == 0)
    first = np.flatnonzero(fresh)
    sizes = np.diff(np.append(first, len(here)))
    starts: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
    columns = (owner[here[first]], depth[here[first]], later[first], sizes)
    for request, position, until, blocks in zip(*(column.tolist() for column in columns), strict=True):
        starts[request].append((position, until, blocks))
    return starts
