"""Matches: rounded down to the engine's reuse grid."""

from __future__ import annotations

import pytest

from fdcache.errors import ConfigurationError
from fdcache.manager import AllocationFailure, MatchStatus, Request
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


def test_the_last_cell_is_computed_after_a_full_hit() -> None:
    world = World(device=16, reuse_grid=2 * BLOCK)
    world.serve(*PATH, 9)
    assert found(world, PATH) == 4
    assert found(world, PATH[: 4 * BLOCK]) == 2


def test_the_grid_counts_blocks_of_all_tiers() -> None:
    world = World(device=8, host=16, reuse_grid=4 * BLOCK)
    world.serve(*PATH, 9)
    world.serve(*(7,) * (4 * BLOCK), 9)
    on_device, on_host = world.match(*PATH, 9)
    assert on_device + on_host == 4
    assert on_host > 0
    world.assert_nothing_is_held()


def test_a_match_that_ends_at_a_pending_block_ends_on_the_grid() -> None:
    world = World(device=8, host=16, reuse_grid=2 * BLOCK, defer_timeout=0.0)
    world.serve(*PATH, 9)
    world.serve(*(7,) * (4 * BLOCK), 9)
    assert world.match(*PATH, 9) == (3, 3)
    first = world.submit(*PATH, 9)
    world.engine.schedule([first], 100)  # its loads are in flight
    assert first.request.is_loading
    assert world.match(*PATH, 9) == (2, 0)
    world.settle()
    world.engine.finish(first)
    world.settle()
    assert found(world, [*PATH, 9]) == 6
    world.assert_nothing_is_held()


def on_both_tiers(grid: int) -> World:
    """Three blocks of the path on the device, three more only on the host; a grid of so many blocks."""
    world = World(device=8, host=16, reuse_grid=grid * BLOCK)
    world.serve(*PATH, 9)
    world.serve(*(7,) * (4 * BLOCK), 9)
    return world


@pytest.mark.parametrize(("grid", "found"), [(1, (3, 3)), (2, (3, 3)), (4, (3, 1)), (5, (3, 2)), (7, (0, 0))])
def test_blocks_beyond_the_grid_are_not_pinned(grid: int, found: tuple[int, int]) -> None:
    world = on_both_tiers(grid)
    assert world.manager.get_stats().device.pins == 0
    before = world.manager.get_stats().counters
    job = world.submit(*PATH, 9)
    job.running, request = True, job.request
    result = world.manager.match_prefix([request])[0]
    assert (result.num_device_blocks, result.num_host_blocks) == found
    stats = world.manager.get_stats()
    assert stats.host is not None
    assert (stats.device.pins, bool(stats.host.pins)) == (found[0], found[1] > 0)
    assert world.manager.allocate_device_blocks([(request, len(PATH) + 1)])[0].ok
    stats = world.manager.get_stats()
    assert stats.host is not None
    assert (stats.host.pins, stats.host.holds) == (0, found[1])
    hits = (
        stats.counters.device_hit_tokens - before.device_hit_tokens,
        stats.counters.host_hit_tokens - before.host_hit_tokens,
    )
    assert hits == (found[0] * BLOCK, found[1] * BLOCK)
    world.engine.schedule([], 1)
    world.settle()
    world.manager.finish([request])
    world.assert_nothing_is_held()


def test_a_match_rounded_down_to_device_blocks_pins_nothing_on_the_host() -> None:
    world = on_both_tiers(2)
    request = Request("probe", PATH[: 3 * BLOCK + 1])
    result = world.manager.match_prefix([request])[0]
    assert (result.num_device_blocks, result.num_host_blocks) == (2, 0)
    stats = world.manager.get_stats()
    assert stats.host is not None
    assert (stats.device.pins, stats.host.pins, stats.host.leases) == (2, 0, 0)
    world.manager.finish([request])
    world.assert_nothing_is_held()


def test_the_second_of_two_equal_requests_reuses_the_loads_of_the_first() -> None:
    world = on_both_tiers(2)
    jobs = [world.submit(*PATH, 9) for _ in range(2)]
    jobs[0].running = True
    first, second = (job.request for job in jobs)
    results = world.manager.match_prefix([first, second])
    assert [(each.num_device_blocks, each.num_host_blocks) for each in results] == [(3, 3)] * 2
    demands = [(request, len(PATH) + 1) for request in (first, second)]
    answers = world.manager.allocate_device_blocks(demands)
    assert [answer.failure for answer in answers] == [None, AllocationFailure.DEFERRED]
    assert world.manager.match_prefix([second])[0].status is MatchStatus.DEFERRED
    world.engine.schedule([], 1)
    world.settle()
    result = world.manager.match_prefix([second])[0]
    assert (result.num_device_blocks, result.num_host_blocks) == (6, 0)
    world.manager.finish([first, second])
    world.assert_nothing_is_held()


@pytest.mark.parametrize("grid", [3, BLOCK + 1, 3 * BLOCK // 2])
def test_a_grid_that_does_not_fit_the_block_size_is_refused(grid: int) -> None:
    with pytest.raises(ConfigurationError, match=f"reuse_grid: {grid}"):
        World(reuse_grid=grid)
