"""Loads ahead: blocks from storage go on to the device while their request waits for later ones.

What holds with a host tier of the engine's own and with that of a service is tested with both.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from fdcache.controller.cache_controller import CacheController
from fdcache.manager import CacheManager, LoadOutcome, MatchResult, MatchStatus, Request
from fdcache.metadata import CacheLevel, TransferPlan
from fdcache.settings.cache import PrefetchPolicy, WritePolicy
from fdcache.tiers import storage_reads
from fdcache.tiers.statistics import Counters
from tests import prefetch_stage, service_engine, storage_engine
from tests.integration.test_serve_late_reads import FAST, knowing
from tests.prefetch_stage import Stage
from tests.service_engine import assert_nothing_is_held
from tests.service_help import until


class Side(Protocol):
    """An engine whose host tier is empty, with a prompt in storage of which each read brings two blocks."""

    tokens: list[int]
    blocks: int
    left_by_a_lost_rank: int

    @property
    def manager(self) -> CacheManager: ...

    @property
    def rank(self) -> CacheController: ...

    def read(self, reads: int) -> None:
        """Let the disk serve as many reads."""

    def open_gate(self) -> None:
        """Let the disk serve all reads."""

    def fail(self) -> None:
        """Let all further reads fail."""

    def lose_rank(self) -> list[LoadOutcome]: ...

    def check(self, request: Request, blocks: int) -> None:
        """Compare the bytes of a request's first blocks on the device."""


class OwnHost:
    """An engine with a host tier and a storage of its own."""

    tokens = storage_engine.tokens_of(1, 8)
    blocks = 8
    left_by_a_lost_rank = 0  # its host memory is gone

    def __init__(self, folder: Path, **options: Any) -> None:
        storage_engine.store_a_path(folder)
        self.engine = storage_engine.Engine(folder, **options)
        self.disk = storage_engine.Disk(self.engine)
        self.manager, self.rank = self.engine.manager, self.engine.controller

    def read(self, reads: int) -> None:
        self.disk.serve(reads)

    def open_gate(self) -> None:
        self.engine.store.gate.set()

    def fail(self) -> None:
        self.engine.store.fails = True

    def lose_rank(self) -> list[LoadOutcome]:
        return self.manager.worker_lost(0)

    def check(self, request: Request, blocks: int) -> None:
        self.engine.check(request, blocks)

    def close(self) -> None:
        self.engine.store.fails = False
        self.engine.close()


class ServiceHost:
    """An engine at a service with storage."""

    tokens = service_engine.PROMPT
    blocks = prefetch_stage.BLOCKS
    left_by_a_lost_rank = blocks

    def __init__(self, stage: Stage, engine: service_engine.Engine | None = None, /, **options: Any) -> None:
        self.stage = stage
        self.engine = engine or stage.engine(PrefetchPolicy.WAIT_COMPLETE, **options)
        self.manager = self.engine.manager

    @property
    def rank(self) -> CacheController:
        return self.engine.ranks[0]

    def read(self, reads: int) -> None:
        self.stage.read(reads)

    def open_gate(self) -> None:
        self.stage.store.gate.set()
        self.stage.store.answer.set()

    def fail(self) -> None:
        self.stage.store.loses = {0}

    def lose_rank(self) -> list[LoadOutcome]:
        return self.engine.replace_worker(0)

    def check(self, request: Request, blocks: int) -> None:
        self.engine.check(request, self.tokens, blocks)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A service with a path of ten blocks in its storage, of which each read brings two."""
    with prefetch_stage.prefetch_stage(tmp_path, monkeypatch) as made:
        monkeypatch.setattr(storage_reads, "MOST_GROUP_BYTES", 2 * service_engine.layout().record_bytes)
        made.per_read = 2
        yield made


@pytest.fixture
def own(tmp_path: Path, groups_of_two: None) -> Iterator[OwnHost]:
    side = OwnHost(tmp_path)
    yield side
    side.close()


@pytest.fixture
def shared(stage: Stage) -> ServiceHost:
    return ServiceHost(stage)


@pytest.fixture(params=["own", "shared"])
def side(request: pytest.FixtureRequest) -> Side:
    made: Side = request.getfixturevalue(request.param)
    return made


def match(side: Side, request: Request) -> MatchResult:
    return side.manager.match_prefix([request])[0]


def counters(side: Side) -> Counters:
    return side.manager.get_stats().counters


def on_device(side: Side) -> int:
    return len(side.manager.find_blocks(Request("asks", side.tokens))[CacheLevel.DEVICE])


def waiting(side: Side) -> Request:
    """Return a request that waits for storage."""
    request = Request("a", side.tokens)
    assert match(side, request).status is MatchStatus.DEFERRED
    carry_out(side, side.manager.take_plans())
    return request


def arrived(side: Side, request: Request) -> None:
    """Let the disk serve one read, and let the request, which goes on waiting, ask again."""
    side.read(1)
    assert match(side, request).status is MatchStatus.DEFERRED


def carry_out(side: Side, plans: list[TransferPlan]) -> None:
    """Submit the plans, and apply what has ended."""
    for plan in plans:
        side.rank.submit_swap_tasks(plan)
    side.manager.apply(side.rank.poll())


def load(side: Side, request: Request, blocks: int) -> None:
    """Let the disk serve one read, and load what it brings while the request waits."""
    arrived(side, request)

    def loaded() -> bool:
        carry_out(side, side.manager.take_plans())
        return counters(side).blocks_loaded == blocks

    until(loaded, "the load is reported")


def rest(side: Side) -> None:
    """Carry out what is planned until nothing is in flight."""
    side.open_gate()

    def rests() -> bool:
        plans = side.manager.take_plans()
        carry_out(side, plans)
        return not plans and not side.manager.get_stats().plans_in_flight

    until(rests, "every plan has ended")


def finish(side: Side, request: Request) -> MatchResult:
    """Run a request that waits to its end, and compare the bytes that it reuses."""
    side.open_gate()
    found: list[MatchResult] = []

    def ends() -> bool:
        carry_out(side, side.manager.take_plans())
        found.append(match(side, request))
        return found[-1].status is MatchStatus.MATCHED

    until(ends, "the request need not wait")
    assert side.manager.allocate_device_blocks([(request, request.num_tokens)])[0].ok
    rest(side)
    side.check(request, found[-1].total_matched_blocks)
    side.manager.finish([request])
    return found[-1]


def test_blocks_are_on_the_device_while_later_ones_are_read(side: Side) -> None:
    request = waiting(side)
    ahead = side.blocks - 2
    for blocks in range(2, ahead + 1, 2):
        load(side, request, blocks)
        assert on_device(side) == blocks
    found = finish(side, request)
    assert (found.num_device_blocks, found.num_ahead_blocks, found.num_storage_blocks) == (ahead, ahead, 2)
    assert found.num_ahead_from_storage == ahead
    assert (counters(side).storage_hit_tokens, counters(side).device_hit_tokens) == (len(side.tokens) - 1, 0)
    assert (counters(side).blocks_loaded, counters(side).blocks_loaded_ahead) == (side.blocks, ahead)


def test_no_step_waits_for_a_load_ahead(side: Side) -> None:
    request = waiting(side)
    arrived(side, request)
    (plan,) = side.manager.take_plans()
    assert plan.is_ahead and plan.loads is not None and len(plan.loads) == 2
    assert side.rank.submit_swap_tasks(plan).is_all_done()
    assert finish(side, request).total_matched_blocks == side.blocks


def test_a_read_that_fails_leaves_the_prefix_that_was_loaded(side: Side) -> None:
    request = waiting(side)
    load(side, request, 2)
    load(side, request, 4)
    side.fail()
    assert finish(side, request).total_matched_blocks == 4


@pytest.mark.parametrize("is_sent", [False, True])
def test_an_aborted_request_leaves_its_loads_as_cached_blocks(side: Side, is_sent: bool) -> None:
    request = waiting(side)
    load(side, request, 2)
    arrived(side, request)
    plans = side.manager.take_plans() if is_sent else []
    side.manager.finish([request])
    carry_out(side, plans)
    rest(side)
    assert on_device(side) == 4
    usage = side.manager.get_stats().device
    assert (usage.pins, usage.holds, usage.leases, usage.writing) == (0, 0, 0, 0)
    assert side.manager.shared_blocks_in_use == 0
    again = Request("again", side.tokens)
    assert finish(side, again).num_ahead_blocks <= 4


def test_a_lost_rank_takes_back_what_was_loaded_ahead(side: Side) -> None:
    request = waiting(side)
    arrived(side, request)
    side.manager.take_plans()
    assert side.lose_rank() == []
    assert on_device(side) == 0
    assert finish(side, request).total_matched_blocks == side.left_by_a_lost_rank


def test_a_load_that_fails_is_not_repeated_ahead(side: Side) -> None:
    request = waiting(side)
    arrived(side, request)
    (plan,) = side.manager.take_plans()
    side.rank.refuse(plan, "the test refuses it")
    side.manager.apply(side.rank.poll())
    arrived(side, request)
    assert side.manager.take_plans() == []
    found = finish(side, request)
    assert (found.num_ahead_blocks, found.num_storage_blocks) == (0, side.blocks)


class TestOwnHost:
    @pytest.mark.parametrize("is_sent", [False, True])
    def test_a_reset_takes_back_what_was_loaded_ahead(self, own: OwnHost, is_sent: bool) -> None:
        request = waiting(own)
        load(own, request, 2)
        arrived(own, request)
        if is_sent:
            carry_out(own, own.manager.take_plans())
        own.manager.reset_cache()
        rest(own)
        assert on_device(own) == 0
        assert finish(own, request).total_matched_blocks == 0

    def test_a_device_without_room_for_the_request_loads_nothing_ahead(self, own: OwnHost) -> None:
        holder = Request("holder", storage_engine.tokens_of(2, 21))
        match(own, holder)
        assert own.engine.allocate(holder).ok
        request = waiting(own)
        arrived(own, request)
        assert counters(own).blocks_loaded_ahead == 0
        own.manager.finish([holder])
        assert match(own, request).status is MatchStatus.DEFERRED
        assert counters(own).blocks_loaded_ahead == 2
        assert finish(own, request).total_matched_blocks == own.blocks

    def test_what_a_load_ahead_evicts_is_copied_to_the_host_first(
        self, tmp_path: Path, groups_of_two: None
    ) -> None:
        own = OwnHost(tmp_path, write_policy=WritePolicy.WRITE_BACK, clean_reserve=0)
        evicted = Request("evicted", storage_engine.tokens_of(2, 28))
        match(own, evicted)
        assert own.engine.allocate(evicted).ok
        own.engine.compute(evicted, evicted.num_tokens)
        own.manager.finish([evicted])
        request = waiting(own)
        for blocks in (2, 4):  # the first two take free blocks
            load(own, request, blocks)
        assert counters(own).blocks_evicted_to_host > 0
        assert finish(own, request).total_matched_blocks == own.blocks
        assert own.engine.run("again", storage_engine.tokens_of(2, 28)).num_host_blocks > 0
        own.close()


DIES = """
import os, signal, sys
from fdcache.manager import Request
from fdcache.settings.cache import StorageTierSettings
from tests.service_engine import PROMPT, Engine

engine = Engine(sys.argv[1], fetches=StorageTierSettings(prefetch_policy="wait_complete"))
request = Request("a", PROMPT)
while not engine.manager.get_stats().counters.blocks_loaded_ahead:
    engine.manager.match_prefix([request])
for plan in engine.manager.take_plans() if sys.argv[2] == "True" else []:
    engine.ranks[0].submit_swap_tasks(plan)
os.kill(os.getpid(), signal.SIGKILL)
"""


class TestServiceHost:
    @pytest.mark.parametrize("defer_timeout", [0.0, 1.0])
    def test_a_request_waits_for_its_load_ahead(self, stage: Stage, defer_timeout: float) -> None:
        shared = ServiceHost(stage, defer_timeout=defer_timeout)
        request = waiting(shared)
        shared.read(4)
        assert match(shared, request).status is MatchStatus.DEFERRED
        stage.read_ends()
        assert match(shared, request).status is MatchStatus.DEFERRED, "eight blocks are on their way"
        (plan,) = shared.manager.take_plans()
        assert plan.is_ahead and plan.loads is not None and len(plan.loads) == 8
        assert match(shared, request).status is MatchStatus.DEFERRED
        shared.engine.carry_out([plan])
        assert finish(shared, request).total_matched_blocks == shared.blocks

    @pytest.mark.parametrize("tier", ["host", "device"])
    def test_a_reset_in_the_middle_leaves_right_bytes(
        self, stage: Stage, shared: ServiceHost, tier: str
    ) -> None:
        request = waiting(shared)
        load(shared, request, 2)
        arrived(shared, request)
        if tier == "device":
            shared.manager.reset_cache()
        else:
            stage.service.ask("reset", tier=tier)
        finish(shared, request)
        assert shared.manager.shared_blocks_in_use == 0

    @pytest.mark.parametrize("is_sent", [False, True])
    def test_a_lost_service_costs_no_byte_and_holds_nothing(self, shared: ServiceHost, is_sent: bool) -> None:
        request = waiting(shared)
        load(shared, request, 2)
        arrived(shared, request)
        plans = shared.manager.take_plans() if is_sent else []
        sessions = shared.manager._host.sessions  # type: ignore[union-attr]
        sessions.lose(sessions.session, "the test")
        shared.engine.carry_out([*plans, *shared.manager.take_plans()])
        assert finish(shared, request).total_matched_blocks >= 2
        assert shared.manager.shared_blocks_in_use == 0

    @pytest.mark.parametrize("is_sent", [False, True])
    def test_an_engine_killed_while_it_loads_leaves_nothing(self, stage: Stage, is_sent: bool) -> None:
        command = [sys.executable, "-c", DIES, stage.service.address, str(is_sent)]
        with subprocess.Popen(command, cwd=Path(__file__).parents[2]) as process:
            until(lambda: stage.figures()["reading_blocks"] == prefetch_stage.BLOCKS, "the reads have begun")
            stage.read(1)
            assert process.wait(60) == -signal.SIGKILL
        stage.read_ends()
        assert_nothing_is_held(stage.service)
        shared = ServiceHost(stage)
        request = Request("a", shared.tokens)
        assert finish(shared, request).total_matched_blocks == shared.blocks

    def test_a_late_read_is_left_with_the_blocks_that_were_loaded(self, stage: Stage) -> None:
        shared = ServiceHost(stage, knowing(stage, compute=0.01, read=FAST))
        request = waiting(shared)
        load(shared, request, 2)
        until(lambda: match(shared, request).status is MatchStatus.MATCHED, "computing would be sooner")
        assert request.num_cached_tokens == 2 * service_engine.BLOCK
        assert shared.manager.get_stats().loads.hedged == 1
        assert shared.manager.allocate_device_blocks([(request, request.num_tokens)])[0].ok
        shared.check(request, 2)
        shared.manager.finish([request])
        stage.read_ends()

    def test_an_engine_that_submits_with_steps_alone_loads_nothing_ahead(self, stage: Stage) -> None:
        shared = ServiceHost(stage, loads_ahead=False)
        request = waiting(shared)
        shared.read(2)
        assert match(shared, request).status is MatchStatus.DEFERRED
        assert shared.manager.take_plans() == []
        found = finish(shared, request)
        assert (found.num_device_blocks, found.num_storage_blocks) == (0, shared.blocks)
