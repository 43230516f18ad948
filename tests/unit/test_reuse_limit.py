"""Reuse cut to the engine's grid, and blocks whose KV looks ahead."""

from __future__ import annotations

import pytest

from fdcache.errors import ConfigurationError
from tests.manager_world import World
from tests.property.engine_model import BLOCK

PATH = [token for block in range(6) for token in (block,) * BLOCK]


def found(world: World, tokens: list[int]) -> int:
    return sum(world.match(*tokens))


@pytest.mark.parametrize(
    ("grid", "cached"), [(0, 6), (2, 6), (BLOCK, 6), (2 * BLOCK, 6), (4 * BLOCK, 4), (8 * BLOCK, 0)]
)
def test_a_match_ends_on_the_grid(grid: int, cached: int) -> None:
    world = World(device=16, reuse_grid=grid)
    world.serve(*PATH, 9)
    assert found(world, [*PATH, 9]) == cached
    world.assert_nothing_is_held()


def test_the_last_token_is_left_to_compute_on_the_grid() -> None:
    world = World(device=16, reuse_grid=2 * BLOCK)
    world.serve(*PATH, 9)
    assert found(world, PATH) == 4
    assert found(world, PATH[: 4 * BLOCK]) == 2


@pytest.mark.parametrize(("lookahead", "cached"), [(0, 6), (1, 5), (BLOCK, 5), (BLOCK + 1, 4), (100, 0)])
def test_blocks_that_look_beyond_the_match_are_computed_again(lookahead: int, cached: int) -> None:
    world = World(device=16, lookahead_tokens=lookahead)
    world.serve(*PATH, 9)
    assert found(world, [*PATH, 9]) == cached


def test_the_cut_counts_blocks_of_all_tiers() -> None:
    world = World(device=8, host=16, reuse_grid=2 * BLOCK, lookahead_tokens=1)
    world.serve(*PATH, 9)
    world.serve(*(7,) * (4 * BLOCK), 9)
    on_device, on_host = world.match(*PATH, 9)
    assert on_device + on_host == 4
    assert on_host > 0
    world.assert_nothing_is_held()


def test_a_copy_that_is_not_waited_for_ends_the_match_on_the_grid() -> None:
    world = World(device=8, host=16, reuse_grid=2 * BLOCK, defer_timeout=0.0)
    world.serve(*PATH, 9)
    world.serve(*(7,) * (4 * BLOCK), 9)
    assert world.match(*PATH, 9) == (3, 3)
    first = world.submit(*PATH, 9)
    world.engine.schedule([first], 100)  # its loads are under way
    assert first.request.is_loading
    assert world.match(*PATH, 9) == (2, 0)
    world.settle()
    world.engine.finish(first)
    world.settle()
    assert found(world, [*PATH, 9]) == 6
    world.assert_nothing_is_held()


@pytest.mark.parametrize("grid", [3, BLOCK + 1, 3 * BLOCK // 2])
def test_a_grid_beside_the_blocks_is_refused(grid: int) -> None:
    with pytest.raises(ConfigurationError, match=f"reuse_grid: {grid}"):
        World(reuse_grid=grid)
