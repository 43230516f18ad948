"""OffloadManager with several groups of layers: pages of several blocks, some of which have left the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache.errors import ConfigurationError, PlanError, UnsupportedLayoutError
from fdcache.groups import CacheGroup, Reach, record_keys
from fdcache.hints import Hint, HintKind
from fdcache.manager import NO_BLOCK, CacheManager, LoadStatus, MatchStatus, OffloadManager, Request
from fdcache.metadata import CacheLevel, CacheSwapMetadata
from fdcache.settings.cache import CacheSettings, EvictionPolicy, WritePolicy
from tests.offload_engine import BLOCK, OffloadEngine, ids, prompt
from tests.swaps import PATIENCE, uniform_layout

LAYOUT = uniform_layout(
    block_size=BLOCK, num_layers=2, groups=(CacheGroup(BLOCK), CacheGroup(BLOCK, Reach.LAST, 2 * BLOCK))
)
"""A group that attends to all tokens, and one that attends to two blocks."""

GONE = NO_BLOCK


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    engine = OffloadEngine(layout=LAYOUT)
    yield engine
    engine.close()


def found(engine: OffloadEngine, request: Request, device_tokens: int = 0) -> int:
    """Return the pages that a match finds beyond those on the device."""
    match = engine.manager.match(request, device_tokens)
    assert match.status is MatchStatus.MATCHED
    return match.num_tokens // BLOCK


def test_a_prefix_is_loaded_without_the_blocks_outside_of_the_window(engine: OffloadEngine) -> None:
    engine.stored("first", prompt(1, 2, 3), range(6))
    request = Request("second", prompt(1, 2, 3))
    assert found(engine, request) == 3
    table = [7, GONE, 8, 9, 10, 11]
    assert engine.manager.load(request, ids(*table)) == 6
    (plan,) = engine.step()
    assert plan.loads is not None
    assert plan.loads.dst_block_ids.tolist() == [7, 8, 9, 10, 11]
    (outcome,) = engine.collect()
    assert (outcome.status, outcome.recompute_from) == (LoadStatus.CONFIRMED, 3 * BLOCK)
    assert engine.holds(request, table)
    engine.manager.finish([request])
    counters = engine.manager.get_stats().counters
    assert (counters.host_hit_tokens, counters.device_hit_tokens) == (3 * BLOCK, 0)


def test_pages_on_the_device_are_not_asked_for_again(engine: OffloadEngine) -> None:
    engine.stored("first", prompt(1, 2, 3), range(6))
    request = Request("second", prompt(1, 2, 3))
    assert found(engine, request, BLOCK) == 2
    assert engine.manager.load(request, ids(7, 8, 9, 10)) == 4
    engine.step()
    (outcome,) = engine.collect()
    assert outcome.recompute_from == 3 * BLOCK
    assert engine.holds(request, [7, 8, 9, 10], first=2)
    engine.manager.finish([request])
    assert engine.manager.get_stats().counters.device_hit_tokens == BLOCK


def test_a_page_counts_only_with_the_blocks_of_all_groups(engine: OffloadEngine) -> None:
    blocks = engine.manager.find_blocks(engine.stored("first", prompt(1, 2), range(4)))
    pool = engine.manager._host.pool
    assert pool is not None
    pool.discard(ids(blocks[CacheLevel.HOST][-1].block_id))
    request = Request("second", prompt(1, 2))
    assert found(engine, request) == 1
    engine.manager.finish([request])


def test_a_load_of_which_a_block_fails_counts_for_nothing(engine: OffloadEngine) -> None:
    failing: list[int] = []

    def choose(swap: CacheSwapMetadata) -> list[int]:
        return failing

    engine.devices[0]._choose = choose  # type: ignore[attr-defined]
    engine.stored("first", prompt(1, 2, 3, 4), range(8))
    request = Request("second", prompt(1, 2, 3, 4))
    assert found(engine, request, BLOCK) == 3
    assert engine.manager.load(request, ids(9, GONE, 10, 11, 12, 13)) == 6
    failing.append(4)
    engine.step()
    (outcome,) = engine.collect()
    assert (outcome.status, outcome.recompute_from) == (LoadStatus.FAILED, BLOCK)
    assert found(engine, request, BLOCK) == 0
    engine.manager.finish([request])


def test_a_page_is_stored_once_the_host_has_the_blocks_that_the_device_lacks(engine: OffloadEngine) -> None:
    engine.stored("first", prompt(1, 2), range(4))
    second = Request("second", prompt(1, 2, 3))
    engine.manager.begin([second])
    engine.step()
    table = [0, GONE, 2, 3, 4, 5]
    engine.compute(second, table)
    engine.manager.offer(second, 3 * BLOCK, ids(*table))
    engine.settle()
    engine.manager.finish([second])
    third = Request("third", prompt(1, 2, 3))
    assert found(engine, third) == 3
    engine.manager.finish([third])
    assert engine.wrong_records() == 0
    assert engine.manager.get_stats().counters.backups_dropped == 0


def test_a_page_whose_blocks_no_tier_has_is_dropped_and_counted(engine: OffloadEngine) -> None:
    request = Request("first", prompt(1, 2, 3))
    engine.manager.begin([request])
    table = [0, 1, 2, GONE, 4, 5]
    engine.compute(request, table)
    engine.manager.offer(request, 3 * BLOCK, ids(*table))
    engine.settle()
    engine.manager.finish([request])
    again = Request("second", prompt(1, 2, 3))
    assert found(engine, again) == 1
    engine.manager.finish([again])
    assert engine.manager.get_stats().counters.backups_dropped == 2


def test_a_missing_block_is_not_taken_for_the_last_one_of_the_device() -> None:
    last = 63
    engine = OffloadEngine(layout=LAYOUT, device_blocks=last + 1, policy=WritePolicy.WRITE_BACK)
    tables = {"first": [0, last, 1, 2], "second": [0, GONE, 1, 2, 4, 5]}
    for name, table in tables.items():
        request = Request(name, prompt(*range(1, len(table) // 2 + 1)))
        engine.manager.begin([request])
        engine.step()
        engine.compute(request, table)
        engine.manager.offer(request, len(table) // 2 * BLOCK, ids(*table))
        engine.manager.finish([request])
    engine.manager.evicted(ids(4, 5))
    engine.settle()
    assert engine.manager.get_stats().counters.backups_dropped == 4
    engine.close()


def test_a_block_that_leaves_its_window_is_copied_before_it_is_given_away(engine: OffloadEngine) -> None:
    request = Request("first", prompt(1, 2, 3))
    engine.manager.begin([request])
    engine.step()
    engine.compute(request, range(6))
    engine.manager.offer(request, 3 * BLOCK, ids(*range(6)))
    engine.manager.evicted(ids(1))
    plan, background = engine.step()
    assert plan.evictions is not None
    assert plan.evictions.src_block_ids.tolist() == [0, 1]
    assert background.backups is not None
    assert background.backups.src_block_ids.tolist() == [2, 3, 4, 5]
    engine.fill(1, None)
    engine.settle()
    engine.manager.finish([request])
    again = Request("second", prompt(1, 2, 3))
    assert found(engine, again) == 3
    engine.manager.finish([again])
    assert engine.wrong_records() == 0


@pytest.mark.parametrize("is_first", [True, False])
def test_a_block_is_copied_below_one_whose_copy_is_in_flight(engine: OffloadEngine, is_first: bool) -> None:
    """A chunk's first blocks leave their window with the next chunk, before the copies above them are reported."""
    request = Request("first", prompt(1, 2, 3))
    engine.manager.begin([request])
    engine.step()
    engine.compute(request, range(4))
    engine.manager.offer(request, 2 * BLOCK, ids(*range(4)))
    engine.step()
    in_flight = engine.reports()
    engine.compute(request, range(6))
    engine.manager.offer(request, 3 * BLOCK, ids(*range(6)))
    engine.manager.evicted(ids(5))
    engine.step()
    engine.fill(5, None)
    given_away = engine.reports()
    for reports in (in_flight, given_away) if is_first else (given_away, in_flight):
        engine.manager.apply(reports)
    engine.settle()
    engine.manager.finish([request])
    again = Request("second", prompt(1, 2, 3))
    assert found(engine, again) == 3
    engine.manager.finish([again])
    assert engine.wrong_records() == engine.manager.get_stats().counters.backups_dropped == 0


def test_blocks_come_back_from_storage_after_a_restart(tmp_path: Path) -> None:
    first = OffloadEngine(layout=LAYOUT, folder=tmp_path)
    first.stored("first", prompt(1, 2, 3), range(6))
    first.close()
    second = OffloadEngine(layout=LAYOUT, folder=tmp_path)
    assert second.restored == 6
    request = Request("second", prompt(1, 2, 3))
    second.manager.begin([request])
    deadline = time.monotonic() + PATIENCE
    while (match := second.manager.match(request, 0)).status is not MatchStatus.MATCHED:
        assert time.monotonic() < deadline, "the blocks are read"
        second.step()
        second.collect()
    assert (match.num_tokens, match.from_storage) == (3 * BLOCK, 3 * BLOCK)
    table = [7, GONE, 8, 9, 10, 11]
    assert second.manager.load(request, ids(*table)) == 6
    second.settle()
    assert second.holds(request, table)
    second.manager.finish([request])
    second.close()


def test_hints_and_lookups_concern_the_blocks_of_all_groups() -> None:
    engine = OffloadEngine(layout=LAYOUT, eviction=EvictionPolicy.LEARNED)
    request = engine.stored("first", prompt(1, 2, 3), range(6))
    assert len(engine.manager.find_blocks(request)[CacheLevel.HOST]) == 6
    hint = Hint(kind=HintKind.RETAIN, seconds=60.0, start=BLOCK)
    (outcome,) = engine.manager.hint(request, [hint])
    assert outcome.blocks == 4
    engine.close()


def test_device_blocks_may_be_missing_only_with_windows() -> None:
    plain = OffloadEngine(layout=uniform_layout(block_size=BLOCK, num_layers=2))
    plain.stored("first", prompt(1, 2), [0, 1])
    request = Request("second", prompt(1, 2))
    assert found(plain, request) == 2
    with pytest.raises(PlanError, match="from 0 on"):
        plain.manager.load(request, ids(GONE, 3))
    plain.manager.finish([request])
    plain.close()


def test_other_engines_and_policies_refuse_windows_by_name() -> None:
    settings: Any = {"device_blocks": 8, "host_memory": 1 << 20}
    with pytest.raises(UnsupportedLayoutError, match="groups all/4, last/4: CacheManager"):
        CacheManager(CacheSettings(**settings), LAYOUT)
    selective = CacheSettings(write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE, **settings)
    with pytest.raises(ConfigurationError, match="FDCACHE_WRITE_POLICY"):
        OffloadManager(selective, LAYOUT)


def test_the_key_of_a_pages_last_record_is_the_pages_own() -> None:
    hashes = np.arange(64, dtype=np.uint8).reshape(2, 32)
    keys = record_keys(hashes, 3)
    assert keys.shape == (6, 32)
    assert np.array_equal(keys[2::3], hashes)
    assert len({key.tobytes() for key in keys}) == 6
    assert record_keys(hashes, 1) is hashes
