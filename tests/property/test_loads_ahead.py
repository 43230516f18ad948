"""Loads ahead in any order of reads, copies, failures, aborts and resets: right bytes, and nothing is left held."""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fdcache.manager import LoadStatus, MatchStatus, Request
from fdcache.metadata import SwapPurpose
from fdcache.settings.cache import WritePolicy
from fdcache.tiers import storage_reads
from tests.seeds import budget
from tests.storage_engine import BLOCK, LAYOUT, Disk, Engine, counters, store_a_path, tokens_of

BLOCKS = 8
TURN = ("read", "report", "match", "send")
FAULTS = ("fail a read", "refuse", "other", "abort", "late", "reset")
STEPS = (*(TURN,) * 8, *((one,) for one in (*TURN, *FAULTS)))


class Run:
    """A request for a stored path of an engine whose disk serves one read of two blocks at a time."""

    def __init__(self, folder: Path, policy: WritePolicy) -> None:
        self.engine = Engine(folder, write_policy=policy)
        self.disk = Disk(self.engine)
        self.request = Request("0", tokens_of(1, BLOCKS))
        self.others = 0

    def match(self) -> None:
        """Match the request and, if it need not wait, run it to its end; then another comes."""
        engine, request = self.engine, self.request
        match = engine.match(request)
        if match.status is MatchStatus.DEFERRED:
            return
        if not engine.allocate(request).ok:  # copies in flight hold too many blocks
            self.abort()
            return
        reused = match.num_cached_tokens
        while request.is_loading:
            self.send()
            for outcome in engine.manager.apply(engine.controller.wait_reports(30)):
                assert outcome.request_id == request.request_id
                reused = outcome.recompute_from if outcome.status is not LoadStatus.CONFIRMED else reused
        event(f"{match.num_ahead_blocks} blocks ahead")
        engine.check(request, reused // BLOCK)
        engine.compute(request, request.num_tokens)
        self.abort()

    def abort(self) -> None:
        self.engine.manager.finish([self.request])
        self.others += 1
        self.request = Request(str(self.others), tokens_of(1, BLOCKS))

    def send(self, *, refuses: bool = False) -> None:
        for plan in self.engine.manager.take_plans():
            if refuses and plan.is_ahead:
                self.engine.controller.refuse(plan, "refused")
            else:
                self.engine.controller.submit_swap_tasks(plan)

    def report(self) -> None:
        assert self.engine.manager.apply(self.engine.controller.poll()) == []

    def read(self, *, fails: bool = False) -> None:
        """Serve the oldest read, if there is one."""
        store, queue = self.engine.store, self.engine.controller._parts.storage
        assert queue is not None
        transfers = [each for each in queue._transfers.values() if each.purpose is SwapPurpose.PREFETCH]
        oldest = next((each for each in transfers if not each.done.query()), None)
        if oldest is not None:
            store.fails = fails
            store.allow(1)
            assert oldest.done.wait(60)
            store.fails = False

    def other(self) -> None:
        """Another request needs most of the device for a moment."""
        other = Request(f"other {self.others}", tokens_of(100 + self.others, 26))
        self.others += 1
        if self.engine.match(other).status is MatchStatus.MATCHED and self.engine.allocate(other).ok:
            self.engine.compute(other, other.num_tokens)
        self.engine.manager.finish([other])

    def step(self, name: str) -> None:
        match name:
            case "match":
                self.match()
            case "send":
                self.send()
            case "report":
                self.report()
            case "read":
                self.read()
            case "fail a read":
                self.read(fails=True)
            case "refuse":
                self.send(refuses=True)
            case "other":
                self.other()
            case "abort":
                self.abort()
            case "late":
                self.engine.now += 3.0
            case "reset":
                self.engine.manager.reset_cache()
        self.engine.manager.check_integrity()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a path of eight blocks."""
    folder = tmp_path_factory.mktemp("stored")
    store_a_path(folder)
    return folder


@given(
    steps=st.lists(st.sampled_from(STEPS), min_size=6, max_size=30),
    policy=st.sampled_from((WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK)),
)
@settings(max_examples=budget(120), deadline=None)
def test_blocks_loaded_ahead_are_right_or_not_found(
    stored: Path, steps: list[tuple[str, ...]], policy: WritePolicy
) -> None:
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr(storage_reads, "MOST_GROUP_BYTES", 2 * LAYOUT.record_bytes)
        shutil.copytree(stored, folder, dirs_exist_ok=True)
        run = Run(Path(folder), policy)
        for step in chain(("match", "send"), *steps):
            run.step(step)
        event(f"{counters(run.engine).blocks_loaded_ahead} loaded ahead")
        run.abort()
        run.engine.close()
