"""Record faults: bad records against a medium that fails as a whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fdcache.storage.slab_health import IN_A_ROW, MOST_BAD, WINDOW, RecordFaults


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_single_records_are_bad_until_several_failed_in_a_row() -> None:
    faults = RecordFaults()
    for slot in range(IN_A_ROW - 1):
        verdict = faults.judge({slot}, moved=False, writing=False)
        assert (set(verdict.bad), verdict.medium_fails) == ({slot}, False)
    verdict = faults.judge({IN_A_ROW}, moved=False, writing=False)
    assert (set(verdict.bad), verdict.medium_fails) == (set(), True)


def test_a_success_ends_the_row_of_its_own_direction() -> None:
    faults = RecordFaults()
    for slot in range(3 * IN_A_ROW):
        faults.succeeded(writing=False)
        assert faults.judge({slot}, moved=False, writing=False).bad == {slot}
        if slot >= IN_A_ROW - 1:
            continue
        assert not faults.judge({100 + slot}, moved=False, writing=True).medium_fails
    faults.succeeded(writing=False)
    assert faults.judge({200}, moved=False, writing=True).medium_fails


def test_a_suspect_that_fails_after_a_recovery_is_bad() -> None:
    faults = RecordFaults()
    assert faults.judge({1, 2, 3, 4, 5}, moved=False, writing=False).bad == set()
    faults.recovered()
    verdict = faults.judge({1, 2, 3, 4, 5}, moved=False, writing=False)
    assert (set(verdict.bad), verdict.medium_fails) == ({1, 2, 3, 4, 5}, False)


def test_many_bad_records_within_the_window_are_a_failing_medium() -> None:
    clock = Clock()
    faults = RecordFaults(clock)
    for slot in range(MOST_BAD - 1):
        assert not faults.judge({slot}, moved=True, writing=False).medium_fails
    clock.now = WINDOW + 1
    assert not faults.judge({100}, moved=True, writing=False).medium_fails, (
        "earlier faults are outside the window"
    )
    for slot in range(200, 200 + MOST_BAD - 2):
        faults.judge({slot}, moved=True, writing=True)
    verdict = faults.judge({300}, moved=True, writing=False)
    assert (set(verdict.bad), verdict.medium_fails) == ({300}, True)


@given(
    st.lists(
        st.tuples(st.frozensets(st.integers(0, 30), min_size=1, max_size=6), st.booleans(), st.booleans()),
        max_size=20,
    )
)
def test_only_failed_records_are_bad_and_a_working_medium_hides_none(
    batches: list[tuple[frozenset[int], bool, bool]],
) -> None:
    faults = RecordFaults()
    for failed, moved, writing in batches:
        verdict = faults.judge(failed, moved=moved, writing=writing)
        assert verdict.bad <= failed
        assert verdict.bad == failed or verdict.medium_fails
        assert verdict.bad == failed or not moved
