"""A real Mooncake master on loopback, and connectors to it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fdcache.errors import ConnectorNotFoundError
from fdcache.integrations.mooncake.client import load_client
from fdcache.integrations.mooncake.store import MooncakeConnector
from fdcache.integrations.mooncake.variables import MooncakeSettings
from fdcache.layout import KVLayout
from fdcache.settings.cache import StorageTierSettings
from fdcache.storage.connector import ConnectorContext
from tests.service_help import until

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_random = random.SystemRandom()


def free_port() -> int:
    """Return a port that is free, and outside the range from which the system serves connections."""
    ephemeral = range(*map(int, _EPHEMERAL.read_text().split()))
    while True:
        port = _random.randrange(15000, 65536)
        with socket.socket() as probe, contextlib.suppress(OSError):
            if port not in ephemeral:
                probe.bind(("127.0.0.1", port))
                return port


def stop(pid: int) -> None:
    """Stop a process, and wait until each of its threads has stopped, which the signal alone does not ensure."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    while any(_state(thread) not in "TX" for thread in threads.iterdir()):
        time.sleep(0.001)


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"  # the thread has ended


class Master:
    """Process of a master; it can be killed and started again at the same address."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._log = folder / "master.log"
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    "--rpc_address=127.0.0.1",
                    f"--rpc_port={self.port}",
                    f"--metrics_port={free_port()}",
                ],
                stdout=log,
                stderr=log,
            )
        until(self._is_listening, "the master listens")

    def _is_listening(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the master did not start: {self._log.read_text()}"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def freeze(self) -> None:
        """Stop the process: it neither answers nor closes its connections."""
        assert self._process is not None
        stop(self._process.pid)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def environment(self) -> dict[str, str]:
        return {
            "FDCACHE_STORAGE": "mooncake",
            "MOONCAKE_MASTER_SERVER_ADDR": self.address,
            "MOONCAKE_PROTOCOL": "tcp",
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": "64MiB",
        }

    def connect(
        self, layout: KVLayout, rank: int | None = 0, *, segment: int = 32 << 20, **tier: object
    ) -> MooncakeConnector:
        settings = MooncakeSettings(master=self.address, protocol="tcp", global_segment_size=segment)
        return MooncakeConnector(
            ConnectorContext(layout, rank, StorageTierSettings(connector="mooncake", **tier), settings)
        )


class SharedClient:
    """A client of the library for several connectors, since each client takes a second or two to leave the store.

    ``close`` keeps it open; ``leave`` closes it.
    """

    def __init__(self) -> None:
        self._client = load_client().MooncakeDistributedStore()
        self._is_set_up = False

    def setup(self, *arguments: object) -> int:
        code = 0 if self._is_set_up else int(self._client.setup(*arguments))
        self._is_set_up = code == 0
        return code

    def close(self) -> None:
        pass

    def leave(self) -> None:
        self._client.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def find_master() -> str:
    """Return the path of the master's program; skip the test where Mooncake is not installed."""
    try:
        load_client()
    except ConnectorNotFoundError as error:
        pytest.skip(str(error))
    program = shutil.which("mooncake_master", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("mooncake_master is not on the PATH")
    return program
