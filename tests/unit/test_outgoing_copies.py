"""Copies into a tier of another process: slots in stock, and what the tier's table does not show yet."""

from __future__ import annotations

import numpy as np
import pytest

from fdcache._core import OutgoingCopies, PresenceTable, Tier
from tests.unit.test_shared_memory import ROOT, digest, memory, path, rows, store

A, B, C, D = path("a", 4)


class Elsewhere:
    """A tier, its table, and a client's copies into it."""

    def __init__(self, stock: int = 8, there: tuple[bytes, ...] = ()) -> None:
        self.tier = Tier(32)
        shared = memory(32)
        self.tier.mirror(shared)
        if there:
            store(self.tier, self.tier.open_lease(), ROOT, list(there))
        self.copies = OutgoingCopies(PresenceTable(shared))
        self.grant(*range(100, 100 + stock))

    def grant(self, *slots: int) -> None:
        self.copies.grant(np.array(slots, np.int32), np.array(slots, np.uint32) + 7)

    def reserve(self, *pairs: tuple[bytes, bytes]) -> tuple[list[int], list[int], int]:
        taken = self.copies.reserve(rows(*(parent for parent, _ in pairs)), rows(*(key for _, key in pairs)))
        assert taken.generations.tolist() == [slot + 7 for slot in taken.slots.tolist()]
        return taken.slots.tolist(), taken.status.tolist(), taken.missing

    def end(self, slots: list[int], copied: str, *, reported: bool = True) -> list[bytes]:
        marks = np.array([mark == "1" for mark in copied], np.uint8)
        _, hashes = self.copies.end(np.array(slots, np.int32), marks, reported)
        return [row.tobytes() for row in hashes]

    def seen(self, *keys: bytes) -> list[int]:
        return [int(each) for each in self.copies.contains(rows(*keys))]


def test_a_path_takes_slots_in_ascending_order() -> None:
    there = Elsewhere(stock=0)
    there.grant(9, 4, 6, 5)
    assert there.reserve((ROOT, A), (A, B), (B, C)) == ([4, 6, 9], [0, 0, 0], 0)
    assert (there.copies.stock, there.copies.in_flight) == (1, 3)


def test_what_is_there_or_coming_or_an_orphan_takes_none() -> None:
    there = Elsewhere(there=(A,))
    assert there.reserve((A, B)) == ([100], [0], 0)
    assert there.reserve((ROOT, A), (A, B), (B, C), (C, D), (A, digest("x"))) == ([101], [1, 2, 3, 3, 0], 0)
    assert there.reserve((A, digest("y")), (A, digest("y"))) == ([102], [0, 2], 0)


def test_a_stock_too_small_gives_nothing() -> None:
    there = Elsewhere(stock=2)
    assert there.reserve((ROOT, A), (A, B), (B, C), (C, D)) == ([], [0, 0, 0, 0], 2)
    assert (there.copies.stock, there.copies.in_flight, there.seen(A)) == (2, 0, [0])


def test_a_copy_is_pending_then_ready_then_what_the_table_says() -> None:
    there = Elsewhere()
    slots, _, _ = there.reserve((ROOT, A), (A, B))
    assert there.seen(A, B, C) == [2, 2, 0]
    assert there.end(slots, "11") == [A, B]
    assert there.seen(A, B) == [1, 1]
    assert there.reserve((B, C))[1] == [0]
    store(there.tier, there.tier.open_lease(), ROOT, [A])
    there.copies.acknowledge(rows(A, B, C))
    assert there.seen(A, B, C) == [1, 0, 2]


def test_a_failed_copy_and_one_that_nobody_hears_of_leave_nothing() -> None:
    there = Elsewhere()
    slots, _, _ = there.reserve((ROOT, A), (A, B))
    there.end(slots, "10")
    assert there.seen(A, B) == [1, 0]
    slots, _, _ = there.reserve((A, B))
    there.end(slots, "1", reported=False)
    assert (there.seen(B), there.copies.in_flight) == ([0], 0)


def test_without_answers_only_what_is_being_copied_is_remembered() -> None:
    there = Elsewhere()
    slots, _, _ = there.reserve((ROOT, A))
    there.end(slots, "1")
    there.reserve((A, B))
    there.copies.drop_unacknowledged()
    assert there.seen(A, B) == [0, 2]


def test_the_end_of_a_copy_that_is_not_under_way_changes_nothing() -> None:
    there = Elsewhere()
    slots, _, _ = there.reserve((ROOT, A))
    with pytest.raises(IndexError, match="slot 55"):
        there.end([*slots, 55], "11")
    assert there.copies.in_flight == 1


def test_a_stock_is_given_up_from_a_slot_on() -> None:
    there = Elsewhere(stock=3)
    assert there.copies.give_up_stock(102).tolist() == [102]
    assert there.copies.stock == 2
    assert there.copies.give_up_stock(0).tolist() == [100, 101]
    assert there.copies.stock == 0
    assert there.reserve((ROOT, A))[2] == 1
