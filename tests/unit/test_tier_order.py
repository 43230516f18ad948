"""The tier: eviction order, listings, resets and events."""

import numpy as np
import pytest

from fdcache import _core
from tests.tier_help import (
    OTHER,
    PATH,
    ROOT_HASH,
    assert_all_given_back,
    assert_sound,
    chain,
    copy_in,
    eviction_order,
    hash_list,
    hashes,
    ready_run,
    report,
    slots,
    store,
)
from tests.unit.test_shared_memory import memory


@pytest.fixture
def tier() -> _core.Tier:
    return _core.Tier(8)


class TestEvictionOrder:
    def test_the_path_released_first_goes_first_and_each_from_its_end(self, tier: _core.Tier) -> None:
        first, second = store(tier, PATH), store(tier, OTHER)
        assert eviction_order(tier) == first[::-1] + second[::-1]
        lease = tier.open_lease()
        tier.match(lease, hashes(PATH[:2]))
        tier.release(lease)
        assert eviction_order(tier) == [first[3], first[2], *second[::-1], first[1], first[0]]

    def test_blocks_that_a_lease_pinned_last_are_evicted_first(self, tier: _core.Tier) -> None:
        first, second = store(tier, PATH), store(tier, OTHER)
        lease = tier.open_lease()
        tier.match(lease, hashes(PATH))
        tier.match(lease, hashes(OTHER))
        tier.release(lease)
        assert eviction_order(tier) == second[::-1] + first[::-1]

    def test_a_parent_outlasts_its_children_in_any_order_of_release(self, tier: _core.Tier) -> None:
        stored = store(tier, PATH)
        short, long = tier.open_lease(), tier.open_lease()
        tier.match(long, hashes(PATH))
        tier.match(short, hashes(PATH[:1]))
        tier.release(short)
        assert eviction_order(tier) == []
        tier.release(long)
        assert eviction_order(tier) == stored[::-1]

    def test_contains_find_and_node_do_not_count_as_use(self, tier: _core.Tier) -> None:
        stored = store(tier, PATH)
        tier.contains(hashes(PATH))
        tier.ancestry(slots(stored))
        tier.find(hashes(PATH))
        assert eviction_order(tier) == stored[::-1]


class TestCopiesOut:
    @pytest.fixture
    def single(self) -> tuple[_core.Tier, list[int]]:
        """A full tier of eight blocks that have nothing to do with one another, coldest first."""
        tier = _core.Tier(8)
        return tier, [store(tier, chain(number))[0] for number in range(8)]

    def evict(self, tier: _core.Tier, count: int) -> list[int]:
        lease = tier.open_lease()
        gone = [int(slot) for slot in tier.reserve(lease, count).evicted.slots]
        assert_sound(tier)
        return gone

    def test_a_block_keeps_its_place_while_a_copy_reads_it_and_afterwards(
        self, single: tuple[_core.Tier, list[int]]
    ) -> None:
        tier, stored = single
        tier.hold(slots(stored[:3]))
        assert eviction_order(tier) == stored[3:]
        tier.unhold(slots(stored[2::-1]))
        assert eviction_order(tier) == stored

    def test_eviction_skips_held_blocks_and_takes_them_first_once_released(
        self, single: tuple[_core.Tier, list[int]]
    ) -> None:
        tier, stored = single
        tier.hold(slots(stored[:3]))
        assert self.evict(tier, 2) == stored[3:5]
        tier.unhold(slots([stored[2], stored[0]]))
        assert eviction_order(tier) == [stored[0], stored[2], *stored[5:]]
        tier.hold(slots([stored[0]]))
        assert self.evict(tier, 2) == [stored[2], stored[5]]
        tier.unhold(slots(stored[:2]))
        assert eviction_order(tier) == [*stored[:2], *stored[6:]]

    def test_using_a_skipped_block_makes_it_the_warmest(self, single: tuple[_core.Tier, list[int]]) -> None:
        tier, stored = single
        tier.hold(slots(stored[:2]))
        assert self.evict(tier, 1) == stored[2:3]
        tier.unhold(slots(stored[:2]))
        assert ready_run(tier, chain(0)) == stored[:1]
        assert eviction_order(tier) == [stored[1], *stored[3:], stored[0]]
        assert self.evict(tier, 2) == [stored[1], stored[3]]

    def test_ancestors_of_a_held_block_are_skipped_with_it(self) -> None:
        tier = _core.Tier(6)
        path, other = store(tier, PATH), store(tier, OTHER)
        tier.hold(slots(path[2:3]))
        assert eviction_order(tier) == [path[3], *other[::-1]]
        assert self.evict(tier, 2) == [path[3], other[1]]
        tier.unhold(slots(path[2:3]))
        assert eviction_order(tier) == [*path[2::-1], other[0]]

    def test_shrinking_forgets_removed_blocks_that_eviction_skipped(
        self, single: tuple[_core.Tier, list[int]]
    ) -> None:
        tier, stored = single
        tier.hold(slots([stored[6], stored[7], *stored[:2]]))
        assert self.evict(tier, 1) == stored[2:3]
        tier.unhold(slots([stored[6], stored[7], *stored[:2]]))
        assert tier.resize(4) == 0
        assert tier.resize(8) == 0
        assert_sound(tier)
        assert eviction_order(tier) == [stored[0], stored[1], stored[3]]

    def test_ancestors_of_a_copy_are_not_evicted_for_it(self) -> None:
        tier = _core.Tier(6)
        path, other = store(tier, PATH), store(tier, OTHER)
        taken = tier.reserve_copies(
            0, hashes([PATH[3], *chain(1, 2, 3, 4, 5)[4:]]), hashes(chain(1, 2, 3, 4, 5, 6)[4:])
        )
        assert [int(slot) for slot in taken.evicted.slots] == other[::-1]
        assert_sound(tier)
        assert tier.node(path[0]).holds == 0


class TestListings:
    def test_ancestry_lists_each_block_once_and_parents_first(self, tier: _core.Tier) -> None:
        stored = store(tier, PATH)
        branch = store(tier, chain(1, 2, 7)[2:], PATH[1])
        listed = tier.ancestry(slots([stored[2], branch[0], stored[0]]))
        assert listed.slots.tolist() == [*stored[:3], *branch]
        assert hash_list(listed.parents) == [ROOT_HASH, PATH[0], PATH[1], PATH[1]]
        with pytest.raises(IndexError, match="slot 7 is not in use"):
            tier.ancestry(slots([7]))

    def test_find_lists_ready_blocks_in_the_order_asked(self, tier: _core.Tier) -> None:
        stored = store(tier, PATH)
        taken = tier.reserve_copies(0, hashes([ROOT_HASH]), hashes(OTHER[:1]))
        assert len(taken) == 1
        listed = tier.find(hashes([PATH[2], OTHER[0], PATH[0], OTHER[1]]))
        assert listed.slots.tolist() == [stored[2], stored[0]]
        assert hash_list(listed.parents) == [PATH[1], ROOT_HASH]

    def test_a_node_shows_its_place_in_the_tree(self, tier: _core.Tier) -> None:
        stored = store(tier, PATH)
        node = tier.node(stored[1])
        assert (node.slot, node.parent, node.depth, node.children) == (stored[1], stored[0], 1, 1)
        assert (node.state, node.findable, node.hash, node.hits) == (_core.SLOT_READY, True, PATH[1], 1)
        assert node.ready_seconds >= node.idle_seconds >= 0
        with pytest.raises(IndexError, match="out of range"):
            tier.node(8)


class TestReset:
    def test_a_reset_frees_unused_slots_and_makes_the_others_anonymous(self, tier: _core.Tier) -> None:
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

    def test_a_reset_drops_the_events_before_it(self, tier: _core.Tier) -> None:
        tier.record_events(100)
        store(tier, PATH)
        tier.reset()
        store(tier, OTHER[:1])
        assert self.taken(tier) == [(2, ROOT_HASH, ROOT_HASH), (0, OTHER[0], ROOT_HASH)]

    def test_an_overflow_of_events_is_an_event(self, tier: _core.Tier) -> None:
        tier.record_events(3)
        store(tier, PATH)
        assert self.taken(tier) == [(3, ROOT_HASH, ROOT_HASH), (0, PATH[3], PATH[2])]


def test_listings_of_many_leaves_agree_after_a_while() -> None:
    """More leaves than one call ranks again, though time has changed all their ranks."""
    tier = _core.Tier(2000, "learned")
    for number in range(1500):
        tier.set_clock(5 * number)
        store(tier, chain(number))
    tier.set_clock(600_000)
    store(tier, chain(1500))
    assert_sound(tier)


class TestBelow:
    """`learned`, above another tier."""

    def test_the_path_that_the_tier_below_holds_goes_first_while_it_does(self) -> None:
        tier, below = _core.Tier(8, "learned"), _core.Tier(8)
        tier.set_below(below, False)
        tier.set_clock(0)
        first, second = store(tier, PATH), store(tier, OTHER)
        report(below, copy_in(below, OTHER))
        tier.set_clock(1)
        assert eviction_order(tier) == [*second[::-1], *first[::-1]]
        below.drop(hashes(OTHER[:1]))
        tier.set_clock(2)
        assert eviction_order(tier) == [*first[::-1], *second[::-1]]

    def test_the_host_of_a_service_tells_what_it_holds_and_without_a_session_nothing(self) -> None:
        table = memory(16)
        service, shared = _core.Tier(16), _core.SharedHost()
        service.mirror(table)
        store(service, OTHER)
        tier = _core.Tier(8, "learned")
        tier.set_below(shared, False)
        tier.set_clock(0)
        first, second = store(tier, PATH), store(tier, OTHER)
        view = _core.PresenceTable(table)
        ring = np.zeros(1 << 12, np.uint8)
        shared.begin_session(_core.SharedRuns(view, ring), _core.OutgoingCopies(view))
        tier.set_clock(1)
        assert eviction_order(tier) == [*second[::-1], *first[::-1]]
        shared.end_session()
        tier.set_clock(2)
        assert eviction_order(tier) == [*first[::-1], *second[::-1]]

    def test_a_block_below_goes_first_also_if_every_evicted_block_is_copied(self) -> None:
        tier, below = _core.Tier(8, "learned"), _core.Tier(8)
        tier.set_below(below, True)
        tier.set_clock(0)
        first, second = store(tier, PATH), store(tier, OTHER)
        report(below, copy_in(below, OTHER))
        tier.set_clock(1)
        assert eviction_order(tier) == [*second[::-1], *first[::-1]]

    def test_the_order_of_last_use_does_not_ask_the_tier_below(self) -> None:
        tier, below = _core.Tier(8, "lru"), _core.Tier(8)
        tier.set_below(below, False)
        first, second = store(tier, PATH), store(tier, OTHER)
        report(below, copy_in(below, OTHER))
        assert eviction_order(tier) == [*first[::-1], *second[::-1]]
