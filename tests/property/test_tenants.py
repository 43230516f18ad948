"""Tenants of a tier against a small oracle: limits, and which blocks are evicted for them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache._core import Tier

ROOT = bytes(32)
LIMITS = (6, 3, 5)
SLOTS = 20


def key(tenant: int, path: tuple[int, ...]) -> bytes:
    return bytes([tenant + 1, len(path), *path]).ljust(32, b"\1")


def rows(*keys: bytes) -> np.ndarray:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)


class Model:
    """The oracle: each tenant's blocks as a list, coldest first, children before parents."""

    def __init__(self) -> None:
        self.order: list[list[bytes]] = [[] for _ in LIMITS]
        self.parent: dict[bytes, bytes] = {}

    def is_leaf(self, block: bytes) -> bool:
        return block not in self.parent.values()

    def publish(self, tenant: int, path: list[bytes]) -> list[int]:
        """The status of each block of a path from the root, published in one call."""
        status: list[int] = []
        fresh: list[bytes] = []
        above = ROOT
        for block in path:
            if block in self.parent:
                status.append(1)
            elif above != ROOT and above not in self.parent:
                status.append(2)
            elif self._has_room(tenant, above, fresh):
                self.parent[block] = above
                fresh.append(block)
                status.append(0)
            else:
                status.append(4)
            above = block
        self._touch(tenant, fresh)
        return status

    def _has_room(self, tenant: int, above: bytes, fresh: list[bytes]) -> bool:
        while len(self.order[tenant]) + len(fresh) >= LIMITS[tenant]:
            busy = self._busy(fresh)
            victims = [
                each
                for each in self.order[tenant]
                if each not in busy and each != above and self.is_leaf(each)
            ]
            if not victims:
                return False
            self.order[tenant].remove(victims[0])
            del self.parent[victims[0]]
        return True

    def _busy(self, fresh: list[bytes]) -> set[bytes]:
        busy = set()
        for block in fresh:
            above = block
            while above != ROOT:
                busy.add(above)
                above = self.parent[above]
        return busy

    def _touch(self, tenant: int, blocks: list[bytes]) -> None:
        """These and all above them become the hottest, from the deepest on."""
        used = self._busy(blocks)
        kept = [each for each in self.order[tenant] if each not in used]
        by_depth = sorted(used, key=lambda block: -block[1])
        self.order[tenant] = kept + by_depth

    def drop(self, tenant: int) -> None:
        for block in self.order[tenant]:
            del self.parent[block]
        self.order[tenant] = []


paths = st.lists(st.integers(0, 1), min_size=1, max_size=4)
steps = st.lists(
    st.tuples(st.sampled_from(["publish", "publish", "publish", "use", "drop"]), st.integers(0, 2), paths),
    max_size=40,
)


@given(steps)
@settings(max_examples=150)
def test_a_tenant_at_its_limit_evicts_only_its_own_coldest_blocks(
    todo: list[tuple[str, int, list[int]]],
) -> None:
    tier, model = Tier(SLOTS), Model()
    for tenant, most in enumerate(LIMITS):
        tier.set_tenant_limit(tenant, most)
    for what, tenant, branch in todo:
        path = [key(tenant, tuple(branch[: i + 1])) for i in range(len(branch))]
        if what == "publish":
            lease = tier.open_lease()
            slots = tier.reserve(lease, len(path)).slots
            parents = rows(ROOT, *path[:-1])
            ones, sums = np.ones(len(path), np.uint8), np.zeros(len(path), np.uint64)
            owners = np.full(len(path), tenant, np.uint32)
            status = tier.publish(lease, parents, rows(*path), slots, ones, sums, owners)
            tier.release(lease)
            assert status.tolist() == model.publish(tenant, path)
        elif what == "use":
            lease = tier.open_lease()
            found = len(tier.match(lease, rows(*path)))
            tier.release(lease)
            known = [block for block in path if block in model.parent]
            assert found == len(known)
            model._touch(tenant, known)
        else:
            tier.drop(rows(*(block for block in model.order[tenant] if model.parent[block] == ROOT)))
            model.drop(tenant)
        assert tier.check_integrity() == []
        assert tier.tenant_entries().tolist() == [len(order) for order in model.order]
        there = tier.find(rows(*model.parent)) if model.parent else ()
        assert len(there) == len(model.parent) == tier.stats().ready


def test_tenants_are_turned_on_while_the_tier_is_empty() -> None:
    tier = Tier(4)
    lease = tier.open_lease()
    slots = tier.reserve(lease, 1).slots
    tier.commit(lease, ROOT, rows(key(0, (1,))), slots)
    with pytest.raises(ValueError, match="while the tier is empty"):
        tier.set_tenant_limit(0, 1)


def test_a_tenant_without_a_limit_is_refused_with_nothing_changed() -> None:
    tier = Tier(4)
    tier.set_tenant_limit(0, 2)
    lease = tier.open_lease()
    slots = tier.reserve(lease, 1).slots
    one = np.ones(1, np.uint8)
    with pytest.raises(ValueError, match="tenant 7 has no limit"):
        tier.publish(
            lease,
            rows(ROOT),
            rows(key(0, (1,))),
            slots,
            one,
            np.zeros(1, np.uint64),
            np.array([7], np.uint32),
        )
    assert tier.stats().writing == 1
    tier.release(lease)


def test_views_of_a_whole_tier() -> None:
    tier = Tier(8)
    tier.set_tenant_limit(1, 8)
    lease = tier.open_lease()
    taken = tier.reserve(lease, 3).slots
    names = [key(0, (1,)), key(1, (1,)), key(1, (1, 0))]
    sums, ones = np.zeros(3, np.uint64), np.ones(3, np.uint8)
    owners = np.array([0, 1, 1], np.uint32)
    tier.publish(lease, rows(ROOT, ROOT, names[1]), rows(*names), taken, ones, sums, owners)
    run = tier.match(lease, rows(names[1]))
    assert tier.hottest(1).slots.tolist() == run.slots.tolist()
    assert len(tier.hottest(10)) == 3
    assert sorted(tier.idle(0.0, 1).slots.tolist()) == sorted(taken[1:].tolist())
    assert len(tier.idle(1000.0)) == 0
    assert tier.starting_with(names[2][:6]).hashes.tobytes() == names[2]
    assert [tier.node(int(slot)).tenant for slot in taken] == [0, 1, 1]
