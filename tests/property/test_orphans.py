"""Orphans of a storage pool against a model: any history of stores, lost blocks, reads in flight and restarts."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from fdcache.metadata import HashArray, Int32Array, StorageScan
from fdcache.tiers.pool import READY, RESERVED
from fdcache.tiers.storage_index import StoragePool, restore
from tests.property.test_manager import bounded
from tests.seeds import budget
from tests.tier_help import chain, hashes

Path_ = tuple[int, ...]
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
_NOT, _YES = np.array([False]), np.array([True])


def rows(path: Path_) -> HashArray:
    return hashes(chain(*path))


def all_paths(depth: int = 5) -> list[Path_]:
    paths: list[Path_] = [()]
    for path in paths:
        if len(path) < depth:
            paths += [(*path, 0), (*path, 1)]
    return paths[1:]


class OrphanMachine(RuleBasedStateMachine):
    """Blocks are paths of a binary tree. ``known`` are those that have a slot, ``found`` those that have all ancestors.

    In a small pool blocks are evicted, and only what holds in any case is checked.
    """

    @initialize(slots=st.sampled_from([6, 12, 80]))
    def start(self, slots: int) -> None:
        self.slots = slots
        self.pool = StoragePool(slots)
        self.known: set[Path_] = set()
        self.stores: Counter[Path_] = Counter()
        self.bad = 0
        self.reading: list[tuple[Path_, int, Int32Array]] = []

    @property
    def is_large(self) -> bool:
        return self.slots == 80

    def found(self) -> set[Path_]:
        return {
            path for path in self.known if all(path[:depth] in self.known for depth in range(1, len(path)))
        }

    @rule(path=PATHS)
    def store(self, path: Path_) -> None:
        block = rows(path)
        parents = np.concatenate((np.zeros((1, 32), np.uint8), block[:-1]))
        for _ in range(len(path) + 1):
            taken = self.pool.reserve_copies(0, parents, block)
            if taken.missing or not (taken.status == RESERVED).any():
                break
            count = len(taken.slots)
            self.pool.complete(taken.slots, np.ones(count, np.uint8), np.zeros(count, np.uint64))
        if self.is_large:
            new = {path[: depth + 1] for depth in range(len(path))} - self.known
            self.known |= new
            self.stores.update(new)

    @rule(path=PATHS)
    def read(self, path: Path_) -> None:
        slots = self.pool.find(rows(path)[-1:]).slots
        if len(slots):
            self.pool.hold(slots)
            self.reading.append((path, self.stores[path], slots))

    @rule(pick=st.integers(0, 5), bad=st.booleans())
    def lose(self, pick: int, bad: bool) -> None:
        """End a read: its block is lost, though it may have been lost or become an orphan meanwhile."""
        if not self.reading:
            return
        path, number, slots = self.reading.pop(pick % len(self.reading))
        bad = bad and self.bad < 3
        before = self.pool.usage().quarantined
        self.pool.end_reads(slots, _NOT if bad else _YES, _YES if bad else _NOT)
        self.bad += self.pool.usage().quarantined - before
        if self.stores[path] == number:  # else it was lost before, and is in another slot by now
            self.known.discard(path)

    @rule(pick=st.integers(0, 5))
    def end_read(self, pick: int) -> None:
        if self.reading:
            *_, slots = self.reading.pop(pick % len(self.reading))
            self.pool.end_reads(slots, _NOT, _NOT)

    @rule(lost=st.sets(PATHS, max_size=3))
    def restart(self, lost: set[Path_]) -> None:
        """Enter what a file of all known blocks has, without some of them."""
        if not self.is_large:
            return
        self.known -= lost
        kept = sorted(self.known)
        self.pool, self.reading, self.bad = StoragePool(self.slots), [], 0
        blocks = [chain(*path)[-1] for path in kept]
        parents = [chain(*path)[-2] if len(path) > 1 else bytes(32) for path in kept]
        scan = StorageScan(
            rank=0,
            capacity=self.slots,
            slots=np.arange(len(kept), dtype=np.int32),
            generations=np.ones(len(kept), np.uint32),
            hashes=hashes(blocks),
            parents=hashes(parents),
            checksums=np.zeros(len(kept), np.uint64),
            written_ms=np.arange(len(kept), dtype=np.uint64),
        )
        assert restore(self.pool, [scan]) == len(self.found())

    @invariant()
    def the_pool_is_sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.verify()
        usage = self.pool.usage()
        assert usage.free + usage.ready + usage.writing == self.slots
        for path in all_paths():
            present = self.pool.contains(rows(path)) == READY
            assert present[: present.sum()].all(), "a block can be found below one that cannot"
        if self.is_large:
            found = self.found()
            assert (usage.ready, usage.orphans) == (len(found), len(self.known) - len(found))
            assert all((self.pool.contains(rows(path)) == READY).all() for path in found)
            missing = {path[:depth] for path in self.known for depth in range(1, len(path))} - self.known
            waiting = {path[:-1] for path in self.known} & missing
            assert {row.tobytes() for row in self.pool.awaited(100)} == {chain(*path)[-1] for path in waiting}


def test_orphans_are_found_once_their_ancestors_are_and_never_before() -> None:
    run_state_machine_as_test(OrphanMachine, settings=bounded(examples=budget(200), steps=30))
