"""Times of prefills, from FastDeploy's scheduling and its tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fdcache.integrations.fastdeploy.prefills import PrefillTime, PrefillTimes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def request(name: str, *, loading: bool = False) -> Any:
    return SimpleNamespace(request_id=name, is_loading=loading)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def times(clock: Clock) -> PrefillTimes:
    return PrefillTimes(clock)


def sampled(times: PrefillTimes, clock: Clock, moment: float, *names: str) -> PrefillTime | None:
    clock.now = 100.0 + moment
    return times.sampled(names)


def test_a_prefill_takes_from_its_scheduling_to_its_token(times: PrefillTimes, clock: Clock) -> None:
    chunk = (request("a"), 0, 512)
    times.scheduled([chunk])
    assert sampled(times, clock, 0.5, "a") == PrefillTime([chunk], 0.5, 1, waited=False)
    assert sampled(times, clock, 1.0, "a") is None, "it is measured once"


def test_time_begins_with_the_end_of_the_step_before(times: PrefillTimes, clock: Clock) -> None:
    times.scheduled([(request("a"), 0, 512)])
    assert sampled(times, clock, 0.2, "running") is None
    found = sampled(times, clock, 0.5, "running", "a")
    assert found is not None and found.seconds == pytest.approx(0.3)


def test_chunks_of_a_prompt_are_measured_together(times: PrefillTimes, clock: Clock) -> None:
    long = request("a")
    for start in (0, 512, 1024):
        times.scheduled([(long, start, start + 512)])
        assert sampled(times, clock, start / 1000, "running") is None
    found = sampled(times, clock, 1.5, "a")
    assert found is not None
    assert (len(found.chunks), found.steps, found.seconds) == (3, 3, 1.5)


def test_steps_that_overlap_are_measured_until_the_last_has_its_token(
    times: PrefillTimes, clock: Clock
) -> None:
    times.scheduled([(request("a"), 0, 64), (request("b"), 0, 64)])
    assert sampled(times, clock, 0.1, "b") is None
    times.scheduled([(request("c", loading=True), 32, 64)])
    assert sampled(times, clock, 0.2, "a", "b") is None
    found = sampled(times, clock, 0.3, "c")
    assert found is not None
    assert (len(found.chunks), found.steps, found.waited) == (3, 2, True)
    assert found.seconds == pytest.approx(0.3)


def test_a_request_that_ends_before_its_token_is_not_measured(times: PrefillTimes, clock: Clock) -> None:
    times.scheduled([(request("a"), 0, 64), (request("b"), 0, 64)])
    times.ended("b")
    assert sampled(times, clock, 0.1, "a") is None
    times.scheduled([(request("c"), 0, 64)])
    times.ended("a")
    assert sampled(times, clock, 0.2, "c") is not None


def test_traffic_without_a_pause_begins_a_new_measurement(times: PrefillTimes, clock: Clock) -> None:
    for step in range(65):
        clock.now = 100.0 + step
        times.scheduled([(request(f"{step}"), 0, 64)])
    found = sampled(times, clock, 65.0, "64")
    assert found is not None
    assert (found.steps, found.seconds) == (1, 1.0)
    times.scheduled([])
    assert sampled(times, clock, 66.0, "a") is None
