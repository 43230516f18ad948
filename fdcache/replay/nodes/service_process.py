"""The service of a node: ``fdcache serve`` as a process of its own, which can be killed, stopped and started again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fdcache.errors import ReplayError, ServiceError
from fdcache.service.client.connection import Client

_START_SECONDS = 60.0
_END_SECONDS = 30.0
_ASK_SECONDS = 10.0
_STOP_SECONDS = 5.0
_LINES = 5

_ENTER = """
import ctypes, json, os, sys
os.environ.update(json.load(sys.stdin))
library = ctypes.CDLL(None)
library.prctl(1, 9)
if sys.argv[1]:
    descriptor = os.open(sys.argv[1], os.O_RDONLY)
    if library.setns(descriptor, 0x40000000):
        sys.exit("the network namespace of the node cannot be entered")
    os.close(descriptor)
os.execv(sys.executable, [sys.executable, "-m", "fdcache_cli.main", "serve"])
"""
"""Take variables, enter a namespace, and become a service that ends with the replay."""


class NodeService:
    """A service with these variables. ``namespace``: path of its network namespace, or None."""

    def __init__(self, folder: Path, variables: Mapping[str, str], namespace: str | None) -> None:
        folder.mkdir(mode=0o700)
        self.address = f"ipc://{folder}/fdcache.sock"
        self._log = folder / "log"
        self._namespace = namespace or ""
        self._variables = {
            "FDCACHE_SERVER": self.address,
            "FDCACHE_RUNTIME_DIR": str(folder),
            "FDCACHE_HTTP_ADDRESS": "off",
            "FDCACHE_KV_EVENTS": "off",
            "FDCACHE_KV_EVENTS_REPLAY": "off",
            **variables,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, without waiting for it."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _ENTER, self._namespace], stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        assert self._process.stdin is not None
        with self._process.stdin as variables:
            variables.write(json.dumps(self._variables).encode())

    def wait(self) -> None:
        """Wait until it answers. Raises ``ReplayError`` if it does not."""
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ReplayError(f"the service of a node does not start: {self._last_lines()}")
            time.sleep(0.02)

    def wait_for_storage(self) -> None:
        """Wait until its storage is open, which an engine lets it do, or has failed."""
        deadline = time.monotonic() + _START_SECONDS
        while not self._has_storage() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _has_storage(self) -> bool:
        try:
            layouts = self.ask("stats", seconds=1.0)["storage"]["layouts"]
        except ServiceError:
            return False
        return bool(layouts) and all(each["state"] != "opening" for each in layouts)

    def _answers(self) -> bool:
        try:
            self.ask("stats", seconds=1.0)
        except ServiceError:
            return False
        return True

    def _last_lines(self) -> str:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return " / ".join(text.splitlines()[-_LINES:])

    def ask(self, what: str, seconds: float = _ASK_SECONDS, **arguments: Any) -> Any:
        """Ask it a question. Raises ``ServiceError``."""
        with Client(self.address, timeout=seconds) as client:
            return client.ask(what, **arguments)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def state(self) -> str | None:
        """The letter by which the kernel names the state of the process; None once it has ended."""
        if self._process is None or self._process.poll() is not None:
            return None
        return Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def is_stopped(self) -> bool:
        """Return True once a signal has stopped it, False if none does."""
        deadline = time.monotonic() + _STOP_SECONDS
        while self.state != "T":
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def end(self) -> int | None:
        """Ask it to end; return its exit status, or None if it has to be killed."""
        assert self._process is not None
        self.signal(signal.SIGTERM)
        try:
            return self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return None
