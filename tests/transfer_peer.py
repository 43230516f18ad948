"""An instance in a process of its own that a test commands, and reads that begin when a test lets them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fdcache.manager import Request
from fdcache.manager.requests import PeerSource
from fdcache.settings.peers import PeerSettings
from fdcache.transfer.connector import ReadEnd, ReadOrder, ReadOutcome, TransferContext
from fdcache.transfer.ipc import IpcConnector
from tests.transfer_help import BLOCK, Instance, prompt_of

AHEAD = 3600.0
"""Seconds by which the clocks of another process are ahead."""


class Clock:
    """The monotonic clock of this process, which a test puts forward."""

    def __init__(self, ahead: float = 0.0) -> None:
        self._real = time.monotonic
        self.ahead = ahead

    def __call__(self) -> float:
        return self._real() + self.ahead


class Gate:
    """What holds back the reads of this process; ``fails`` says which of them fail."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self.waiting: list[ReadOrder] = []
        self.reset()

    def reset(self) -> None:
        self.fails: Callable[[GatedConnector, ReadOrder], bool] = lambda connector, order: False
        self.open()

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        self._opened.clear()

    def wait(self, order: ReadOrder) -> None:
        self.waiting.append(order)
        self._opened.wait()
        self.waiting.remove(order)


GATE = Gate()


class GatedConnector(IpcConnector):
    """The connector ``ipc``, whose reads begin and then wait at the gate."""

    def __init__(self, context: TransferContext) -> None:
        super().__init__(context)
        reads: Any = self._reads
        reads.copy = partial(self._copy, reads.copy)

    @property
    def first_address(self) -> int:
        return self._planes.addresses[0]

    def _copy(self, copy: Callable[[Any, ReadOrder], None], source: Any, order: ReadOrder) -> None:
        GATE.wait(order)
        if GATE.fails(self, order):
            self._end(ReadEnd(order.read_id, ReadOutcome.ERROR, error="the link is down"))
        else:
            copy(source, order)


def install_gate(folder: Path) -> str:
    """Write what an installed package with the connector ``gated`` has; return the folder to import it from."""
    package = folder / "gated-1.dist-info"
    package.mkdir(exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: gated\nVersion: 1\n")
    points = "[fdcache.transfer_connectors]\ngated = tests.transfer_peer:GatedConnector\n"
    (package / "entry_points.txt").write_text(points)
    return str(folder)


def renew_often(patch: Callable[[object, str, object], None]) -> None:
    """Let decode repeat what may be lost every 20 ms, however long its leases are."""
    patch(PeerSettings, "renew", 0.02)


class Commands:
    """What a test lets the instance of another process do."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._requests: dict[str, Request] = {}
        self._slots: dict[str, list[int]] = {}

    def send(self, name: str, seed: int, blocks: int, computed: int | None = None) -> None:
        """Hand blocks over, the first ``computed`` of which are computed; by default all, and the request ends."""
        request = self._requests[name] = Request(name, prompt_of(seed, blocks))
        self._instance.start(request)
        self._slots[name] = request.block_table[:blocks].tolist()
        self._instance.handovers.send([(request, name)])
        self._instance.step()
        self.compute(name, 0, blocks if computed is None else computed)
        if computed is None:
            self.finish(name)

    def send_many(self, count: int, seed: int, blocks: int) -> None:
        requests = [Request(f"{index}", prompt_of(seed + index, blocks)) for index in range(count)]
        for request in requests:
            self._instance.start(request)
            self._instance.handovers.send([(request, request.request_id)])
        self._instance.manager.finish(requests)

    def compute_many(self, count: int) -> None:
        """Announce the first layer of all, some of whose requests are gone."""
        self._instance.controller.layer_computed(0, {f"{index}": 2 for index in range(count)})

    def compute(self, name: str, first: int, last: int) -> None:
        if first < last:
            self._instance.compute(self._requests[name], name, first, last)

    def fetch(self, name: str, seed: int, blocks: int, source: PeerSource) -> int:
        request = self._requests[name] = Request(name, prompt_of(seed, blocks))
        return self._instance.fetch(request, source)

    def give_up(self, name: str) -> None:
        self._instance.handovers.end_transfers([self._requests[name]])
        self._instance.manager.finish([self._requests[name]])

    def finish(self, name: str) -> None:
        self._instance.manager.finish([self._requests[name]])

    def overwrite(self, name: str) -> None:
        """Use the blocks of a request for other bytes."""
        for plane in self._instance.planes:
            plane[self._slots[name]] ^= 0xA5

    def slots(self, name: str) -> list[int]:
        return self._slots[name]

    def flip(self, name: str, rank: int, block: int) -> None:
        """Flip a bit of a block on one rank."""
        self._instance.rank_planes[rank][1][self._slots[name][block], 7] ^= 4

    def is_offered(self, name: str) -> bool:
        """Return True if every rank has summed all blocks of a transfer."""
        stats = [each.transfer_stats() for each in self._instance.ranks]
        views = [view for each in stats if each is not None for view in each.transfers]
        return sum(view.transfer == name and view.complete for view in views) == len(self._instance.ranks)

    def outcomes(self) -> list[tuple[str, int, str]]:
        outcomes = self._instance.outcomes
        return [
            (each.status.value, each.recompute_from // BLOCK, each.error_message or "") for each in outcomes
        ]

    def wrong(self, name: str, last: int) -> list[int]:
        return self._instance.wrong_blocks(self._requests[name], 0, last)

    def results(self) -> list[str]:
        return self._instance.results

    def is_clean(self) -> bool:
        return self._instance.is_clean

    def free_blocks(self) -> int:
        return self._instance.manager.num_free_device_blocks

    def reads_waiting(self) -> int:
        return len(GATE.waiting)

    def open_gate(self) -> None:
        GATE.open()

    def close_gate(self) -> None:
        GATE.close()

    def expire(self) -> bool:
        """Let time pass; return True once that has ended every lease."""
        assert isinstance(time.monotonic, Clock)
        time.monotonic.ahead += 300.0
        return self._instance.is_clean


def _serve(pipe: Connection, role: str, folder: Path, name: str, options: dict[str, Any]) -> None:
    time.monotonic = Clock(AHEAD)
    renew_often(setattr)
    with Instance(role, folder, name, **options) as instance:
        commands = Commands(instance)
        pipe.send(instance.addresses)
        while True:
            while pipe.poll(0.001):
                command = pipe.recv()
                if command is None:
                    return
                what, arguments = command
                pipe.send(getattr(commands, what)(*arguments))
            instance.step()


class Peer:
    """An instance in another process, whose clocks are an hour ahead."""

    def __init__(self, role: str, folder: Path, name: str, **options: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.transfer_peer"])
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, role, folder, name, options), daemon=True)
        self.process.start()
        theirs.close()
        self.addresses: list[str] = self._pipe.recv()

    def close(self) -> None:
        """End the process, unless it was killed."""
        if self.process.exitcode is None:
            self.resume()
            self._pipe.send(None)
            self.process.join()

    def ask(self, what: str, *arguments: Any) -> Any:
        """Let the instance do a command; return its answer."""
        self._pipe.send((what, arguments))
        return self._pipe.recv()

    def source(self, transfer: str, attempt: int = 1) -> PeerSource:
        return PeerSource(transfer, tuple(self.addresses), attempt)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        """Stop the process, and wait until it has."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def resume(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)
