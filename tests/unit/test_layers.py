"""Layer groups, and loads that fail from a layer on."""

from __future__ import annotations

import pytest

from fdcache.controller.layers import layer_groups, widen_groups
from tests.faults import FailingLoadsDevice
from tests.swaps import Worker, plan, uniform_layout


@pytest.mark.parametrize(
    ("layers", "first", "later", "groups"),
    [
        (1, 1, 4, [(0, 1)]),
        (6, 1, 4, [(0, 1), (1, 5), (5, 6)]),
        (6, 2, 2, [(0, 2), (2, 4), (4, 6)]),
        (3, 8, 1, [(0, 3)]),
    ],
)
def test_groups_cover_all_layers(layers: int, first: int, later: int, groups: list[tuple[int, int]]) -> None:
    assert layer_groups(layers, first, later) == groups


def test_groups_are_joined_until_large_enough_and_the_first_stays_small() -> None:
    offsets = [100 * layer for layer in range(11)]
    groups = layer_groups(10, 1, 2)
    assert widen_groups(groups, offsets, 0) == groups
    assert widen_groups(groups, offsets, 350) == [(0, 1), (1, 5), (5, 10)]
    assert widen_groups(groups, offsets, 10_000) == [(0, 1), (1, 10)]
    assert widen_groups([(0, 10)], offsets, 10_000) == [(0, 10)]


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_load_that_fails_at_a_layer_fails_its_block_alone(layer: int) -> None:
    layout = uniform_layout()
    first_plane = layout.planes.index(layout.layer_planes(layer)[0])
    device = FailingLoadsDevice(lambda pairs: [1], plane=first_plane)
    with Worker(layout, device=device, first_group_layers=1, group_layers=1) as worker:
        worker.run(plan(1, backup=[(0, 0), (1, 1), (2, 2)]))
        untouched = worker.block(6)
        (result,) = worker.run(plan(2, load=[(0, 5), (1, 6), (2, 7)])).results
        assert result.failed.tolist() == [1]
        assert worker.block(5) == worker.block(0)
        assert worker.block(7) == worker.block(2)
        assert worker.block(6) == worker.block(1)[:first_plane] + untouched[first_plane:]
