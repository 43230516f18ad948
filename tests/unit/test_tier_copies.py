"""The tier: copies into it and out of it."""

import pytest

from fdcache import _core
from tests.tier_help import (
    OTHER,
    PATH,
    ROOT_HASH,
    assert_all_given_back,
    assert_sound,
    chain,
    checksums,
    copy_in,
    eviction_order,
    figures,
    flags,
    hash_list,
    hashes,
    ready_run,
    report,
    slots,
    store,
)


@pytest.fixture
def tier() -> _core.Tier:
    return _core.Tier(8)


class TestCopiesIn:
    def test_a_pending_block_is_announced_but_not_handed_out(self, tier: _core.Tier) -> None:
        planned = copy_in(tier, PATH)
        lease = tier.open_lease()
        run = tier.match(lease, hashes(PATH))
        assert (len(run), run.pending) == (0, True)
        assert tier.contains(hashes([*PATH[:1], *OTHER[:1]])).tolist() == [2, 0]
        assert report(tier, planned[:2]) == planned[:2]
        run = tier.match(lease, hashes(PATH))
        assert (run.slots.tolist(), run.pending) == (planned[:2], True)

    def test_one_status_per_block_and_slots_for_the_reserved_ones(self, tier: _core.Tier) -> None:
        store(tier, PATH[:2])
        copy_in(tier, OTHER[:1])
        wanted = [*PATH, OTHER[0], OTHER[1], PATH[3], chain(7, 7)[1]]
        parents = [ROOT_HASH, *PATH[:3], ROOT_HASH, OTHER[0], PATH[2], chain(7)[0]]
        taken = tier.reserve_copies(0, hashes(parents), hashes(wanted))
        assert taken.status.tolist() == [1, 1, 0, 0, 2, 3, 2, 3]
        assert len(taken) == 2
        assert [tier.node(int(slot)).hash for slot in taken.slots] == PATH[2:]

    @pytest.mark.parametrize(
        ("parent_first", "copied", "ready"), [(True, True, 2), (False, True, 1), (True, False, 0)]
    )
    def test_a_copy_below_one_in_flight_counts_if_that_one_has_succeeded_before(
        self, tier: _core.Tier, parent_first: bool, copied: bool, ready: int
    ) -> None:
        (parent,) = copy_in(tier, PATH[:1])
        above, wanted = hashes(PATH[:1]), hashes(PATH[1:2])
        assert tier.reserve_copies(0, above, wanted).status.tolist() == [3]
        taken = tier.reserve_copies(0, above, wanted, below_pending=True)
        assert taken.status.tolist() == [0]
        (child,) = taken.slots.tolist()
        if parent_first:
            report(tier, [parent], copied=copied)
            report(tier, [child])
        else:
            report(tier, [child])
            report(tier, [parent], copied=copied)
        assert len(ready_run(tier, PATH)) == ready
        assert_all_given_back(tier)

    def test_no_copy_is_below_an_absent_block(self, tier: _core.Tier) -> None:
        taken = tier.reserve_copies(0, hashes(PATH[:1]), hashes(PATH[1:2]), below_pending=True)
        assert taken.status.tolist() == [3]

    def test_a_block_reported_as_ready_is_not_evicted_for_the_reservation(self) -> None:
        tier = _core.Tier(4)
        store(tier, PATH[:2])
        store(tier, OTHER)
        wanted = [*PATH[:2], *chain(5, 5)]
        parents = [ROOT_HASH, PATH[0], ROOT_HASH, wanted[2]]
        taken = tier.reserve_copies(0, hashes(parents), hashes(wanted))
        assert taken.status.tolist() == [1, 1, 0, 0]
        assert hash_list(taken.evicted.hashes) == OTHER[::-1]
        assert tier.contains(hashes(PATH[:2])).tolist() == [1, 1]

    def test_a_parent_is_not_evicted_for_its_own_child(self) -> None:
        tier = _core.Tier(2)
        store(tier, PATH[:2])
        before = figures(tier)
        refused = tier.reserve_copies(0, hashes(PATH[1:2]), hashes(PATH[2:3]))
        assert (refused.missing, len(refused)) == (1, 0)
        assert figures(tier) == before

    def test_a_refusal_leaves_the_eviction_order_alone(self) -> None:
        tier = _core.Tier(4)
        store(tier, PATH[:2])
        store(tier, OTHER)
        before = figures(tier)
        wanted = [PATH[2], PATH[3], chain(1, 2, 3, 4, 5)[-1]]
        refused = tier.reserve_copies(0, hashes([PATH[1], PATH[2], PATH[3]]), hashes(wanted))
        assert refused.missing == 1
        assert figures(tier) == before

    def test_checksums_stay_with_the_blocks(self, tier: _core.Tier) -> None:
        planned = copy_in(tier, PATH[:2])
        tier.complete(slots(planned), flags([True, True]), checksums([11, 2**63 + 5]))
        assert [tier.node(slot).checksum for slot in planned] == [11, 2**63 + 5]

    def test_a_copy_completes_after_its_lease_is_released(self, tier: _core.Tier) -> None:
        lease = tier.open_lease()
        planned = copy_in(tier, PATH, lease)
        tier.release(lease)
        assert tier.stats().pending == 4
        assert report(tier, planned) == planned
        assert_all_given_back(tier)
        assert ready_run(tier, PATH) == planned

    def test_a_failed_block_fails_its_descendants(self, tier: _core.Tier) -> None:
        planned = copy_in(tier, PATH)
        ready = tier.complete(slots(planned), flags([True, False, True, True]), checksums())
        assert ready.tolist() == [1, 0, 0, 0]
        assert ready_run(tier, PATH) == planned[:1]
        assert_all_given_back(tier)

    def test_a_failed_parent_keeps_its_slot_until_its_children_are_reported(self, tier: _core.Tier) -> None:
        parent, child = copy_in(tier, PATH[:2])
        report(tier, [parent], copied=False)
        assert tier.stats().free == 6
        again = tier.reserve_copies(0, hashes([ROOT_HASH, PATH[0]]), hashes(PATH[:2]))
        assert again.status.tolist() == [0, 2]
        assert parent not in again.slots.tolist()
        assert report(tier, again.slots.tolist()) == again.slots.tolist()
        assert report(tier, [child]) == []
        assert_all_given_back(tier)
        assert ready_run(tier, PATH) == again.slots.tolist()

    def test_a_failed_slot_can_be_computed_and_committed_by_its_lease(self, tier: _core.Tier) -> None:
        lease = tier.open_lease()
        planned = copy_in(tier, PATH[:2], lease)
        report(tier, planned[:1], copied=False)
        blocked = tier.commit(lease, ROOT_HASH, hashes(PATH[:1]), slots(planned[:1]))
        assert blocked.tolist() == []
        report(tier, planned[1:], copied=False)
        done = tier.commit(lease, ROOT_HASH, hashes(PATH[:2]), slots(planned))
        assert done.tolist() == [0, 0]
        tier.release(lease)
        assert_all_given_back(tier)

    @pytest.mark.parametrize("wrong", [[0, 0], [0, 1, 2, 3, 0], [0, 7], [0, 99], [0, -1]])
    def test_a_report_that_does_not_fit_changes_nothing(self, tier: _core.Tier, wrong: list[int]) -> None:
        copy_in(tier, PATH)
        before = figures(tier)
        with pytest.raises((ValueError, IndexError), match="slot"):
            tier.complete(slots(wrong), flags([True] * len(wrong)), checksums())
        assert figures(tier) == before

    def test_the_root_has_no_block(self, tier: _core.Tier) -> None:
        with pytest.raises(ValueError, match="all zero"):
            tier.reserve_copies(0, hashes(PATH[:1]), hashes([ROOT_HASH]))
        lease = tier.open_lease()
        taken = tier.reserve(lease, 1).slots
        with pytest.raises(ValueError, match="all zero"):
            tier.commit(lease, ROOT_HASH, hashes([ROOT_HASH]), taken)
        assert_sound(tier)


class TestCopiesOut:
    def test_a_held_block_is_not_evicted(self, tier: _core.Tier) -> None:
        stored = store(tier, PATH)
        tier.hold(slots(stored[1:2]))
        assert tier.available == 6
        taken = tier.reserve(tier.open_lease(), 6)
        assert hash_list(taken.evicted.hashes) == [PATH[3], PATH[2]]
        tier.unhold(slots(stored[1:2]))
        assert eviction_order(tier) == [stored[1], stored[0]]

    def test_a_copy_keeps_its_slot_and_not_the_blocks_above_it(self, tier: _core.Tier) -> None:
        stored = store(tier, PATH)
        tier.hold(slots(stored[3:]))
        assert (tier.available, tier.above_copies) == (4, 3)
        before = figures(tier)
        assert tier.evict_copied(4) is None
        assert figures(tier) == before
        gone = tier.evict_copied(2)
        assert gone is not None
        assert hash_list(gone.hashes) == PATH[3:]
        assert (tier.available, tier.above_copies) == (7, 0)
        assert eviction_order(tier) == stored[2::-1]
        assert_sound(tier)
        tier.unhold(slots(stored[3:]))
        assert_all_given_back(tier)

    def test_a_path_with_copies_in_several_places_makes_way_to_its_root(self, tier: _core.Tier) -> None:
        stored = store(tier, PATH)
        tier.hold(slots([stored[1], stored[3]]))
        assert (tier.available, tier.above_copies) == (4, 2)
        gone = tier.evict_copied(2)
        assert gone is not None
        assert hash_list(gone.hashes) == PATH[3:0:-1]
        assert tier.reserve(tier.open_lease(), 6).missing == 0
        assert_sound(tier)

    def test_blocks_that_can_be_evicted_go_before_those_that_are_copied(self, tier: _core.Tier) -> None:
        store(tier, OTHER[:2])
        stored = store(tier, PATH)
        tier.hold(slots(stored[1:3]))
        gone = tier.evict_copied(1)
        assert gone is not None
        assert hash_list(gone.hashes) == [*OTHER[1::-1], PATH[3], PATH[2], PATH[1]]
        assert (tier.available, tier.above_copies) == (6, 0)
        taken = tier.reserve(tier.open_lease(), 6)
        assert hash_list(taken.evicted.hashes) == PATH[:1]
        assert not set(taken.slots.tolist()) & set(stored[1:3])
        tier.unhold(slots(stored[1:3]))
        assert_sound(tier)

    @pytest.mark.parametrize("wrong", [[0, 0], [0, 1], [0, 7], [0, 99], [0, -1]])
    def test_unholding_a_slot_that_is_not_held_changes_nothing(
        self, tier: _core.Tier, wrong: list[int]
    ) -> None:
        stored = store(tier, PATH)
        tier.hold(slots(stored[:1]))
        before = figures(tier)
        with pytest.raises((ValueError, IndexError), match="slot"):
            tier.unhold(slots(wrong))
        assert figures(tier) == before

    def test_only_a_report_ends_the_wait_of_a_pending_block(self, tier: _core.Tier) -> None:
        planned = copy_in(tier, PATH[:1])
        with pytest.raises(ValueError, match="no copy out of it"):
            tier.unhold(slots(planned))
        tier.hold(slots(planned))
        tier.unhold(slots(planned))
        assert report(tier, planned) == planned
        assert_all_given_back(tier)
