"""Runs that a client finds and pins in shared memory: the ring, the version of the table, and loads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fdcache._core import BlockList, LoadingRuns, PresenceTable, PresenceWriter, RunRing, SharedRuns, Tier
from fdcache.metadata import CacheLevel
from fdcache.service.server.host_pool import HostPool
from fdcache.tiers.pool import BlockPool
from tests.unit.test_shared_memory import ROOT, memory, path, rows, store

A, B = path("a", 8), path("b", 8)
SMALL_RING = 128 + 16 * 4 + 32 * 10


class Shared:
    """A tier of 16 slots with path A in it, its table, and one client."""

    def __init__(self, ring: int = 1 << 12) -> None:
        self.tier, self.table = Tier(16), memory(16)
        self.tier.mirror(self.table)
        self.lease = self.tier.open_lease()
        store(self.tier, self.lease, ROOT, A)
        self.memory = np.zeros(ring, np.uint8)
        self.writer = PresenceWriter(self.table)
        self.ring = RunRing(self.memory)
        self.runs = SharedRuns(PresenceTable(self.table), self.memory)

    def pin(self, *keys: bytes, start: int = 0) -> int:
        hashes = rows(*keys)
        return self.runs.pin(hashes, self.runs.find(hashes, start))

    def records(self) -> list[tuple[int, int, list[bytes]]]:
        taken = self.ring.take()
        for _, start, hashes in taken:
            assert not hashes[:start].any()
        return [(run, start, [row.tobytes() for row in hashes[start:]]) for run, start, hashes in taken]


@pytest.fixture
def shared() -> Shared:
    return Shared()


class TestFind:
    @pytest.mark.parametrize(("start", "size"), [(0, 8), (3, 5), (8, 0)])
    def test_it_names_the_slots_and_generations_of_the_tier(
        self, shared: Shared, start: int, size: int
    ) -> None:
        found = shared.runs.find(rows(*A, *B[:2]), start)
        there = shared.tier.find(rows(*A[start:]))
        assert len(found) == size
        assert found.slots.tolist() == there.slots.tolist()
        assert found.generations.tolist() == there.generations.tolist()
        assert found.unverified is None

    def test_it_marks_unverified_blocks(self, shared: Shared) -> None:
        shared.writer.set_unverified(rows(A[2], A[5], B[0]), True)
        there = shared.tier.find(rows(*A))
        found = shared.runs.find(rows(*A), 1)
        assert found.unverified is not None
        assert found.unverified.tolist() == [0, 1, 0, 0, 1, 0, 0]
        assert found.slots.tolist() == there.slots[1:].tolist()
        assert found.generations.tolist() == there.generations[1:].tolist()
        shared.writer.set_unverified(rows(A[2], A[5]), False)
        assert shared.runs.find(rows(*A), 1).unverified is None

    def test_a_path_that_is_absent_has_no_run(self, shared: Shared) -> None:
        assert len(shared.runs.find(rows(*B), 0)) == 0
        assert shared.pin(*B) == 0
        assert shared.records() == []

    def test_arrays_outlive_the_run_that_they_are_from(self, shared: Shared) -> None:
        slots = shared.runs.find(rows(*A), 0).slots
        assert slots.tolist() == shared.tier.find(rows(*A)).slots.tolist()


class TestPin:
    def test_pins_and_unpins_are_read_in_order(self, shared: Shared) -> None:
        first, second = shared.pin(*A[:3]), shared.pin(*A, start=6)
        shared.runs.unpin(first)
        third = shared.runs.next_number()
        assert len({0, first, second, third}) == 4
        assert shared.records() == [(first, 0, A[:3]), (second, 6, A[6:]), (first, 0, [])]
        assert shared.records() == []

    def test_a_closed_table_pins_nothing_until_it_is_opened(self, shared: Shared) -> None:
        for _ in range(2):
            shared.writer.close()
            assert len(shared.runs.find(rows(*A), 0)) == 8
            assert shared.pin(*A) == 0
        assert shared.records() == []
        for _ in range(2):
            shared.writer.open()
            assert shared.pin(*A)
        assert len(shared.records()) == 2

    @pytest.mark.parametrize("change", ["close", "close and open", "remove", "clear"])
    def test_what_was_found_before_a_removal_is_not_pinned(self, shared: Shared, change: str) -> None:
        hashes = rows(*A)
        found = shared.runs.find(hashes, 0)
        if change == "remove":
            shared.tier.drop(rows(A[7]))
        elif change == "clear":
            shared.tier.reset()
        else:
            shared.writer.close()
        if change == "close and open":
            shared.writer.open()
        assert shared.runs.pin(hashes, found) == 0
        (pinned, _, _), (unpinned, _, _) = shared.records()
        assert pinned == unpinned

    def test_blocks_that_come_later_do_not_hinder(self, shared: Shared) -> None:
        hashes = rows(*A)
        found = shared.runs.find(hashes, 0)
        store(shared.tier, shared.lease, ROOT, B[:4])
        assert shared.runs.pin(hashes, found)

    def test_a_run_of_a_longer_path_is_refused(self, shared: Shared) -> None:
        with pytest.raises(ValueError, match="longer path"):
            shared.runs.pin(rows(*A[:5]), shared.runs.find(rows(*A), 0))


class TestRing:
    def test_records_go_round_the_ring(self) -> None:
        shared = Shared(SMALL_RING)
        for turn in range(100):
            size = 1 + turn % 8
            run = shared.pin(*A[:size])
            assert run
            shared.runs.unpin(run)
            assert shared.records() == [(run, 0, A[:size]), (run, 0, [])]

    def test_a_full_ring_pins_nothing_and_delays_what_is_unpinned(self) -> None:
        shared = Shared(SMALL_RING)
        first = shared.pin(*A)
        assert first
        assert shared.pin(*A) == 0
        pinned = [shared.runs.next_number() for _ in range(12)]
        for run in pinned:
            shared.runs.unpin(run)
        assert shared.pin(A[0]) == 0
        unpinned = [run for run, _, _ in shared.records()[1:]]
        assert len(unpinned) < 12
        shared.runs.flush()
        unpinned += [run for run, _, _ in shared.records()]
        assert unpinned == pinned
        assert shared.pin(*A)

    def test_a_closed_ring_takes_nothing(self, shared: Shared) -> None:
        shared.ring.close()
        assert shared.pin(*A) == 0
        shared.runs.unpin(5)
        assert shared.records() == []

    @pytest.mark.parametrize(
        ("written", "start", "count"),
        [(15, 0, 0), (2**63, 0, 0), (1 << 12, 0, 0), (16, 0, 1), (48, 2**17, 1), (16, 0, 2**32 - 1)],
    )
    def test_a_record_that_no_client_writes_is_refused(
        self, shared: Shared, written: int, start: int, count: int
    ) -> None:
        shared.memory[:8].view(np.uint64)[0] = written
        shared.memory[128:136].view(np.uint64)[0] = 1
        shared.memory[136:144].view(np.uint32)[:] = start, count
        for _ in range(2):
            with pytest.raises(ValueError, match="ring"):
                shared.ring.take()

    def test_sound_records_before_a_bad_one_count(self, shared: Shared) -> None:
        run = shared.pin(*A)
        shared.memory[:8].view(np.uint64)[0] += np.uint64(8)
        assert shared.records() == [(run, 0, A)]
        with pytest.raises(ValueError, match="ring"):
            shared.ring.take()

    @pytest.mark.parametrize("size", [0, 128, 143, 145])
    def test_memory_of_a_wrong_size_is_refused(self, size: int) -> None:
        with pytest.raises(ValueError, match="ring"):
            RunRing(np.zeros(size, np.uint8))


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class TestLoads:
    def test_a_run_is_read_until_its_last_slot_has_ended(self) -> None:
        loads = LoadingRuns()
        loads.begin(1, ints(4, 5, 6))
        loads.begin(2, ints(7))
        assert (len(loads), 1 in loads, 2 in loads, 3 in loads) == (4, True, True, False)
        assert loads.end(ints(6, 4)) == [1]
        assert 1 in loads
        assert sorted(loads.end(ints(7, 5))) == [1, 2]
        assert (len(loads), 1 in loads, 2 in loads) == (0, False, False)

    def test_a_slot_that_two_runs_pin_ends_once_for_each(self) -> None:
        loads = LoadingRuns()
        loads.begin(1, ints(4))
        loads.begin(2, ints(4))
        (first,) = loads.end(ints(4))
        (second,) = loads.end(ints(4))
        assert {first, second} == {1, 2}
        assert len(loads) == 0

    def test_a_slot_that_no_load_reads_is_refused(self) -> None:
        loads = LoadingRuns()
        loads.begin(1, ints(4))
        with pytest.raises(IndexError, match="slot 5"):
            loads.end(ints(4, 5))
        assert (len(loads), 1 in loads) == (1, True)


def end_of_bad_load(pool: HostPool, found: BlockList) -> None:
    pool.hold(found.slots)
    pool.end_load(found.slots, found.hashes, np.zeros(1, np.uint8), np.ones(1, np.uint8))


REMOVALS: dict[str, Callable[[HostPool], object]] = {
    "reserve": lambda pool: pool.reserve(pool.open_lease(), 4),
    "evict_copied": lambda pool: pool.evict_copied(0),
    "reserve_copies": lambda pool: pool.reserve_copies(0, rows(ROOT), rows(B[0])),
    "publish": lambda pool: pool.publish(
        pool.open_lease(), rows(), rows(), ints(), np.empty(0, np.uint8), np.empty(0, np.uint64)
    ),
    "drop": lambda pool: pool.drop(rows(A[0])),
    "discard": lambda pool: pool.discard(pool.find(rows(A[7])).slots),
    "end_load": lambda pool: end_of_bad_load(pool, pool.find(rows(A[7]))),
    "reset": lambda pool: pool.reset(),
    "resize": lambda pool: pool.resize(4),
}


class TestHostPool:
    """Whatever removes blocks reads the rings first, while no client can pin."""

    @pytest.mark.parametrize("removal", REMOVALS)
    @pytest.mark.parametrize("is_open", [True, False])
    def test_a_removal_closes_the_table_and_reads_the_rings(self, removal: str, is_open: bool) -> None:
        table = memory(8)
        runs = SharedRuns(PresenceTable(table), np.zeros(1 << 12, np.uint8))
        seen: list[tuple[int, int]] = []

        def take_runs() -> None:
            seen.append((runs.pin(hashes, runs.find(hashes, 0)), len(runs.find(hashes, 0))))

        pool = HostPool(8, 0, PresenceWriter(table), lambda: None)
        pool.mirror(table)
        lease = pool.open_lease()
        store(pool, lease, ROOT, A)
        pool.release(lease)
        hashes = rows(*A)
        pool.open_table(is_open)
        pool._take_runs = take_runs
        REMOVALS[removal](pool)
        assert seen == [(0, 8)]
        left = runs.find(hashes, 0)
        assert bool(runs.pin(hashes, left)) == (is_open and len(left) > 0)

    def test_every_other_call_of_a_tier_keeps_the_blocks(self) -> None:
        removing = {name for name in vars(HostPool) if not name.startswith("_")} - {
            "open_table",
            "move_table",
        }
        assert removing == set(REMOVALS)
        keeping = {
            "above_copies", "ancestry", "available", "awaited", "begin_load", "begin_load_of", "below", "cancel_load",
            "capacity", "check_integrity", "coldest", "commit", "complete", "contains", "drop_orphans", "find",
            "find_and_pin", "finish", "free_among", "give_back", "hint", "hint_fates", "hold", "hold_ready",
            "hottest", "idle", "load_reuse", "match", "mirror", "node", "num_orphans", "open_lease", "quarantine",
            "record_events", "release", "restore", "reuse", "room", "save_reuse", "set_above",
            "set_below", "set_clock", "set_states", "set_tenant_limit", "starting_with", "stats", "take_event_bytes",
            "take_events", "tenant_entries", "unhold", "withhold",
        }  # fmt: skip
        public = {name for name in dir(BlockPool(CacheLevel.HOST, 1)) if not name.startswith("_")}
        own = {"hottest_paths", "level", "loading_from_storage", "nodes", "usage", "verify"}
        assert public - own == removing | keeping
