"""The tier: reservations of runs of slots, and eviction ahead of need."""

import time

import numpy as np
import pytest

from fdcache import _core
from fdcache.layout import KVLayout
from fdcache.manager.tiers import make_tiers
from fdcache.metadata import EXTENT_BYTES
from fdcache.settings.cache import CacheSettings, StorageTierSettings
from fdcache.tiers.host import LocalHostTier
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.statistics import Counters
from tests.tier_help import ROOT_HASH, digest, hashes, slots

SIZE = 64
EVERY_OTHER_FIRST = [*range(0, SIZE, 2), *range(1, SIZE, 2)]


def full_tier(spare: float) -> _core.Tier:
    """Every slot has an entry of its own; the even ones are colder than the odd ones."""
    tier = _core.Tier(SIZE, spare=spare)
    filling = tier.open_lease()
    taken = tier.reserve(filling, SIZE).slots.tolist()
    for slot in taken:
        tier.commit(filling, ROOT_HASH, hashes([digest((slot,))]), slots([slot]))
    leases = []
    for slot in EVERY_OTHER_FIRST:
        leases.append(tier.open_lease())
        tier.match(leases[-1], hashes([digest((slot,))]))
    tier.release(filling)
    for lease in leases:
        tier.release(lease)
    return tier


def test_without_spare_only_needed_blocks_are_evicted() -> None:
    tier = full_tier(0.0)
    taken = tier.reserve(tier.open_lease(), 2)
    assert (taken.slots.tolist(), taken.evicted.slots.tolist()) == ([0, 2], [0, 2])


def test_short_free_runs_cause_eviction_ahead_of_need_coldest_first() -> None:
    tier = full_tier(0.6 * 0.8)
    taken = tier.reserve(tier.open_lease(), 2)
    gone = taken.evicted.slots.tolist()
    assert gone == EVERY_OTHER_FIRST[: len(gone)]
    assert 2 < len(gone) <= 2 + 30
    assert tier.stats().free == len(gone) - 2
    assert tier.check_integrity() == []


def test_a_run_is_taken_from_blocks_evicted_ahead_of_need() -> None:
    tier = full_tier(0.5)
    lease = tier.open_lease()
    first, second = tier.reserve(lease, 2), tier.reserve(lease, 2)
    assert np.diff(first.slots).tolist() == [1]
    assert len(first.evicted) == 2 + SIZE // 2
    assert len(second.evicted) <= 2


def test_ancestors_of_a_copy_are_not_evicted_ahead_of_need() -> None:
    tier = full_tier(0.5)
    coldest = digest((0,))
    taken = tier.reserve_copies(0, hashes([coldest, ROOT_HASH]), hashes([digest((0, 1)), digest((99,))]))
    assert taken.missing == 0
    assert len(taken.evicted) > 2
    assert 0 not in taken.evicted.slots.tolist()


@pytest.mark.parametrize("spare", [-0.1, 0.6, float("nan")])
def test_a_spare_share_out_of_range_is_refused(spare: float) -> None:
    with pytest.raises(ValueError, match="spare share is between"):
        _core.Tier(8, spare=spare)


def test_freed_neighbours_are_one_run_and_the_tightest_is_taken() -> None:
    tier = _core.Tier(16)
    leases = [tier.open_lease() for _ in range(4)]
    for lease, count in zip(leases, (2, 3, 5, 6), strict=True):
        tier.reserve(lease, count)
    tier.release(leases[0])
    tier.release(leases[3])
    assert tier.reserve(leases[2], 2).slots.tolist() == [0, 1]
    tier.release(leases[1])
    assert tier.reserve(tier.open_lease(), 3).slots.tolist() == [2, 3, 4]


def test_host_slots_lie_in_extents_and_device_slots_need_not() -> None:
    layout = KVLayout.uniform(
        model="runs", revision="1", num_layers=1, block_size=64, kv_heads=8, head_dim=128, dtype="bfloat16"
    )
    extent = EXTENT_BYTES // layout.record_bytes
    settings = CacheSettings(device_blocks=4 * extent, host_memory=4 * extent * (layout.record_bytes + 128))
    tiers = make_tiers(settings, layout, StorageTierSettings(), None, Counters(), time.monotonic)
    assert isinstance(tiers.host, LocalHostTier) and tiers.device is not None
    pools: list[tuple[BlockPool, int]] = [(tiers.host, extent), (tiers.device, 1)]
    for tier, first in pools:
        lease = tier.open_lease()
        tier.reserve(lease, 1)
        assert tier.reserve(lease, extent).slots.tolist() == list(range(first, first + extent))


def test_of_runs_of_one_length_the_lowest_is_taken_so_that_the_last_extents_stay_empty() -> None:
    free = _core.FreeRuns(extent=8)
    for extents in range(1, 5):
        free.resize(8 * extents)
        free.add(8 * (extents - 1), 8)
    assert [free.take(8) for _ in range(4)] == [[(0, 8)], [(8, 8)], [(16, 8)], [(24, 8)]]
