"""The time of a tier: its clock, ages of any length, and what passes of it for learned eviction."""

from __future__ import annotations

import numpy as np
import pytest

from fdcache import _core
from fdcache.hashing import hash_blocks
from fdcache.metadata import HashArray
from tests.tier_help import eviction_order

BLOCK = 4
DAY = 86_400_000
"""In milliseconds."""


def path(first: int, blocks: int = 4) -> HashArray:
    return hash_blocks(np.arange(first, first + blocks * BLOCK, dtype=np.int32), BLOCK, parent=bytes(32))


def use(tier: _core.Tier, hashes: HashArray) -> list[int]:
    """Use a path, as a request does, and return its slots."""
    lease = tier.open_lease()
    found = len(tier.match(lease, hashes).slots)
    parent = bytes(hashes[found - 1]) if found else bytes(32)
    if found < len(hashes):
        tier.commit(lease, parent, hashes[found:], tier.reserve(lease, len(hashes) - found).slots)
    slots = [int(slot) for slot in tier.find(hashes).slots]
    tier.finish(lease, len(hashes) * BLOCK, 20, BLOCK)
    return slots


def reuses(tier: _core.Tier, first: int = 0, end: int | None = None) -> float:
    """Return the reuses that were counted at the ages from ``first`` on."""
    tables = tier.reuse()
    assert tables is not None
    return float(tables.reused.reshape(-1, tables.AGES)[:, first:end].sum())


def experienced(start: int = 0) -> _core.Tier:
    """A tier that has seen a path of four blocks used each second for ten minutes."""
    tier = _core.Tier(8, "learned")
    for second in range(600):
        tier.set_clock(start + 1000 * second)
        use(tier, path(0))
    assert reuses(tier) == pytest.approx(4 * 599, rel=0.1)
    return tier


@pytest.mark.parametrize("back", [1, 17_000, 599_000])
def test_counts_stay_when_the_callers_clock_goes_back(back: int) -> None:
    tier = experienced()
    before = reuses(tier)
    for gap in range(60):
        tier.set_clock(599_000 - back + gap)
        use(tier, path(0))
        tier.set_clock(599_000 + 20_000 * gap)
        use(tier, path(0))
    assert reuses(tier) > before
    assert tier.check_integrity() == []


def test_time_stands_still_until_the_callers_clock_has_come_as_far_again() -> None:
    tier = _core.Tier(8)
    tier.set_clock(100_000)
    first, other = use(tier, path(0)), use(tier, path(100))
    for now, idle in ((40_000, 0), (100_000, 0), (100_250, 0.25)):
        tier.set_clock(now)
        assert tier.node(first[0]).idle_seconds == idle
        assert tier.node(other[0]).ready_seconds == idle
    assert len(tier.idle(1.0).slots) == 0


def test_hours_without_a_request_fade_nothing() -> None:
    tier = experienced()
    before = reuses(tier)
    tier.set_clock(599_000 + 8 * 3600 * 1000)
    use(tier, path(0))
    tier.set_clock(599_000 + 9 * 3600 * 1000)
    use(tier, path(0))
    assert reuses(tier) > 0.99 * before


def test_counts_fade_with_the_blocks_that_are_used() -> None:
    tier = experienced()
    at_a_second, half_lives, mean_path = reuses(tier), 0.0, 4 + 12 * 0.998**600
    for turn in range(6000):
        tier.set_clock(4_000_000 + 3_600_000 * turn)
        use(tier, path(0))
        half_lives += 4 / (16 * (8 + 1000 * mean_path))
        mean_path += 0.002 * (4 - mean_path)
    assert half_lives > 0.2
    assert reuses(tier, 0, 4) == pytest.approx(at_a_second * 2**-half_lives, rel=0.01)


@pytest.mark.parametrize("days", [1, 49, 50, 60, 120, 4000])
def test_a_block_that_was_not_used_for_a_while_is_idle_however_long(days: int) -> None:
    tier = _core.Tier(8)
    tier.set_clock(0)
    (slot, *_) = use(tier, path(0))
    tier.set_clock(days * DAY)
    use(tier, path(100))
    assert tier.node(slot).idle_seconds == days * 86_400
    assert tier.node(slot).ready_seconds == days * 86_400
    assert list(tier.idle(days * 86_400 - 1.0).slots) == list(tier.find(path(0)).slots)
    assert len(tier.idle(days * 86_400 + 1.0).slots) == 0


@pytest.mark.parametrize("days", [1.0, 30.0, 2**32 / DAY, 60.0, 2**33 / DAY, 4000.0])
def test_what_was_used_weeks_ago_goes_before_what_was_used_just_now(days: float) -> None:
    tier = _core.Tier(8, "learned")
    tier.set_clock(0)
    old = use(tier, path(0))
    now = round(days * DAY)
    tier.set_clock(now - 5000)
    new = use(tier, path(100))
    tier.set_clock(now + 1000)
    assert eviction_order(tier) == [*old[::-1], *new[::-1]]


def test_a_use_after_weeks_counts_as_one_at_the_highest_age() -> None:
    tier = _core.Tier(8, "learned")
    for turn in range(6):
        tier.set_clock(50 * DAY * turn)
        use(tier, path(0))
    assert reuses(tier, -1) == pytest.approx(4 * 5, rel=0.01)
    assert reuses(tier, 0, -1) == 0


def test_a_clock_of_wall_time_is_as_good_as_one_from_zero() -> None:
    assert experienced().save_reuse() == experienced(1_800_000_000_000).save_reuse()
