"""Runs that clients pin in shared memory: in any order of steps, what is pinned stays in its slot."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from fdcache._core import SLOT_FREE, FoundRun, PresenceTable, PresenceWriter, RunRing, SharedRuns
from fdcache.service.server.host_pool import HostPool
from tests.property.test_tier import bounded
from tests.seeds import budget
from tests.unit.test_shared_memory import ROOT, memory, path, rows

SLOTS, LENGTH = 4, 3
PATHS = [path(str(number), LENGTH) for number in range(3)]


@dataclass
class Client:
    """One client, what it has found and pinned, and the leases that the service holds for it."""

    runs: SharedRuns
    ring: RunRing
    found: list[tuple[np.ndarray, FoundRun]] = field(default_factory=list)
    pinned: dict[int, FoundRun] = field(default_factory=dict)
    leases: dict[int, int] = field(default_factory=dict)


class Pins(RuleBasedStateMachine):
    @initialize(ring=st.sampled_from([128 + 16 * 9, 1 << 12]))
    def begin(self, ring: int) -> None:
        table = memory(SLOTS)
        self.pool = HostPool(SLOTS, 0, PresenceWriter(table), self.take_runs)
        self.pool.mirror(table)
        self.clients = []
        for _ in range(2):
            shared = np.zeros(ring, np.uint8)
            self.clients.append(Client(SharedRuns(PresenceTable(table), shared), RunRing(shared)))

    @rule()
    def take_runs(self) -> None:
        """What the service does before it removes blocks, and from time to time."""
        for client in self.clients:
            client.runs.flush()
            for run, start, hashes in client.ring.take():
                if not len(hashes):
                    self.pool.release(client.leases.pop(run))
                    continue
                client.leases[run] = self.pool.open_lease()
                self.pool.match(client.leases[run], hashes, start)

    @rule(number=st.integers(0, len(PATHS) - 1))
    def store(self, number: int) -> None:
        """Store a path, which evicts others."""
        keys, lease = PATHS[number], self.pool.open_lease()
        have = len(self.pool.match(lease, rows(*keys)))
        taken = self.pool.reserve(lease, len(keys) - have)
        if not taken.missing:
            self.pool.commit(lease, keys[have - 1] if have else ROOT, rows(*keys[have:]), taken.slots)
        self.pool.release(lease)

    @rule(change=st.sampled_from(["drop", "reset", "open", "close"]), number=st.integers(0, len(PATHS) - 1))
    def change(self, change: str, number: int) -> None:
        if change == "drop":
            self.pool.drop(rows(PATHS[number][1]))
        elif change == "reset":
            self.pool.reset()
        else:
            self.pool.open_table(change == "open")

    @rule(which=st.integers(0, 1), number=st.integers(0, len(PATHS) - 1), start=st.integers(0, 2))
    def find(self, which: int, number: int, start: int) -> None:
        client, hashes = self.clients[which], rows(*PATHS[number])
        found = client.runs.find(hashes, start)
        ready = self.pool.find(hashes[start:]).slots.tolist()
        assert found.slots.tolist() == ready
        client.found.append((hashes, found))

    @rule(which=st.integers(0, 1), data=st.data())
    def pin(self, which: int, data: st.DataObject) -> None:
        """Pin what was found some time ago."""
        client = self.clients[which]
        if not client.found:
            return
        hashes, found = client.found.pop(data.draw(st.integers(0, len(client.found) - 1)))
        if run := client.runs.pin(hashes, found):
            assert len(found)
            client.pinned[run] = found

    @rule(which=st.integers(0, 1), number=st.integers(0, len(PATHS) - 1))
    def find_and_pin(self, which: int, number: int) -> None:
        client, hashes = self.clients[which], rows(*PATHS[number])
        found = client.runs.find(hashes, 0)
        if run := client.runs.pin(hashes, found):
            client.pinned[run] = found

    @rule(which=st.integers(0, 1), data=st.data())
    def unpin(self, which: int, data: st.DataObject) -> None:
        client = self.clients[which]
        if client.pinned:
            run = data.draw(st.sampled_from(sorted(client.pinned)))
            del client.pinned[run]
            client.runs.unpin(run)

    @invariant()
    def pinned_slots_have_no_other_block(self) -> None:
        for client in getattr(self, "clients", []):
            for found in client.pinned.values():
                for slot, generation in zip(found.slots.tolist(), found.generations.tolist(), strict=True):
                    node = self.pool.node(slot)
                    assert node.state != SLOT_FREE
                    assert node.generation == generation

    def teardown(self) -> None:
        if not hasattr(self, "clients"):
            return
        for client in self.clients:
            for run in client.pinned:
                client.runs.unpin(run)
        for _ in range(20):
            self.take_runs()
        assert not any(client.leases for client in self.clients)
        assert self.pool.stats().pins == 0
        assert self.pool.check_integrity() == []


def test_pinned_runs_stay_until_they_are_unpinned() -> None:
    run_state_machine_as_test(Pins, settings=bounded(examples=60, steps=40))


@pytest.mark.slow
def test_pinned_runs_stay_until_they_are_unpinned_at_length() -> None:
    run_state_machine_as_test(Pins, settings=bounded(examples=budget(2000), steps=100))
