"""Numbers of device blocks that an engine gives an OffloadManager."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fdcache.errors import PlanError
from fdcache.metadata import CacheLevel
from tests.offload_engine import BLOCK, OffloadEngine, begun, ids, offload_engine, prompt

engine = offload_engine
LARGEST = 2**31 - 1


@pytest.mark.parametrize(
    "wrong",
    [
        [2**31],
        np.array([2**31]),
        np.array([2**32 + 5]),
        np.array([5], np.uint64) + np.uint64(2**63),
        [1.5],
        np.array([1.0]),
        [True],
        ["1"],
        np.array([[1]]),
        [-1],
        None,
    ],
    ids=repr,
)
def test_numbers_that_are_no_device_blocks_are_refused_and_change_nothing(
    engine: OffloadEngine, wrong: Any
) -> None:
    request = begun(engine, "a", prompt(1))
    calls = (
        lambda: engine.manager.evicted(wrong),
        lambda: engine.manager.forget(wrong),
        lambda: engine.manager.next_evicted(wrong),
        lambda: engine.manager.load(request, wrong),
        lambda: engine.manager.offer(request, BLOCK, wrong),
    )
    for call in calls:
        with pytest.raises(PlanError, match="device_ids"):
            call()
    assert engine.settle() == []
    engine.manager.finish([request])


@pytest.mark.parametrize("right", [[5], (5,), np.array([5]), np.array([5], np.uint64), np.array([5, 7])[::2]])
def test_any_list_of_integers_names_device_blocks(engine: OffloadEngine, right: Any) -> None:
    engine.stored("first", prompt(1), [0])
    request = begun(engine, "second", prompt(1))
    engine.manager.match(request, 0)
    assert engine.manager.load(request, right) == 1
    engine.settle()
    assert engine.holds(request, [5])
    engine.manager.finish([request])


def test_the_largest_number_costs_its_own_blocks_alone(engine: OffloadEngine) -> None:
    """No worker has so many device blocks: the plan fails, and everything else goes on."""
    manager, request = engine.manager, begun(engine, "a", prompt(1, 2))
    manager.offer(request, 2 * BLOCK, ids(0, LARGEST))
    for plan in manager.take_plans():
        for rank in engine.ranks:
            with pytest.raises(PlanError, match=str(LARGEST)):
                rank.submit_swap_tasks(plan)
    assert engine.collect() == []
    assert manager.get_stats().device.blocks == 2
    manager.forget(ids(LARGEST))
    manager.evicted(ids(LARGEST, 0))
    manager.next_evicted(ids(LARGEST))
    manager.finish([request])
    other = engine.stored("b", prompt(3, 4), [1, 2])
    assert len(manager.find_blocks(other)[CacheLevel.HOST]) == 2
