"""The tier: restored blocks, and discarded entries."""

from __future__ import annotations

import numpy as np
import pytest

from fdcache import _core
from tests.tier_help import chain, digest, hash_list, hashes, slots

ROOT = bytes(32)


def restore(
    tier: _core.Tier, blocks: list[tuple[int, bytes, bytes]], times: list[int] | None = None
) -> list[int]:
    """Blocks are (slot, hash, parent)."""
    count = len(blocks)
    done = tier.restore(
        slots(block[0] for block in blocks),
        np.arange(5, 5 + count, dtype=np.uint32),
        hashes([block[1] for block in blocks]),
        hashes([block[2] for block in blocks]),
        np.arange(100, 100 + count, dtype=np.uint64),
        np.array(times or range(count), np.uint64),
    )
    assert tier.check_integrity() == []
    return [int(one) for one in done]


def path(first_slot: int, *numbers: int) -> list[tuple[int, bytes, bytes]]:
    digests = chain(*numbers)
    return [(first_slot + i, block, digests[i - 1] if i else ROOT) for i, block in enumerate(digests)]


def match(tier: _core.Tier, *numbers: int) -> list[int]:
    lease = tier.open_lease()
    found: list[int] = tier.match(lease, hashes(chain(*numbers))).slots.tolist()
    tier.release(lease)
    return found


def test_restored_blocks_are_found_with_their_generation_and_checksum() -> None:
    tier = _core.Tier(10)
    assert restore(tier, path(3, 1, 2, 3)) == [1, 1, 1]
    assert match(tier, 1, 2, 3) == [3, 4, 5]
    node = tier.node(4)
    assert (node.generation, node.checksum, node.depth) == (6, 101, 1)


def test_the_order_of_a_scan_does_not_matter() -> None:
    tier = _core.Tier(10)
    assert restore(tier, path(0, 1, 2, 3, 4)[::-1]) == [1, 1, 1, 1]
    assert match(tier, 1, 2, 3, 4) == [0, 1, 2, 3]


def test_a_block_without_its_parent_is_left_out_with_all_below_it() -> None:
    tier = _core.Tier(10)
    blocks = path(0, 1, 2, 3, 4)
    assert restore(tier, blocks[:1] + blocks[2:]) == [1, 0, 0]
    assert tier.stats().free == 9


def test_blocks_that_name_each_other_as_parents_are_left_out() -> None:
    tier = _core.Tier(10)
    one, two = digest([1]), digest([2])
    assert restore(tier, [(0, one, two), (1, two, one)]) == [0, 0]


def test_the_newer_of_two_slots_with_one_hash_is_restored() -> None:
    tier = _core.Tier(10)
    assert restore(tier, [(0, digest([1]), ROOT), (1, digest([1]), ROOT)], [7, 9]) == [0, 1]
    assert match(tier, 1) == [1]


def test_restored_blocks_are_evicted_leaves_first_oldest_first() -> None:
    tier = _core.Tier(4)
    restore(tier, path(0, 1, 2) + path(2, 7, 8), [10, 11, 3, 4])
    assert tier.coldest(4).slots.tolist() == [3, 2, 1, 0]


def test_a_path_with_a_new_end_is_kept_as_a_whole() -> None:
    tier = _core.Tier(4)
    restore(tier, path(0, 1, 2) + path(2, 7, 8), [1, 20, 5, 6])
    assert tier.coldest(4).slots.tolist() == [3, 2, 1, 0]


def test_generations_continue_above_all_restored_ones() -> None:
    tier = _core.Tier(4)
    restore(tier, path(0, 1, 2))
    taken = tier.reserve_copies(0, hashes([ROOT]), hashes([digest([9])]))
    assert taken.generations.tolist() == [7]


def test_a_restored_block_does_not_bring_back_generations_that_its_slot_had() -> None:
    tier = _core.Tier(1)
    lease = tier.open_lease()
    for _ in range(20):
        tier.reserve(lease, 1)
        assert tier.release(lease)
        lease = tier.open_lease()
    assert restore(tier, path(0, 1)) == [1]
    assert tier.node(0).generation == 5
    assert tier.reserve(lease, 1).generations.tolist() == [21]


def test_slots_in_use_and_out_of_range_are_left_out() -> None:
    tier = _core.Tier(4)
    lease = tier.open_lease()
    mine = tier.reserve(lease, 1).slots.tolist()[0]
    assert restore(tier, [(mine, digest([1]), ROOT), (9, digest([2]), ROOT)]) == [0, 0]


def test_a_discarded_entry_takes_its_descendants_along() -> None:
    tier = _core.Tier(10)
    restore(tier, path(0, 1, 2, 3, 4) + path(4, 7))
    gone = tier.discard(slots([1]))
    assert tier.check_integrity() == []
    assert sorted(gone.slots.tolist()) == [1, 2, 3]
    assert match(tier, 1, 2, 3, 4) == [0]
    assert match(tier, 7) == [4]
    assert tier.stats().free == 8


def test_a_quarantined_slot_is_not_used_again() -> None:
    tier = _core.Tier(3)
    restore(tier, path(0, 1, 2))
    tier.discard(slots([1]), True)
    assert tier.check_integrity() == []
    stats = tier.stats()
    assert (stats.quarantined, stats.writing, stats.holds) == (1, 1, 0)
    taken = tier.reserve_copies(0, hashes([ROOT, digest([5])]), hashes(chain(5, 6)))
    assert 1 not in taken.slots.tolist()
    tier.reset()
    assert tier.stats().quarantined == 1
    assert tier.check_integrity() == []


def test_a_discarded_block_in_use_is_freed_when_its_use_ends() -> None:
    tier = _core.Tier(4)
    restore(tier, path(0, 1, 2, 3))
    lease = tier.open_lease()
    tier.match(lease, hashes(chain(1, 2, 3)))
    tier.hold(slots([1]))
    tier.discard(slots([1]))
    assert tier.check_integrity() == []
    assert tier.stats().free == 1
    tier.unhold(slots([1]))
    tier.release(lease)
    assert tier.check_integrity() == []
    assert tier.stats().free == 3
    assert match(tier, 1) == [0]


def test_a_copy_below_a_discarded_entry_is_dropped() -> None:
    tier = _core.Tier(4)
    restore(tier, path(0, 1))
    pending = tier.reserve_copies(0, hashes([digest([1])]), hashes([digest([1, 2])]))
    tier.discard(slots([0]))
    assert tier.check_integrity() == []
    ready = tier.complete(pending.slots, np.ones(1, np.uint8), np.ones(1, np.uint64))
    assert ready.tolist() == [0]
    assert tier.check_integrity() == []
    assert tier.stats().free == 4


def test_discarding_a_slot_without_an_entry_changes_nothing() -> None:
    tier = _core.Tier(4)
    restore(tier, path(0, 1))
    assert len(tier.discard(slots([2]))) == 0
    with pytest.raises(IndexError):
        tier.discard(slots([7]))
    assert hash_list(tier.find(hashes(chain(1))).hashes) == chain(1)


def test_a_discard_skips_blocks_whose_parent_never_arrived() -> None:
    tier = _core.Tier(6)
    restore(tier, path(0, 1))
    one, two = chain(7, 8)
    taken = tier.reserve_copies(0, hashes([ROOT, one]), hashes([one, two]))
    tier.complete(taken.slots[:1], np.zeros(1, np.uint8), np.empty(0, np.uint64))
    assert tier.discard(slots([0])).slots.tolist() == [0]
    assert tier.check_integrity() == []
    assert tier.complete(taken.slots[1:], np.ones(1, np.uint8), np.empty(0, np.uint64)).tolist() == [0]
    assert tier.stats().free == 6


def test_only_the_tier_ends_the_hold_of_a_slot_out_of_use() -> None:
    tier = _core.Tier(4)
    restore(tier, path(0, 1, 2))
    tier.withhold(slots([0]))
    tier.quarantine(slots([1, 1]))
    for slot in (0, 1):
        with pytest.raises(ValueError, match="no copy out of it holds slot"):
            tier.unhold(slots([slot]))
        with pytest.raises(ValueError, match="no copy holds slot"):
            tier.complete(slots([slot]), np.ones(1, np.uint8), np.ones(1, np.uint64))
    tier.discard(slots([1]), True)
    stats = tier.stats()
    assert (stats.withheld, stats.quarantined, stats.holds) == (1, 1, 0)
    assert tier.check_integrity() == []
