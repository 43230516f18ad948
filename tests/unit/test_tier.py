"""The tier's rules, one by one."""

import numpy as np
import pytest

from fdcache import _core
from fdcache.errors import StaleLeaseError
from tests.tier_help import (
    ROOT_HASH,
    assert_all_given_back,
    assert_sound,
    chain,
    checksums,
    copy_in,
    eviction_order,
    flags,
    hash_list,
    hashes,
    ready_run,
    report,
    slots,
    store,
)

PATH = chain(1, 2, 3, 4)
OTHER = chain(9, 8)


@pytest.fixture
def tier() -> _core.Tier:
    return _core.Tier(8)


def figures(tier: _core.Tier) -> tuple[object, ...]:
    """All that must not change when an operation is refused."""
    stats = tier.stats()
    nodes = [tier.node(slot) for slot in range(stats.slots)]
    return (
        (stats.free, stats.writing, stats.ready, stats.pending, stats.pins, stats.holds, stats.evictions),
        [(n.state, n.pins, n.holds, n.hits, n.parent, n.hash, n.generation) for n in nodes],
        eviction_order(tier),
    )


class TestSizes:
    @pytest.mark.parametrize("size", [0, 2**31])
    def test_a_size_out_of_range_is_refused(self, tier: _core.Tier, size: int) -> None:
        with pytest.raises(ValueError, match="between 1 and"):
            _core.Tier(size)
        with pytest.raises(ValueError, match="between 1 and"):
            tier.resize(size)
        assert tier.stats().slots == 8

    def test_new_slots_are_given_in_ascending_runs(self, tier: _core.Tier) -> None:
        lease = tier.open_lease()
        assert tier.reserve(lease, 3).slots.tolist() == [0, 1, 2]
        tier.resize(12)
        assert tier.reserve(lease, 5).slots.tolist() == [3, 4, 5, 6, 7]
        assert tier.reserve(lease, 4).slots.tolist() == [8, 9, 10, 11]

    def test_a_slot_taken_away_and_added_again_never_repeats_a_generation(self, tier: _core.Tier) -> None:
        store(tier, PATH)
        before = tier.find(hashes(PATH[3:4]))
        assert (before.slots.tolist(), before.generations.tolist()) == ([3], [1])
        assert tier.resize(3) == 0
        assert tier.resize(8) == 0
        lease = tier.open_lease()
        taken = tier.reserve(lease, 8)
        assert taken.slots.tolist() == list(range(8))
        assert min(taken.generations[3:]) > 1

    def test_shrinking_drops_what_hangs_below_the_slots_that_go(self, tier: _core.Tier) -> None:
        low = tier.open_lease()
        tier.reserve(low, 4)
        root = store(tier, PATH[:1])
        tier.release(low)
        below = store(tier, PATH[1:], PATH[0])
        assert root == [4]
        assert max(below) < 4
        assert tier.resize(4) == 0
        assert_all_given_back(tier)
        assert tier.stats().ready == 0


class TestLeases:
    def test_a_second_release_does_nothing(self, tier: _core.Tier) -> None:
        store(tier, PATH)
        first, second = tier.open_lease(), tier.open_lease()
        for lease in (first, second):
            tier.match(lease, hashes(PATH))
        assert tier.release(first)
        assert not tier.release(first)
        assert [tier.node(slot).pins for slot in range(4)] == [1, 1, 1, 1]

    def test_a_released_or_unknown_lease_is_refused(self, tier: _core.Tier) -> None:
        lease = tier.open_lease()
        tier.release(lease)
        for stale in (lease, 0, 77):
            with pytest.raises(StaleLeaseError, match="released"):
                tier.reserve(stale, 1)
        assert tier.stats().free == 8

    def test_a_lease_from_before_a_reset_finds_and_stores_nothing(self, tier: _core.Tier) -> None:
        lease = tier.open_lease()
        taken = tier.reserve(lease, 4).slots
        tier.reset()
        with pytest.raises(StaleLeaseError, match="before a reset"):
            tier.match(lease, hashes(PATH))
        with pytest.raises(StaleLeaseError, match="before a reset"):
            tier.commit(lease, ROOT_HASH, hashes(PATH), taken)
        with pytest.raises(StaleLeaseError, match="before a reset"):
            tier.reserve_copies(lease, hashes([ROOT_HASH]), hashes(PATH[:1]))
        assert tier.stats().writing == 4
        assert tier.release(lease)
        assert_all_given_back(tier)


class TestMatch:
    @pytest.mark.parametrize("known", range(5))
    def test_the_leading_run_comes_in_path_order_and_pinned(self, tier: _core.Tier, known: int) -> None:
        stored = store(tier, PATH[:known])
        lease = tier.open_lease()
        run = tier.match(lease, hashes(PATH))
        assert run.slots.tolist() == stored
        assert not run.pending
        assert [tier.node(slot).pins for slot in stored] == [1] * known
        assert tier.stats().evictable == 0

    def test_a_later_start_leaves_out_what_stands_before_it(self, tier: _core.Tier) -> None:
        stored = store(tier, PATH)
        lease = tier.open_lease()
        assert tier.match(lease, hashes(PATH), 2).slots.tolist() == stored[2:]
        assert len(tier.match(lease, hashes(PATH), 9)) == 0

    def test_hits_are_counted(self, tier: _core.Tier) -> None:
        store(tier, PATH)
        lease = tier.open_lease()
        assert tier.match(lease, hashes(PATH[:2])).hits.tolist() == [2, 2]
        assert tier.match(lease, hashes(PATH)).hits.tolist() == [3, 3, 2, 2]

    @pytest.mark.parametrize(
        "mixed", [[OTHER[0], PATH[1]], [PATH[0], PATH[2]], [PATH[1]], [chain(5)[0], PATH[1]]]
    )
    def test_hashes_that_are_not_one_path_pin_nothing(self, tier: _core.Tier, mixed: list[bytes]) -> None:
        store(tier, PATH)
        store(tier, OTHER)
        before = figures(tier)
        with pytest.raises(ValueError, match="not one path"):
            tier.match(tier.open_lease(), hashes(mixed))
        assert figures(tier) == before


class TestReserve:
    def test_what_is_free_is_taken_before_anything_is_evicted(self, tier: _core.Tier) -> None:
        store(tier, PATH)
        taken = tier.reserve(tier.open_lease(), 5)
        assert len(taken.evicted) == 1
        assert hash_list(taken.evicted.hashes) == [PATH[3]]
        assert hash_list(taken.evicted.parents) == [PATH[2]]

    def test_too_many_are_refused_whole(self, tier: _core.Tier) -> None:
        store(tier, PATH)
        tier.match(tier.open_lease(), hashes(PATH[:3]))
        before = figures(tier)
        refused = tier.reserve(tier.open_lease(), 7)
        assert (len(refused), len(refused.evicted), refused.missing) == (0, 0, 2)
        assert figures(tier) == before

    def test_every_use_of_a_slot_has_its_own_generation(self) -> None:
        tier = _core.Tier(1)
        seen = []
        for _ in range(4):
            lease = tier.open_lease()
            seen += tier.reserve(lease, 1).generations.tolist()
            tier.release(lease)
        assert seen == [1, 2, 3, 4]


class TestCommit:
    def test_nothing_is_found_before_it(self, tier: _core.Tier) -> None:
        lease = tier.open_lease()
        taken = tier.reserve(lease, 4).slots
        assert ready_run(tier, PATH) == []
        tier.commit(lease, ROOT_HASH, hashes(PATH[:2]), taken[:2])
        assert ready_run(tier, PATH) == taken[:2].tolist()

    def test_a_duplicate_keeps_its_slot_and_its_children_hang_below_the_entry(self, tier: _core.Tier) -> None:
        first, second = tier.open_lease(), tier.open_lease()
        ones, twos = tier.reserve(first, 2).slots, tier.reserve(second, 3).slots
        assert tier.commit(first, ROOT_HASH, hashes(PATH[:2]), ones).tolist() == [0, 0]
        assert tier.commit(second, ROOT_HASH, hashes(PATH[:3]), twos).tolist() == [1, 1, 0]
        tier.release(first)
        assert tier.stats().evictable == 0
        assert tier.node(int(twos[2])).parent == ones[1]
        tier.release(second)
        assert tier.stats().free == 5
        assert ready_run(tier, PATH) == [*ones.tolist(), int(twos[2])]
        assert_all_given_back(tier)

    @pytest.mark.parametrize(
        "whose", ["another lease's", "an entry's", "nobody's", "out of range", "negative"]
    )
    def test_a_slot_that_is_not_the_leases_own_is_refused(self, tier: _core.Tier, whose: str) -> None:
        lease, other = tier.open_lease(), tier.open_lease()
        own = int(tier.reserve(lease, 1).slots[0])
        wrong = {
            "another lease's": int(tier.reserve(other, 1).slots[0]),
            "an entry's": store(tier, OTHER)[0],
            "nobody's": 7,
            "out of range": 99,
            "negative": -1,
        }[whose]
        before = figures(tier)
        with pytest.raises((ValueError, IndexError), match=f"slot {wrong} is not"):
            tier.commit(lease, ROOT_HASH, hashes(PATH[:2]), slots([own, wrong]))
        assert figures(tier) == before

    def test_one_slot_for_two_blocks_is_refused(self, tier: _core.Tier) -> None:
        lease = tier.open_lease()
        own = tier.reserve(lease, 1).slots[0]
        before = figures(tier)
        with pytest.raises(ValueError, match="twice"):
            tier.commit(lease, ROOT_HASH, hashes(PATH[:2]), slots([own, own]))
        assert figures(tier) == before

    def test_it_stops_where_the_parent_is_not_ready(self, tier: _core.Tier) -> None:
        lease = tier.open_lease()
        taken = tier.reserve(lease, 4).slots
        assert tier.commit(lease, PATH[0], hashes(PATH[1:]), taken[1:]).tolist() == []
        copy_in(tier, PATH[:1])
        assert tier.commit(lease, PATH[0], hashes(PATH[1:]), taken[1:]).tolist() == []
        assert tier.commit(lease, ROOT_HASH, hashes(PATH), taken).tolist() == []

    def test_it_stops_at_a_hash_that_stands_elsewhere(self, tier: _core.Tier) -> None:
        store(tier, PATH)
        lease = tier.open_lease()
        taken = tier.reserve(lease, 3).slots
        crossed = [OTHER[0], PATH[1], OTHER[1]]
        assert tier.commit(lease, ROOT_HASH, hashes(crossed), taken).tolist() == [0]
        repeated = [PATH[0], OTHER[0], PATH[0]]
        assert tier.commit(lease, ROOT_HASH, hashes(repeated[::2]), taken[1:]).tolist() == [1]
        assert_sound(tier)

    def test_it_stops_at_a_slot_that_a_copy_still_uses(self, tier: _core.Tier) -> None:
        lease = tier.open_lease()
        taken = tier.reserve(lease, 2).slots
        tier.hold(taken[1:])
        assert tier.commit(lease, ROOT_HASH, hashes(PATH[:2]), taken).tolist() == [0]
        tier.unhold(taken[1:])
        assert tier.commit(lease, PATH[0], hashes(PATH[1:2]), taken[1:]).tolist() == [0]


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

    def test_nothing_that_it_calls_ready_is_evicted_for_it(self) -> None:
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

    def test_an_abandoned_copy_completes_and_belongs_to_nobody(self, tier: _core.Tier) -> None:
        lease = tier.open_lease()
        planned = copy_in(tier, PATH, lease)
        tier.release(lease)
        assert tier.stats().pending == 4
        assert report(tier, planned) == planned
        assert_all_given_back(tier)
        assert ready_run(tier, PATH) == planned

    def test_a_failed_block_takes_everything_below_it_along(self, tier: _core.Tier) -> None:
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

    @pytest.mark.parametrize("wrong", [[0, 0], [0, 1], [0, 7], [0, 99], [0, -1]])
    def test_ending_what_never_began_changes_nothing(self, tier: _core.Tier, wrong: list[int]) -> None:
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


class TestEvictionOrder:
    def test_the_path_released_first_goes_first_and_each_from_its_end(self, tier: _core.Tier) -> None:
        first, second = store(tier, PATH), store(tier, OTHER)
        assert eviction_order(tier) == first[::-1] + second[::-1]
        lease = tier.open_lease()
        tier.match(lease, hashes(PATH[:2]))
        tier.release(lease)
        assert eviction_order(tier) == [first[3], first[2], *second[::-1], first[1], first[0]]

    def test_what_a_lease_took_last_goes_first(self, tier: _core.Tier) -> None:
        first, second = store(tier, PATH), store(tier, OTHER)
        lease = tier.open_lease()
        tier.match(lease, hashes(PATH))
        tier.match(lease, hashes(OTHER))
        tier.release(lease)
        assert eviction_order(tier) == second[::-1] + first[::-1]

    def test_a_parent_outlasts_its_children_whoever_releases_first(self, tier: _core.Tier) -> None:
        stored = store(tier, PATH)
        short, long = tier.open_lease(), tier.open_lease()
        tier.match(long, hashes(PATH))
        tier.match(short, hashes(PATH[:1]))
        tier.release(short)
        assert eviction_order(tier) == []
        tier.release(long)
        assert eviction_order(tier) == stored[::-1]

    def test_looking_does_not_count_as_use(self, tier: _core.Tier) -> None:
        stored = store(tier, PATH)
        tier.contains(hashes(PATH))
        tier.ancestry(slots(stored))
        tier.find(hashes(PATH))
        assert eviction_order(tier) == stored[::-1]


class TestListings:
    def test_ancestry_lists_each_block_once_and_parents_first(self, tier: _core.Tier) -> None:
        stored = store(tier, PATH)
        branch = store(tier, chain(1, 2, 7)[2:], PATH[1])
        listed = tier.ancestry(slots([stored[2], branch[0], stored[0]]))
        assert listed.slots.tolist() == [*stored[:3], *branch]
        assert hash_list(listed.parents) == [ROOT_HASH, PATH[0], PATH[1], PATH[1]]
        with pytest.raises(IndexError, match="slot 7 is not in use"):
            tier.ancestry(slots([7]))

    def test_find_lists_what_is_ready_in_the_order_asked(self, tier: _core.Tier) -> None:
        stored = store(tier, PATH)
        taken = tier.reserve_copies(0, hashes([ROOT_HASH]), hashes(OTHER[:1]))
        assert len(taken) == 1
        listed = tier.find(hashes([PATH[2], OTHER[0], PATH[0], OTHER[1]]))
        assert listed.slots.tolist() == [stored[2], stored[0]]
        assert hash_list(listed.parents) == [PATH[1], ROOT_HASH]

    def test_a_node_shows_where_it_stands(self, tier: _core.Tier) -> None:
        stored = store(tier, PATH)
        node = tier.node(stored[1])
        assert (node.slot, node.parent, node.depth, node.children) == (stored[1], stored[0], 1, 1)
        assert (node.state, node.findable, node.hash, node.hits) == (_core.SLOT_READY, True, PATH[1], 1)
        assert node.ready_seconds >= node.idle_seconds >= 0
        with pytest.raises(IndexError, match="out of range"):
            tier.node(8)


class TestReset:
    def test_everything_unused_is_free_and_the_rest_anonymous(self, tier: _core.Tier) -> None:
        store(tier, PATH)
        store(tier, OTHER)
        lease = tier.open_lease()
        used = tier.match(lease, hashes(OTHER)).slots
        tier.reset()
        assert (tier.stats().free, tier.stats().writing, tier.stats().epoch) == (6, 2, 1)
        assert ready_run(tier, OTHER) == []
        fresh = tier.open_lease()
        assert not set(tier.reserve(fresh, 6).slots.tolist()) & set(used.tolist())
        assert tier.release(lease)
        assert tier.release(fresh)
        assert_all_given_back(tier)

    def test_the_same_path_can_be_stored_anew(self, tier: _core.Tier) -> None:
        lease = tier.open_lease()
        old = tier.reserve(lease, 2).slots
        tier.commit(lease, ROOT_HASH, hashes(OTHER), old)
        tier.reset()
        new = store(tier, OTHER)
        assert ready_run(tier, OTHER) == new
        assert not set(old.tolist()) & set(new)


class TestEvents:
    def taken(self, tier: _core.Tier) -> list[tuple[int, bytes, bytes]]:
        kinds, blocks, parents = tier.take_events()
        return list(zip(kinds.tolist(), hash_list(blocks), hash_list(parents), strict=True))

    def test_nothing_is_recorded_unless_asked(self, tier: _core.Tier) -> None:
        store(tier, PATH)
        tier.reset()
        assert self.taken(tier) == []

    def test_stored_and_removed_name_the_parent(self, tier: _core.Tier) -> None:
        tier.record_events(100)
        store(tier, OTHER)
        assert self.taken(tier) == [(0, OTHER[0], ROOT_HASH), (0, OTHER[1], OTHER[0])]
        tier.reserve(tier.open_lease(), 7)
        assert self.taken(tier) == [(1, OTHER[1], OTHER[0])]
        assert self.taken(tier) == []

    def test_a_reset_overrides_what_came_before_it(self, tier: _core.Tier) -> None:
        tier.record_events(100)
        store(tier, PATH)
        tier.reset()
        store(tier, OTHER[:1])
        assert self.taken(tier) == [(2, ROOT_HASH, ROOT_HASH), (0, OTHER[0], ROOT_HASH)]

    def test_a_reader_that_is_too_late_learns_of_it(self, tier: _core.Tier) -> None:
        tier.record_events(3)
        store(tier, PATH)
        assert self.taken(tier) == [(3, ROOT_HASH, ROOT_HASH), (0, PATH[3], PATH[2])]


class TestArguments:
    def test_parallel_arrays_must_agree(self, tier: _core.Tier) -> None:
        lease = tier.open_lease()
        with pytest.raises(ValueError, match="differ in length"):
            tier.commit(lease, ROOT_HASH, hashes(PATH), slots([0]))
        with pytest.raises(ValueError, match="differ in length"):
            tier.reserve_copies(0, hashes([ROOT_HASH]), hashes(PATH))
        with pytest.raises(ValueError, match="differ in length"):
            tier.complete(slots([0]), flags([]), checksums())
        with pytest.raises(ValueError, match="differ in length"):
            tier.complete(slots([0]), flags([True]), checksums([1, 2]))

    def test_hashes_have_32_bytes(self, tier: _core.Tier) -> None:
        with pytest.raises(TypeError):
            tier.contains(np.zeros((2, 31), np.uint8))
        with pytest.raises(ValueError, match="32 bytes"):
            tier.commit(tier.open_lease(), b"short", hashes([]), slots([]))


def test_an_unknown_eviction_order_is_refused() -> None:
    assert _core.Tier(4, eviction="lru").stats().slots == 4
    with pytest.raises(ValueError, match="no eviction order is called fifo; there is lru"):
        _core.Tier(4, eviction="fifo")
