"""Look-ahead tokens: a block is reused by requests that continue with the same tokens."""

from __future__ import annotations

import pytest

from fdcache.errors import RequestStateError
from fdcache.manager import CacheManager, Request
from tests.manager_world import World
from tests.property.engine_model import BLOCK

A, B, X, Y = ((token,) * BLOCK for token in (1, 2, 8, 9))
PATH = [token for block in range(6) for token in (block,) * BLOCK]
TAIL = (5,)


def found(world: World, *tokens: int) -> int:
    return sum(world.match(*tokens))


@pytest.mark.parametrize(("lookahead", "cached"), [(0, 6), (1, 6), (BLOCK, 5), (BLOCK + 1, 5), (100, 0)])
def test_blocks_with_equal_lookahead_tokens_are_reused(lookahead: int, cached: int) -> None:
    world = World(device=16, lookahead_tokens=lookahead)
    world.serve(*PATH, 9)
    assert found(world, *PATH, 9) == cached


@pytest.mark.parametrize(("lookahead", "cached"), [(0, 6), (1, 5), (BLOCK, 5), (BLOCK + 1, 4), (100, 0)])
def test_a_block_with_other_lookahead_tokens_is_computed_again(lookahead: int, cached: int) -> None:
    world = World(device=16, lookahead_tokens=lookahead)
    world.serve(*PATH, 9, *(0,) * 2 * BLOCK)
    assert found(world, *PATH, 8, *(0,) * 2 * BLOCK) == cached


def test_a_block_is_stored_once_for_each_continuation() -> None:
    world = World(device=16, lookahead_tokens=1)
    for path in ((*A, *X, *TAIL), (*A, *Y, *TAIL), (*A, *Y, *TAIL), (*A, *X, *TAIL)):
        world.serve(*path)  # the model engine checks what it reads
    assert found(world, *A, *X, *TAIL) == found(world, *A, *Y, *TAIL) == 2
    assert found(world, *A, *B, *TAIL) == 0
    assert world.manager.get_stats().device.ready == 4
    world.assert_nothing_is_held()


def test_two_requests_publish_the_same_block_for_different_continuations() -> None:
    world = World(device=16, lookahead_tokens=1)
    jobs = [world.submit(*A, *rest, *TAIL) for rest in (X, Y, Y)]
    world.engine.schedule(jobs, 100)
    world.settle()
    for job in jobs:
        world.engine.finish(job)
    assert world.manager.get_stats().device.ready == 4
    world.serve(*A, *Y, *TAIL)
    assert found(world, *A, *Y, *TAIL) == 2
    world.assert_nothing_is_held()


def test_a_continuation_on_the_host_is_not_mixed_up_with_another_on_the_device() -> None:
    world = World(device=8, host=16, lookahead_tokens=1)
    world.serve(*A, *B, *X, *TAIL)
    world.manager.sleep()
    world.manager.wakeup()
    world.serve(*A, *B, *Y, *TAIL)
    assert world.match(*A, *B, *X, *TAIL) == (1, 2)
    assert world.match(*A, *B, *Y, *TAIL) == (3, 0)
    world.serve(*A, *B, *X, *TAIL)
    assert world.match(*A, *B, *X, *TAIL) == (3, 0)
    world.assert_nothing_is_held()


def test_a_generated_block_is_published_once_its_lookahead_token_is_known() -> None:
    world = World(device=8, lookahead_tokens=1)
    request = Request("r", [*A, *B[:-1]])
    world.manager.match_prefix([request])
    world.manager.allocate_device_blocks([(request, 2 * BLOCK)])
    request.append_tokens([B[-1]])
    world.manager.commit([(request, 2 * BLOCK)])
    assert len(request.block_hashes) == world.manager.get_stats().device.ready == 1
    request.append_tokens([X[0]])
    world.manager.commit([(request, 2 * BLOCK)])
    assert len(request.block_hashes) == world.manager.get_stats().device.ready == 2
    world.manager.finish([request])
    assert found(world, *A, *B, *X) == 2
    assert found(world, *A, *B, *Y) == 1
    world.assert_nothing_is_held()


def test_a_request_cannot_change_its_lookahead() -> None:
    world = World(device=8, lookahead_tokens=1)
    request = Request("r", [*A, *TAIL])
    world.manager.match_prefix([request])
    world.manager.finish([request])
    other = CacheManager(world.manager.settings.model_copy(update={"lookahead_tokens": 0}), world.layout)
    with pytest.raises(RequestStateError, match="another layout or look-ahead"):
        other.match_prefix([request])
