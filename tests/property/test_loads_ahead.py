"""Loads ahead in any order of reads, copies, failures, aborts, resets and losses: right bytes, nothing is left held.

The host tier and its storage are of the engine's own process, or of a service.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fdcache.controller.cache_controller import CacheController
from fdcache.manager import CacheManager, LoadOutcome, LoadStatus, MatchStatus, Request
from fdcache.metadata import SwapPurpose
from fdcache.settings.cache import PrefetchPolicy, WritePolicy
from fdcache.tiers import storage_reads
from tests import service_engine, storage_engine
from tests.prefetch_stage import Stage, prefetch_stage
from tests.seeds import budget
from tests.service_help import until

TURN = ("read", "report", "match", "send")
BLOCKS = 8


class Run(ABC):
    """A request for a stored path of an engine whose disk serves one read of two blocks at a time."""

    faults: ClassVar[tuple[str, ...]]
    prompt: list[int]
    record_bytes: ClassVar[int]

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.request = Request("0", self.prompt)
        self.others = 0

    @property
    def manager(self) -> CacheManager:
        manager: CacheManager = self.engine.manager
        return manager

    @property
    @abstractmethod
    def rank(self) -> CacheController:
        """The worker."""

    @abstractmethod
    def check(self, blocks: int) -> None:
        """Compare the leading blocks of the request on the device."""

    @abstractmethod
    def compute(self, reused: int) -> None:
        """Write the blocks of the request after those that are reused, and publish all."""

    def match(self) -> None:
        """Match the request and, if it need not wait, run it to its end; then another comes."""
        manager, request = self.manager, self.request
        (match,) = manager.match_prefix([request])
        if match.status is MatchStatus.DEFERRED:
            return
        (allocation,) = manager.allocate_device_blocks([(request, request.num_tokens)])
        if allocation.ok:  # copies in flight hold too many blocks otherwise
            reused = match.num_cached_tokens
            for outcome in self.load():
                if outcome.request_id == request.request_id and outcome.status is not LoadStatus.CONFIRMED:
                    reused = outcome.recompute_from
            event(f"{match.num_ahead_blocks} blocks ahead")
            blocks = reused // manager.layout.block_size
            self.check(blocks)
            self.compute(blocks)
        self.abort()

    def load(self) -> list[LoadOutcome]:
        """Send the plans of the step, and others until the request loads nothing any more; return how loads ended."""
        self.send()
        outcomes: list[LoadOutcome] = []
        while self.request.is_loading:
            outcomes += self.manager.apply(self.rank.wait_reports(30))
            self.send()
        return outcomes

    def abort(self) -> None:
        self.manager.finish([self.request])
        self.others += 1
        self.request = Request(str(self.others), self.prompt)

    def send(self, *, refuses: bool = False) -> None:
        for plan in self.manager.take_plans():
            if refuses and plan.is_ahead:
                self.rank.refuse(plan, "refused")
            else:
                self.rank.submit_swap_tasks(plan)

    def refuse(self) -> None:
        self.send(refuses=True)

    def report(self) -> None:
        self.manager.apply(self.rank.poll())

    @abstractmethod
    def read(self) -> None:
        """Serve one read, if one waits."""

    def other(self) -> None:
        """Another request needs most of the device for a moment."""
        size = self.manager.layout.block_size
        tokens = [5000 + 100 * self.others + index for index in range(26 * size)]
        other = Request(f"other {self.others}", tokens)
        self.others += 1
        if self.manager.match_prefix([other])[0].status is MatchStatus.MATCHED:
            self.manager.allocate_device_blocks([(other, len(tokens))])
        self.manager.finish([other])

    def step(self, name: str) -> None:
        getattr(self, name.replace(" ", "_"))()
        self.manager.check_integrity()

    @abstractmethod
    def close(self) -> None:
        """End everything: nothing may be held then."""


class OwnHost(Run):
    """The host tier and its storage are of this process."""

    faults = ("fail a read", "refuse", "other", "abort", "late", "reset")
    prompt = storage_engine.tokens_of(1, BLOCKS)
    record_bytes = storage_engine.LAYOUT.record_bytes

    def __init__(self, folder: Path, policy: WritePolicy) -> None:
        super().__init__(storage_engine.Engine(folder, write_policy=policy))
        self.disk = storage_engine.Disk(self.engine)

    @property
    def rank(self) -> CacheController:
        controller: CacheController = self.engine.controller
        return controller

    def check(self, blocks: int) -> None:
        self.engine.check(self.request, blocks)

    def compute(self, reused: int) -> None:
        self.engine.compute(self.request, self.request.num_tokens)

    def read(self, *, fails: bool = False) -> None:
        store, queue = self.engine.store, self.rank._parts.storage
        assert queue is not None
        transfers = [each for each in queue._transfers.values() if each.purpose is SwapPurpose.PREFETCH]
        oldest = next((each for each in transfers if not each.done.query()), None)
        if oldest is not None:
            store.fails = fails
            store.allow(1)
            assert oldest.done.wait(60)
            store.fails = False

    def fail_a_read(self) -> None:
        self.read(fails=True)

    def late(self) -> None:
        self.engine.now += 3.0

    def reset(self) -> None:
        self.manager.reset_cache()

    def close(self) -> None:
        self.abort()
        self.engine.close()


class ServiceHost(Run):
    """The host tier and its storage are of a service."""

    faults = (
        *("bad record", "refuse", "other", "abort", "reset device", "reset host", "lose rank"),
        *("lose service", "leave", "late"),
    )
    prompt = service_engine.PROMPT
    record_bytes = service_engine.layout().record_bytes

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        super().__init__(stage.engine(PrefetchPolicy.WAIT_COMPLETE))

    @property
    def rank(self) -> CacheController:
        rank: CacheController = self.engine.ranks[0]
        return rank

    def check(self, blocks: int) -> None:
        self.engine.check(self.request, self.prompt, blocks)

    def compute(self, reused: int) -> None:
        self.engine.compute(self.request, self.prompt, reused)
        self.manager.commit([(self.request, self.request.num_tokens)])

    def read(self) -> None:
        store = self.stage.store
        if len(store.reads) > store.ended:
            stop = store.ended + 1
            store.allow(1)
            until(lambda: store.ended >= stop, "the disk has read")

    def bad_record(self) -> None:
        self.stage.store.loses = {1}
        self.read()
        self.stage.store.loses = set()

    def late(self) -> None:
        self.stage.store.answer.clear()
        self.read()
        self.stage.store.answer.set()

    def leave(self) -> None:
        """Go on without the reads, as for one that is late."""
        fetches = self.manager._tiers.fetches
        assert fetches is not None
        fetches.leave(self.manager._requests.fetch_number(self.request), keep=True)

    def reset_device(self) -> None:
        self.manager._reset_device()

    def reset_host(self) -> None:
        self.stage.service.ask("reset", tier="host")

    def lose_rank(self) -> None:
        self.engine.replace_worker(0)

    def lose_service(self) -> None:
        sessions = self.manager._host.sessions  # type: ignore[union-attr]
        if sessions.session is not None:
            sessions.lose(sessions.session, "the test")

    def close(self) -> None:
        self.abort()
        self.stage.store.gate.set()

        def is_over() -> bool:
            self.engine.carry_out(self.manager.take_plans())
            self.report()
            stats = self.manager.get_stats()
            return not (stats.plans_in_flight or stats.queued_backups or self.manager.shared_blocks_in_use)

        until(is_over, "all copies have ended")
        usage = self.manager.get_stats().device
        assert (usage.pins, usage.holds, usage.leases, usage.writing) == (0, 0, 0, 0)
        self.manager.check_integrity()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a path of eight blocks."""
    folder = tmp_path_factory.mktemp("stored")
    storage_engine.store_a_path(folder)
    return folder


@contextmanager
def begun(owner: type[Run], stored: Path, policy: WritePolicy) -> Iterator[Run]:
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as name:
        patch.setattr(storage_reads, "MOST_GROUP_BYTES", 2 * owner.record_bytes)
        if owner is OwnHost:
            shutil.copytree(stored, name, dirs_exist_ok=True)
            yield OwnHost(Path(name), policy)
        else:
            with prefetch_stage(Path(name), patch) as stage:
                yield ServiceHost(stage)


@pytest.mark.parametrize("owner", [OwnHost, ServiceHost])
@given(data=st.data(), policy=st.sampled_from((WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK)))
@settings(max_examples=budget(120), deadline=None)
def test_blocks_loaded_ahead_are_right_or_not_found(
    stored: Path, owner: type[Run], data: st.DataObject, policy: WritePolicy
) -> None:
    names = (*(TURN,) * 8, *((one,) for one in (*TURN, *owner.faults)))
    steps = data.draw(st.lists(st.sampled_from(names), min_size=6, max_size=30), "steps")
    with begun(owner, stored, policy) as run:
        for step in chain(("match", "send"), *steps):
            run.step(step)
        event(f"{run.manager.get_stats().counters.blocks_loaded_ahead} loaded ahead of {BLOCKS}")
        run.close()
