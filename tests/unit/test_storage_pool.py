"""The slots of a slab file as a tier: full disks, bad slots."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache.tiers.storage_index import StoragePool

SLOTS = 12


class Disk:
    """A full disk: it has room for the first few slots that are written."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.placed: set[int] = set()

    def takes(self, slot: int) -> bool:
        if slot not in self.placed and len(self.placed) >= self.room:
            return False
        self.placed.add(slot)
        return True


class Rig:
    """A pool whose blocks all hang below the root, and its disk."""

    def __init__(self, room: int, retry_after: float = 0.0) -> None:
        self.now = 0.0
        self.pool = StoragePool(SLOTS, retry_after=retry_after, clock=lambda: self.now)
        self.disk = Disk(room)
        self.bad: set[int] = set()
        self.stored: list[int] = []
        """Blocks, the least recently stored first."""

    def store(self, *blocks: int) -> list[int]:
        """Write blocks; returns those that were stored."""
        self.pool.grow_if_due()
        rows = np.frombuffer(b"".join(map(name, blocks)), np.uint8).reshape(len(blocks), 32)
        rows = rows[: self.pool.available]
        taken = self.pool.reserve_copies(0, np.zeros_like(rows), rows)
        assert not taken.missing
        for row in taken.evicted.hashes:
            evicted = self.stored.pop(0)
            assert row.tobytes() == name(evicted), "eviction takes the coldest"
        slots = taken.slots.tolist()
        bad = np.array([slot in self.bad for slot in slots], np.bool_)
        room = np.array([slot in self.bad or self.disk.takes(slot) for slot in slots], np.bool_)
        copied = room & ~bad
        arrived = self.pool.end_writes(taken.slots, copied, np.zeros(len(slots), np.uint64), bad, ~room)
        assert arrived.tolist() == copied.tolist()
        self.pool.verify()
        kept = [block for block, ok in zip(blocks, arrived, strict=False) if ok]
        self.stored += kept
        return kept

    def check(self) -> None:
        stats = self.pool.stats()
        assert stats.ready == len(self.stored)
        assert stats.free + stats.ready + stats.quarantined + stats.withheld == SLOTS
        assert (stats.holds, stats.pins, stats.leases) == (0, 0, 0)


def name(block: int) -> bytes:
    return hashlib.sha256(str(block).encode()).digest()


def write_each(rig: Rig, blocks: Iterable[int]) -> list[int]:
    return [block for each in blocks for block in rig.store(each)]


def test_on_a_full_disk_only_slots_with_room_are_used_and_evicted() -> None:
    rig = Rig(room=4, retry_after=60.0)
    assert rig.store(*range(8)) == [0, 1, 2, 3]
    assert rig.pool.stats().withheld == SLOTS - 4
    assert write_each(rig, range(8, 40)) == list(range(8, 40)), "every block is stored, in place of another"
    assert rig.stored == [36, 37, 38, 39]
    rig.check()


def test_withheld_slots_come_back_when_the_disk_has_room() -> None:
    rig = Rig(room=4, retry_after=60.0)
    rig.store(*range(8))
    rig.disk.room = SLOTS
    assert rig.pool.stats().withheld == SLOTS - 4
    rig.now = 61.0
    write_each(rig, range(8, 30))
    assert rig.pool.stats().withheld == 0
    assert len(rig.stored) == SLOTS
    rig.check()


def test_a_disk_that_stays_full_is_retried_with_one_slot_at_a_time() -> None:
    rig = Rig(room=4, retry_after=60.0)
    rig.store(*range(4))
    refused = 0
    for step in range(100):
        rig.now = step * 10.0
        refused += not rig.store(100 + step)
    assert refused <= 1 + 1000 / 60
    assert len(rig.stored) == 4
    rig.check()


def test_a_disk_without_any_room_offers_no_slot() -> None:
    rig = Rig(room=0)
    assert rig.store(1, 2, 3) == []
    assert rig.pool.stats().withheld == SLOTS
    rig.disk.room = SLOTS
    assert write_each(rig, range(10, 10 + SLOTS)) == list(range(10, 10 + SLOTS))
    rig.check()


def test_bad_slots_survive_a_reset_and_withheld_slots_end_with_their_files() -> None:
    rig = Rig(room=4, retry_after=3600.0)
    rig.bad = {1}
    rig.store(*range(8))
    stats = rig.pool.stats()
    assert (stats.quarantined, stats.ready, stats.withheld) == (1, 4, SLOTS - 5)
    rig.pool.start_over()
    rig.stored.clear()
    stats = rig.pool.stats()
    assert (stats.quarantined, stats.withheld, stats.free) == (1, 0, SLOTS - 1)
    rig.pool.verify()


def test_slots_of_restored_records_are_never_withheld() -> None:
    rig = Rig(room=2, retry_after=3600.0)
    rig.disk.placed = {8, 9}
    rig.pool.found(np.array([8, 9], np.int32))
    assert rig.store(*range(3)) == []
    assert rig.pool.stats().withheld == SLOTS - 2
    assert rig.store(5, 6) == [5, 6]
    rig.check()


@settings(max_examples=200)
@given(
    st.integers(0, SLOTS),
    st.lists(
        st.one_of(
            st.integers(1, 5).map(lambda count: ("store", count)),
            st.integers(0, SLOTS).map(lambda room: ("room", room)),
            st.integers(0, SLOTS - 1).map(lambda slot: ("bad", slot)),
            st.sampled_from([1, 30, 120]).map(lambda seconds: ("wait", seconds)),
        ),
        max_size=40,
    ),
)
def test_slots_are_conserved_and_the_coldest_are_evicted_with_any_disk(
    room: int, steps: list[tuple[str, int]]
) -> None:
    rig = Rig(room, retry_after=60.0)
    fresh = 0
    for what, value in steps:
        if what == "store":
            rig.store(*range(fresh, fresh + value))
            fresh += value
        elif what == "room":
            rig.disk.room = max(value, rig.disk.room)
        elif what == "bad":
            rig.bad.add(value)
        else:
            rig.now += value
        rig.check()
    rig.disk.room = SLOTS
    for _ in range(3 * SLOTS):
        rig.now += 61.0
        rig.store(fresh)
        fresh += 1
    stats = rig.pool.stats()
    assert stats.withheld == 0, "with room on the disk every slot comes back"
    assert stats.ready + stats.quarantined == SLOTS or stats.free
    rig.check()
