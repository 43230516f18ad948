"""A process of one instance of a replay of prefill and decode."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from fdcache.errors import ReplayError
from fdcache.replay.pd_instance import Command, InstanceSpec, NotStarted, Started, run_instance
from fdcache.settings.peers import TransferRole

_START_SECONDS = 60.0
_END_SECONDS = 10.0


class InstanceProcess:
    """A process of one instance. It can be killed and started again at the same address, or stopped for a time."""

    def __init__(self, role: TransferRole, spec: InstanceSpec) -> None:
        self.role, self._spec = role, spec
        self._context = multiprocessing.get_context("spawn")
        self.pipe: Connection
        self.process: BaseProcess
        self.addresses: tuple[str, ...] = ()
        self._unsent: list[Command] | None = None
        """What waits for the process while it is stopped: a full pipe would stop the router, too."""
        self.start()

    def start(self) -> None:
        """Start the process and wait until it works."""
        self.pipe, theirs = self._context.Pipe()
        self.process = self._context.Process(
            target=run_instance, args=(theirs, self._spec), name=f"fdcache-{self.role.value}", daemon=True
        )
        self.process.start()
        theirs.close()
        started = self.receive(_START_SECONDS)
        if isinstance(started, NotStarted):
            raise ReplayError(started.reason)
        if not isinstance(started, Started):
            raise ReplayError(f"the {self.role.value} process did not start; see its messages above")
        self.addresses = started.addresses

    def send(self, command: Command) -> None:
        """Send a command, unless the process is gone."""
        if self._unsent is not None:
            self._unsent.append(command)
            return
        try:
            self.pipe.send(command)
        except OSError as error:
            raise ReplayError(f"the {self.role.value} process has ended") from error

    def receive(self, seconds: float) -> Any:
        """Return the next answer, None after this many seconds. Raises ``ReplayError`` if the process has ended."""
        if not self.pipe.poll(seconds):
            return None
        try:
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            raise ReplayError(f"the {self.role.value} process has ended; see its messages above") from error

    def stop(self) -> None:
        """Stop the process; what is sent to it waits until it goes on."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        self._unsent = []

    def resume(self) -> None:
        """Continue the process if it is stopped."""
        if self._unsent is not None:
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGCONT)
            unsent, self._unsent = self._unsent, None
            for command in unsent:
                self.send(command)

    def kill(self) -> None:
        """End the process at once, whatever it is doing."""
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def close(self) -> None:
        """End the process."""
        if self._unsent is not None:
            self.kill()
            return
        self.process.join(timeout=_END_SECONDS)
        if self.process.exitcode is None:
            self.kill()
        elif not self.pipe.closed:
            self.pipe.close()
