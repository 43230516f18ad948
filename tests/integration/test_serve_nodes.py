"""Services of several nodes that read blocks from each other's host tiers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fdcache.replay.report import Report
from tests.integration.test_serve_storage import chat, storage_of
from tests.network_help import Network
from tests.nodes_help import KEY, RedisServer, free_address
from tests.service_help import ServiceProcess, until

COMMON = {
    "FDCACHE_HOST_MEMORY": "32MiB",
    "FDCACHE_WRITE_POLICY": "write_through",
    "FDCACHE_STORAGE": "nodes",
    "FDCACHE_NODES_KEY": KEY,
}


def started(stack: ExitStack, folder: Path, address: str, *enter: str, **settings: str) -> ServiceProcess:
    """Start the service of a node, with ``enter`` in a namespace of its own."""
    service = stack.enter_context(ServiceProcess(folder, FDCACHE_NODES_ADDRESS=address, **COMMON, **settings))
    service.command = [*enter, *service.command]
    service.start()
    return service


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def hits(report: Report) -> int:
    return report.tally.hit_tokens["storage"]


def finds(service: ServiceProcess) -> bool:
    """Return True if a service without blocks reads some from another node."""
    service.ask("reset")
    return hits(chat(service, requests=20)) > 0


def error_of(service: ServiceProcess) -> str | None:
    (found,) = storage_of(service)["layouts"]
    assert found["state"] == "ready"
    error = found["error"]
    assert error is None or isinstance(error, str)
    return error


def two_that_share(stack: ExitStack, folder: Path) -> tuple[list[str], str, ServiceProcess, ServiceProcess]:
    """Return two nodes' addresses, these as a setting, and the nodes: the second reads what the first holds."""
    addresses = [free_address(), free_address()]
    listed = ",".join(addresses)
    first, second = (
        started(stack, folder / name, each, FDCACHE_NODES=listed)
        for name, each in zip("ab", addresses, strict=True)
    )
    chat(first, requests=40)
    until(lambda: finds(second), "blocks are found")
    return addresses, listed, first, second


@pytest.mark.parametrize("way", ["listed", "directory"])
def test_a_second_node_finds_what_the_first_holds(
    way: str, tmp_path: Path, request: pytest.FixtureRequest, stack: ExitStack
) -> None:
    addresses = [free_address(), free_address()]
    if way == "listed":
        found = {"FDCACHE_NODES": ",".join(addresses)}
    else:
        redis: RedisServer = request.getfixturevalue("redis_server")
        found = {"FDCACHE_NODES_DIRECTORY": redis.url}
    first, second = (
        started(stack, tmp_path / name, each, **found) for name, each in zip("ab", addresses, strict=True)
    )
    assert hits(chat(first, requests=40)) == 0
    until(lambda: finds(second), "the storage is open, and blocks are found")
    assert error_of(second) is None
    assert second.ask("integrity") == first.ask("integrity") == []
    logs = "".join((tmp_path / f"{name}.log").read_text() for name in "ab")
    assert KEY not in logs and RedisServer.password not in logs


def test_a_killed_node_costs_nothing_but_its_blocks(tmp_path: Path, stack: ExitStack) -> None:
    addresses, listed, first, second = two_that_share(stack, tmp_path)
    first.kill()

    def is_named() -> bool:
        assert not finds(second)
        return addresses[0] in (error_of(second) or "")

    until(is_named, "the node that has gone is named")
    first = started(stack, tmp_path / "c", addresses[0], FDCACHE_NODES=listed)  # without its memory
    until(lambda: finds(first), "blocks are found")
    assert first.ask("integrity") == second.ask("integrity") == []


def test_what_is_reset_on_a_node_is_not_read_by_others(tmp_path: Path, stack: ExitStack) -> None:
    _, _, first, second = two_that_share(stack, tmp_path)
    assert first.ask("reset", tier="host")
    assert not finds(second)


def test_a_node_that_is_cut_off_or_stopped_delays_nobody_for_long(
    network: Network, tmp_path: Path, stack: ExitStack
) -> None:
    """A partition and a stopped process give no answer at all; later requests do not wait for them."""
    here, there = f"tcp://{network.here}:7411", f"tcp://{network.there}:7411"
    listed = f"{here},{there}"
    first = started(stack, tmp_path / "a", here, FDCACHE_NODES=listed)
    second = started(stack, tmp_path / "b", there, "ip", "netns", "exec", network.name, FDCACHE_NODES=listed)
    chat(first, requests=40)
    until(lambda: finds(second), "blocks are found")
    network.set("down")
    assert not finds(second)
    assert here in (error_of(second) or "")
    network.set("up")
    until(lambda: finds(second), "the node is found again")
    assert first.process is not None
    os.kill(first.process.pid, signal.SIGSTOP)
    try:
        assert not finds(second)
    finally:
        os.kill(first.process.pid, signal.SIGCONT)
    assert first.ask("integrity") == second.ask("integrity") == []


def test_a_directory_that_is_lost_changes_nothing(
    redis_server: RedisServer, tmp_path: Path, stack: ExitStack
) -> None:
    directory = {"FDCACHE_NODES_DIRECTORY": redis_server.url}
    first, second = (started(stack, tmp_path / name, free_address(), **directory) for name in "ab")
    chat(first, requests=40)
    until(lambda: finds(second), "blocks are found")
    redis_server.kill()
    until(
        lambda: "directory" in ((finds(second) and error_of(second)) or ""),
        "the directory is missed, and blocks are found",
    )
    redis_server.start()
    third = started(stack, tmp_path / "c", free_address(), **directory)
    until(lambda: finds(third), "the third node knows the others")
