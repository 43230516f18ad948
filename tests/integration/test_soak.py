"""The driver of `make soak`, on some hundred requests."""

from __future__ import annotations

import time

import pytest

from tests import soak


def samples(objects: int, resident: int, requests: int = 1_000_000) -> list[soak.Sample]:
    """Return the samples of a process that keeps so much of each request, around a warm-up of 64 MiB."""
    return [
        soak.Sample(
            served, (64 << 20) + resident * served + 4096 * (i % 3), 10**6 + objects * served + 50 * (i % 2)
        )
        for i, served in enumerate(range(0, requests + 1, soak.CHECK_EVERY))
    ]


# Whatever the policy, the same plans and reports could leave something behind.
@pytest.mark.parametrize(
    "policy",
    [None, "write_back", *(pytest.param(each, marks=pytest.mark.slow) for each in soak.POLICIES[:2])],
)
def test_requests_of_a_short_soak_leave_nothing_behind(policy: str | None) -> None:
    outcome = soak.soak(policy, 80, deadline=time.time() + 600, seed=3, check_every=20)
    assert outcome.faults == []
    assert outcome.requests >= 80
    assert outcome.counts["tokens reused"] > 0
    if policy is not None:
        assert outcome.counts["load blocks"] > 0


def test_memory_that_stays_flat_is_no_leak() -> None:
    assert soak.leaks(samples(objects=0, resident=0)) == []


def test_bytes_and_objects_kept_of_each_request_are_found() -> None:
    assert soak.leaks(samples(objects=0, resident=64)) == ["memory grows by 48.8 MiB"]
    assert soak.leaks(samples(objects=1, resident=0)) == ["800,000 Python objects more are kept"]


def test_growth_before_the_end_of_the_warm_up_does_not_count() -> None:
    grown = [soak.Sample(served, min(served, 200_000) << 10, 0) for served in range(0, 1_000_001, 20_000)]
    assert soak.leaks(grown) == []
