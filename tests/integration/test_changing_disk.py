"""Load or recompute with a disk that becomes slow and fast again, in the virtual time of its benchmark."""

from __future__ import annotations

import pytest

from benchmarks.ttft.changing_disk import COMPUTE, FAST, PERIODS, STEP, measure


@pytest.fixture(scope="module")
def seconds() -> dict[str, list[float]]:
    return measure()


@pytest.mark.parametrize("period", PERIODS)
def test_in_each_period_the_better_way_is_found(seconds: dict[str, list[float]], period: str) -> None:
    """A disk that is fast again is noticed with the first read that nothing waits for, within ten seconds or so."""
    best = (COMPUTE if "slow" in period else FAST) + STEP
    assert sum(seconds[period][20:40]) < 1.05 * 20 * best
    assert max(seconds[period]) < COMPUTE + COMPUTE + 0.1
