"""OffloadManager with states: what stands for the tokens before a position, and is of use there alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from fdcache.errors import PlanError
from fdcache.groups import CacheGroup, Reach
from fdcache.manager import LoadStatus, MatchStatus, Request
from fdcache.metadata import CacheLevel
from fdcache.settings.cache import EvictionPolicy, StatePositions
from tests.offload_engine import BLOCK, OffloadEngine, ids, prompt
from tests.swaps import uniform_layout

STATE = CacheGroup(BLOCK, Reach.STATE)
LAYOUT = uniform_layout(block_size=BLOCK, num_layers=2, groups=(STATE, STATE, CacheGroup(BLOCK)))
ALONE = uniform_layout(block_size=BLOCK, num_layers=2, groups=(STATE,))


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    engine = OffloadEngine(layout=LAYOUT)
    yield engine
    engine.close()


def stored(
    engine: OffloadEngine, name: str, tokens: list[int], table: list[int], states: dict[int, list[int]]
) -> None:
    """Store a prompt, and the states at the ends of some of its pages, by their number."""
    request = Request(name, tokens)
    engine.manager.begin([request])
    engine.manager.prepare([request])
    engine.compute(request, table)
    engine.manager.offer(request, len(tokens), ids(*table))
    for pages, blocks in states.items():
        for block, key in zip(blocks, engine.state_keys(request, pages), strict=True):
            engine.fill(block, key.tobytes())
        above = table[pages - 1] if table else -1
        engine.manager.offer_states(request, pages * BLOCK, ids(*blocks), above)
    engine.settle()
    engine.manager.finish([request])


def found(engine: OffloadEngine, request: Request, device_tokens: int = 0) -> int:
    """Return the pages that a match finds beyond those on the device."""
    match = engine.manager.match(request, device_tokens)
    assert match.status is MatchStatus.MATCHED
    return match.num_tokens // BLOCK


def test_a_prefix_is_found_up_to_the_last_page_that_has_states(engine: OffloadEngine) -> None:
    stored(engine, "first", prompt(1, 2, 3, 4), [0, 1, 2, 3], {1: [4, 5], 3: [6, 7]})
    request = Request("second", prompt(1, 2, 3, 4))
    assert found(engine, request) == 3
    assert found(engine, request, BLOCK) == 2
    assert found(engine, request, 3 * BLOCK) == 0
    assert found(engine, request) == 3
    assert engine.manager.load(request, ids(8, 9, 10, 11)) == 0  # a block less than what is asked for
    assert found(engine, request) == 3
    assert engine.manager.load(request, ids(8, 9, 10, 11, 12)) == 5
    engine.step()
    (outcome,) = engine.collect()
    assert (outcome.status, outcome.recompute_from) == (LoadStatus.CONFIRMED, 3 * BLOCK)
    assert engine.holds(request, [8, 9, 10])
    assert engine.hold_keys([11, 12], engine.state_keys(request, 3))
    engine.manager.finish([request])
    assert engine.manager.get_stats().counters.host_hit_tokens == 3 * BLOCK


def test_a_page_outlives_its_states_and_finds_what_is_above(engine: OffloadEngine) -> None:
    stored(engine, "first", prompt(1, 2, 3), [0, 1, 2], {1: [4, 5], 3: [6, 7]})
    request = Request("second", prompt(1, 2, 3))
    engine.manager.prepare([request])
    pool = engine.manager._host.pool
    assert pool is not None
    pool.discard(pool.find(engine.state_keys(request, 3)[:1]).slots)
    assert found(engine, request) == 1
    assert len(engine.manager.find_blocks(request)[CacheLevel.HOST]) == 3
    engine.manager.finish([request])


def test_other_prompts_with_the_same_last_page_have_other_states(engine: OffloadEngine) -> None:
    stored(engine, "first", prompt(1, 2), [0, 1], {2: [4, 5]})
    request = Request("second", prompt(3, 2))
    assert found(engine, request) == 0
    engine.manager.finish([request])


def test_states_alone_are_paths_of_their_own() -> None:
    engine = OffloadEngine(layout=ALONE)
    stored(engine, "first", prompt(1, 2, 3, 4), [], {2: [4], 4: [5]})
    request = Request("second", prompt(1, 2, 3, 4, 5))
    assert found(engine, request) == 4
    assert found(engine, request, 3 * BLOCK) == 1
    assert engine.manager.load(request, ids(9)) == 1
    engine.step()
    (outcome,) = engine.collect()
    assert outcome.recompute_from == 4 * BLOCK
    assert engine.hold_keys([9], engine.state_keys(request, 4))
    engine.manager.finish([request])
    engine.close()


def test_states_of_another_number_or_in_the_middle_of_a_page_are_not_stored(engine: OffloadEngine) -> None:
    request = Request("first", prompt(1, 2))
    engine.manager.begin([request])
    with pytest.raises(PlanError, match="1 device blocks for the 2 states"):
        engine.manager.offer_states(request, BLOCK, ids(4))
    engine.manager.offer_states(request, BLOCK + 1, ids(4, 5))
    engine.manager.offer_states(request, 9 * BLOCK, np.array([4, 5], np.int32))
    engine.settle()
    assert engine.manager.get_stats().counters.blocks_backed_up == 0
    engine.manager.finish([request])


def test_a_failed_load_of_states_counts_for_nothing(engine: OffloadEngine) -> None:
    failing: list[int] = []
    engine.devices[0]._choose = lambda swap: failing  # type: ignore[attr-defined]
    stored(engine, "first", prompt(1, 2), [0, 1], {2: [4, 5]})
    request = Request("second", prompt(1, 2))
    assert found(engine, request) == 2
    assert engine.manager.load(request, ids(8, 9, 10, 11)) == 4
    failing.append(3)
    engine.step()
    (outcome,) = engine.collect()
    assert (outcome.status, outcome.recompute_from) == (LoadStatus.FAILED, 0)
    assert found(engine, request) == 0
    engine.manager.finish([request])


def test_a_match_names_the_group_that_ended_it(engine: OffloadEngine) -> None:
    stored(engine, "first", prompt(1, 2, 3), [0, 1, 2], {1: [4, 5]})
    ended: list[int | None] = []
    for number, tokens in enumerate(
        (prompt(1), prompt(1, 2), prompt(1, 2, 3, 4), prompt(5), prompt(1, 6)), start=1
    ):
        request = Request(f"{number}", tokens)
        engine.manager.begin([request])
        ended.append(engine.manager.match(request, 0).ended_by)
        assert engine.manager.load(request, ids()) == 0
        engine.manager.offer(request, 0, ids())
        engine.manager.finish([request])
    assert ended == [None, 0, 0, 2, 2]  # whole; no states after page 2, nor 3; no page; none after the first


def test_ends_of_matches_are_counted_by_what_their_layers_need(engine: OffloadEngine) -> None:
    stored(engine, "first", prompt(1, 2), [0, 1], {1: [4, 5]})
    for name, tokens in (("a", prompt(1, 2)), ("b", prompt(1, 3)), ("c", prompt(1))):
        request = Request(name, tokens)
        assert found(engine, request) == 1
        assert engine.manager.load(request, ids(8, 9, 10)) == 3
        engine.settle()
        engine.manager.finish([request])
    counters = engine.manager.get_stats().counters
    assert (counters.matches_ended_by_state, counters.matches_ended_by_all) == (1, 1)
    assert (counters.matches_ended_by_last, counters.matches_ended_by_chunk) == (0, 0)


# --- positions --------------------------------------------------------------------------------------------


def kept(
    positions: StatePositions, prompt_pages: int, pages: int, *, more: int = 1, gone: int = 0
) -> list[int]:
    """Generate behind a prompt, and offer the states of each page; return the pages whose states are in the host.

    ``more``: tokens of the prompt behind its pages. ``gone``: the last pages whose states' device blocks are given away
    before the request ends.
    """
    engine = OffloadEngine(
        layout=ALONE, device_blocks=2 * pages, host_blocks=2 * pages, state_positions=positions
    )
    tokens = prompt(*range(1, pages + 1))
    request = Request("first", tokens[: prompt_pages * BLOCK + more])
    engine.manager.begin([request])
    request.append_tokens(tokens[prompt_pages * BLOCK + more :])
    engine.manager.prepare([request])
    for number in range(1, pages + 1):
        (key,) = engine.state_keys(request, number)
        engine.fill(number, key.tobytes())
        engine.manager.offer_states(request, number * BLOCK, ids(number))
        engine.settle()
    if gone:
        engine.manager.evicted(ids(*range(pages - gone + 1, pages + 1)))
        engine.settle()
    engine.manager.finish([request])
    engine.settle()
    there = [
        number
        for number in range(1, pages + 1)
        if engine.manager.host_has(engine.state_keys(request, number)).all()
    ]
    engine.close()
    return there


def test_states_are_stored_at_the_ends_of_prompt_and_reply_and_at_growing_distances() -> None:
    between = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24]
    assert kept(StatePositions.SPACED, 26, 27) == [*between, 26, 27]
    behind = [9 + each for each in between]
    assert kept(StatePositions.SPACED, 9, 9 + 27) == [*between[:8], 9, *behind, 9 + 27]
    assert kept(StatePositions.ENDS, 9, 30) == [9, 30]
    assert kept(StatePositions.ENDS, 9, 30, more=0) == [8, 9, 30], "its repetition computes the last token"
    assert kept(StatePositions.ALL, 9, 30) == list(range(1, 31))


def test_last_states_whose_device_blocks_are_given_away_are_not_stored() -> None:
    assert kept(StatePositions.ENDS, 9, 30, gone=1) == [9]


@pytest.mark.parametrize("eviction", list(EvictionPolicy))
def test_a_full_tier_drops_a_state_without_its_pages_and_pages_without_a_state(
    eviction: EvictionPolicy,
) -> None:
    engine = OffloadEngine(layout=LAYOUT, host_blocks=18, device_blocks=32, eviction=eviction)
    stored(engine, "first", prompt(1, 2, 3, 4), [0, 1, 2, 3], {1: [4, 5], 4: [6, 7]})
    request = Request("again", prompt(1, 2, 3, 4, 5))
    seen = set()
    for number in range(10, 40):
        assert found(engine, request) in (0, 1, 4)
        engine.manager.unmatch([request])
        engine.now += 5.0
        others = prompt(*(100 * each + number for each in range(1, 5)))
        stored(engine, f"{number}", others, [8, 9, 10, 11], {4: [12, 13]})
        pages = engine.manager.host_has(request.block_hashes[:4]).tolist()
        states = [bool(engine.manager.host_has(engine.state_keys(request, at)).all()) for at in (1, 4)]
        seen.add((pages == [True] * 4 and states[1], states[0]))
        engine.manager.check_integrity()
    assert (True, False) in seen, "no state was dropped while all pages stayed"
    engine.manager.finish([request])
    engine.close()


@pytest.mark.parametrize("eviction", list(EvictionPolicy))
def test_a_full_tier_drops_the_pages_below_a_state_and_keeps_it(eviction: EvictionPolicy) -> None:
    engine = OffloadEngine(layout=LAYOUT, host_blocks=14, device_blocks=32, eviction=eviction)
    stored(engine, "first", prompt(1, 2, 3, 4), [0, 1, 2, 3], {2: [4, 5]})
    request = Request("again", prompt(1, 2, 3, 4, 5))
    for number in range(10, 40):
        assert found(engine, request) == 2
        engine.manager.unmatch([request])
        engine.now += 5.0
        stored(engine, f"{number}", prompt(number), [8], {1: [9, 10]})
        engine.manager.check_integrity()
    assert engine.manager.host_has(request.block_hashes[:4]).tolist() == [True, True, False, False]
    assert engine.manager.host_has(engine.state_keys(request, 2)).all()
    engine.manager.finish([request])
    engine.close()
