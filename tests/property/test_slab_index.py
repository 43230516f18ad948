"""A connector over a slab file against a simple model: puts, gets, deletes, damage, restarts, clears."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fdcache.metadata import HashArray
from fdcache.storage.connector import Outcome
from fdcache.testing.storage import KnownRecords, conformance_layout
from tests.local_connector import LocalConnector
from tests.storage_help import open_store
from tests.tier_help import chain, hashes

LAYOUT = conformance_layout()
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)

Path_ = tuple[int, ...]


class SlabIndexMachine(RuleBasedStateMachine):
    """Blocks are paths of a binary tree; the file has room for all of them."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fdcache-test"))
        self.records = KnownRecords(LAYOUT, 8)
        self.stored: set[Path_] = set()
        self.orphans: set[Path_] = set()
        self.damaged: set[Path_] = set()
        self.open()

    def open(self) -> None:
        self.connector = LocalConnector(open_store(self.folder, LAYOUT, size=1 << 20))

    def teardown(self) -> None:
        if hasattr(self, "connector"):
            self.connector.close()
            shutil.rmtree(self.folder)

    def forget_below(self, path: Path_) -> None:
        self.stored = {one for one in self.stored if one[: len(path)] != path}
        self.damaged &= self.stored | self.orphans

    def lose(self, path: Path_) -> None:
        """Forget a block; those below it wait for it."""
        below = {one for one in self.stored if one[: len(path)] == path}
        self.stored -= below
        self.orphans = (self.orphans | below) - {path}
        self.damaged.discard(path)

    def adopt(self) -> None:
        while joined := {one for one in self.orphans if one[:-1] in self.stored}:
            self.stored |= joined
            self.orphans -= joined

    def rows(self, path: Path_) -> HashArray:
        return hashes(chain(*path))

    @rule(path=PATHS)
    def put(self, path: Path_) -> None:
        result = self.connector.put(self.records.fill(self.rows(path)), 10)
        assert result.ok.all()
        self.stored |= {path[: depth + 1] for depth in range(len(path))}
        self.orphans -= self.stored
        self.adopt()

    @rule(path=PATHS)
    def get(self, path: Path_) -> None:
        self.records.wipe()
        rows = self.rows(path)
        result = self.connector.get(self.records.batch(rows), 10)
        expected = []
        for depth in range(len(path)):
            prefix = path[: depth + 1]
            if prefix not in self.stored:
                expected.append(Outcome.MISS)
            elif prefix in self.damaged:
                expected.append(Outcome.CORRUPT)
            else:
                expected.append(Outcome.OK)
                assert self.records.holds(depth, rows[depth].tobytes())
        assert result.outcomes.tolist() == expected
        for depth, outcome in enumerate(expected):
            if outcome is Outcome.CORRUPT:
                self.lose(path[: depth + 1])

    @rule(path=PATHS)
    def delete(self, path: Path_) -> None:
        result = self.connector.delete(self.rows(path)[-1:], 10)
        assert result.outcomes.tolist() == [Outcome.OK if path in self.stored else Outcome.MISS]
        self.forget_below(path)

    @rule(path=PATHS, at=st.integers(0, 200))
    def damage(self, path: Path_, at: int) -> None:
        if path not in self.stored or path in self.damaged:
            return
        slot = int(self.connector.pool.find(self.rows(path)[-1:]).slots[0])
        store = self.connector.store
        with store.path.open("r+b") as file:
            offset = store.file.superblock.record_offset + slot * LAYOUT.record_bytes + at
            byte = os.pread(file.fileno(), 1, offset)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), offset)
        self.damaged.add(path)

    @rule()
    def restart(self) -> None:
        self.connector.close()
        self.open()

    @rule()
    def clear(self) -> None:
        assert self.connector.clear(10) >= len(self.stored)
        self.stored.clear()
        self.orphans.clear()
        self.damaged.clear()

    @invariant()
    def the_index_is_the_model(self) -> None:
        if not hasattr(self, "connector"):
            return
        assert self.connector.pool.check_integrity() == []
        assert self.connector.pool.stats().ready == len(self.stored)
        assert self.connector.pool.stats().orphans == len(self.orphans)
        for path in self.stored:
            assert self.connector.exists(self.rows(path), 10).length == len(path)


TestSlabIndex = SlabIndexMachine.TestCase
TestSlabIndex.settings = settings(max_examples=40, stateful_step_count=25)
