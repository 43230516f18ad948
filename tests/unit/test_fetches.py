"""Fetches from storage by number."""

from __future__ import annotations

import pytest

from fdcache.metadata import HashArray
from fdcache.settings.cache import PrefetchPolicy
from fdcache.tiers.fetches import FetchTable, FetchTerms
from tests.unit.test_storage_reads import BLOCKS, Stage, path

WAIT = FetchTerms(PrefetchPolicy.WAIT_COMPLETE)


def nothing_on_device(hashes: HashArray) -> int:
    return 0


def table_of(stage: Stage, terms: FetchTerms = WAIT, **options: int) -> FetchTable:
    return FetchTable(lambda: stage.reads, terms, **options)  # type: ignore[arg-type]


def test_a_table_is_on_while_there_are_reads() -> None:
    reads = [Stage([path(0)], host=64).reads]
    table = FetchTable(lambda: reads[0] if reads else None, WAIT)
    assert table.is_on
    reads.clear()
    assert not table.is_on


def test_a_request_waits_for_its_reads_and_then_knows_which_blocks_were_read() -> None:
    stage = Stage([path(0)], host=64)
    table = table_of(stage)
    number = table.number()
    assert table.wait(number, path(0), nothing_on_device) is not None
    assert table.is_reading(path(0)[0].tobytes())
    stage.end(stage.send())
    assert table.wait(number, path(0), nothing_on_device) is None
    assert table.fetched(number, 0, BLOCKS) == range(BLOCKS)
    assert table.fetched(number, 1, 2) == range(2)
    assert table.num_leases == 1
    table.unpin(number)
    assert (table.num_leases, number in table) == (0, True)
    table.end(number)
    assert number not in table
    assert stage.reads.is_idle


def test_with_best_effort_no_request_waits() -> None:
    stage = Stage([path(0)], host=64)
    table = table_of(stage, FetchTerms(PrefetchPolicy.BEST_EFFORT))
    number = table.number()
    table.begin(number, path(0), nothing_on_device)
    assert stage.ordered == [BLOCKS]
    assert table.wait(number, path(0), nothing_on_device) is None


def test_a_number_is_read_for_once_and_ends_once() -> None:
    stage = Stage([path(0)], host=64)
    table = table_of(stage)
    number = table.number()
    for _ in range(2):
        table.begin(number, path(0), nothing_on_device)
    assert stage.ordered == [BLOCKS]
    for _ in range(2):
        table.end(number)
    table.unpin(number)
    assert number not in table
    assert table.fetched(number, 0, BLOCKS) == range(0)


@pytest.mark.parametrize("keep_done", [True, False])
def test_a_fetch_that_found_nothing_is_kept_if_it_is_not_to_be_tried_again(keep_done: bool) -> None:
    stage = Stage([], host=64)
    table = table_of(stage, keep_done=keep_done)
    number = table.number()
    assert table.wait(number, path(0), nothing_on_device) is None
    assert (number in table) == keep_done
    before = stage.looks
    assert table.wait(number, path(0), nothing_on_device) is None
    assert (stage.looks == before) == keep_done


def test_a_full_table_gets_nothing_more_read() -> None:
    stage = Stage([path(number) for number in range(3)], host=64)
    table = table_of(stage, most_blocks=2 * BLOCKS)
    numbers = [table.number() for _ in range(3)]
    for number in numbers:
        table.begin(number, path(number - 1), nothing_on_device)
    assert [number in table for number in numbers] == [True, True, False]
    table.end(numbers[0])
    table.begin(numbers[2], path(2), nothing_on_device)
    assert numbers[2] in table
    table.end_all()
    assert not any(number in table for number in numbers)


def test_without_storage_nothing_is_read_and_no_request_waits() -> None:
    table = FetchTable(lambda: None, WAIT)
    number = table.number()
    table.begin(number, path(0), nothing_on_device)
    assert table.wait(number, path(0), nothing_on_device) is None
    assert not table.is_reading(path(0)[0].tobytes())
    table.end(number)
