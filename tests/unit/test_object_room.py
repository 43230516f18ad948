"""Which objects go when there are too many, and when a node looks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fdcache.storage.objects.backend import ROOT, Stored, StoreFailedError
from fdcache.storage.objects.folder import SharedFolder
from fdcache.storage.objects.room import Room, interval_of, victims
from tests.service_help import until

HOUR = 3600.0


def path(name: str, at: float, length: int = 4) -> list[Stored]:
    """Objects of one path, written one after another."""
    return [Stored(f"{name}{i}", 100, at + i) for i in range(length)]


def names(stored: Iterable[Stored]) -> list[str]:
    return [each.name for each in stored]


def test_the_longest_unused_path_goes_first_from_its_end() -> None:
    stored = [*path("b", 50 * HOUR), *path("a", 10 * HOUR), *path("c", 90 * HOUR)]
    assert names(victims(stored, 1200)) == []
    assert names(victims(stored, 1199)) == ["a3"]
    assert names(victims(stored, 800)) == ["a3", "a2", "a1", "a0", "b3"]


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 1e9)), max_size=40),
    st.integers(0, 10_000),
)
def test_what_is_kept_fits_and_no_more_goes_than_is_needed(
    given_: list[tuple[int, float]], limit: int
) -> None:
    stored = [Stored(str(i), size, at) for i, (size, at) in enumerate(given_)]
    gone = victims(stored, limit)
    total = sum(each.size for each in stored)
    kept = total - sum(each.size for each in gone)
    assert kept <= limit
    if total <= limit:
        assert not gone
    elif gone:
        assert kept + gone[-1].size > limit * 15 / 16
    assert victims(stored[::-1], limit) == gone, "every node chooses the same"
    assert 1.0 <= interval_of(stored) <= HOUR


class Shelf:
    """Objects in memory."""

    place = "shelf"

    def __init__(self, stored: Iterable[Stored] = ()) -> None:
        self.objects = {each.name: each for each in stored}
        self.sweeps = 0
        self.marked: list[str] = []
        self.fails = False
        self.may_list = threading.Event()
        self.may_list.set()

    def stored(self, prefix: str) -> Iterator[Stored]:
        self.sweeps += 1
        assert self.may_list.wait(30)
        if self.fails:
            raise StoreFailedError("the shelf has fallen down")
        yield from list(self.objects.values())

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self.objects.pop(name, None)

    def mark_used(self, names: Iterable[str]) -> None:
        self.marked += names


def open_room(shelf: Shelf, size: int) -> Room:
    return Room(shelf, size)  # type: ignore[arg-type]


def test_a_node_looks_after_it_has_written_its_share_of_what_was_free() -> None:
    shelf = Shelf()
    room = open_room(shelf, 64_000)
    room.wrote(1)
    until(lambda: room.objects == 0, "the first sweep")
    for _ in range(4):
        room.wrote(999)
    assert shelf.sweeps == 1
    room.wrote(10)
    until(lambda: shelf.sweeps == 2, "a sixteenth of the size is written")
    room.close()


def test_a_node_that_finds_too_much_removes_it_and_tells_its_index() -> None:
    shelf = Shelf(path("a", 0.0, 20))
    told: list[str] = []
    room = Room(shelf, 1000, told.append)  # type: ignore[arg-type]
    assert room.sweep() == 11
    assert (room.objects, room.bytes, room.removed) == (9, 900, 11)
    assert len(shelf.objects) == 9
    assert sorted(told) == sorted({f"a{i}" for i in range(20)} - set(shelf.objects))
    assert room.sweep() == 0
    room.close()


def test_a_medium_without_room_makes_the_store_smaller() -> None:
    shelf = Shelf(path("a", 0.0, 32))
    room = open_room(shelf, 1 << 40)
    room.is_short()
    until(lambda: len(shelf.objects) < 32, "something has gone")
    assert len(shelf.objects) >= 28
    room.close()


def test_a_store_that_fails_ends_no_thread() -> None:
    shelf = Shelf(path("a", 0.0))
    room = open_room(shelf, 1 << 20)
    shelf.fails = True
    room.wrote(1)
    until(lambda: shelf.sweeps == 1, "a sweep has failed")
    shelf.fails = False
    room.mark_used(["a1", "a0"])
    until(lambda: shelf.marked == ["a1", "a0"], "the objects are marked")
    room.wrote(1)
    until(lambda: room.objects == 4, "the next sweep")
    room.close()


def test_a_store_that_hangs_does_not_keep_a_node_from_ending() -> None:
    shelf = Shelf()
    room = open_room(shelf, 1000)
    shelf.may_list.clear()
    room.wrote(1)
    until(lambda: shelf.sweeps == 1, "the sweep hangs")
    room.close(timeout=0.01)
    shelf.may_list.set()


YEAR = 365 * 24 * HOUR


def aged(count: int, step: float) -> list[Stored]:
    """Objects that were used one after another until now, the first one longest ago."""
    now = time.time()
    return [Stored(f"n{i}", 100, now - (count - i) * step) for i in range(count)]


@given(st.integers(1, 3), st.sampled_from([-40 * YEAR, -YEAR, 2 * HOUR, 5 * YEAR]))
def test_a_few_wrong_dates_do_not_change_which_others_go(wrong: int, skew: float) -> None:
    shelf = Shelf(aged(32, 60.0))
    strays = [Stored(f"s{i}", 100, time.time() + skew + i) for i in range(wrong)]
    shelf.objects |= {each.name: each for each in strays}
    room = open_room(shelf, 3200)
    room.sweep()
    assert sum(each.size for each in shelf.objects.values()) <= 3200
    assert all(f"n{i}" in shelf.objects for i in range(16, 32)), "what was used last stays"
    if skew < 0:
        assert not any(each.name in shelf.objects for each in strays), "the oldest go first"


def test_objects_from_the_future_age_from_the_first_sweep_on() -> None:
    shelf = Shelf([*aged(8, 60.0), Stored("ahead", 100, time.time() + YEAR)])
    room = open_room(shelf, 1 << 20)
    assert room.sweep() == 0
    assert shelf.marked == ["ahead"]
    assert room.interval < HOUR
    shelf.objects["ahead"] = Stored("ahead", 100, time.time() - HOUR)
    room = open_room(shelf, 899)
    assert room.sweep() == 1
    assert "ahead" not in shelf.objects


def test_files_of_a_wrong_clock_age_and_the_folder_keeps_its_size(tmp_path: Path) -> None:
    folder = SharedFolder(tmp_path)
    now = time.time()
    dates = {"future": now + 5 * YEAR, "past": now - 40 * YEAR} | {f"n{i}": now - 60.0 * i for i in range(8)}
    for name, at in dates.items():
        folder.create(f"{ROOT}/layout/{name}", np.zeros(100, np.uint8))
        os.utime(tmp_path / ROOT / "layout" / name, (at, at))
    assert Room(folder, 999).sweep() == 1
    left = {Path(each.name).name: each for each in folder.stored(f"{ROOT}/")}
    assert set(left) == set(dates) - {"past"}
    assert abs(left["future"].used_at - now) < HOUR
    os.utime(tmp_path / ROOT / "layout" / "future", (now - HOUR, now - HOUR))
    assert Room(folder, 899).sweep() == 1
    assert not (tmp_path / ROOT / "layout" / "future").exists(), "it ages as others do"
