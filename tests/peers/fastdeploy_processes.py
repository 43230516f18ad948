"""Workers in processes of their own, as FastDeploy starts them, configured by the environment alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.peers.fastdeploy_worker import ControllerCopier, Worker, WrongRead

_SECONDS = 120.0


class WorkerProcess:
    """Proxy of a worker in another process. ``kill`` ends it with SIGKILL."""

    def __init__(self, rank: int, options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, rank, options), daemon=True)
        self._process.start()
        theirs.close()
        self.rank = rank
        self.wrong: list[WrongRead] = []
        self.checked = 0
        self._answer()

    def insert(self, data: bytes) -> None:
        self._call("insert", data)

    def step(self) -> dict[int, tuple[str, list[int]]]:
        sampled, wrong, checked = self._call("step")
        self.wrong += wrong
        self.checked += checked
        return dict(sampled)

    def sleep(self) -> None:
        self._call("sleep")

    def wake(self, num_blocks: int) -> None:
        self._call("wake", num_blocks)

    def drop_requests(self) -> None:
        self._call("drop_requests")

    @property
    def copier(self) -> WorkerProcess:
        return self

    def close(self) -> None:
        self._call("close")
        self._process.join(_SECONDS)

    def kill(self) -> None:
        assert self._process.pid
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(_SECONDS)

    def _call(self, name: str, *arguments: object) -> Any:
        self._line.send((name, *arguments))
        return self._answer()

    def _answer(self) -> Any:
        if not self._line.poll(_SECONDS):
            raise TimeoutError(f"the worker of rank {self.rank} does not answer")
        answer = self._line.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _serve(line: Connection, rank: int, options: Any) -> None:
    from tests.peers.fastdeploy_main import prepare

    prepare(Path(os.environ["FDCACHE_RUNTIME_DIR"]) / f"logs-{rank}")
    from tests.peers.fastdeploy_engine import make_config, make_worker

    config = make_config(options)
    worker: Worker = make_worker(options, rank, ControllerCopier(config, rank))
    line.send(None)
    while True:
        name, *arguments = line.recv()
        if name == "close":
            worker.copier.close()
            line.send(None)
            return
        try:
            answer = getattr(worker, name)(*arguments)
        except Exception as error:  # noqa: BLE001 - sent to the engine, which raises it
            line.send(error)
            continue
        if name == "step":
            answer = (answer, worker.wrong, worker.checked)
            worker.wrong, worker.checked = [], 0
        line.send(answer)
