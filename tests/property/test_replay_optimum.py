"""Belady's optimum, compared with every possible eviction on small workloads, and with the cache itself."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fdcache.errors import ReplayError
from fdcache.replay.config import ReplayConfig, VerifyBytes
from fdcache.replay.optimum import BlockStream, optimal_hit_rate, optimal_hits
from fdcache.replay.points import run_point
from fdcache.replay.workloads import OUTPUT_STREAMS, WorkItem
from fdcache.settings.cache import EvictionPolicy, WritePolicy
from fdcache.tiers.host import host_block_bytes
from tests.replay_help import small_config
from tests.seeds import budget

BLOCK = 4

PROMPTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=4),  # streams of whole blocks
        st.integers(0, BLOCK - 1),  # more tokens of a stream of the prompt's own
        st.integers(0, 2 * BLOCK),  # output
        st.integers(0, 3).map(lambda chance: chance == 0),  # the next turn of the request before
    ),
    min_size=1,
    max_size=8,
)
Prompts = list[tuple[list[int], int, int, bool]]


def workload(prompts: Prompts) -> list[WorkItem]:
    """Prompts of few distinct blocks; some extend the prompt and the output before them."""
    items: list[WorkItem] = []
    for index, (streams, rest, output, extends) in enumerate(prompts):
        parts = [*((stream, BLOCK) for stream in streams), (1000 + index, rest)]
        if extends and items:
            last = items[-1]
            earlier = zip(last.streams.tolist(), last.lengths.tolist(), strict=True)
            parts = [*earlier, (last.output_stream, last.output_length), *parts]
        items.append(
            WorkItem(
                index=index,
                timestamp_ms=100.0 * index,
                streams=np.array([stream for stream, _ in parts], np.uint64),
                lengths=np.array([length for _, length in parts], np.int64),
                output_stream=OUTPUT_STREAMS + index,
                output_length=output,
                after=index - 1 if extends and index else None,
            )
        )
    return items


def config(capacity: int, **options: object) -> ReplayConfig:
    chosen = {"device_blocks": capacity, "block_size": BLOCK, "layers": 1, "host_memory": 0, **options}
    return small_config(verify=VerifyBytes.OFF, **chosen)  # type: ignore[arg-type]


def best_of_all(stream: BlockStream, capacity: int, *, leaves_only: bool) -> int:
    """Try every set of blocks to keep at every request."""
    ends = np.cumsum(stream.lengths)
    paths = [
        tuple(stream.blocks[end - length : end].tolist())
        for end, length in zip(ends, stream.lengths, strict=True)
    ]
    parent = {block: path[at - 1] if at else None for path in paths for at, block in enumerate(path)}
    later = [set[int]().union(*paths[at:]) for at in range(1, len(paths) + 1)]

    def is_prefix_closed(blocks: frozenset[int]) -> bool:
        return all(parent[block] in blocks | {None} for block in blocks)

    @cache
    def best(request: int, kept: frozenset[int]) -> int:
        if request == len(paths):
            return 0
        path = paths[request]
        hits = 0
        while hits < stream.findable[request] and path[hits] in kept:
            hits += 1
        others = sorted(kept - set(path))
        room = min(capacity - int(stream.needed[request]), len(others))
        sizes = range(room + 1) if leaves_only else [room]
        left = {
            (frozenset(chosen) | frozenset(path)) & later[request]
            for size in sizes
            for chosen in combinations(others, size)
        }
        return hits + max(
            best(request + 1, each) for each in left if not leaves_only or is_prefix_closed(each)
        )

    return best(0, frozenset())


@example([([0, 1], 0, 0, False), ([0, 0], 0, 0, False), ([0, 1], 1, 0, False)], 0, False)
@given(PROMPTS, st.integers(0, 6), st.booleans())
@settings(max_examples=budget(1500))
def test_the_optimum_is_that_of_every_possible_eviction(
    prompts: Prompts, spare: int, leaves_only: bool
) -> None:
    stream = BlockStream.of(workload(prompts[:5]), config(1))
    capacity = int(stream.needed.max()) + spare
    assert optimal_hits(stream, capacity) == best_of_all(stream, capacity, leaves_only=leaves_only)


@given(
    PROMPTS,
    st.integers(3, 16),
    st.integers(1, 4),
    st.integers(0, 6),
    st.sampled_from(WritePolicy),
    st.sampled_from(EvictionPolicy),
)
@settings(max_examples=budget(500))
def test_no_run_finds_more_than_the_optimum(
    prompts: Prompts, capacity: int, concurrency: int, host: int, write: WritePolicy, eviction: EvictionPolicy
) -> None:
    items = workload(prompts)
    run = config(
        capacity,
        host_memory=host * host_block_bytes(config(1).layout),
        concurrency=concurrency,
        cache={"write_policy": write, "eviction": eviction},
    )
    stream = BlockStream.of(items, run)
    host_blocks = run.cache.host_memory // host_block_bytes(run.layout)
    try:
        result = run_point(items, run)
    except ReplayError as error:
        assert "larger than the device tier" in str(error)
        assert not (stream.needed <= capacity).any()
        return
    assert result.rejected == (stream.needed > capacity).sum()
    assert result.prompt_tokens == stream.admitted(capacity).prompt_tokens.sum()
    assert result.hit_rate <= optimal_hit_rate(stream, capacity, capacity + host_blocks) + 1e-12


@given(PROMPTS, st.integers(0, 10))
@settings(max_examples=budget(300))
def test_a_cache_that_never_evicts_reaches_the_optimum(prompts: Prompts, spare: int) -> None:
    items = workload(prompts)
    stream = BlockStream.of(items, config(1))
    enough = int(stream.needed.sum()) + spare
    reached = run_point(items, config(enough, concurrency=1)).hit_rate
    assert reached == pytest.approx(optimal_hit_rate(stream, enough, enough))


@given(PROMPTS)
@settings(max_examples=budget(300))
def test_more_memory_never_lowers_the_optimum(prompts: Prompts) -> None:
    stream = BlockStream.of(workload(prompts), config(1))
    least = int(stream.needed.max())
    hits = [optimal_hits(stream, capacity) for capacity in range(least, least + 20)]
    assert hits == sorted(hits)
