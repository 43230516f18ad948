"""The tier: slots filled by other processes, with publish, restore and drop."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fdcache._core import Tier

ROOT = bytes(32)


def digest(name: int) -> bytes:
    return name.to_bytes(4, "little") * 8


def rows(*keys: bytes) -> np.ndarray:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)


def publish(
    tier: Tier, lease: int, slots: list[int], parents: list[bytes], hashes: list[bytes], copied: str = ""
) -> list[int]:
    marks = np.array([mark == "1" for mark in copied or "1" * len(slots)], np.uint8)
    sums = np.arange(len(slots), dtype=np.uint64)
    status = tier.publish(lease, rows(*parents), rows(*hashes), np.array(slots, np.int32), marks, sums)
    return [int(each) for each in status]


def stocked(slots: int, count: int) -> tuple[Tier, int, list[int]]:
    tier = Tier(slots)
    lease = tier.open_lease()
    return tier, lease, tier.reserve(lease, count).slots.tolist()


class TestPublish:
    def test_a_published_path_can_be_found_and_has_no_pins(self) -> None:
        tier, lease, slots = stocked(8, 5)
        a, b, c = digest(1), digest(2), digest(3)
        assert publish(tier, lease, slots[:3], [ROOT, a, b], [a, b, c]) == [0, 0, 0]
        stats = tier.stats()
        assert (stats.ready, stats.evictable, stats.pins, stats.writing) == (3, 3, 2, 2)
        assert tier.node(slots[2]).checksum == 2
        assert tier.check_integrity() == []

    def test_paths_of_one_call_are_evicted_in_the_order_given_each_from_its_end(self) -> None:
        tier, lease, slots = stocked(8, 4)
        a, b, c, d = digest(1), digest(2), digest(3), digest(4)
        assert publish(tier, lease, slots, [ROOT, a, ROOT, ROOT], [a, b, c, d]) == [0, 0, 0, 0]
        assert tier.coldest(4).slots.tolist() == [slots[1], slots[0], slots[2], slots[3]]

    def test_blocks_that_cannot_be_kept_free_their_slots_at_once(self) -> None:
        tier, lease, slots = stocked(8, 4)
        a, b, c = digest(1), digest(2), digest(3)
        assert publish(tier, lease, slots[:1], [ROOT], [a]) == [0]
        status = publish(tier, lease, slots[1:], [ROOT, c, a], [a, b, c], "110")
        assert status == [1, 2, 3]
        stats = tier.stats()
        assert (stats.free, stats.ready, stats.writing) == (7, 1, 0)
        assert tier.check_integrity() == []

    def test_after_a_reset_the_slots_of_a_lease_from_before_are_dropped(self) -> None:
        tier, lease, slots = stocked(4, 2)
        tier.reset()
        assert publish(tier, lease, slots, [ROOT, digest(1)], [digest(1), digest(2)]) == [3, 3]
        assert tier.stats().free == 4

    def test_slots_of_another_lease_are_refused_with_nothing_changed(self) -> None:
        tier, lease, slots = stocked(4, 2)
        other = tier.open_lease()
        with pytest.raises(ValueError, match="not one that this lease reserved"):
            publish(tier, other, slots, [ROOT, digest(1)], [digest(1), digest(2)])
        assert tier.stats().writing == 2
        assert publish(tier, lease, slots, [ROOT, digest(1)], [digest(1), digest(2)]) == [0, 0]

    def test_slots_given_up_cannot_be_published_again(self) -> None:
        tier, lease, slots = stocked(4, 1)
        tier.hold(np.array(slots, np.int32))
        assert publish(tier, lease, slots, [ROOT], [digest(1)], "0") == [3]
        with pytest.raises(ValueError, match="not one that this lease reserved"):
            publish(tier, lease, slots, [ROOT], [digest(1)])
        assert tier.check_integrity() == []

    def test_an_entry_that_was_dropped_gets_no_other_hash_while_others_read_it(self) -> None:
        tier, lease, slots = stocked(4, 1)
        a, b = digest(1), digest(2)
        tier.commit(lease, ROOT, rows(a), np.array(slots, np.int32))
        reader = tier.open_lease()
        for each in (reader, lease):
            tier.match(each, rows(a))
        tier.drop(rows(a))
        with pytest.raises(ValueError, match="not one that this lease reserved"):
            publish(tier, lease, slots, [ROOT], [b])
        with pytest.raises(ValueError, match="not one that this lease reserved"):
            tier.commit(lease, ROOT, rows(b), np.array(slots, np.int32))
        assert tier.contains(rows(b)).tolist() == [0]
        assert tier.check_integrity() == []

    def test_children_of_a_failed_copy_do_not_move_below_another_block(self) -> None:
        tier = Tier(4)
        lease = tier.open_lease()
        a, b, other = digest(1), digest(2), digest(3)
        slots = tier.reserve_copies(lease, rows(ROOT, a), rows(a, b)).slots
        zero, one, sums = np.zeros(1, np.uint8), np.ones(1, np.uint8), np.zeros(1, np.uint64)
        tier.complete(slots[:1], zero, sums)
        assert publish(tier, lease, slots[:1].tolist(), [ROOT], [other]) == [3]
        assert tier.complete(slots[1:], one, sums).tolist() == [0]
        assert tier.contains(rows(a, b, other)).tolist() == [0, 0, 0]
        assert tier.check_integrity() == []


class TestRestore:
    def restore(self, tier: Tier, found: list[tuple[int, int, bytes, bytes]], generation: int) -> list[int]:
        taken = tier.restore(
            np.array([each[0] for each in found], np.int32),
            np.array([each[1] for each in found], np.uint32),
            rows(*(each[3] for each in found)),
            rows(*(each[2] for each in found)),
            np.zeros(len(found), np.uint64),
            generation=generation,
        )
        return [int(each) for each in taken]

    def test_restored_entries_keep_their_slots_and_generations(self) -> None:
        tier = Tier(6)
        a, b = digest(1), digest(2)
        assert self.restore(tier, [(4, 7, ROOT, a), (2, 9, a, b)], 20) == [1, 1]
        lease = tier.open_lease()
        run = tier.match(lease, rows(a, b))
        assert (run.slots.tolist(), run.generations.tolist()) == ([4, 2], [7, 9])
        assert tier.reserve(lease, 4).generations.tolist() == [21] * 4
        assert tier.check_integrity() == []

    def test_orphans_and_duplicates_are_not_restored(self) -> None:
        tier = Tier(6)
        a, b = digest(1), digest(2)
        assert self.restore(tier, [(0, 1, digest(9), b), (1, 1, ROOT, a), (2, 1, ROOT, a)], 5) == [0, 1, 0]
        assert tier.stats().free == 5
        assert tier.check_integrity() == []

    def test_a_slot_in_use_is_left_out(self) -> None:
        tier, _, slots = stocked(4, 1)
        assert self.restore(tier, [(slots[0], 1, ROOT, digest(1))], 5) == [0]


class TestDrop:
    def test_a_dropped_block_takes_its_descendants_along(self) -> None:
        tier, lease, slots = stocked(8, 5)
        a, b, c, d, e = map(digest, range(1, 6))
        publish(tier, lease, slots, [ROOT, a, b, a, d], [a, b, c, d, e])
        assert len(tier.drop(rows(b))) == 2
        assert tier.contains(rows(a, b, c, d, e)).tolist() == [1, 0, 0, 1, 1]
        assert tier.stats().free == 5
        assert tier.check_integrity() == []

    def test_a_dropped_block_stays_while_it_is_pinned(self) -> None:
        tier, lease, slots = stocked(4, 2)
        a, b = digest(1), digest(2)
        publish(tier, lease, slots, [ROOT, a], [a, b])
        reader = tier.open_lease()
        tier.match(reader, rows(a, b))
        assert len(tier.drop(rows(a))) == 2
        assert tier.stats().free == 2
        tier.release(reader)
        assert tier.stats().free == 4
        assert tier.check_integrity() == []


def test_invariants_hold_for_any_order_of_publish_drop_and_match() -> None:
    rng = random.Random(7)
    tier = Tier(40)
    stock = tier.open_lease()
    held: list[int] = []
    known: dict[bytes, bytes] = {}
    readers: list[int] = []
    for step in range(3000):
        choice = rng.randrange(6)
        if choice == 0 and tier.available > 8:
            held += tier.reserve(stock, rng.randrange(1, 5)).slots.tolist()
        elif choice == 1 and held:
            count = rng.randrange(1, min(4, len(held)) + 1)
            slots, held = held[:count], held[count:]
            parent = rng.choice([ROOT, *known])
            hashes = [digest(step * 10 + i + 1) for i in range(count)]
            parents = [parent, *hashes[:-1]]
            known.update(zip(hashes, parents, strict=True))
            publish(tier, stock, slots, parents, hashes, "".join(rng.choice("1110") for _ in slots))
        elif choice == 2 and known:
            path = [rng.choice(list(known))]
            while path[0] != ROOT:
                path.insert(0, known[path[0]])
            readers.append(tier.open_lease())
            tier.match(readers[-1], rows(*path[1:]))
        elif choice == 3 and readers:
            tier.release(readers.pop(rng.randrange(len(readers))))
        elif choice == 4 and known and rng.random() < 0.3:
            tier.drop(rows(rng.choice(list(known))))
        elif choice == 5 and rng.random() < 0.02:
            tier.reset()
            tier.release(stock)
            stock, held = tier.open_lease(), []
            for reader in readers:
                tier.release(reader)
            readers.clear()
        assert tier.check_integrity() == []
