"""Decisions of load or recompute: what they take into account, what is told of them, and that none leaves anything."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from fdcache.manager import AllocationFailure, MatchStatus, Request
from fdcache.settings.cache import PrefetchPolicy, WritePolicy
from tests.integration.test_load_or_recompute import BLOCKS, engine_of, learn, loads, settle_reads
from tests.seeds import budget
from tests.storage_engine import BLOCK, HOST_BLOCKS, Engine, counters, store_a_path, tokens_of


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    store_a_path(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("read", "choice"), [(0.05, "nothing"), (0.02, "whole")])
def test_blocks_that_the_device_has_already_are_no_gain_of_a_read(
    stored: Path, read: float, choice: str
) -> None:
    """The host has none of the device's six blocks: eight have to be read for two that need not be computed."""
    with engine_of(stored, write_policy=WritePolicy.WRITE_BACK) as engine:
        computed = Request("computed", tokens_of(1, 6), use_cache=True, max_cached_tokens=0)
        engine.match(computed)
        assert engine.allocate(computed).ok
        engine.compute(computed, computed.num_tokens)
        engine.manager.finish([computed])
        learn(engine, compute=0.1, read=read)
        engine.store.gate.clear()
        request = Request("a", tokens_of(1, BLOCKS))
        status = MatchStatus.MATCHED if choice == "nothing" else MatchStatus.DEFERRED
        assert engine.match(request).status is status
        (decision,) = loads(engine).recent
        assert (decision.device_blocks, decision.host_blocks, decision.storage_blocks) == (6, 0, 2)
        assert decision.choice == choice
        assert decision.expected_seconds_nothing == pytest.approx(0.2, rel=0.1)
        assert decision.expected_seconds_whole == pytest.approx(8 * read, rel=0.1)
        if choice == "whole":
            engine.send()
            engine.now += 8 * read + 0.1  # it would still save 0.1 s if it came now
            assert engine.match(request).status is MatchStatus.DEFERRED
            engine.now += 0.15
            assert engine.match(request).status is MatchStatus.MATCHED
        assert request.num_cached_tokens == 6 * BLOCK
        settle_reads(engine)
        engine.manager.finish([request])


@pytest.mark.parametrize("queued", [0.0, 60.0])
def test_the_true_time_begins_with_the_match(stored: Path, queued: float) -> None:
    """A request whose reads have begun when it arrived may wait long for its turn."""
    with engine_of(stored) as engine:
        learn(engine, compute=0.1, read=0.05)
        engine.store.gate.clear()
        request = Request("a", tokens_of(1, BLOCKS))
        engine.manager.begin([request])
        engine.send()
        (decision,) = loads(engine).recent
        assert (decision.choice, decision.waited_seconds) == ("whole", 0.0)
        if not queued:
            assert engine.match(request).status is MatchStatus.DEFERRED
            engine.now += 0.3
        settle_reads(engine)
        engine.now += queued
        assert engine.match(request).num_cached_tokens == BLOCKS * BLOCK
        assert engine.allocate(request).ok
        engine.now += 2.0
        engine.compute(request, request.num_tokens)
        (decision,) = loads(engine).recent
        waited = 0.0 if queued else 0.3
        assert decision.waited_seconds == pytest.approx(waited)
        assert decision.true_seconds == pytest.approx(waited + 2.0)
        engine.settle()
        engine.manager.finish([request])


def test_requests_that_share_reads_have_decisions_of_their_own(stored: Path) -> None:
    with engine_of(stored, policy=PrefetchPolicy.WAIT_COMPLETE) as engine:
        learn(engine, compute=0.1, read=0.05)
        engine.store.gate.clear()
        first, second = (Request(name, tokens_of(1, BLOCKS)) for name in ("a", "b"))
        assert engine.match(first).status is MatchStatus.DEFERRED
        engine.send()
        assert engine.match(second).status is MatchStatus.DEFERRED
        kept, shared = loads(engine).recent
        assert (kept.request_id, shared.request_id) == ("a", "b")
        assert (shared.choice, shared.storage_blocks, shared.host_blocks) == ("whole", BLOCKS, 0)
        assert shared.expected_seconds == pytest.approx(kept.expected_seconds)
        engine.now += 2.0
        for request in (first, second):
            assert engine.match(request).status is MatchStatus.MATCHED
        for request in (first, second):
            assert engine.allocate(request).ok
            engine.compute(request, request.num_tokens)
            engine.manager.finish([request])
        figures = loads(engine)
        assert (figures.whole, figures.hedged, figures.judged) == (2, 2, 2)
        assert [each.hedged for each in figures.recent] == [True, True]
        assert all(each.waited_seconds == pytest.approx(2.0) for each in figures.recent)
        settle_reads(engine)
        assert counters(engine).blocks_prefetched == BLOCKS


def test_a_request_does_not_wait_for_reads_of_others_that_are_not_worth_it(stored: Path) -> None:
    with engine_of(stored) as engine:
        learn(engine, compute=0.1, read=0.05)
        engine.store.gate.clear()
        first, second = (Request(name, tokens_of(1, BLOCKS)) for name in ("a", "b"))
        assert engine.match(first).status is MatchStatus.DEFERRED
        engine.send()
        engine.now += 11.0
        learn(engine, compute=0.01, read=0.05)
        assert engine.match(second).status is MatchStatus.MATCHED
        figures = loads(engine)
        assert [each.choice for each in figures.recent] == ["whole", "nothing"]
        assert (figures.hedged, figures.probes) == (0, 0)
        settle_reads(engine)
        engine.manager.finish([first, second])
        assert counters(engine).blocks_prefetched == BLOCKS


def test_a_late_read_is_counted_also_without_a_decision(stored: Path) -> None:
    """The speeds were not known yet when it began."""
    with engine_of(stored) as engine:
        engine.store.gate.clear()
        request = Request("a", tokens_of(1, BLOCKS))
        assert engine.match(request).status is MatchStatus.DEFERRED
        engine.send()
        learn(engine, compute=0.1, read=0.05)
        engine.now += 3.0
        assert engine.match(request).status is MatchStatus.MATCHED
        figures = loads(engine)
        assert (figures.hedged, figures.recent) == (1, [])
        settle_reads(engine)
        engine.manager.finish([request])


def test_a_disk_that_answers_nothing_is_soon_not_waited_for(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        for path in range(1, 7):
            engine.run(f"stored {path}", tokens_of(path, 4))
    with engine_of(tmp_path) as engine:
        learn(engine, compute=0.1, read=0.01)
        engine.store.gate.clear()
        waited = []
        for path in range(1, 7):
            request = Request(f"{path}", tokens_of(path, 4))
            begin = engine.now
            while engine.match(request).status is MatchStatus.DEFERRED:
                engine.send()
                engine.now += 0.01
            waited.append(engine.now - begin)
            assert request.num_cached_tokens == 0
            engine.manager.finish([request])
        assert waited[0] > 0.3, "as long as the read would have saved"
        assert waited[-2:] == [0.0, 0.0]
        settle_reads(engine)
        assert counters(engine).blocks_prefetched >= 4 * 3


def test_room_is_waited_for_no_longer_than_a_read(tmp_path: Path) -> None:
    """Half of the host tier is taken by reads that never end."""
    paths = HOST_BLOCKS // 2 // 4 + 1
    with engine_of(tmp_path) as engine:
        for path in range(1, paths + 1):
            engine.run(f"stored {path}", tokens_of(path, 4))
    with engine_of(tmp_path) as engine:
        learn(engine, compute=0.1, read=0.001)
        engine.store.gate.clear()
        waiting = [Request(f"{path}", tokens_of(path, 4)) for path in range(1, paths + 1)]
        for request in waiting:
            assert engine.match(request).status is MatchStatus.DEFERRED
        engine.send()
        assert counters(engine).blocks_requested_from_storage == HOST_BLOCKS // 2
        engine.now += 0.1  # it would still save 0.2 s
        assert engine.match(waiting[-1]).status is MatchStatus.DEFERRED
        engine.now += 0.5
        assert engine.match(waiting[-1]).status is MatchStatus.MATCHED
        engine.manager.finish(waiting)
        settle_reads(engine)


class Traffic:
    """Requests at random with a disk that is held up, and speeds that change, at random."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.chosen = random.Random(seed)
        self.new: list[Request] = []
        self.matched: list[Request] = []
        self.allocated: list[Request] = []
        self._number = 0
        self.learn()

    @property
    def requests(self) -> list[Request]:
        return [*self.new, *self.matched, *self.allocated]

    def learn(self) -> None:
        speeds = [self.chosen.choice((1e-6, 0.05, 1.0)) for _ in range(3)]
        learn(self.engine, compute=speeds[0], load=speeds[1], read=speeds[2])

    def arrive(self) -> None:
        self._number += 1
        path, blocks = self.chosen.randint(1, 3), self.chosen.randint(1, BLOCKS)
        self.new.append(Request(f"r{self._number}", tokens_of(path, blocks)))
        if self.chosen.random() < 0.5:
            self.engine.manager.begin(self.new[-1:])

    def step(self) -> None:
        """Let one request go on, be unmatched or end."""
        manager, requests = self.engine.manager, self.requests
        if not requests:
            return
        request = self.chosen.choice(requests)
        if self.chosen.random() < 0.2:
            manager.finish([request])
            for each in (self.new, self.matched, self.allocated):
                if request in each:
                    each.remove(request)
        elif request in self.new:
            if self.engine.match(request).status is MatchStatus.MATCHED:
                self._move(request, self.new, self.matched)
        elif request in self.matched:
            if self.chosen.random() < 0.2:
                manager.unmatch([request])
                self._move(request, self.matched, self.new)
            elif (given := self.engine.allocate(request)).ok:
                self._move(request, self.matched, self.allocated)
            elif given.failure is AllocationFailure.DEFERRED:
                self._move(request, self.matched, self.new)
        elif not request.is_loading:
            first, seconds = (
                min(request.num_cached_tokens, request.num_tokens),
                self.chosen.choice((None, 0.1, 5.0)),
            )
            manager.observe_prefill([(request, first, request.num_tokens)], seconds, waited=True)
            self.engine.compute(request, request.num_tokens)

    def _move(self, request: Request, here: list[Request], there: list[Request]) -> None:
        here.remove(request)
        there.append(request)

    def copy(self) -> None:
        self.engine.send()
        time.sleep(0.0005)
        self.engine.manager.apply(self.engine.controller.poll())

    def wait(self) -> None:
        self.engine.now += self.chosen.choice((0.001, 0.05, 0.5, 5.0, 12.0, 40.0))

    def hold_up(self) -> None:
        gate = self.engine.store.gate
        gate.set() if self.chosen.random() < 0.6 else gate.clear()


@pytest.mark.parametrize("seed", range(budget(8)))
@pytest.mark.parametrize("policy", [PrefetchPolicy.WAIT_COMPLETE, PrefetchPolicy.TIMEOUT])
def test_whatever_is_decided_leaves_nothing_behind(tmp_path: Path, policy: PrefetchPolicy, seed: int) -> None:
    with engine_of(tmp_path) as engine:
        for path in range(1, 4):
            engine.run(f"stored {path}", tokens_of(path, BLOCKS))
    with engine_of(tmp_path, policy=policy) as engine:
        traffic = Traffic(engine, seed)
        actions = [
            *[traffic.arrive, traffic.step] * 4,
            *[traffic.copy, traffic.wait] * 2,
            traffic.hold_up,
            traffic.learn,
        ]
        for _ in range(120):
            traffic.chosen.choice(actions)()
            engine.manager.check_integrity()
        engine.manager.finish(traffic.requests)
        settle_reads(engine)
        assert not engine.manager._choices.open
        storage = engine.manager._tiers.storage
        assert storage is not None
        assert storage.reads.is_idle
        figures = loads(engine)
        assert figures.whole + figures.part + figures.nothing > 0
