"""The tier: sizes, leases, look-ups, reservations and commits."""

import numpy as np
import pytest

from fdcache import _core
from fdcache.errors import StaleLeaseError
from tests.tier_help import (
    OTHER,
    PATH,
    ROOT_HASH,
    assert_all_given_back,
    assert_sound,
    chain,
    checksums,
    copy_in,
    figures,
    flags,
    hash_list,
    hashes,
    ready_run,
    slots,
    store,
)


@pytest.fixture
def tier() -> _core.Tier:
    return _core.Tier(8)


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

    def test_added_slots_start_above_the_highest_generation_of_the_removed_ones(
        self, tier: _core.Tier
    ) -> None:
        others = tier.open_lease()
        tier.reserve(others, 7)
        for generation in (1, 2, 3):
            lease = tier.open_lease()
            taken = tier.reserve(lease, 1)
            assert (taken.slots.tolist(), taken.generations.tolist()) == ([7], [generation])
            tier.release(lease)
        tier.release(others)
        assert tier.resize(4) == 0
        assert tier.resize(8) == 0
        assert min(tier.reserve(tier.open_lease(), 8).generations[4:]) > 3

    def test_shrinking_drops_the_descendants_of_removed_slots(self, tier: _core.Tier) -> None:
        low, high = tier.open_lease(), tier.open_lease()
        tier.reserve(low, 4)
        root = store(tier, PATH[:1])
        tier.reserve(high, 3)
        tier.release(low)
        below = store(tier, PATH[1:], PATH[0])
        assert root == [4]
        assert max(below) < 4
        tier.release(high)
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

    def test_a_match_from_a_later_start_leaves_out_earlier_blocks(self, tier: _core.Tier) -> None:
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
        "mixed", [[OTHER[0], PATH[1]], [PATH[0], PATH[2]], [chain(5)[0], PATH[1]], [OTHER[1], PATH[0]]]
    )
    def test_hashes_that_are_not_one_path_pin_nothing(self, tier: _core.Tier, mixed: list[bytes]) -> None:
        store(tier, PATH)
        store(tier, OTHER)
        before = figures(tier)
        run = tier.match(tier.open_lease(), hashes(mixed))
        assert (len(run), run.pending) == (0, False)
        assert figures(tier) == before
        assert tier.stats().contradictions == 1

    def test_a_run_of_a_path_is_found_without_the_blocks_before_it(self, tier: _core.Tier) -> None:
        planned = store(tier, PATH)
        lease = tier.open_lease()
        run = tier.match(lease, hashes([*PATH[1:], chain(7)[0]]))
        assert run.slots.tolist() == planned[1:]
        tier.release(lease)
        assert_all_given_back(tier)


class TestReserve:
    def test_free_slots_are_taken_before_any_eviction(self, tier: _core.Tier) -> None:
        store(tier, PATH)
        taken = tier.reserve(tier.open_lease(), 5)
        assert len(taken.evicted) == 1
        assert hash_list(taken.evicted.hashes) == [PATH[3]]
        assert hash_list(taken.evicted.parents) == [PATH[2]]

    def test_a_reservation_is_all_or_nothing(self, tier: _core.Tier) -> None:
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
    def test_a_block_is_not_found_before_its_commit(self, tier: _core.Tier) -> None:
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

    def test_a_commit_ends_at_a_parent_that_is_not_ready(self, tier: _core.Tier) -> None:
        lease = tier.open_lease()
        taken = tier.reserve(lease, 4).slots
        assert tier.commit(lease, PATH[0], hashes(PATH[1:]), taken[1:]).tolist() == []
        copy_in(tier, PATH[:1])
        assert tier.commit(lease, PATH[0], hashes(PATH[1:]), taken[1:]).tolist() == []
        assert tier.commit(lease, ROOT_HASH, hashes(PATH), taken).tolist() == []

    def test_a_commit_ends_at_a_hash_below_another_parent(self, tier: _core.Tier) -> None:
        store(tier, PATH)
        lease = tier.open_lease()
        taken = tier.reserve(lease, 3).slots
        crossed = [OTHER[0], PATH[1], OTHER[1]]
        assert tier.commit(lease, ROOT_HASH, hashes(crossed), taken).tolist() == [0]
        repeated = [PATH[0], OTHER[0], PATH[0]]
        assert tier.commit(lease, ROOT_HASH, hashes(repeated[::2]), taken[1:]).tolist() == [1]
        assert_sound(tier)

    def test_a_commit_ends_at_a_slot_that_a_copy_still_uses(self, tier: _core.Tier) -> None:
        lease = tier.open_lease()
        taken = tier.reserve(lease, 2).slots
        tier.hold(taken[1:])
        assert tier.commit(lease, ROOT_HASH, hashes(PATH[:2]), taken).tolist() == [0]
        tier.unhold(taken[1:])
        assert tier.commit(lease, PATH[0], hashes(PATH[1:2]), taken[1:]).tolist() == [0]


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


@pytest.mark.parametrize("start", [8, 1])
def test_hashes_that_start_alike_are_told_apart_while_blocks_come_and_go(start: int) -> None:
    tier, generator = _core.Tier(60), np.random.default_rng(start)
    names = [b"\x07" * start + number.to_bytes(32 - start, "big") for number in range(1, 121)]
    for _ in range(60):
        lease = tier.open_lease()
        for name in generator.permutation(120)[:25]:
            block = hashes([names[name]])
            if tier.contains(block)[0] == 0:
                tier.commit(lease, ROOT_HASH, block, tier.reserve(lease, 1).slots)
        tier.release(lease)
        assert_sound(tier)
        present = {tier.node(slot).hash for slot in range(60) if tier.node(slot).findable}
        assert tier.contains(hashes(names)).tolist() == [int(name in present) for name in names]


@pytest.mark.parametrize("size", [1_000, 20_000, 65_537, 200_000])
def test_an_entry_takes_at_most_128_bytes_beside_its_hash(size: int) -> None:
    assert _core.Tier(size, eviction="lru").stats().memory_bytes <= size * (32 + 128)


def test_an_unknown_eviction_order_is_refused() -> None:
    assert _core.Tier(4, eviction="lru").stats().slots == 4
    with pytest.raises(ValueError, match=r"unknown eviction order .fifo.; use .lru."):
        _core.Tier(4, eviction="fifo")
