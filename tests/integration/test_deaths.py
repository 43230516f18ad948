"""Engines and services that die, stop or end: their slots, pins and files."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from fdcache.errors import ServiceRunningError
from fdcache.manager import LoadStatus
from fdcache.service.client.connection import Connection
from fdcache.service.wire.liveness import LiveFile, live_processes
from fdcache.service.wire.protocol import Attach
from tests.service_engine import (
    PROMPT,
    Engine,
    assert_nothing_is_held,
    ready_blocks,
)
from tests.service_help import (
    TIMEOUT,
    LocalService,
    local_service,
    next_line,
    service_process,
    spawned,
    until,
)

_PYTHON = (sys.executable, "-c")


class TestDeath:
    def test_slots_and_pins_of_a_killed_client_are_freed(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service, spawned(*_PYTHON, _CLIENT, service.address) as process:
            next_line(process)
            (client,) = service.ask("clients")
            assert client["stock"] > 0
            until(lambda: service.ask("clients")[0]["runs"] == 1, "only the last look-up is pinned")
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            assert_nothing_is_held(service)
            assert service.service.totals.clients_lost == 1

    def test_slots_of_a_killed_engine_stay_its_own_while_a_worker_of_it_lives(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service, spawned(*_PYTHON, _CLIENT, service.address) as process:
            next_line(process)
            (engine,) = (live for live in live_processes(tmp_path) if live.path == live.engine)
            worker, connection = LiveFile(tmp_path, engine.path), Connection(service.address)
            connection.call(Attach(0, worker.live), TIMEOUT)
            connection.close()
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            until(lambda: not Path(engine.path).exists(), "its death is noticed")
            (client,) = service.ask("clients")
            assert client["stock"] > 0
            worker.close()
            assert_nothing_is_held(service)
            assert service.service.totals.clients_lost == 1

    def test_a_stopped_client_keeps_its_slots_and_loses_its_pins(self, tmp_path: Path) -> None:
        with (
            local_service(tmp_path, FDCACHE_SESSION_TIMEOUT="1s") as service,
            spawned(*_PYTHON, _CLIENT, service.address) as process,
        ):
            next_line(process)
            os.kill(process.pid, signal.SIGSTOP)
            until(lambda: service.ask("clients")[0]["silent"], "its silence is noticed")
            (client,) = service.ask("clients")
            assert client["stock"] > 0
            assert client["runs"] == 0
            os.kill(process.pid, signal.SIGCONT)
            until(lambda: not service.ask("clients")[0]["silent"], "it speaks again")
            process.kill()
            process.wait()
            assert_nothing_is_held(service)

    def test_a_client_stopped_in_mid_copy_loads_nothing_from_released_slots(self, tmp_path: Path) -> None:
        with local_service(
            tmp_path,
            FDCACHE_SESSION_TIMEOUT="1s",
            FDCACHE_HOST_MEMORY="256KiB",
        ) as service:
            writer = Engine(service.address, device_blocks=64)
            writer.serve(PROMPT)
            until(lambda: ready_blocks(service) == 10, "the blocks are stored")
            with spawned(*_PYTHON, _STOPPED_LOADER, service.address) as process:
                assert next_line(process).strip() == "in mid-copy"
                until(lambda: service.service.totals.runs_given_up == 1, "its pins are given up")
                starts = iter(range(1000, 10**6, 1000))

                def has_evicted_it() -> bool:
                    start = next(starts)
                    writer.serve(list(range(start, start + 81)))
                    writer.await_stock()
                    return bool(service.ask("namespaces")[0]["totals"]["evicted"] >= 60)

                until(has_evicted_it, "the slots have other blocks")
                os.kill(process.pid, signal.SIGCONT)
                assert next_line(process).strip() == "failed, recompute from 0"
            writer.close()
            assert_nothing_is_held(service)

    def test_an_engine_computes_while_the_service_is_gone_and_reconnects(self, tmp_path: Path) -> None:
        with service_process(tmp_path / "s") as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            until(lambda: ready_blocks(service) == 10, "the blocks are stored")
            service.kill()
            alone = list(range(200, 241))
            assert engine.serve(alone) == (0, [])
            service.start()
            until(lambda: service.ask("clients"), "the engine has registered again")
            engine.await_stock()
            engine.manager._device.reset()
            assert engine.serve(PROMPT)[0] == 10
            engine.close()
            other = Engine(service.address)
            found, outcomes = other.serve(PROMPT)
            assert found == 10
            assert [outcome.status for outcome in outcomes] == [LoadStatus.CONFIRMED]
            other.close()
            assert_nothing_is_held(service)
            assert service.terminate() == 0
            assert service.leftovers() == []

    def test_a_drain_waits_for_clients_and_leaves_no_files(self, tmp_path: Path) -> None:
        with service_process(tmp_path / "s") as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            assert service.terminate() == 0
            assert engine.serve(list(range(300, 341))) == (0, [])
            engine.close()
            assert service.leftovers() == []

    def test_a_second_service_is_refused_with_the_pid_of_the_first(self, tmp_path: Path) -> None:
        with service_process(tmp_path / "s") as service:
            assert service.process is not None
            with pytest.raises(ServiceRunningError, match=str(service.process.pid)):
                LocalService(tmp_path / "s")
            assert service.answers()


_CLIENT = """
import sys, time
from fdcache.manager import Request
from tests.service_engine import Engine, PROMPT
engine = Engine(sys.argv[1])
engine.serve(PROMPT)
engine.manager._device.reset()
request = Request("held", PROMPT)
while True:
    if engine.manager.match_prefix([request])[0].num_host_blocks == 10: break
    engine.manager.finish([request])
    time.sleep(0.01)
engine.await_stock()
print("held", flush=True)
time.sleep(600)
"""


_STOPPED_LOADER = """
import os, signal, sys
from fdcache.manager import Request
from fdcache.controller.cache_controller import CacheController
from fdcache.settings.cache import CopySettings
from tests.faults import PausingDevice
from tests.service_engine import Engine, PROMPT
engine = Engine(sys.argv[1])
device = PausingDevice(pause_at=1)
rank = CacheController(CopySettings(first_group_layers=1, group_layers=1), engine.layout, device=device)
rank.initialize_kv_cache(32)
rank.initialize_host_cache(engine.manager.host_cache)
request = Request("loads", PROMPT)
assert engine.manager.match_prefix([request])[0].num_host_blocks == 10
engine.manager.allocate_device_blocks([(request, len(PROMPT))])
(plan,) = engine.manager.take_plans()
rank.submit_swap_tasks(plan).wait_for_layer(0, 30)
print("in mid-copy", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
device.resume.set()
(outcome,) = engine.manager.apply(rank.wait_reports(30))
print(f"{outcome.status.value}, recompute from {outcome.recompute_from}", flush=True)
signal.pause()
"""
