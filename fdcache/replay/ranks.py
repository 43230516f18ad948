"""The ranks of a replay: a single one in this process, several in processes of their own."""

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
from fdcache.replay.worker import RankWorker, StartProgress, WorkerSpec

STEP_TIMEOUT = 120.0
"""Seconds that a rank process has for one step before the run fails."""

_STOP = b""


class Ranks(Protocol):
    """All ranks of the engine. They execute orders in sequence and answer each once."""

    def send(self, order: StepOrder) -> None:
        """Send the next step to every rank, without waiting for results."""

    def receive(self) -> list[StepResult]:
        """Return the results of the oldest unanswered order, by rank. Raises ``ReplayError`` for a lost rank."""

    def close(self) -> None:
        """End the ranks and release their memory. Idempotent."""


def start_ranks(spec: WorkerSpec, count: int, on_start: StartProgress | None = None) -> Ranks:
    """Start a single rank in this process, or several in processes of their own."""
    return LocalRank(spec, on_start) if count == 1 else RankProcesses(spec, count, on_start)


class LocalRank:
    """A single rank in this process. A step runs when its result is received, after the next one is planned."""

    def __init__(self, spec: WorkerSpec, on_start: StartProgress | None = None) -> None:
        self.worker = RankWorker(spec, 0, on_start)
        self._closed = False
        self._orders: deque[StepOrder] = deque()

    def send(self, order: StepOrder) -> None:
        """Queue the order."""
        self._orders.append(order)

    def receive(self) -> list[StepResult]:
        """Execute the oldest order."""
        return [self.worker.execute(self._orders.popleft())]

    def close(self) -> None:
        """Shut the rank down."""
        if not self._closed:
            self._closed = True
            self.worker.close()


class RankProcesses:
    """One spawned process per rank, with a pipe to each."""

    def __init__(self, spec: WorkerSpec, count: int, on_start: StartProgress | None = None) -> None:
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
            self.receive()  # every rank answers once when it has started
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
        """Wait for the result of every rank."""
        return [self._receive_from(rank) for rank in range(len(self._pipes))]

    def _receive_from(self, rank: int) -> StepResult:
        while isinstance(message := self._next_message(rank), Starting):
            if self._on_start is not None:
                self._on_start(message.activity, message.done, message.total)
        return message

    def _next_message(self, rank: int) -> StepResult | Starting:
        pipe, process = self._pipes[rank], self._processes[rank]
        if not wait([pipe, process.sentinel], timeout=STEP_TIMEOUT):
            raise ReplayError(f"rank {rank} did not answer within {STEP_TIMEOUT:.0f} s; check if it hangs")
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
        return ReplayError(f"rank {rank} (process {process.pid}) {how}; the run cannot continue without it")

    def close(self) -> None:
        """Ask every rank to end, and kill those that do not within the drain timeout."""
        for pipe in self._pipes:
            try:
                pipe.send_bytes(_STOP)
            except OSError:
                continue  # the rank has ended already
        for process in self._processes:
            process.join(timeout=self._drain_timeout)
            if process.exitcode is None:
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []


def _serve(pipe: Connection, spec: WorkerSpec, rank: int) -> None:
    """Run a rank process: execute orders until the stop order or the end of the scheduler's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders: SimpleQueue[bytes] = SimpleQueue()
    # Read in a separate thread, so that full pipes cannot block both sides.
    threading.Thread(target=_read_orders, args=(pipe, orders), daemon=True).start()
    try:
        worker = RankWorker(spec, rank, lambda *progress: pipe.send_bytes(encode_starting(*progress)))
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
        pass  # the scheduler's process has ended, and so does this rank
    orders.put(_STOP)
