"""Start and end of a service: signals, sd_notify, dead arenas, other users' arenas, settings of memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from fdcache.errors import ConfigurationError, HostMemoryError, ServiceRunningError
from fdcache.machine.memory import huge_page_problem, node_cores
from fdcache.service.client.connection import Connection
from fdcache.service.server.arena import Arena
from fdcache.service.server.arenas import find_arenas, foreign_arenas, remove_arena
from fdcache.service.server.lifecycle import Server
from fdcache.service.server.machine_findings import examine
from fdcache.service.server.machine_setup import clean_arenas
from fdcache.service.server.preflight import check_all
from fdcache.service.server.process import notify, notify_status
from fdcache.service.wire.liveness import LiveFile
from fdcache.service.wire.protocol import Register
from fdcache.settings import Settings, Severity
from tests.service_engine import PROMPT, Engine, layout, ready_blocks
from tests.service_help import (
    TIMEOUT,
    LocalService,
    ServiceProcess,
    arguments,
    local_service,
    next_line,
    run,
    spawned,
    until,
)

NOBODY = 65534
T = TypeVar("T")


class TestSignals:
    def test_the_first_signal_drains_and_the_second_one_ends_at_once(self, tmp_path: Path) -> None:
        with ServiceProcess(tmp_path / "s", FDCACHE_DRAIN_TIMEOUT="600s") as service:
            service.start()
            assert service.process is not None
            live, line = LiveFile(service.directory), Connection(service.address)
            line.call(Register(layout().to_json().encode(), live.live, "stays"), TIMEOUT)
            service.process.send_signal(signal.SIGTERM)
            until(lambda: service.ask("stats")["state"] == "draining", "it drains")
            assert [each["name"] for each in service.ask("clients")] == ["stays"]
            service.process.send_signal(signal.SIGTERM)
            assert service.process.wait(TIMEOUT) == 0
            live.close()
            line.close()
            assert service.leftovers() == []

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_during_the_start_leaves_no_files(
        self, tmp_path: Path, number: signal.Signals, notifications: socket.socket
    ) -> None:
        with ServiceProcess(
            tmp_path / "s", FDCACHE_HOST_MEMORY="64MiB", NOTIFY_SOCKET=notifications.getsockname()
        ) as service:
            with (tmp_path / "log").open("wb") as log:
                process = service.spawn(log)
            assert notifications.recv(1000).startswith(b"STATUS=touching memory: 1 of 16")
            process.send_signal(number)
            assert process.wait(TIMEOUT) in (0, 130)
            assert service.leftovers() == []
            assert b"Traceback" not in (tmp_path / "log").read_bytes()


@pytest.fixture
def notifications(tmp_path: Path) -> Iterator[socket.socket]:
    """Socket of a service manager, for sd_notify."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "notify"))
        line.settimeout(TIMEOUT)
        yield line


class TestServiceManager:
    def hear(self, line: socket.socket, last: str) -> list[str]:
        """Return the lines received, up to the one that begins with ``last``."""
        heard: list[str] = []
        while not heard or not heard[-1].startswith(last):
            heard += line.recv(1000).decode().splitlines()
        return heard

    def test_progress_readiness_and_the_end_are_sent(
        self, tmp_path: Path, notifications: socket.socket
    ) -> None:
        with ServiceProcess(tmp_path / "s", NOTIFY_SOCKET=notifications.getsockname()) as service:
            with (tmp_path / "log").open("wb") as log:
                service.spawn(log)
            *progress, ready, status = self.hear(notifications, "STATUS=serving")
            every = [f"STATUS=touching memory: {i} of 16" for i in range(1, 17)]
            assert progress[0] == every[0]
            assert set(progress) <= set(every)
            assert (ready, status) == ("READY=1", f"STATUS=serving at {service.address}")
            assert service.terminate() == 0
            assert self.hear(notifications, "STATUS=") == ["STOPPING=1", "STATUS=draining 0 clients"]

    def test_a_manager_that_does_not_read_delays_no_longer_than_the_timeout(
        self, notifications: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("NOTIFY_SOCKET", notifications.getsockname())
        sent = 0
        while not caplog.records:
            notify(f"STATUS={sent}", timeout=0.05)
            sent += 1
        assert caplog.messages == ["NOTIFY_SOCKET: timed out"]
        notify_status("dropped at once")
        assert self.hear(notifications, f"STATUS={sent - 2}") == [f"STATUS={i}" for i in range(sent - 1)]

    def test_an_abstract_socket_works_and_one_that_is_gone_is_harmless(self, tmp_path: Path) -> None:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        line.bind(f"\0fdcache-test-{tmp_path.name}-{time.monotonic_ns()}")
        line.settimeout(TIMEOUT)
        name = line.getsockname().decode().replace("\0", "@", 1)
        with ServiceProcess(tmp_path / "s", NOTIFY_SOCKET=name) as service:
            with line, (tmp_path / "log").open("wb") as log:
                service.spawn(log)
                assert "READY=1" in self.hear(line, "STATUS=serving")
            assert service.terminate() == 0


class TestDeadArenas:
    def dead(self, directory: Path) -> str:
        """Leave an arena with ten blocks behind. Return its address."""
        directory.mkdir()
        service = LocalService(directory)
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: ready_blocks(service) == 10, "the blocks are stored")
        engine.close()
        service.crash()
        return service.address

    def serve_beside(self, tmp_path: Path, **others: str) -> Server:
        other = tmp_path / "other"
        other.mkdir(mode=0o700)
        chosen = arguments(other, FDCACHE_ARENA_DIR=str(tmp_path / "dead"), **others)
        return Server(Settings.load(environ={}, arguments=chosen))

    def test_a_dead_arena_is_found_with_its_address_and_size(self, tmp_path: Path) -> None:
        address = self.dead(tmp_path / "dead")
        (found,) = find_arenas(tmp_path / "dead")
        assert (found.alive, found.address) == (False, address)
        assert found.nbytes >= 16 << 20
        assert f"--socket {address}" in found.remedy

    def test_serve_shows_a_dead_arena_that_its_own_address_recovers(self, tmp_path: Path) -> None:
        address = self.dead(tmp_path / "dead")
        other = tmp_path / "other"
        other.mkdir(mode=0o700)
        settings = _texts(arguments(other, FDCACHE_ARENA_DIR=str(tmp_path / "dead")))
        command = (sys.executable, "-m", "fdcache_cli.main", "serve")
        with spawned(*command, env={**os.environ, **settings}) as shown:
            lines = []
            while not (line := next_line(shown)).startswith("ready"):
                lines.append(line)
            shown.send_signal(signal.SIGTERM)
            assert shown.wait(TIMEOUT) == 0
        (line,) = [each for each in lines if each.startswith("dead arena")]
        assert address in line
        with local_service(tmp_path / "dead") as service:
            assert service.server.recovered == 10
        assert find_arenas(tmp_path / "dead") == []

    def test_a_dead_arena_is_removed_and_a_live_one_is_not(self, tmp_path: Path) -> None:
        self.dead(tmp_path / "dead")
        (found,) = find_arenas(tmp_path / "dead")
        remove_arena(found)
        assert find_arenas(tmp_path / "dead") == []
        with local_service(tmp_path / "dead"):
            (found,) = find_arenas(tmp_path / "dead")
            assert found.alive
            with pytest.raises(ServiceRunningError, match=rf"process {found.pid}"):
                remove_arena(found)
            assert len(list((tmp_path / "dead").glob("fdcache-*-free-*"))) == 16

    def test_too_little_memory_names_the_dead_arenas(self, tmp_path: Path) -> None:
        self.dead(tmp_path / "dead")
        server = self.serve_beside(tmp_path, FDCACHE_HOST_MEMORY=str(_all_memory()))
        with pytest.raises(HostMemoryError, match="reset arena removes it"):
            server.start()
        assert [each.alive for each in find_arenas(tmp_path / "dead")] == [False]

    def test_files_without_a_manifest_are_an_arena(self, tmp_path: Path) -> None:
        (tmp_path / "fdcache-0badcafe-free-00001").write_bytes(bytes(4096))
        (tmp_path / "others-file").touch()
        (found,) = find_arenas(tmp_path)
        assert (found.name, found.nbytes, found.alive) == ("0badcafe", 4096, False)
        remove_arena(found)
        assert [path.name for path in tmp_path.iterdir()] == ["others-file"]


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A directory that all users may write, as /dev/shm."""
    with tempfile.TemporaryDirectory(prefix="fdcache-test-") as name:
        Path(name).chmod(0o1777)
        yield Path(name)


def as_nobody(look: Callable[[], T]) -> T:
    """Call ``look`` as user nobody, in another process."""
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("fork"), initializer=os.setresuid, initargs=(NOBODY,) * 3
    ) as pool:
        return pool.submit(look).result(TIMEOUT)


def settings_in(folder: Path, **others: str) -> Settings:
    named = {"FDCACHE_RUNTIME_DIR": str(folder / "run"), "FDCACHE_HTTP_ADDRESS": "off", **others}
    return Settings.load(environ=named)


def errors(settings: Settings) -> list[str]:
    return [str(each) for each in check_all(settings) if each.severity is Severity.ERROR]


def arenas_shown(settings: Settings) -> list[str]:
    return [each.found for each in examine(settings) if each.name == "arena"]


def refusal_of_start(settings: Settings) -> str:
    server = Server(settings)
    with pytest.raises(ConfigurationError) as refused:
        server.start()
    server.close()
    return str(refused.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
class TestOtherUsers:
    def test_arenas_of_other_users_are_passed_over(self, shared_folder: Path) -> None:
        theirs = Arena(shared_folder, "0decaf00")
        theirs.lock()
        theirs.create(1 << 20)
        (shared_folder / "fdcache-0badcafe-free-00000").touch(mode=0o600)
        assert as_nobody(partial(find_arenas, shared_folder)) == []
        found = as_nobody(partial(foreign_arenas, shared_folder))
        assert [(each.name, each.uid) for each in found] == [("0badcafe", 0), ("0decaf00", 0)]
        settings = settings_in(shared_folder, FDCACHE_ARENA_DIR=str(shared_folder))
        assert as_nobody(partial(errors, settings)) == []
        assert as_nobody(partial(clean_arenas, settings)) == []
        shown = as_nobody(partial(arenas_shown, settings))
        assert shown == [f"skipped, {size} MiB of user 0, which this user may not read" for size in (0, 1)]
        theirs.close(discard=True)

    @pytest.mark.parametrize("folder", ["/etc", "/root", "/root/below"])
    def test_an_arena_directory_of_another_user_is_refused(self, shared_folder: Path, folder: str) -> None:
        settings = settings_in(shared_folder, FDCACHE_ARENA_DIR=folder)
        (said,) = as_nobody(partial(errors, settings))
        assert said.startswith(f"FDCACHE_ARENA_DIR (environment): {folder} ")
        assert as_nobody(partial(refusal_of_start, settings)).startswith(f"FDCACHE_ARENA_DIR: {folder} ")


class TestMemory:
    def test_an_unknown_numa_node_is_refused_with_the_remedy(self, tmp_path: Path) -> None:
        done = run("serve", **_texts(arguments(tmp_path, FDCACHE_NUMA_NODE="4095")))
        assert done.returncode == 78
        assert "no NUMA node 4095; unset the variable" in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == []

    def test_memory_of_a_numa_node(self, tmp_path: Path) -> None:
        assert node_cores(0)
        with local_service(tmp_path, FDCACHE_NUMA_NODE="0") as service:
            assert service.ask("stats")["tiers"]["host"]["bytes"] == 16 << 20

    @pytest.mark.parametrize("folder", ["here", "shm"])
    def test_huge_pages_are_used_or_their_absence_is_logged(
        self, tmp_path: Path, folder: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        where = tmp_path if folder == "here" else Path("/dev/shm")
        settings = {
            "FDCACHE_HUGE_PAGES": "1",
            "FDCACHE_HOST_MEMORY": "32MiB",
            "FDCACHE_ARENA_DIR": str(where),
        }
        with local_service(tmp_path, **settings) as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            until(lambda: ready_blocks(service) == 10, "the blocks are stored")
            engine.close()
            assert service.ask("stats")["tiers"]["host"]["extent_bytes"] == 2 << 20
        problem = huge_page_problem(where)
        assert ("FDCACHE_HUGE_PAGES" in caplog.text) == (problem is not None)


def _all_memory() -> int:
    """Return the bytes of the machine, more than are free."""
    return int(psutil.virtual_memory().total)


def _texts(values: dict[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}
