"""The manager, its host tier and its storage against the model engine: failed reads and writes, rot, cold starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from fdcache.errors import StorageError
from fdcache.layout import KVLayout
from fdcache.manager import CacheManager, MatchStatus
from fdcache.metadata import SwapPurpose
from fdcache.settings.cache import CacheSettings, PrefetchPolicy, StorageTierSettings, WritePolicy
from fdcache.storage.slab_format import slots_for
from fdcache.tiers.pool import READY
from fdcache.tiers.storage_index import LocalIndex
from fdcache.tiers.storage_reads import GroupSize
from tests.property.engine_model import BLOCK, Engine
from tests.property.test_manager import ManagerMachine, bounded
from tests.seeds import budget

_STORAGE = (SwapPurpose.STORE, SwapPurpose.PREFETCH)
_NONE = frozenset[int]()
_fails = st.sampled_from([_NONE] * 8 + [frozenset({0}), frozenset({1}), frozenset({2, 3}), frozenset({4})])
_paths = st.sampled_from(["00101", "00110", "0011", "11"]).map(
    lambda path: (*(int(block) for block in path for _ in range(BLOCK)), 1)
)


def storage_of(layout: KVLayout, blocks: int, **others: Any) -> StorageTierSettings:
    """Return the settings of local storage of ``blocks`` blocks."""
    size = layout.record_bytes
    while True:
        try:
            if slots_for(size, layout) >= blocks:
                break
        except StorageError:
            pass
        size += layout.record_bytes
    return StorageTierSettings(connector="local", directory=Path("/nowhere"), size=size, **others)


class Reads(GroupSize):
    """Reads of one size."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(lambda: 0.0)
        self.nbytes = nbytes

    def of(self, nbytes: int) -> int:
        return self.nbytes


class StorageMachine(ManagerMachine):
    """All of that, with a file below the host tier of every rank."""

    @initialize(
        ranks=st.integers(1, 2),
        device_blocks=st.integers(5, 10),
        host_blocks=st.sampled_from([3, 6, 12, 30]),
        policy=st.sampled_from(WritePolicy),
        threshold=st.integers(1, 2),
        clean_reserve=st.integers(1, 4),
        grid=st.sampled_from([1, 1, 2, 3]),
        lookahead=st.sampled_from([0, 0, 1, 2, BLOCK + 1]),
        defer_timeout=st.sampled_from([2.0, 2.0, 0.0]),
        storage_blocks=st.sampled_from([2, 6, 14, 40]),
        before=st.lists(_paths, max_size=3),
        terms=st.fixed_dictionaries(
            {"prefetch_policy": st.sampled_from(PrefetchPolicy), "write_blocks": st.sampled_from([1, 3, 64])}
        ),
        read_blocks=st.sampled_from([1, 2, 64]),
    )
    def start(
        self,
        storage_blocks: int,
        before: list[tuple[int, ...]],
        terms: dict[str, Any],
        read_blocks: int,
        **shape: Any,
    ) -> None:
        self.storage_blocks = storage_blocks
        self.read_blocks = read_blocks
        self.terms = terms
        self.begin(**shape)
        self.restore()
        for prompt in before:
            self.serve_one(prompt, frozenset)
        if before:
            self.kill()

    def make_manager(self, cache: CacheSettings, layout: KVLayout) -> CacheManager:
        self.cache = cache
        tier = storage_of(
            layout, self.storage_blocks, prefetch_timeout=2.0, timeout=2.0, retry_after=0.0, **self.terms
        )
        manager = CacheManager(cache, layout, storage=tier, clock=lambda: self.now)
        assert manager._tiers.storage is not None
        manager._tiers.storage.reads._group = Reads(self.read_blocks * layout.record_bytes * layout.tp_size)
        return manager

    @property
    def index(self) -> LocalIndex:
        tier = self.engine.manager._tiers.storage
        assert tier is not None and isinstance(tier.index, LocalIndex)
        return tier.index

    def restore(self) -> None:
        """Restore the files of every rank."""
        manager = self.engine.manager
        scans = [rank.disk.scan(rank.index, self.storage_blocks) for rank in self.engine.ranks]
        manager.restore_storage(scans)

    def work_elsewhere(self, data: st.DataObject) -> None:
        for rank in self.engine.ranks:
            for purpose in data.draw(st.permutations(_STORAGE)):
                self.engine.execute_storage(rank, purpose, data.draw(_fails))

    @rule(data=st.data(), prompts=st.lists(_paths, min_size=1, max_size=3), cold=st.booleans())
    def live(self, data: st.DataObject, prompts: list[tuple[int, ...]], cold: bool) -> None:
        """Run requests from arrival to end and store their blocks. ``cold``: only storage has earlier blocks."""
        if cold:
            self.forget_what_is_above()
        for prompt in prompts:
            self.serve_one(prompt, lambda: data.draw(_fails))

    def serve_one(self, tokens: tuple[int, ...], fails: Callable[[], frozenset[int]]) -> None:
        engine = self.engine
        engine.submit(tokens)
        job = engine.jobs[-1]
        engine.manager.begin([job.request])
        for _ in range(12):
            engine.schedule([job], 24)
            for rank in engine.ranks:
                failing = fails()
                while rank.queue:
                    engine.execute(rank, failing)
                for purpose in _STORAGE:
                    engine.execute_storage(rank, purpose, fails())
            while engine.reports:
                engine.deliver(0)
            while engine.steps and len(engine.steps[0].executed_by) == len(engine.ranks):
                engine.accept_oldest()
        engine.finish(job)

    @rule(rank=st.integers(0, 1), purpose=st.sampled_from(_STORAGE), fails=_fails, count=st.integers(1, 3))
    def use_disk(self, rank: int, purpose: SwapPurpose, fails: frozenset[int], count: int) -> None:
        worker = self.engine.ranks[rank % len(self.engine.ranks)]
        for _ in range(count):
            self.engine.execute_storage(worker, purpose, fails)

    @rule(rank=st.integers(0, 1), pick=st.integers(0, 40))
    def rot(self, rank: int, pick: int) -> None:
        self.engine.ranks[rank % len(self.engine.ranks)].disk.rot(pick)

    @rule(rank=st.integers(0, 1), slot=st.integers(0, 40))
    def wear_out(self, rank: int, slot: int) -> None:
        """Break a slot of a rank's file."""
        self.engine.ranks[rank % len(self.engine.ranks)].disk.bad.add(slot)

    @rule(rank=st.integers(0, 1), room=st.sampled_from([0, 1, 3, 5, 9, None, None]))
    def change_room(self, rank: int, room: int | None) -> None:
        """Fill the disk, or make room on it."""
        self.engine.ranks[rank % len(self.engine.ranks)].disk.room = room

    @precondition(lambda self: self.engine.jobs)
    @rule(pick=st.integers(0, 5))
    def prefetch(self, pick: int) -> None:
        self.engine.manager.begin([self.job(pick).request])

    @precondition(lambda self: not self.index.is_open)
    @rule()
    def restore_after_loss(self) -> None:
        self.restore()

    @rule()
    def forget_what_is_above(self) -> None:
        """Reset device and host: only storage keeps the blocks."""
        manager = self.engine.manager
        manager._reset_device()
        assert manager._host is not None
        manager._host.reset()

    @precondition(lambda self: self.disturbances < 3)
    @rule()
    def kill(self) -> None:
        """Kill the engine and all its ranks with copies in flight; another engine finds the files."""
        self.disturbances += 1
        former = self.engine
        self.engine = Engine(self.make_manager(self.cache, former.manager.layout), len(former.ranks))
        for rank, dead in zip(self.engine.ranks, former.ranks, strict=True):
            rank.disk = dead.disk.reopened()
        self.restore()
        for job in former.jobs:
            self.engine.submit(job.tokens)

    def come_to_rest(self) -> None:
        if not self.index.is_open:
            self.restore()
        manager = self.engine.manager
        for _ in range(200):
            super().come_to_rest()
            stats = manager.get_stats()
            if not (stats.plans_in_flight or stats.queued_stores or stats.queued_backups):
                return
        raise AssertionError("copies never end")

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.every_request_gets_its_turn()
        super().teardown()
        storage = self.engine.manager.get_stats().storage
        assert storage is not None
        assert (storage.pins, storage.holds, storage.leases) == (0, 0, 0)
        assert storage.writing == storage.quarantined + storage.withheld + storage.orphans
        assert storage.free + storage.evictable + storage.writing == storage.blocks
        reads = self.engine.manager._tiers.storage.reads  # type: ignore[union-attr]
        assert reads.blocks_in_flight == 0
        assert reads.take_unneeded() == ()
        reads.advance()
        assert reads.is_idle
        self.every_entry_is_in_every_file()
        self.no_orphan_waits_for_a_block_that_the_host_has()

    def no_orphan_waits_for_a_block_that_the_host_has(self) -> None:
        host = self.engine.manager._host
        if host is None or any(rank.disk.room is not None for rank in self.engine.ranks):
            return
        for _ in range(20):
            if not self.index.has_room or not (host.index.contains(self.index.awaited(1000)) == READY).any():
                return
            self.come_to_rest()
        raise AssertionError("a block that others in the storage wait for is not stored")

    def every_request_gets_its_turn(self) -> None:
        """With any policy and any failures, each request is matched once the disks have worked."""
        for job in list(self.engine.jobs):
            self.engine.stop(job)
        self.come_to_rest()
        for job in list(self.engine.jobs):
            for _ in range(30):
                result = self.engine.manager.match_prefix([job.request])[0]
                if result.status is MatchStatus.MATCHED:
                    break
                self.engine.schedule([], 1)
                self.engine.drain()
            else:
                raise AssertionError("a request waits for a read that has ended")
            self.engine.finish(job)

    def every_entry_is_in_every_file(self) -> None:
        """The slot of every entry holds its block in every rank's file, damaged or not."""
        pool = self.index.pool
        for node in pool.nodes(range(pool.stats().slots)):
            for rank in self.engine.ranks:
                assert node.block_id not in rank.disk.told_bad, "a slot is used again that is bad"
                stored = rank.disk.slots.get(node.block_id)
                assert stored is not None, f"rank {rank.index} has nothing in slot {node.block_id}"
                assert (stored.generation, stored.block) == (node.generation, node.hash_value)


def test_blocks_come_back_from_storage_right_or_not_at_all() -> None:
    run_state_machine_as_test(StorageMachine, settings=bounded(examples=budget(500), steps=30))


@pytest.mark.slow
def test_blocks_come_back_from_storage_right_or_not_at_all_in_long_histories() -> None:
    run_state_machine_as_test(StorageMachine, settings=bounded(examples=budget(800), steps=60))
