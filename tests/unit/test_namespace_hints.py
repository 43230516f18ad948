"""The hints of a namespace's clients: outcomes, the budget of a tenant, and clients that leave."""

from __future__ import annotations

import numpy as np
import pytest

from fdcache.errors import ProtocolError
from fdcache.hashing import hash_blocks
from fdcache.hints import EARLY_REASONS, MOST_HINTS, HintKind, HintStatus
from fdcache.metadata import CacheLevel, HashArray
from fdcache.service.server.namespace_hints import NamespaceHints
from fdcache.service.wire.protocol import HintGiven, Hints
from fdcache.tiers.pool import BlockPool

SLOTS = 32


class World:
    """A tier and its hints, with a clock of their own."""

    def __init__(self, policy: str = "learned", most: int | None = None) -> None:
        self.now = 0.0
        self.pool = BlockPool(CacheLevel.HOST, SLOTS, policy)
        limit = None if most is None else (7, most)
        self.hints = NamespaceHints(lambda: [self.pool], lambda hashes: limit, lambda: self.now)
        self.pool.set_clock(0)

    def store(self, name: int, blocks: int = 4) -> HashArray:
        """Use the blocks of a path, which need room."""
        rows = hash_blocks(
            np.arange(1000 * name, 1000 * name + 4 * blocks, dtype=np.int32), 4, parent=bytes(32)
        )
        lease = self.pool.open_lease()
        found = self.pool.match(lease, rows)
        taken = self.pool.reserve(lease, blocks - len(found))
        parent = rows[len(found) - 1].tobytes() if len(found) else bytes(32)
        self.pool.commit(lease, parent, rows[len(found) :], taken.slots)
        self.pool.finish(lease)
        return rows

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.pool.set_clock(int(self.now * 1000))

    def give(
        self, rows: HashArray, kind: HintKind = HintKind.RETAIN, session: int = 1, number: int = 1
    ) -> tuple[HintStatus, int]:
        seconds = 60.0 if kind in (HintKind.RETAIN, HintKind.RETURN) else None
        given = HintGiven(number, kind, 0, len(rows), seconds=seconds)
        (result,) = self.hints.take(session, Hints(rows.tobytes(), [given]))
        assert result.number == number
        return result.status, result.blocks


@pytest.fixture
def world() -> World:
    return World()


def test_a_hint_is_answered_and_later_told_as_kept(world: World) -> None:
    rows = world.store(1)
    assert world.give(rows, number=9) == (HintStatus.TAKEN, 4)
    assert world.hints.settle() == {}
    world.wait(61)
    ((session, (result,)),) = world.hints.settle().items()
    assert (session, result.number, result.status, result.blocks) == (1, 9, HintStatus.KEPT, 4)
    assert world.hints.settle() == {}
    assert world.hints.figures.outcomes == {"taken": 1, "kept": 1}
    assert world.hints.figures.given == 1


@pytest.mark.parametrize(("is_dropped", "reason"), [(False, "room"), (True, "removed")])
def test_blocks_that_went_are_told_with_the_reason(world: World, is_dropped: bool, reason: str) -> None:
    rows = world.store(1)
    world.give(rows)
    if is_dropped:
        world.pool.drop(rows[:1])
    else:
        world.pool.reserve(world.pool.open_lease(), SLOTS)
    world.wait(61)
    (((result,)),) = world.hints.settle().values()
    assert (result.status, result.lost, result.reason) == (HintStatus.EVICTED_EARLY, 4, reason)
    assert reason in EARLY_REASONS
    assert world.hints.figures.evicted_early == {reason: 1}


def test_hints_for_nothing_or_a_policy_that_does_not_learn_change_nothing(world: World) -> None:
    rows = hash_blocks(np.arange(16, dtype=np.int32), 4, parent=bytes(32))
    assert world.give(rows) == (HintStatus.NO_BLOCK, 0)
    lru = World("lru")
    assert lru.give(lru.store(1)) == (HintStatus.IGNORED, 0)


def test_what_contradicts_itself_is_refused_and_the_rest_taken(world: World) -> None:
    rows = world.store(1)
    bad = HintGiven(1, HintKind.RETAIN, 0, 4)
    good = HintGiven(2, HintKind.ONCE, 0, 4)
    results = world.hints.take(1, Hints(rows.tobytes(), [bad, good]))
    assert [each.status for each in results] == [HintStatus.REFUSED, HintStatus.TAKEN]
    assert "seconds" in results[0].reason
    results = world.hints.take(1, Hints(rows.tobytes(), [good] * (MOST_HINTS + 1)))
    assert results[-1].status is HintStatus.REFUSED
    with pytest.raises(ProtocolError, match="hashes"):
        world.hints.take(1, Hints(b"short", [good]))


def test_half_of_a_tenants_quota_may_stay_for_hints() -> None:
    world = World(most=16)
    paths = [world.store(name) for name in range(4)]
    assert [world.give(rows, number=i)[0] for i, rows in enumerate(paths)] == [
        HintStatus.TAKEN,
        HintStatus.TAKEN,
        HintStatus.OVER_BUDGET,
        HintStatus.OVER_BUDGET,
    ]
    assert world.give(paths[2], HintKind.RELEASE)[0] is HintStatus.TAKEN
    world.store(0)  # used again: its hint is over
    assert world.give(paths[3])[0] is HintStatus.TAKEN


def test_when_blocks_return_takes_no_room_of_a_tenants_quota() -> None:
    world = World(most=16)
    paths = [world.store(name) for name in range(4)]
    for number, rows in enumerate(paths):
        assert world.give(rows, HintKind.RETURN, number=number)[0] is HintStatus.TAKEN
    assert [world.give(rows, number=9)[0] for rows in paths] == [
        HintStatus.TAKEN,
        HintStatus.TAKEN,
        HintStatus.OVER_BUDGET,
        HintStatus.OVER_BUDGET,
    ]


def test_a_hint_that_is_given_again_needs_no_further_budget() -> None:
    for world in (World(most=12), World()):
        rows = world.store(1, 6 if world.hints._limit_of(np.empty((0, 32), np.uint8)) else 12)
        assert [world.give(rows, number=number)[0] for number in range(3)] == [HintStatus.TAKEN] * 3


def test_a_tenant_without_a_quota_is_bound_by_the_tier_alone(world: World) -> None:
    paths = [world.store(name) for name in range(5)]
    statuses = [world.give(rows, number=i)[0] for i, rows in enumerate(paths)]
    assert statuses == [HintStatus.TAKEN] * 4 + [HintStatus.OVER_BUDGET]


def test_nothing_is_told_of_a_client_that_has_gone(world: World) -> None:
    first, second = world.store(1), world.store(2)
    world.give(first, session=1)
    world.give(second, session=12)
    world.hints.forget(1)
    world.wait(61)
    assert set(world.hints.settle()) == {12}
