"""Slots reserved for copies of a tenant's blocks: within its limit, at the expense of its own."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from fdcache._core import CopyReservation
from fdcache.metadata import CacheLevel, HashArray
from fdcache.plans.ledger import parents_of
from fdcache.tiers.pool import ABSENT, BlockPool

MINE, OTHERS, LIMIT = 1, 2, 4
_seeds = count(1)


@pytest.fixture
def pool() -> BlockPool:
    made = BlockPool(CacheLevel.HOST, 16)
    for tenant, most in ((0, 16), (MINE, LIMIT), (OTHERS, 16)):
        made.set_tenant_limit(tenant, most)
    return made


def path(blocks: int) -> HashArray:
    return np.random.default_rng(next(_seeds)).integers(1, 256, (blocks, 32)).astype(np.uint8)


def reserve(pool: BlockPool, hashes: HashArray, tenant: int, start: int = 0) -> CopyReservation:
    return pool.reserve_copies(0, parents_of(hashes, start, len(hashes)), hashes[start:], tenant=tenant)


def copied(pool: BlockPool, hashes: HashArray, tenant: int, start: int = 0) -> None:
    taken = reserve(pool, hashes, tenant, start)
    assert taken.missing == 0
    slots = np.asarray(taken.slots)
    pool.complete(slots, np.ones(len(slots), np.uint8), np.zeros(len(slots), np.uint64))
    pool.verify()


def entries(pool: BlockPool) -> list[int]:
    return [int(each) for each in pool.tenant_entries()]


def test_a_tenant_evicts_its_own_blocks_beyond_its_limit(pool: BlockPool) -> None:
    others, first, second = path(6), path(3), path(3)
    copied(pool, others, OTHERS)
    copied(pool, first, MINE)
    copied(pool, second, MINE)
    assert entries(pool) == [0, LIMIT, 6]
    assert (pool.contains(first) == ABSENT).tolist() == [False, True, True]
    assert not (pool.contains(others) == ABSENT).any()


def test_what_a_tenant_has_no_room_for_is_missing_and_nothing_is_evicted(pool: BlockPool) -> None:
    first, long = path(2), path(7)
    copied(pool, first, MINE)
    taken = reserve(pool, long, MINE)
    assert (taken.missing, len(taken.slots)) == (7 - LIMIT, 0)
    assert entries(pool) == [0, 2, 0]
    copied(pool, long[:LIMIT], MINE)
    assert entries(pool) == [0, LIMIT, 0]


def test_blocks_below_those_of_a_tenant_are_its_own_whoever_is_named(pool: BlockPool) -> None:
    hashes = path(6)
    copied(pool, hashes[:3], MINE)
    assert reserve(pool, hashes, OTHERS, 3).missing == 2
    copied(pool, hashes[:4], OTHERS, 3)
    assert entries(pool) == [0, LIMIT, 0]


def test_a_tenant_without_a_limit_yet_is_refused(pool: BlockPool) -> None:
    with pytest.raises(ValueError, match="tenant 7 has no limit yet"):
        reserve(pool, path(1), 7)
