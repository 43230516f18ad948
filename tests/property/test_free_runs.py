"""The free slots of a tier against a set of numbers: none is lost, runs are maximal, the tightest fit is taken."""

from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from fdcache import _core
from tests.property.test_tier import bounded

Run = tuple[int, int]


def runs_of(free: set[int], extent: int) -> list[Run]:
    """Maximal stretches of neighbours, cut where an extent begins."""
    runs: list[Run] = []
    for slot in sorted(free):
        if runs and sum(runs[-1]) == slot and (not extent or slot % extent):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slot, 1))
    return runs


def fewest_runs(lengths: list[int], count: int) -> list[int]:
    """The lengths left after a take: each time the tightest run that holds the rest, else the longest."""
    left = sorted(lengths)
    while count:
        fitting = [length for length in left if length >= count]
        chosen = fitting[0] if fitting else left[-1]
        left.remove(chosen)
        if chosen > count:
            left = sorted([*left, chosen - count])
        count -= min(chosen, count)
    return left


class FreeSlots(RuleBasedStateMachine):
    @initialize(extent=st.sampled_from([0, 1, 5, 8]), slots=st.integers(1, 24))
    def begin(self, extent: int, slots: int) -> None:
        self.extent, self.slots = extent, slots
        self.tier = _core.FreeRuns(extent)
        self.free: set[int] = set()
        self.tier.resize(slots)

    def used(self) -> list[int]:
        return sorted(set(range(self.slots)) - self.free)

    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        """One after another in any order, so that runs grow at either end and join."""
        if used := self.used():
            for slot in data.draw(st.lists(st.sampled_from(used), unique=True)):
                self.tier.add(slot)
                self.free.add(slot)

    @rule(data=st.data())
    def free_a_run(self, data: st.DataObject) -> None:
        """Perhaps over several extents."""
        if used := runs_of(set(self.used()), 0):
            first, count = data.draw(st.sampled_from(used))
            self.tier.add(first, count)
            self.free.update(range(first, first + count))

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.free)))
        left = fewest_runs([length for _, length in runs_of(self.free, self.extent)], count)
        taken = self.tier.take(count)
        assert taken == sorted(taken)
        for first, length in taken:
            slots = set(range(first, first + length))
            assert slots <= self.free
            self.free -= slots
            assert not self.extent or first // self.extent == (first + length - 1) // self.extent
        assert sum(length for _, length in taken) == count
        # Runs that were cut leave their rest where it was, so that what is left says which were taken.
        assert sorted(length for _, length in self.tier.runs()) == left

    @rule(slots=st.integers(1, 24))
    def resize(self, slots: int) -> None:
        self.tier.resize(slots)
        self.free = {slot for slot in self.free if slot < slots}
        self.slots = slots

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.free.clear()

    @rule(data=st.data())
    def refuse_what_is_not_so(self, data: st.DataObject) -> None:
        with pytest.raises(ValueError, match="fewer slots are free"):
            self.tier.take(len(self.free) + 1)
        with pytest.raises(ValueError, match="not slots of the tier"):
            self.tier.add(self.slots)
        if self.free:
            with pytest.raises(ValueError, match="freed twice"):
                self.tier.add(data.draw(st.sampled_from(sorted(self.free))))

    @invariant()
    def same_runs(self) -> None:
        assert self.tier.runs() == runs_of(self.free, self.extent)
        assert len(self.tier) == len(self.free)
        assert self.tier.check_integrity() == []


def test_free_slots_are_those_of_a_set_in_maximal_runs() -> None:
    run_state_machine_as_test(FreeSlots, settings=bounded(examples=200, steps=40))


def test_runs_too_long_for_bins_of_their_own_are_fitted_to_a_sixteenth() -> None:
    free = _core.FreeRuns()
    free.resize(100_000)
    lengths = [40, 47, 700, 702, 5000, 20_000]
    first = 0
    for length in lengths:
        free.add(first, length)
        first += length + 1
    for count in (39, 45, 690, 701, 4800, 19_999):
        ((_, taken),) = free.take(count)
        assert taken == count
    left = [length for _, length in free.runs()]
    assert sorted(left) == sorted(
        length - count for length, count in zip(lengths, (39, 45, 690, 701, 4800, 19_999), strict=True)
    )


def test_the_lowest_extents_of_a_new_tier_are_taken_first() -> None:
    free = _core.FreeRuns(8)
    free.resize(40)
    free.add(0, 40)
    assert [first for first, _ in free.take(24)] == [0, 8, 16]
    assert all(
        end <= start for (first, length), (start, _) in pairwise(free.runs()) for end in [first + length]
    )
