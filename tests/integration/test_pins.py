"""What may come between the look-up of a prompt and its load: evictions, resets, and the death of either side."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fdcache.manager import LoadStatus, Request
from fdcache.service.client.remote_tier import RemoteHostTier
from tests.service_engine import PROMPT, Engine, assert_nothing_is_held, ready_blocks, round_trips, totals
from tests.service_help import LocalService, local_service, next_line, service_process, spawned, until

SMALL = {"FDCACHE_HOST_MEMORY": "256KiB"}


class Interrupted:
    """Calls ``found`` once after an engine's next look-up, and ``pinned`` once after its next pin."""

    def __init__(self, engine: Engine) -> None:
        host = engine.manager._host
        assert isinstance(host, RemoteHostTier)
        session = host.sessions.session
        assert session is not None
        self.found: Callable[[], object] = lambda: None
        self.pinned: Callable[[], object] = lambda: None
        session.runs.observer = self._observe

    def _observe(self, stage: str) -> None:
        call = getattr(self, stage)
        setattr(self, stage, lambda: None)
        call()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    with local_service(tmp_path, **SMALL) as running:
        yield running


@pytest.fixture
def engine(service: LocalService) -> Iterator[Engine]:
    """An engine whose prompt is on the host and not on its device any more."""
    made = Engine(service.address)
    made.serve(PROMPT)

    def are_stored() -> bool:
        made.carry_out(made.manager.take_plans())  # slots to copy into are granted bit by bit
        return ready_blocks(service) == 10

    until(are_stored, "the blocks are stored")
    made.manager._device.reset()
    yield made
    made.close()
    assert_nothing_is_held(service)


def evict(service: LocalService) -> None:
    """Let another engine store so much that every block is evicted which nothing pins."""
    writer = Engine(service.address, device_blocks=64)
    before = totals(service)["evicted"]
    starts = iter(range(1000, 10**6, 1000))

    def has_evicted() -> bool:
        start = next(starts)
        writer.serve(list(range(start, start + 81)))
        writer.await_stock()
        return totals(service)["evicted"] >= before + 150

    until(has_evicted, "the tier has other blocks")
    writer.close()
    until(lambda: len(service.ask("clients")) == 1, "the writer has left")


def test_a_reused_prompt_asks_the_service_for_nothing(service: LocalService, engine: Engine) -> None:
    answered = service.service.totals.latencies
    kinds = {"match", "publish", "loadended", "release"}
    before = {kind: sum(each.counts) for kind, each in answered.kinds.items() if kind in kinds}
    found, outcomes = engine.serve(PROMPT)
    assert (found, [outcome.status for outcome in outcomes]) == (10, [LoadStatus.CONFIRMED])
    assert service.ask("clients")[0]["runs"] == 0
    assert {kind: sum(each.counts) for kind, each in answered.kinds.items() if kind in kinds} == before
    assert totals(service)["hit_blocks"] == 10


def test_a_pinned_run_is_shown_at_once(service: LocalService, engine: Engine) -> None:
    request = Request("held", PROMPT)
    assert engine.manager.match_prefix([request])[0].num_host_blocks == 10
    (client,) = service.ask("clients")
    assert (client["runs"], client["lookups"] > 0) == (1, True)
    assert service.ask("namespaces")[0]["tier"]["pins"] >= 10
    engine.manager.finish([request])
    assert service.ask("clients")[0]["runs"] == 0


@pytest.mark.parametrize("how", ["evicted", "reset"])
def test_blocks_that_go_before_they_are_pinned_are_not_found(
    service: LocalService, engine: Engine, how: str
) -> None:
    gone = (lambda: evict(service)) if how == "evicted" else (lambda: service.ask("reset", tier="host"))
    Interrupted(engine).found = gone
    assert engine.serve(PROMPT) == (0, [])
    assert round_trips(service) == 1
    assert service.ask("integrity") == []


@pytest.mark.parametrize("how", ["evicted", "reset"])
def test_blocks_that_are_pinned_are_loaded_whatever_goes(
    service: LocalService, engine: Engine, how: str
) -> None:
    gone = (lambda: evict(service)) if how == "evicted" else (lambda: service.ask("reset", tier="host"))
    Interrupted(engine).pinned = gone
    found, outcomes = engine.serve(PROMPT)  # it compares the bytes
    assert (found, [outcome.status for outcome in outcomes]) == (10, [LoadStatus.CONFIRMED])
    assert round_trips(service) == 0
    assert service.ask("integrity") == []


@pytest.mark.parametrize(("what", "pins"), [("stats", True), ("reset", False)])
def test_no_client_pins_while_a_reset_finds_out_who_loads(
    service: LocalService, engine: Engine, monkeypatch: pytest.MonkeyPatch, what: str, pins: bool
) -> None:
    request = Request("r", PROMPT)
    engine.manager.match_prefix([request])
    engine.manager.finish([request])
    session = engine.manager._host.sessions.session  # type: ignore[union-attr]
    hashes, runs, take_runs = request.block_hashes, session.runs, service.service.clients.take_runs
    pinned: list[int] = []

    def take_and_pin(*arguments: object) -> None:
        take_runs(*arguments)
        if not pinned:
            pinned.append(runs.pin(hashes, runs.find(hashes, 0)))

    monkeypatch.setattr(service.service, "tick", lambda send: None)
    monkeypatch.setattr(service.service.clients, "take_runs", take_and_pin)
    service.ask(what, **({"tier": "host", "dry_run": True} if what == "reset" else {}))
    assert bool(pinned[0]) == pins
    monkeypatch.undo()
    runs.unpin(pinned[0])


def test_a_paused_service_lets_no_client_pin(service: LocalService, engine: Engine) -> None:
    for is_open in (True, False, True):
        service.ask("resume" if is_open else "pause")
        request = Request("r", PROMPT)
        assert engine.manager.match_prefix([request])[0].num_host_blocks == (10 if is_open else 0)
        engine.manager.finish([request])
    assert round_trips(service) == 1
    (namespace,) = service.ask("namespaces")
    assert namespace["totals"]["missed"]["paused"] == 10


@pytest.mark.parametrize("when", ["found", "pinned"])
def test_an_engine_killed_after_its_look_up_leaves_nothing_pinned(tmp_path: Path, when: str) -> None:
    with local_service(tmp_path) as service:
        with spawned(sys.executable, "-c", _KILLED, service.address, when) as process:
            assert next_line(process).strip() == "begins"
            assert process.wait() == -signal.SIGKILL
        assert_nothing_is_held(service)
        assert service.service.totals.clients_lost == 1
        assert list(tmp_path.glob("*.ring")) == []


_KILLED = """
import os, signal, sys
from fdcache.manager import Request
from tests.integration.test_pins import Interrupted
from tests.service_engine import PROMPT, Engine
engine = Engine(sys.argv[1])
engine.serve(PROMPT)
print("begins", flush=True)
setattr(Interrupted(engine), sys.argv[2], lambda: os.kill(os.getpid(), signal.SIGKILL))
while True:
    engine.manager._device.reset()
    request = Request("r", PROMPT)
    engine.manager.match_prefix([request])
    engine.manager.finish([request])
"""


@pytest.mark.parametrize("when", ["found", "pinned"])
def test_a_service_killed_after_a_look_up_harms_no_load(tmp_path: Path, when: str) -> None:
    with service_process(tmp_path / "s") as service:
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: ready_blocks(service) == 10, "the blocks are stored")
        engine.manager._device.reset()
        setattr(Interrupted(engine), when, service.kill)
        found, outcomes = engine.serve(PROMPT)  # from memory that outlives the service
        assert (found, [outcome.status for outcome in outcomes]) == (10, [LoadStatus.CONFIRMED])
        service.start()
        until(lambda: service.ask("clients"), "the engine has registered again")
        until(lambda: not service.ask("integrity"), "nothing is amiss")
        assert service.ask("clients")[0]["runs"] == 0
        engine.await_stock()
        engine.manager._device.reset()
        assert engine.serve(PROMPT)[0] == 10
        engine.close()
        assert_nothing_is_held(service)
        assert service.terminate() == 0
        assert service.leftovers() == []


def test_unverified_blocks_are_verified_when_they_are_pinned_without_the_service(tmp_path: Path) -> None:
    service = LocalService(tmp_path)
    first = Engine(service.address)
    first.serve(PROMPT)
    until(lambda: ready_blocks(service) == 10, "the blocks are stored")
    first.close()
    service.crash()
    with local_service(tmp_path) as service:
        engine = Engine(service.address)
        for expected in (np.ones(10, np.uint8), None):
            request = Request("reads", PROMPT)
            assert engine.manager.match_prefix([request])[0].num_host_blocks == 10
            engine.manager.allocate_device_blocks([(request, len(PROMPT))])
            (plan,) = engine.manager.take_plans()
            assert plan.loads is not None
            assert np.array_equal(plan.loads.unverified, expected)  # type: ignore[arg-type]
            engine.carry_out([plan])
            engine.manager.finish([request])
            engine.manager.take_plans()
            until(lambda: not service.ask("namespaces")[0]["unverified"], "they are verified")
            engine.manager._device.reset()
        assert round_trips(service) == 0
        engine.close()
        assert_nothing_is_held(service)
