"""Services for the tests: in a thread of this process, or as the real command that can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

from fdcache.errors import ServiceError
from fdcache.service.client.connection import Client
from fdcache.service.server.lifecycle import Server
from fdcache.settings import Settings
from tests.commands import Done, run_command

TIMEOUT = 60.0


def until(condition: Callable[[], object], what: str, timeout: float = TIMEOUT, pause: float = 0.01) -> None:
    """Wait for something that has to become true; look at it again after a pause."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout:g} s"
        time.sleep(pause)


def arguments(directory: Path, **others: str) -> dict[str, object]:
    """Settings of a service of the tests: everything in one folder, no HTTP, and no memory left at a clean end."""
    return {
        "FDCACHE_SERVER": f"ipc://{directory}/fdcache.sock",
        "FDCACHE_RUNTIME_DIR": str(directory),
        "FDCACHE_ARENA_DIR": str(directory),
        "FDCACHE_HTTP_ADDRESS": "off",
        "FDCACHE_HOST_MEMORY": "16MiB",
        "FDCACHE_DISCARD": "1",
        **others,
    }


def run(*arguments: object, **environ: str) -> Done:
    """Run a command in this process, with ``environ`` added to its environment."""
    return run_command(arguments, {**os.environ, "COLUMNS": "200", **environ})


@contextmanager
def spawned(*command: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process whose output is read as text; it does not outlive the test that began it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def next_line(process: subprocess.Popen[str]) -> str:
    """Return the next line that the process prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "it ended"
    return line


class LocalService:
    """A service in a thread that does not delay the end of a test run.

    The state of ``service`` may be looked at while nothing is asked of it. ``tier``: constants of the storage tier.
    """

    def __init__(self, directory: Path, tier: Mapping[str, object] | None = None, /, **settings: str) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        directory.chmod(0o700)
        self.directory = directory
        self.address = f"ipc://{directory}/fdcache.sock"
        loaded = Settings.load(environ={}, arguments=arguments(directory, **settings))
        storage = loaded.storage_tier.model_copy(update=tier)
        self.server = Server(loaded.model_copy(update={"storage_tier": storage}))
        self.server.start()
        self._thread = threading.Thread(target=self.server.run, name="fdcache-serve", daemon=True)
        self._thread.start()
        self.client = Client(self.address, timeout=TIMEOUT)

    @property
    def service(self) -> Any:
        return self.server.service

    def ask(self, what: str, **arguments: Any) -> Any:
        return self.client.ask(what, **arguments)

    def drain(self) -> bool:
        """End it as one signal would; return True if it ended in time."""
        self.server.stop()
        self._thread.join(TIMEOUT)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """End it as a signal would, forced."""
        if self._thread.is_alive():
            self.server.stop(force=True)
            self._thread.join()
        self.client.close()
        self.server.close()

    def crash(self) -> None:
        """End it as if it had been killed: arena and files stay."""
        self.server.stop(force=True)
        self._thread.join()
        self.client.close()
        self.server.abandon()


@contextmanager
def local_service(
    directory: Path, tier: Mapping[str, object] | None = None, /, **settings: str
) -> Iterator[LocalService]:
    service = LocalService(directory, tier, **settings)
    try:
        yield service
    finally:
        service.stop()


class ServiceProcess:
    """``fdcache serve`` as a process of its own, begun by ``start`` and ended with the context at the latest."""

    def __init__(self, directory: Path, **settings: str) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        directory.chmod(0o700)
        self.directory = directory
        self.address = f"ipc://{directory}/fdcache.sock"
        self._settings = {name: str(value) for name, value in arguments(directory, **settings).items()}
        self.command = [sys.executable, "-m", "fdcache_cli.main", "serve"]
        self.pass_fds: tuple[int, ...] = ()
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self) -> None:
        with (self.directory.parent / f"{self.directory.name}.log").open("ab") as log:
            self.spawn(log)
        until(self.answers, "the service answers")

    def spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Begin it without waiting for anything."""
        self.process = subprocess.Popen(
            self.command,
            env={**os.environ, **self._settings},
            stdout=log,
            stderr=log,
            pass_fds=self.pass_fds,
        )
        return self.process

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.directory.parent / f"{self.directory.name}.log").read_text()
        with Client(self.address, timeout=1.0) as client:
            try:
                client.ask("stats")
            except ServiceError:
                return False
            return True

    def ask(self, what: str, **arguments: Any) -> Any:
        with Client(self.address, timeout=TIMEOUT) as client:
            return client.ask(what, **arguments)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def leftovers(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


@contextmanager
def service_process(directory: Path, **settings: str) -> Iterator[ServiceProcess]:
    with ServiceProcess(directory, **settings) as service:
        service.start()
        yield service
