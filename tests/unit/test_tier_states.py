"""Evictions of states: ``learned`` weighs them by the pages that they save for the slots that are free without them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.groups.evictions import TRAFFIC, found
from fdcache import _core
from fdcache.groups import CacheGroup, Reach, record_keys, state_keys
from fdcache.service.server.arena import Arena
from fdcache.service.server.namespaces import Namespaces
from fdcache.settings.cache import EvictionPolicy, StorageTierSettings
from fdcache.settings.server import ServerSettings
from fdcache.tiers.storage import make_index
from fdcache.tiers.storage_index import LocalIndex
from tests.offload_engine import OffloadEngine
from tests.swaps import uniform_layout
from tests.tier_help import assert_sound, chain, copy_in, hash_list, hashes, report

SHORT, LONG = chain(1), chain(2, 3, 4, 5, 6, 7, 8, 9)


def put(tier: _core.Tier, pages: list[bytes], records: int, states: int, *, stored: int = 0) -> list[bytes]:
    """Copy pages, of which the first are there, and states at their end into a tier; return the keys of the states."""
    of_pages = hash_list(record_keys(hashes(pages), records))
    ends = hash_list(state_keys(hashes(pages[-1:]), records, states))
    path, first = [*of_pages, *ends], stored * records
    parents = hashes([bytes(32), *path][first : len(path)])
    taken = tier.reserve_copies(0, parents, hashes(path[first:])).slots.tolist()
    assert len(report(tier, taken)) == len(path) - first
    return ends


def evicted(tier: _core.Tier, count: int) -> list[bytes]:
    """Return the keys of the first entries to leave, in order."""
    return hash_list(tier.coldest(count).hashes)


def make_room(tier: _core.Tier, count: int) -> None:
    """Evict this many entries."""
    tier.reserve(tier.open_lease(), tier.stats().free + count)


@pytest.mark.parametrize(("records", "states"), [(1, 1), (1, 9), (2, 3), (3, 1), (3, 2)])
def test_the_end_that_saves_least_for_its_slots_goes_first_with_its_pages(records: int, states: int) -> None:
    tier = _core.Tier(200, "learned")
    tier.set_states(records, states)
    tier.set_clock(0)
    put(tier, LONG, records, states)
    tier.set_clock(1)
    put(tier, SHORT, records, states)
    before = set(hash_list(tier.coldest(200).hashes))
    make_room(tier, records + states)
    gone = before - set(hash_list(tier.coldest(200).hashes))
    assert gone == {
        *hash_list(record_keys(hashes(SHORT), records)),
        *hash_list(state_keys(hashes(SHORT), records, states)),
    }
    assert_sound(tier)


def test_without_states_and_by_last_use_the_path_used_longest_ago_goes_first() -> None:
    for eviction, told in (("learned", False), ("lru", True)):
        tier = _core.Tier(200, eviction)
        if told:
            tier.set_states(1, 2)
        tier.set_clock(0)
        ends = put(tier, LONG, 1, 2)
        tier.set_clock(1)
        put(tier, SHORT, 1, 2)
        assert evicted(tier, 1) == ends[-1:]


def test_states_save_the_pages_since_those_before_them() -> None:
    tier = _core.Tier(200, "learned")
    tier.set_states(1, 2)
    put(tier, LONG[:7], 1, 2)
    last = put(tier, LONG, 1, 2, stored=7)  # one page more: a third of its slots
    other = put(tier, chain(30, 31), 1, 2)  # a half
    assert evicted(tier, 1) == last[-1:]
    make_room(tier, 3)
    assert evicted(tier, 1) == other[-1:]


def test_states_between_others_free_their_own_slots_alone() -> None:
    tier = _core.Tier(200, "learned")
    tier.set_states(1, 2)
    inner = put(tier, LONG[:3], 1, 2)  # saves three pages for two slots
    put(tier, LONG, 1, 2, stored=3)  # five for seven
    alone = put(tier, chain(30, 31, 32), 1, 2)  # three for five
    make_room(tier, 5)
    assert len(tier.find(hashes(alone[-1:])).slots) == 0
    assert len(tier.find(hashes(inner[-1:])).slots) == 1


def test_a_new_page_without_states_waits_for_them_for_a_minute() -> None:
    tier = _core.Tier(200, "learned")
    tier.set_states(1, 2)
    tier.set_clock(0)
    report(tier, copy_in(tier, LONG))
    ends = put(tier, SHORT, 1, 2)
    assert evicted(tier, 1) == ends[-1:]
    tier.set_clock(61_000)
    assert evicted(tier, 1) == LONG[-1:]


@pytest.mark.parametrize(("number", "below_best"), [(0, 0.02), (1, 0.05), (2, 0.04)])
def test_what_is_worth_more_for_its_slots_stays(number: int, below_best: float) -> None:
    """Nine records of states beside a page: by last use two fifths less are found where pages are worth more."""
    traffic = TRAFFIC[number]
    learned = np.mean([found(traffic, "learned", 6000, seed) for seed in range(4)])
    assert learned > traffic.best - below_best
    if not number:
        assert found(traffic, "lru", 6000) < traffic.best - 0.2


STATE = CacheGroup(4, Reach.STATE)
LAYOUT = uniform_layout(block_size=4, num_layers=1, groups=(STATE, STATE, CacheGroup(4)))


def knows_states(tier: _core.Tier) -> bool:
    """Return True if the states of a short prompt go before those of a long one that was used before."""
    tier.set_clock(0)
    put(tier, LONG, 1, 2)
    tier.set_clock(1)
    ends = put(tier, SHORT, 1, 2)
    return evicted(tier, 1) == ends[-1:]


def test_the_tier_of_an_engine_knows_the_states_of_its_layout() -> None:
    engine = OffloadEngine(layout=LAYOUT, host_blocks=100, eviction=EvictionPolicy.LEARNED)
    pool = engine.manager._host.pool
    assert pool is not None and knows_states(pool)
    engine.close()


def test_the_tier_of_local_storage_knows_them() -> None:
    index = make_index(StorageTierSettings(size=100 * LAYOUT.record_bytes), LAYOUT, None)
    assert isinstance(index, LocalIndex) and knows_states(index.pool)


def test_the_tier_of_a_service_knows_them(tmp_path: Path) -> None:
    arena = Arena(tmp_path, "t")
    arena.lock()
    arena.create(16 << 16)
    namespaces = Namespaces(ServerSettings(), arena, EvictionPolicy.LEARNED)
    namespace = namespaces.open(LAYOUT)
    while namespaces.make_room(namespace, set()):
        pass
    assert namespace.tier is not None and knows_states(namespace.tier)
    namespace.close()
    arena.close(discard=True)
