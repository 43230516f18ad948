"""What a service knows of the devices of its engines, for routers: who has a block, and what is gone with an engine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fdcache.hashing import tenant_key
from fdcache.metadata import CacheLevel
from fdcache.service.client.connection import Client
from fdcache.service.client.control import Control, Prefix
from fdcache.service.client.remote_tier import RemoteHostTier
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.tiers import events
from fdcache.tiers.events import BlocksCleared, BlockStored, EventsLost
from fdcache.tiers.pool import EVENT_REMOVED
from tests.service_engine import PROMPT, Engine
from tests.service_help import (
    TIMEOUT,
    LocalService,
    ServiceProcess,
    local_service,
    next_line,
    run,
    spawned,
    until,
)

BLOCKS = 10


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    with local_service(tmp_path, FDCACHE_KV_EVENTS="tcp://127.0.0.1:*") as running:
        yield running


def on_devices(service: LocalService | ServiceProcess, tokens: list[int] = PROMPT) -> list[int]:
    """Return how many devices have each block of a prompt, as the command line shows it."""
    with Client(service.address) as client:
        return [int(block.devices or 0) for block in Control(client).explain(Prefix(tokens)).blocks]


def test_a_block_on_a_device_alone_is_explained_as_there(service: LocalService, tmp_path: Path) -> None:
    engine = Engine(service.address)
    engine.serve(PROMPT)
    until(lambda: on_devices(service) == [1] * BLOCKS, "the engine has the blocks")
    service.ask("reset", tier="host", in_flight="keep")
    (tmp_path / "tokens").write_text(json.dumps([*PROMPT[:20], *range(900, 921)]))
    shown = run("inspect", "explain", "--tokens", tmp_path / "tokens", "--server", service.address).stdout
    rows = [line.split() for line in shown.splitlines()]
    assert [row[2] for row in rows if row and row[0].isdigit()] == ["device"] * 5 + ["nowhere"] * 5
    assert "the run ends before block 0: reset" in shown
    assert "an engine that has them on its device reuses 5 more" in shown
    engine.close()


def engine_with_events(address: str, capacity: int) -> Engine:
    settings = CacheSettings(
        server=address,
        device_blocks=32,
        write_policy=WritePolicy.WRITE_THROUGH,
        rpc_timeout=TIMEOUT,
        event_buffer=capacity,
    )
    return Engine(address, settings=settings)


def of_device(engine: Engine) -> list[Any]:
    return [event for event in engine.manager.take_events() if event.tier is CacheLevel.DEVICE]


def test_a_block_is_on_the_devices_of_those_engines_that_have_it(service: LocalService) -> None:
    first, second = Engine(service.address), Engine(service.address)
    first.serve(PROMPT)
    until(lambda: on_devices(service) == [1] * BLOCKS, "one engine has the blocks")
    second.serve(PROMPT[:21])
    until(lambda: on_devices(service) == [2] * 5 + [1] * 5, "the other has some of them, too")
    first.close()
    until(lambda: on_devices(service) == [1] * 5 + [0] * 5, "those of the first are gone")
    second.manager.reset_cache()
    until(lambda: on_devices(service) == [0] * BLOCKS, "a reset is told without a further step")
    second.close()


def test_a_new_session_tells_all_blocks_again(service: LocalService) -> None:
    engine = Engine(service.address)
    engine.serve(PROMPT)
    until(lambda: on_devices(service) == [1] * BLOCKS, "the engine has the blocks")
    (namespace,) = service.service.namespaces.values()
    service.service.clients.end_sessions(namespace)

    def is_told() -> bool:
        engine.manager.take_plans()
        return on_devices(service) == [1] * BLOCKS

    until(lambda: on_devices(service) == [0] * BLOCKS, "the former session ended")
    until(is_told, "the new one tells them")
    engine.close()


def test_an_idle_engine_tells_its_blocks_to_a_service_that_comes_back(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "s", FDCACHE_KV_EVENTS="tcp://127.0.0.1:*") as service:
        service.start()
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: on_devices(service) == [1] * BLOCKS, "the engine has the blocks")
        with engine.manager._lock:  # a step is at work as the session begins
            service.kill()
            service.start()
            until(lambda: len(service.ask("clients")) == 1, "there is a session again")
        until(lambda: on_devices(service) == [1] * BLOCKS, "it has them still, without a further step")
        engine.close()


def test_blocks_are_not_told_to_a_session_that_was_not_told_of_all(service: LocalService) -> None:
    engine = Engine(service.address)
    engine.serve(PROMPT)
    until(lambda: on_devices(service) == [1] * BLOCKS, "the engine has the blocks")
    (namespace,) = service.service.namespaces.values()
    tier = engine.manager._service
    assert isinstance(tier, RemoteHostTier)
    tier.sessions.greet = lambda: True
    former = tier.sessions.session
    service.service.clients.end_sessions(namespace)
    until(lambda: tier.sessions.session not in (None, former), "there is another session")
    tier.notes.tell_device(bytes([EVENT_REMOVED]), bytes(32))
    assert not tier.notes.has_device
    engine.close()


def test_an_engine_that_is_silent_has_no_blocks_for_routers_until_it_is_heard_again(tmp_path: Path) -> None:
    variables = {"FDCACHE_KV_EVENTS": "tcp://127.0.0.1:*", "FDCACHE_SESSION_TIMEOUT": "2"}
    with local_service(tmp_path, **variables) as service:
        command = (sys.executable, "-m", "tests.router.engine", service.address)
        with spawned(*command, stdin=subprocess.PIPE) as engine:
            assert next_line(engine) == "ready\n"
            assert engine.stdin is not None
            engine.stdin.write(json.dumps([PROMPT, None]) + "\n")
            engine.stdin.flush()
            next_line(engine)
            until(lambda: on_devices(service) == [1] * BLOCKS, "the engine has the blocks")
            engine.send_signal(signal.SIGSTOP)
            until(
                lambda: on_devices(service) == [0] * BLOCKS,
                "nobody is sent to an engine that does not answer",
            )
            assert len(service.ask("clients")) == 1
            engine.send_signal(signal.SIGCONT)
            until(lambda: on_devices(service) == [1] * BLOCKS, "it has them still, without a further step")


def test_blocks_beyond_the_buffer_are_told_anew(
    service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_MOST_TOLD", 4)
    engine = Engine(service.address)
    engine.serve(PROMPT[:5])
    engine.serve(PROMPT)
    until(lambda: on_devices(service) == [1] * BLOCKS, "all blocks are known")
    engine.close()


def test_the_engine_has_its_own_events_beside_the_service(service: LocalService) -> None:
    engine = engine_with_events(service.address, 64)
    engine.serve(PROMPT)
    until(lambda: on_devices(service) == [1] * BLOCKS, "the service knows the blocks")
    events = of_device(engine)
    assert [type(event) for event in events] == [BlockStored] * BLOCKS
    assert events[0].parent_hash is None
    assert [event.parent_hash for event in events[1:]] == [event.block_hash for event in events[:-1]]
    assert of_device(engine) == []
    engine.manager.reset_cache()
    assert of_device(engine) == [BlocksCleared(CacheLevel.DEVICE)]
    engine.close()


def test_an_engine_that_does_not_take_its_events_is_told_that_they_are_lost(service: LocalService) -> None:
    engine = engine_with_events(service.address, 4)
    engine.serve(PROMPT[:5])
    engine.serve(PROMPT)
    until(lambda: on_devices(service) == [1] * BLOCKS, "the service knows the blocks")
    assert of_device(engine) == [EventsLost(CacheLevel.DEVICE)]
    engine.close()


def test_deleted_blocks_are_on_no_device_though_the_engine_is_idle(service: LocalService) -> None:
    engine, other = Engine(service.address), [*range(500, 540)]
    engine.serve(PROMPT)
    engine.serve(other, tenant="acme")
    of_acme = Prefix(other, tenant="acme")
    with Client(service.address) as client:
        control = Control(client)

        def counts(prefix: Prefix) -> list[int]:
            return [int(block.devices or 0) for block in control.explain(prefix).blocks]

        until(lambda: counts(Prefix(PROMPT)) == counts(of_acme) == [1] * BLOCKS, "the engine has the blocks")
        control.delete(Prefix(PROMPT), start=4)
        assert counts(Prefix(PROMPT)) == [1] * 4 + [0] * 6
        service.ask("reset", tenant=tenant_key("acme").hex(), in_flight="keep")
        assert counts(of_acme) == [0] * BLOCKS
        engine.serve(PROMPT)  # forgets, and computes them anew
        until(lambda: counts(Prefix(PROMPT)) == [1] * BLOCKS, "the blocks are there again")
    engine.close()
