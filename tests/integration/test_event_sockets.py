"""A reader of events finds somebody listening before the service is there: its first moment, or a supervisor."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fdcache.service.server import listening
from tests.router.indexer import free_port
from tests.service_help import ServiceProcess, arguments, next_line, spawned, until

GREETING = b"\xff"
"""The first byte of a peer of ZeroMQ."""

BEFORE_IMPORTS = """
import sys

class Wait:
    def find_spec(self, name, *_):
        if name == "fdcache_cli.commands":
            print("before the imports", flush=True)
            sys.stdin.readline()
            sys.meta_path.remove(self)

sys.meta_path.insert(0, Wait())
sys.argv = ["fdcache", *sys.argv[1:]]
from fdcache_cli.main import run
run()
"""

SUPERVISOR = """
import os, sys

os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.fixture(autouse=True)
def nothing_held() -> Iterator[None]:
    yield
    listening.drop()


def supervised(service: ServiceProcess, held: socket.socket) -> None:
    """Start a service with a socket as systemd does, as descriptor 3."""
    service.pass_fds = (held.fileno(),)
    service.command = [sys.executable, "-c", SUPERVISOR, str(held.fileno()), *service.command]


def greets(connection: socket.socket) -> bool:
    connection.settimeout(20)
    return connection.recv(1) == GREETING


def test_the_socket_of_a_supervisor_refuses_nobody_while_the_service_is_away(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        place = held.getsockname()
        with ServiceProcess(tmp_path / "s", FDCACHE_KV_EVENTS=f"tcp://127.0.0.1:{place[1]}") as service:
            supervised(service, held)
            service.start()
            with socket.create_connection(place) as early:
                assert greets(early)
            service.kill()
            with socket.create_connection(place) as waiting:
                service.start()
                assert greets(waiting)


def test_a_start_prints_where_events_are(tmp_path: Path) -> None:
    places = {"FDCACHE_KV_EVENTS": "tcp://127.0.0.1:*", "FDCACHE_KV_EVENTS_REPLAY": "tcp://127.0.0.1:*"}
    with ServiceProcess(tmp_path / "s", **places) as service:
        service.start()
        log = tmp_path / "s.log"
        until(lambda: "ready; Ctrl-C" in log.read_text(), "it is ready")
        rows = dict(line.split(None, 1) for line in log.read_text().splitlines() if " tcp://" in line)
        assert list(rows) == ["events", "replay"]
        for address in rows.values():
            with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as reader:
                assert greets(reader)


def test_a_service_listens_before_it_imports_anything(tmp_path: Path) -> None:
    events, replay = free_port(), free_port()
    variables = arguments(
        tmp_path,
        FDCACHE_KV_EVENTS=f"tcp://127.0.0.1:{events}",
        FDCACHE_KV_EVENTS_REPLAY=f"tcp://*:{replay}",
    )
    tmp_path.chmod(0o700)
    environ = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    command = (sys.executable, "-c", BEFORE_IMPORTS, "serve")
    with spawned(*command, stdin=-1, env=environ) as process:
        assert next_line(process) == "before the imports\n"
        with (
            socket.create_connection(("127.0.0.1", events)) as reader,
            socket.create_connection(("127.0.0.1", replay)) as asking,
        ):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert greets(reader)
            assert greets(asking)


@pytest.mark.parametrize("option", ["--check", "--help"])
def test_a_look_at_the_settings_listens_nowhere(tmp_path: Path, option: str) -> None:
    port = free_port()
    tmp_path.chmod(0o700)
    variables = arguments(tmp_path, FDCACHE_KV_EVENTS=f"tcp://127.0.0.1:{port}")
    environ = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    with spawned(sys.executable, "-c", BEFORE_IMPORTS, "serve", option, stdin=-1, env=environ) as process:
        assert next_line(process) == "before the imports\n"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_sockets_are_found_by_their_address() -> None:
    port = free_port()
    listening.begin({"FDCACHE_KV_EVENTS": f"tcp://*:{port}", "FDCACHE_KV_EVENTS_REPLAY": "ipc:///tmp/x"})
    assert listening.take("off") is None
    assert listening.take(f"tcp://127.0.0.1:{port}") is None
    descriptor = listening.take(f"tcp://0.0.0.0:{port}")
    assert descriptor is not None
    assert not os.get_blocking(descriptor)
    os.close(descriptor)
    assert listening.drop() == []


@pytest.mark.parametrize(
    "address",
    ["off", "", "tcp://", "tcp://127.0.0.1:*", "tcp://127.0.0.1:99999", "tcp://[::1]:5557", "tcp://name:1"],
)
def test_other_addresses_are_left_to_whoever_binds_them(address: str) -> None:
    listening.begin({"FDCACHE_KV_EVENTS": address})
    assert listening.drop() == []


def test_an_address_that_is_taken_is_left_to_whoever_binds_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        listening.begin({"FDCACHE_KV_EVENTS": f"tcp://127.0.0.1:{other.getsockname()[1]}"})
        assert listening.drop() == []


@pytest.mark.parametrize("environ", [{"LISTEN_FDS": "1"}, {"LISTEN_FDS": "1", "LISTEN_PID": "1"}])
def test_sockets_for_another_process_are_not_taken(environ: dict[str, str]) -> None:
    listening.begin(environ)
    assert listening.drop() == []


def test_a_socket_of_a_supervisor_that_fits_no_address_is_told(tmp_path: Path) -> None:
    log = tmp_path / "s.log"
    with socket.create_server(("127.0.0.1", 0)) as held, ServiceProcess(tmp_path / "s") as service:
        supervised(service, held)
        service.start()
        until(lambda: "where a supervisor listens for it" in log.read_text(), "it is told")
