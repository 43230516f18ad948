"""The Paddle engine on the host tier of a real ``fdcache serve``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fdcache import Request
from tests.paddle_help import ENGINE, GQA, Server, assert_as_without_cache, prompt, tokens
from tests.service_help import ServiceProcess, service_process, until


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service with the blocks of a prompt of 150 tokens, stored by an engine in another process."""
    with service_process(tmp_path_factory.mktemp("service")) as service:
        serve_elsewhere(service.address)
        until(lambda: not service.ask("clients"), "the first engine has disconnected")
        yield service
        assert service.ask("integrity") == []
        assert service.terminate() == 0
        assert service.leftovers() == []


def serve_elsewhere(address: str) -> None:
    program = f"""
from dataclasses import replace
from fdcache import Request
from tests.paddle_help import ENGINE, GQA, Server, prompt, tokens
server = Server(GQA, replace(ENGINE, server={address!r}))
server.serve(prompt("before", tokens(0, 150)))
server.close()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120)


def test_a_match_cut_by_the_grid_is_unpinned_as_a_whole(service: ServiceProcess) -> None:
    """The service pins nine blocks, the engine loads eight of them, and none stays pinned."""
    server = Server(GQA, replace(ENGINE, server=service.address))
    manager = server.fdcache.manager
    request = Request("cut", tokens(0, 150))
    result = manager.match_prefix([request])[0]
    assert (result.num_device_blocks, result.num_host_blocks) == (0, 8)
    assert service.ask("clients")[0]["runs"] == 1
    assert manager.allocate_device_blocks([(request, 150)])[0].ok
    assert server.worker.controller is not None
    for plan in manager.take_plans():
        server.worker.controller.submit_swap_tasks(plan)
    while manager.get_stats().plans_in_flight:
        manager.apply(server.worker.controller.poll())
    assert manager.get_stats().counters.host_hit_tokens == 128
    until(lambda: service.ask("clients")[0]["runs"] == 0, "the whole run is unpinned")
    manager.finish([request])
    server.close()
    until(lambda: not service.ask("clients"), "the engine has disconnected")


def test_an_engine_finds_the_blocks_of_another_process_in_the_service(service: ServiceProcess) -> None:
    server = Server(GQA, replace(ENGINE, server=service.address))
    tasks = server.serve(prompt("again", tokens(0, 150)), prompt("other", tokens(1, 100)))
    counters = server.fdcache.manager.get_stats().counters
    assert counters.host_hit_tokens == tasks[0].cached_tokens == 128
    assert counters.loads_failed == 0
    assert_as_without_cache(server, tasks)
    server.close()
    until(lambda: not service.ask("clients"), "the engine has disconnected")
