"""Random histories of a small tier, compared with the oracle after every step."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from fdcache import _core
from fdcache.errors import StaleLeaseError
from tests.property.tier_oracle import EVENT_LOST, ROOT, UNKNOWN_HASH, TierOracle
from tests.seeds import budget
from tests.tier_help import (
    ROOT_HASH,
    chain,
    checksums,
    digest,
    eviction_order,
    flags,
    hash_list,
    hashes,
    slots,
)

Result = TypeVar("Result")
Path = tuple[int, ...]

PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
PICK = st.integers(0, 15)
ANY_SLOTS = st.lists(st.integers(-1, 13), max_size=4)


def given(taken: _core.Reservation) -> list[tuple[int, int]]:
    assert taken.slots.tolist() == sorted(set(taken.slots.tolist()))
    return list(zip(taken.slots.tolist(), taken.generations.tolist(), strict=True))


class TierHistory(RuleBasedStateMachine):
    @initialize(
        size=st.integers(2, 12),
        events=st.sampled_from([0, 1, 5, 1000]),
        extent=st.sampled_from([0, 1, 3]),
        spare=st.sampled_from([0.0, 0.2, 0.5]),
    )
    def begin(self, size: int, events: int, extent: int, spare: float) -> None:
        self.tier = _core.Tier(size, extent=extent, spare=spare)
        self.oracle = TierOracle(size, spare)
        self.tier.record_events(events)
        self.oracle.record_events(events)
        for _ in range(2):
            self.open_lease()

    def same_error(self, act: Callable[[], Result], expect: Callable[[], object]) -> Result | None:
        """Return the result of `act`, None when it failed as `expect` did."""
        try:
            return act()
        except (StaleLeaseError, IndexError, ValueError) as error:
            with pytest.raises(type(error)):
                expect()
            return None

    def both(self, act: Callable[[], None], expect: Callable[[], None]) -> None:
        """Both succeed, or both fail in the same way."""
        try:
            act()
        except (StaleLeaseError, IndexError, ValueError) as error:
            with pytest.raises(type(error)):
                expect()
        else:
            expect()

    def held_slots(self) -> list[int]:
        return [slot for slot, block in self.oracle.used.items() for _ in range(block.holds)]

    def lease(self, pick: int) -> int:
        """Draw an open lease, now and then a released or unknown one."""
        known = list(self.oracle.leases)
        if known and pick < 15:
            return known[pick % len(known)]
        return pick % 2

    # --- leases and look-up ---

    @rule()
    def open_lease(self) -> None:
        assert self.tier.open_lease() == self.oracle.open_lease()

    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        lease = self.lease(pick)
        assert self.tier.release(lease) == self.oracle.release(lease)

    @rule(pick=PICK, path=PATHS, start=st.sampled_from([0, 0, 0, 1, 2, 6]))
    def match(self, pick: int, path: Path, start: int) -> None:
        lease, wanted = self.lease(pick), chain(*path)
        run = self.same_error(
            lambda: self.tier.match(lease, hashes(wanted), start),
            lambda: self.oracle.match(lease, wanted, start),
        )
        if run is None:
            return
        assert (run.slots.tolist(), run.pending) == self.oracle.match(lease, wanted, start)
        blocks = [self.oracle.used[slot] for slot in run.slots.tolist()]
        assert run.generations.tolist() == [block.generation for block in blocks]
        assert run.hits.tolist() == [block.hits for block in blocks]

    @rule(paths=st.lists(PATHS, max_size=6))
    def contains(self, paths: list[Path]) -> None:
        wanted = [digest(path) for path in paths]
        assert self.tier.contains(hashes(wanted)).tolist() == self.oracle.contains(wanted)

    @rule(paths=st.lists(PATHS, max_size=6))
    def find(self, paths: list[Path]) -> None:
        wanted = [digest(path) for path in paths]
        found = [slot for one in wanted if (slot := self.oracle.find_ready(one)) is not None]
        assert self.tier.find(hashes(wanted)).slots.tolist() == found

    @rule(wanted=st.lists(st.integers(0, 11), max_size=3), levels=st.sampled_from([0, 1, 2, 100]))
    def ancestry(self, wanted: list[int], levels: int) -> None:
        listed = self.same_error(
            lambda: self.tier.ancestry(slots(wanted), levels), lambda: self.oracle.ancestry(wanted, levels)
        )
        if listed is not None:
            assert listed.slots.tolist() == self.oracle.ancestry(wanted, levels)
            assert hash_list(listed.hashes) == [self.oracle.hash_of(slot) for slot in listed.slots.tolist()]

    # --- reserve, commit ---

    def check_evicted(self, taken: _core.Reservation, before: dict[int, Any], expected: list[int]) -> None:
        listed = taken.evicted
        assert listed.slots.tolist() == expected
        blocks = [before[slot] for slot in expected]
        assert hash_list(listed.hashes) == [block.hash for block in blocks]
        assert listed.generations.tolist() == [block.generation for block in blocks]
        assert listed.hits.tolist() == [block.hits for block in blocks]
        parents = [
            UNKNOWN_HASH if b.unjoined else ROOT_HASH if b.parent == ROOT else before[b.parent].hash
            for b in blocks
        ]
        assert hash_list(listed.parents) == parents

    @rule(pick=PICK, count=st.integers(0, 4))
    def reserve(self, pick: int, count: int) -> None:
        self.reserve_for(self.lease(pick), count)

    def reserve_for(self, lease: int, count: int) -> None:
        before = dict(self.oracle.used)
        taken = self.same_error(
            lambda: self.tier.reserve(lease, count), lambda: self.oracle.reserve(lease, count, [])
        )
        if taken is None:
            return
        missing, evicted = self.oracle.reserve(lease, count, given(taken), len(taken.evicted))
        assert taken.missing == missing
        assert len(taken) == (0 if missing else count)
        self.check_evicted(taken, before, evicted)

    def commit(self, lease: int, path: Path, depth: int, chosen: Sequence[int]) -> None:
        wanted = chain(*path)[depth : depth + len(chosen)]
        chosen = chosen[: len(wanted)]
        parent = digest(path[:depth]) if depth else ROOT_HASH
        status = self.same_error(
            lambda: self.tier.commit(lease, parent, hashes(wanted), slots(chosen)),
            lambda: self.oracle.commit(lease, parent, wanted, chosen),
        )
        if status is not None:
            assert status.tolist() == self.oracle.commit(lease, parent, wanted, chosen)

    def anonymous(self, lease: int) -> list[int]:
        used = self.oracle.used
        return [slot for slot, block in used.items() if block.owner == lease and block.hash is None]

    @rule(pick=PICK, path=PATHS, data=st.data())
    def commit_own(self, pick: int, path: Path, data: st.DataObject) -> None:
        lease = self.lease(pick)
        own = self.anonymous(lease)
        ready = [d for d in range(len(path)) if not d or self.oracle.find_ready(digest(path[:d])) is not None]
        chosen = data.draw(st.permutations(own))[: data.draw(st.integers(0, 5))]
        self.commit(lease, path, data.draw(st.sampled_from(ready)), chosen)

    @rule(
        path=PATHS, spare=st.integers(0, 1), alone=st.booleans(), stay=st.sampled_from([False, False, True])
    )
    def compute(self, path: Path, spare: int, alone: bool, stay: bool) -> None:
        """Run a request from its match, or without one, to its commit and perhaps to its end."""
        lease, wanted = self.tier.open_lease(), chain(*path)
        assert lease == self.oracle.open_lease()
        found = 0
        if not alone:
            found = len(self.tier.match(lease, hashes(wanted)))
            self.oracle.match(lease, wanted, 0)
        self.reserve_for(lease, len(path) - found + spare)
        if own := sorted(self.anonymous(lease)):
            self.commit(lease, path, found, own)
        if not stay:
            assert self.tier.release(lease)
            assert self.oracle.release(lease)

    # --- copies ---

    def reserve_copies(self, lease: int, blocks: Sequence[Path], *, is_unknown: bool = False) -> None:
        wanted = [digest(path) for path in blocks]
        parents = [digest(path[:-1]) if path[:-1] else ROOT_HASH for path in blocks]
        if is_unknown:
            parents[0] = UNKNOWN_HASH
        before = dict(self.oracle.used)
        taken = self.same_error(
            lambda: self.tier.reserve_copies(lease, hashes(parents), hashes(wanted)),
            lambda: self.oracle.reserve_copies(lease, parents, wanted, []),
        )
        if taken is None:
            return
        status, missing, evicted = self.oracle.reserve_copies(
            lease, parents, wanted, given(taken), len(taken.evicted)
        )
        assert (taken.status.tolist(), taken.missing) == (status, missing)
        self.check_evicted(taken, before, evicted)

    @rule(pick=PICK, owned=st.booleans(), paths=st.lists(PATHS, min_size=1, max_size=2))
    def copy_paths_in(self, pick: int, owned: bool, paths: list[Path]) -> None:
        blocks = [path[: depth + 1] for path in paths for depth in range(len(path))]
        self.reserve_copies(self.lease(pick) if owned else 0, blocks)

    @rule(pick=PICK, owned=st.booleans(), path=PATHS, above=st.integers(1, 4))
    def copy_run_in(self, pick: int, owned: bool, path: Path, above: int) -> None:
        """Copy the end of a path of which nobody tells what precedes it."""
        blocks = [path[:end] for end in range(min(above, len(path) - 1) + 1, len(path) + 1)]
        self.reserve_copies(self.lease(pick) if owned else 0, blocks, is_unknown=True)

    @rule(pick=PICK, path=PATHS)
    def copy_and_look_up(self, pick: int, path: Path) -> None:
        for end in range(len(path), 0, -1):
            self.reserve_copies(0, [path[:end]], is_unknown=True)
            self.complete(self.held_pending(), [True] * len(self.held_pending()), [])
        self.match(pick, path, 0)

    def held_pending(self) -> list[int]:
        used = self.oracle.used.items()
        return [slot for slot, block in used if block.hash is not None and not block.ready]

    @rule(pick=PICK, blocks=st.lists(PATHS, max_size=4))
    def copy_blocks_in(self, pick: int, blocks: list[Path]) -> None:
        self.reserve_copies(self.lease(pick), blocks)

    def complete(self, chosen: Sequence[int], copied: Sequence[bool], sums: Sequence[int]) -> None:
        ready = self.same_error(
            lambda: self.tier.complete(slots(chosen), flags(copied), checksums(sums)),
            lambda: self.oracle.complete(chosen, copied, sums),
        )
        if ready is not None:
            assert ready.tolist() == self.oracle.complete(chosen, copied, sums)

    @rule(data=st.data(), with_sums=st.booleans())
    def complete_some(self, data: st.DataObject, with_sums: bool) -> None:
        held = sorted(self.held_slots(), key=lambda slot: (len(self.oracle.path(slot)), slot))
        end = data.draw(st.integers(0, len(held)))
        copied = data.draw(st.lists(st.sampled_from([True, True, True, False]), min_size=end, max_size=end))
        self.complete(held[:end], copied, list(range(7, 7 + end)) if with_sums else [])

    @rule(data=st.data())
    def complete_in_any_order(self, data: st.DataObject) -> None:
        held = self.held_slots()
        chosen = data.draw(st.lists(st.sampled_from(held), max_size=6)) if held else []
        copied = data.draw(st.lists(st.booleans(), min_size=len(chosen), max_size=len(chosen)))
        self.complete(chosen, copied, [])

    def hold_slots(self, chosen: list[int]) -> None:
        self.both(lambda: self.tier.hold(slots(chosen)), lambda: self.oracle.hold(chosen))

    def unhold_slots(self, chosen: list[int]) -> None:
        self.both(lambda: self.tier.unhold(slots(chosen)), lambda: self.oracle.unhold(chosen))

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        used = sorted(self.oracle.used)
        self.hold_slots(data.draw(st.lists(st.sampled_from(used), max_size=3)) if used else [])

    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        held = self.held_slots()
        self.unhold_slots(data.draw(st.lists(st.sampled_from(held), max_size=4)) if held else [])

    @rule(path=PATHS, most=st.integers(0, 5))
    def hold_ready(self, path: Path, most: int) -> None:
        held = self.tier.hold_ready(hashes(chain(*path)), most)
        assert held.slots.tolist() == self.oracle.hold_ready(chain(*path), most)

    @rule(what=st.sampled_from(["commit", "complete", "hold", "unhold"]), pick=PICK, chosen=ANY_SLOTS)
    def nonsense(self, what: str, pick: int, chosen: list[int]) -> None:
        match what:
            case "commit":
                self.commit(self.lease(pick), (0, 1, 0, 1), 0, chosen)
            case "complete":
                self.complete(chosen, [True] * len(chosen), [])
            case "hold":
                self.hold_slots(chosen)
            case _:
                self.unhold_slots(chosen)

    # --- the whole tier ---

    @rule(sure=st.integers(0, 4))
    def reset(self, sure: int) -> None:
        if sure == 4:
            self.tier.reset()
            self.oracle.reset()

    @rule(size=st.integers(1, 12), sure=st.booleans())
    def resize(self, size: int, sure: bool) -> None:
        if sure:
            assert self.tier.resize(size) == self.oracle.resize(size)

    @rule()
    def take_events(self) -> None:
        kinds, stored, parents = self.tier.take_events()
        taken = list(zip(kinds.tolist(), hash_list(stored), hash_list(parents), strict=True))
        assert taken == self.oracle.take_events()
        assert all(kind != EVENT_LOST for kind in kinds.tolist()[1:])

    # --- after every step ---

    @invariant()
    def sound(self) -> None:
        assert self.tier.check_integrity() == []

    @invariant()
    def same_order(self) -> None:
        assert eviction_order(self.tier) == self.oracle.eviction_order()

    @invariant()
    def same_figures(self) -> None:
        oracle, stats = self.oracle, self.tier.stats()
        blocks = oracle.used.values()
        assert (stats.slots, stats.free) == (oracle.slots, oracle.free())
        assert stats.ready == sum(block.ready for block in blocks)
        assert stats.writing == sum(not block.ready for block in blocks)
        assert stats.pending == sum(not block.ready and block.hash is not None for block in blocks)
        assert stats.evictable == sum(oracle.is_idle(slot) for slot in oracle.used)
        assert self.tier.available == stats.free + stats.evictable
        assert stats.pins == sum(len(lease.pins) for lease in oracle.leases.values())
        assert stats.holds == sum(block.holds for block in blocks)
        assert (stats.leases, stats.epoch) == (len(oracle.leases), oracle.epoch)
        assert stats.evictions == oracle.evictions
        assert stats.unjoined == sum(block.unjoined for block in blocks)
        assert stats.contradictions == oracle.contradictions

    @invariant()
    def same_blocks(self) -> None:
        for slot in range(self.oracle.slots):
            node, block = self.tier.node(slot), self.oracle.used.get(slot)
            if block is None:
                assert (node.state, node.findable, node.pins, node.holds) == (_core.SLOT_FREE, False, 0, 0)
                continue
            assert (node.state == _core.SLOT_READY, node.findable) == (block.ready, block.hash is not None)
            assert node.state != _core.SLOT_FREE
            assert (node.generation, node.holds) == (block.generation, block.holds)
            assert node.pins == self.oracle.pins(slot)
            assert node.children == len(self.oracle.children(slot))
            if block.hash is not None:
                assert node.hash == block.hash
                assert node.parent == (None if block.parent == ROOT else block.parent)
            if block.ready:
                assert (node.hits, node.checksum) == (block.hits, block.checksum)
                assert node.depth == len(self.oracle.path(slot)) - 1


def bounded(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


def test_short_histories() -> None:
    run_state_machine_as_test(TierHistory, settings=bounded(examples=80, steps=50))


@pytest.mark.slow
def test_long_histories() -> None:
    run_state_machine_as_test(TierHistory, settings=bounded(examples=budget(2000), steps=100))
