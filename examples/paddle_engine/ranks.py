"""Tensor parallelism: one process per rank; all execute the same steps."""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Any

import numpy as np

from examples.paddle_engine.batch import Chunk
from examples.paddle_engine.config import EngineConfig, ModelConfig
from examples.paddle_engine.worker import StepResult, Worker
from fdcache import TransferPlan
from fdcache.metadata import StorageScan
from fdcache.tiers.host import HostCache

_MOST_ROWS = 4096


@dataclass(frozen=True)
class SumOverRanks:
    """All-reduce through shared memory. All ranks add in the same order and get the same bits."""

    rank: int
    buffers: Sequence[Any]
    barrier: Any

    def __call__(self, x: Any) -> Any:
        """Return the sum of the ranks' tensors."""
        import paddle

        mine = np.frombuffer(self.buffers[self.rank], np.float32, count=x.size)
        mine[:] = x.numpy().reshape(-1)
        self.barrier.wait()
        total = sum(np.frombuffer(buffer, np.float32, count=x.size) for buffer in self.buffers)
        self.barrier.wait()
        return paddle.to_tensor(total).reshape(x.shape)


class RankProcesses:
    """The workers of all ranks in processes of their own, with the interface of one worker."""

    def __init__(self, model: ModelConfig, engine: EngineConfig, host_cache: HostCache | None) -> None:
        context: SpawnContext = multiprocessing.get_context("spawn")
        buffers = [context.RawArray(ctypes.c_float, _MOST_ROWS * model.hidden) for _ in range(engine.ranks)]
        barrier = context.Barrier(engine.ranks)
        self._shared = (buffers, barrier)  # kept alive for processes that are starting
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(engine.ranks):
            pipe, theirs = context.Pipe()
            reduce = SumOverRanks(rank, buffers, barrier)
            process = context.Process(
                target=_serve, args=(theirs, model, engine, host_cache, rank, reduce), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def execute(self, plans: Sequence[TransferPlan], chunks: Sequence[Chunk]) -> StepResult:
        """Return rank 0's results and the reports of all ranks."""
        results: list[StepResult] = self._call("execute", list(plans), list(chunks))
        return StepResult(results[0].chunks, tuple(report for each in results for report in each.reports))

    def storage_scans(self) -> list[StorageScan]:
        """Return the scans of the ranks' storage at the start."""
        return [scan for scans in self._call("storage_scans") for scan in scans]

    def addresses(self) -> list[str]:
        """Return the address of each rank for peers."""
        return [address for addresses in self._call("addresses") for address in addresses]

    def connect_peers(self, addresses: Sequence[str]) -> None:
        """Name a prefill instance that blocks will be fetched from."""
        self._call("connect_peers", addresses)

    def update_weights(self, seed: int) -> None:
        """Replace the weights on every rank."""
        self._call("update_weights", seed)

    def shutdown(self) -> None:
        """End the processes."""
        self._call("shutdown")
        for process in self._processes:
            process.join()

    def _call(self, name: str, *arguments: object) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((name, arguments))
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, Exception):
                for process in self._processes:
                    process.kill()
                raise answer
        return answers


def _serve(
    pipe: Connection,
    model: ModelConfig,
    engine: EngineConfig,
    host_cache: HostCache | None,
    rank: int,
    reduce: SumOverRanks,
) -> None:
    """Run a rank's process: execute calls until ``shutdown``."""
    worker, name = None, ""
    while name != "shutdown":
        name, arguments = pipe.recv()
        try:
            worker = worker or Worker(model, engine, host_cache, rank=rank, reduce=reduce)
            pipe.send(getattr(worker, name)(*arguments))
        except Exception as error:  # noqa: BLE001 (it is raised again by the caller)
            reduce.barrier.abort()
            pipe.send(error)
