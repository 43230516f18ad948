"""A copy between two tiers is held up, and something happens at each point of it."""

from collections.abc import Callable

import pytest

from fdcache import _core
from fdcache.errors import StaleLeaseError
from tests.tier_help import (
    assert_all_given_back,
    assert_sound,
    chain,
    checksums,
    flags,
    hashes,
    ready_run,
    slots,
    store,
)

PATH = chain(1, 2, 3, 4)
PARENTS = [bytes(32), *PATH[:3]]
SIZE = 8
POINTS = ["before the plan", "planned", "half reported", "all reported"]


class HeldUpCopy:
    """A load of four blocks from a host tier into a device tier; the test gives the reports by hand."""

    def __init__(self) -> None:
        self.host, self.device = _core.Tier(SIZE), _core.Tier(SIZE)
        store(self.host, PATH)
        self.host_lease, self.device_lease = self.host.open_lease(), self.device.open_lease()
        self.sources = self.host.match(self.host_lease, hashes(PATH)).slots.tolist()
        self.destinations: list[int] = []
        self.reported = 0

    @property
    def tiers(self) -> tuple[_core.Tier, _core.Tier]:
        return self.host, self.device

    def go_to(self, point: str, copied: bool) -> None:
        if point == "before the plan":
            return
        self.plan()
        self.report({"planned": 0, "half reported": 2, "all reported": 4}[point], copied)

    def plan(self) -> None:
        taken = self.device.reserve_copies(self.device_lease, hashes(PARENTS), hashes(PATH))
        self.destinations = taken.slots.tolist()
        self.host.hold(slots(self.sources))

    def report(self, until: int, copied: bool) -> None:
        news = slice(self.reported, until)
        arrived = self.destinations[news]
        self.device.complete(slots(arrived), flags([copied] * len(arrived)), checksums())
        self.host.unhold(slots(self.sources[news]))
        self.reported = until

    def release(self) -> None:
        self.host.release(self.host_lease)
        self.device.release(self.device_lease)

    def in_flight(self) -> list[tuple[_core.Tier, list[int]]]:
        if not self.destinations:
            return [(self.host, []), (self.device, [])]
        return [
            (self.host, self.sources[self.reported :]),
            (self.device, self.destinations[self.reported :]),
        ]


def abort(copy: HeldUpCopy) -> None:
    """The request goes, and another one wants the same blocks at once."""
    copy.release()
    other = copy.device.open_lease()
    copy.device.match(other, hashes(PATH))
    wanted = copy.device.reserve_copies(other, hashes(PARENTS), hashes(PATH))
    copy.device.complete(wanted.slots, flags([False] * len(wanted)), checksums())
    copy.device.release(other)


def reset(copy: HeldUpCopy) -> None:
    for tier in copy.tiers:
        tier.reset()


def resize(copy: HeldUpCopy) -> None:
    for tier, held in copy.in_flight():
        before = tier.stats().slots
        if held:
            assert tier.resize(max(held)) >= 1
            assert tier.stats().slots == before
        assert tier.resize(SIZE * 2) == 0
        assert tier.resize(SIZE) == 0


def shut_down(copy: HeldUpCopy) -> None:
    copy.release()
    reset(copy)


OPERATIONS: list[Callable[[HeldUpCopy], None]] = [HeldUpCopy.release, abort, reset, resize, shut_down]


def assert_kept(copy: HeldUpCopy, generations: dict[tuple[int, int], int]) -> None:
    """However much the rest of the world wants, the slots of the copy are given to nobody."""
    for index, (tier, held) in enumerate(copy.in_flight()):
        assert_sound(tier)
        hungry = tier.open_lease()
        taken = tier.reserve(hungry, tier.available)
        assert taken.missing == 0
        assert not set(held) & set(taken.slots.tolist())
        assert not set(held) & set(taken.evicted.slots.tolist())
        for slot in held:
            assert tier.node(slot).state != _core.SLOT_FREE
            assert tier.node(slot).holds == 1
            assert tier.node(slot).generation == generations[index, slot]
        assert_sound(tier)
        tier.release(hungry)


@pytest.mark.parametrize("copied", [True, False], ids=["arrives", "fails"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
class TestHeldUp:
    def test_no_slot_is_freed_before_its_report_and_all_are_after(
        self, operation: Callable[[HeldUpCopy], None], point: str, copied: bool
    ) -> None:
        copy = HeldUpCopy()
        copy.go_to(point, copied)
        generations = {
            (index, slot): tier.node(slot).generation
            for index, (tier, held) in enumerate(copy.in_flight())
            for slot in held
        }
        operation(copy)
        assert_kept(copy, generations)
        if point != "before the plan":
            copy.report(4, copied)
        copy.release()
        for tier in copy.tiers:
            assert_all_given_back(tier)
            assert tier.reserve(tier.open_lease(), SIZE).missing == 0

    def test_what_is_found_afterwards_is_what_arrived_and_survived(
        self, operation: Callable[[HeldUpCopy], None], point: str, copied: bool
    ) -> None:
        copy = HeldUpCopy()
        copy.go_to(point, copied)
        operation(copy)
        planned = copy.destinations
        if planned:
            copy.report(4, copied)
        forgotten = operation in (reset, shut_down)
        assert ready_run(copy.device, PATH) == (planned if copied and not forgotten else [])
        assert len(ready_run(copy.host, PATH)) == (0 if forgotten else 4)


@pytest.mark.parametrize("operation", [HeldUpCopy.release, abort, reset, shut_down], ids=lambda o: o.__name__)
def test_no_plan_is_made_for_a_request_that_is_gone(operation: Callable[[HeldUpCopy], None]) -> None:
    copy = HeldUpCopy()
    operation(copy)
    with pytest.raises(StaleLeaseError):
        copy.plan()
    copy.release()
    for tier in copy.tiers:
        assert_all_given_back(tier)


@pytest.mark.parametrize("point", ["planned", "half reported"])
def test_a_shrink_succeeds_once_the_reports_are_in(point: str) -> None:
    copy = HeldUpCopy()
    copy.go_to(point, copied=True)
    copy.release()
    waiting = 4 - copy.reported
    for tier, held in copy.in_flight():
        # The blocks above one that is held are in use with it.
        assert tier.resize(1) == max(held)
        assert len(held) == waiting
    copy.report(4, copied=True)
    for tier in copy.tiers:
        assert tier.resize(1) == 0
        assert ready_run(tier, PATH) == [0]
        assert_all_given_back(tier)


def test_a_reset_between_two_copies_into_one_slot_keeps_them_apart() -> None:
    tier = _core.Tier(1)
    tier.reserve_copies(0, hashes(PARENTS[:1]), hashes(PATH[:1]))
    tier.reset()
    refused = tier.reserve_copies(0, hashes(PARENTS[:1]), hashes(PATH[:1]))
    assert refused.missing == 1
    assert tier.complete(slots([0]), flags([True]), checksums()).tolist() == [0]
    assert ready_run(tier, PATH) == []
    again = tier.reserve_copies(0, hashes(PARENTS[:1]), hashes(PATH[:1]))
    assert (again.slots.tolist(), again.generations.tolist()) == ([0], [2])
    assert tier.complete(slots([0]), flags([True]), checksums()).tolist() == [1]
    assert_all_given_back(tier)
