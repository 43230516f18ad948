"""The ranks of a replay: one in this process, or one process each."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections import deque
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Protocol

from fdcache.errors import FdcacheError, ReplayError
from fdcache.replay.messages import (
    RankError,
    Starting,
    StepOrder,
    StepResult,
    decode_order,
    decode_result,
    encode_failure,
    encode_order,
    encode_result,
    encode_starting,
)
from fdcache.replay.worker import Progress, RankWorker, WorkerSpec

STEP_TIMEOUT = 120.0
"""Seconds a rank process has for one step before the run is given up."""

_STOP = b""


class Ranks(Protocol):
    """Every rank of the engine. Orders are carried out in the order sent; each is answered once."""

    def send(self, order: StepOrder) -> None:
        """Hand every rank the next step without waiting for it."""

    def receive(self) -> list[StepResult]:
        """The answers to the oldest unanswered order, by rank. Raises ``ReplayError`` for a lost rank."""

    def close(self) -> None:
        """End the ranks and give their memory back; harmless when done before."""


def start_ranks(spec: WorkerSpec, count: int, on_start: Progress | None = None) -> Ranks:
    """One rank in this process, several in processes of their own; ``on_start`` hears of their memory and storage."""
    return LocalRank(spec, on_start) if count == 1 else RankProcesses(spec, count, on_start)


class LocalRank:
    """A single rank, whose steps run when their answer is asked for: after the next one was planned."""

    def __init__(self, spec: WorkerSpec, on_start: Progress | None = None) -> None:
        self._worker: RankWorker | None = RankWorker(spec, 0, on_start)
        self._orders: deque[StepOrder] = deque()

    def send(self, order: StepOrder) -> None:
        """Queue the order."""
        self._orders.append(order)

    def receive(self) -> list[StepResult]:
        """Carry out the oldest order."""
        if self._worker is None:
            raise ReplayError("the rank was closed")
        return [self._worker.execute(self._orders.popleft())]

    def close(self) -> None:
        """Shut the rank down."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


class RankProcesses:
    """Spawned ranks, spoken to over pipes in msgpack."""

    def __init__(self, spec: WorkerSpec, count: int, on_start: Progress | None = None) -> None:
        self._on_start = on_start
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        self._drain_timeout = spec.transfer.drain_timeout
        try:
            for rank in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(theirs, spec, rank), name=f"fdcache-rank{rank}", daemon=True
                )
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
            self.receive()  # every rank answers once before its first order, when its memory is there
        except BaseException:
            self.close()
            raise

    def send(self, order: StepOrder) -> None:
        """Send the order to every rank."""
        data = encode_order(order)
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(data)
            except OSError as error:
                raise self._lost(rank) from error

    def receive(self) -> list[StepResult]:
        """Wait for every rank's answer."""
        return [self._receive_from(rank) for rank in range(len(self._pipes))]

    def _receive_from(self, rank: int) -> StepResult:
        while isinstance(said := self._hear(rank), Starting):
            if self._on_start is not None:
                self._on_start(said.what, said.done, said.total)
        return said

    def _hear(self, rank: int) -> StepResult | Starting:
        pipe, process = self._pipes[rank], self._processes[rank]
        if not wait([pipe, process.sentinel], timeout=STEP_TIMEOUT):
            raise ReplayError(f"rank {rank} gave no answer within {STEP_TIMEOUT:.0f} s; see whether it hangs")
        try:
            if not pipe.poll():
                raise self._lost(rank)
            return decode_result(pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._lost(rank) from error
        except RankError as error:
            raise ReplayError(f"rank {rank} failed: {error}") from error

    def _lost(self, rank: int) -> ReplayError:
        process = self._processes[rank]
        process.join(timeout=5.0)
        code = process.exitcode
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
        return ReplayError(f"rank {rank} (process {process.pid}) {how}; the run cannot go on without it")

    def close(self) -> None:
        """Ask every rank to end, and end by force those that do not."""
        for pipe in self._pipes:
            try:
                pipe.send_bytes(_STOP)
            except OSError:
                continue  # this rank is gone already, which is what was asked for
        for process in self._processes:
            process.join(timeout=self._drain_timeout)
            if process.exitcode is None:
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []


def _serve(pipe: Connection, spec: WorkerSpec, rank: int) -> None:
    """A rank process: orders in, results out, until the stop order or the end of the scheduler's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders: SimpleQueue[bytes] = SimpleQueue()
    # A thread of its own reads, so that neither side can wait for the other to empty a full pipe.
    threading.Thread(target=_read_orders, args=(pipe, orders), daemon=True).start()
    try:
        worker = RankWorker(spec, rank, lambda *words: pipe.send_bytes(encode_starting(*words)))
        try:
            pipe.send_bytes(encode_result(StepResult(0, [], [], 0)))
            while data := orders.get():
                pipe.send_bytes(encode_result(worker.execute(decode_order(data))))
        finally:
            worker.close()
    except BrokenPipeError:
        return
    except (FdcacheError, ValueError, MemoryError) as error:
        pipe.send_bytes(encode_failure(f"{type(error).__name__}: {error}"))


def _read_orders(pipe: Connection, orders: SimpleQueue[bytes]) -> None:
    try:
        while data := pipe.recv_bytes():
            orders.put(data)
    except (EOFError, OSError):
        pass  # the scheduler's process is gone; the rank ends as if told to
    orders.put(_STOP)
