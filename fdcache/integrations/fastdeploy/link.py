"""Link between FastDeploy's scheduler and its workers, beside FastDeploy's own batches: plans there, reports back.

The plans of steps are numbered. They wait at the worker until a batch names the last number that it needs, so an empty
or lost batch loses no plan. Plans without a number are submitted when they arrive.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TypeAlias

import msgspec

from fdcache.errors import CacheNotReadyError, ConfigurationError, LayoutError
from fdcache.layout import KVLayout
from fdcache.machine.decoding import MALFORMED
from fdcache.metadata import (
    StorageScan,
    TransferPlan,
    TransferReport,
    decode_plan,
    decode_report,
    decode_scan,
    encode,
)

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.05
_PREDECESSOR_SECONDS = 10.0
"""Seconds that an engine waits for the previous engine on its port to end."""


class WorkerHello(msgspec.Struct, tag=True, frozen=True):
    """First message of a worker: its rank and its layout."""

    rank: int
    layout: str
    quantisation: str | None


class WorkerWelcome(msgspec.Struct, tag=True, frozen=True):
    """Answer to ``WorkerHello``: the scheduler's layout, and the number of the last plan not sent to this worker."""

    layout: str
    number: int
    refusal: str | None = None


class Order(msgspec.Struct, tag=True, frozen=True):
    """A plan; ``number`` is 0 for a plan that belongs to no step."""

    number: int
    plan: bytes


class WorkerReport(msgspec.Struct, tag=True, frozen=True):
    """Report of a plan by one rank."""

    report: bytes


class Go(msgspec.Struct, tag=True, frozen=True):
    """The plans up to ``number`` wait for no batch of their own, but for that of number ``batch``."""

    number: int
    batch: int


class Scan(msgspec.Struct, tag=True, frozen=True):
    """Contents of one rank's storage when it was opened."""

    scan: bytes


class PeerAddress(msgspec.Struct, tag=True, frozen=True):
    """Address at which peer instances reach a rank. Also an event."""

    rank: int
    address: str


class WorkerLost(msgspec.Struct, frozen=True):
    """Event: the process of a rank has ended."""

    rank: int


WorkerEvent: TypeAlias = TransferReport | StorageScan | PeerAddress | WorkerLost
_to_scheduler = msgspec.msgpack.Decoder(WorkerHello | WorkerReport | Scan | PeerAddress)
_to_worker = msgspec.msgpack.Decoder(WorkerWelcome | Order | Go)
_encode = msgspec.msgpack.encode


def _lock(path: Path) -> int:
    """Lock the socket's path until the returned descriptor is closed or the process ends.

    A listener removes its socket by name when it ends, so the next engine on the port has to wait for that. Raises
    ``ConfigurationError`` if the previous engine keeps running.
    """
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _PREDECESSOR_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise ConfigurationError(
                    f"{path}: an engine with this port is running; give this one another port, or another "
                    "FDCACHE_RUNTIME_DIR"
                ) from None
            time.sleep(_RETRY_SECONDS)
        else:
            return descriptor


class SchedulerLink:
    """Scheduler's end of the link: a Unix socket and one thread per worker.

    Plans sent before a worker connects wait for it. After a worker is lost, plans wait for its successor, which is
    admitted once the scheduler has collected the ``WorkerLost`` event and called ``forget``.
    """

    def __init__(self, path: Path, layout: KVLayout, quantisation: str | None) -> None:
        self.path = path
        self.announced = 0
        """Number of the last plan that belongs to a step."""
        self._layout = layout
        self._quantisation = quantisation
        self._changed = threading.Condition()
        self._workers: dict[int, Connection] = {}
        self._waiting: dict[int, list[bytes]] = {rank: [] for rank in range(layout.tp_size)}
        self._lost: set[int] = set()
        self._events: deque[WorkerEvent] = deque()
        self._closed = False
        try:
            self._lock = _lock(path)
            path.unlink(missing_ok=True)
            self._listener = Listener(str(path), family="AF_UNIX", backlog=64)
        except OSError as error:
            raise ConfigurationError(
                f"{path}: the socket cannot be made: {error}; set FDCACHE_RUNTIME_DIR to another directory"
            ) from error
        self._accepting = self._thread("accept", self._accept)

    def announce(self, plan: TransferPlan) -> int:
        """Send a step's plan and return its number; workers submit it with the first batch that needs it."""
        with self._changed:
            self.announced += 1
            self._send(_encode(Order(self.announced, encode(plan))))
            return self.announced

    def send(self, plan: TransferPlan) -> None:
        """Send a plan that workers submit when it arrives."""
        with self._changed:
            self._send(_encode(Order(0, encode(plan))))

    def go(self, batch: int) -> None:
        """Have workers submit the announced plans without a batch, as soon as they have taken the one numbered so."""
        with self._changed:
            self._send(_encode(Go(self.announced, batch)))

    @property
    def pending_events(self) -> tuple[WorkerEvent, ...]:
        """Events that ``collect`` has not returned yet."""
        return tuple(self._events)

    def collect(self) -> list[WorkerEvent]:
        """Return the events since the last call, in order."""
        events: list[WorkerEvent] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def forget(self, rank: int) -> None:
        """Drop the plans that wait for a lost rank, and admit a new process in its place."""
        with self._changed:
            self._waiting[rank].clear()
            self._lost.discard(rank)
            self._changed.notify_all()

    def close(self) -> None:
        """Disconnect the workers. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            for worker in self._workers.values():
                _shut_down(worker)
        with suppress(OSError), Client(str(self.path), family="AF_UNIX"):
            pass  # wakes the accepting thread
        self._accepting.join(_PREDECESSOR_SECONDS)
        os.close(self._lock)

    def _send(self, message: bytes) -> None:
        for rank, waiting in self._waiting.items():
            worker = self._workers.get(rank)
            if worker is None:
                waiting.append(message)
                continue
            try:
                worker.send_bytes(message)
            except OSError:  # its thread reports the loss
                logger.debug("rank %d is no longer connected", rank)

    def _thread(self, name: str, target: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name=f"fdcache-{name}", daemon=True)
        thread.start()
        return thread

    def _accept(self) -> None:
        with self._listener:
            while True:
                worker = self._listener.accept()
                if self._closed:
                    worker.close()
                    return
                self._thread("worker", self._serve, worker)

    def _serve(self, worker: Connection) -> None:
        with worker:
            try:
                rank = self._welcome(worker)
            except (EOFError, OSError, LayoutError, *MALFORMED) as error:
                logger.warning("a worker disconnected before it was admitted: %s", error)
                return
            if rank is None:
                return
            with suppress(EOFError, OSError):
                while True:
                    self._handle(_to_scheduler.decode(worker.recv_bytes()))
            with self._changed:
                del self._workers[rank]
                if not self._closed:
                    self._lost.add(rank)
                    self._events.append(WorkerLost(rank))

    def _welcome(self, worker: Connection) -> int | None:
        """Admit a worker and send it the waiting plans; return its rank, or None if it was refused."""
        hello = _to_scheduler.decode(worker.recv_bytes())
        if not isinstance(hello, WorkerHello):
            raise msgspec.DecodeError("its first message is not a Hello")
        with self._changed:
            refusal = self._refusal(hello)
            if refusal is None:
                self._changed.wait_for(lambda: self._closed or hello.rank not in self._lost)
            worker.send_bytes(
                _encode(WorkerWelcome(self._layout.to_json(), self._start(hello.rank), refusal))
            )
            if refusal is not None or self._closed:
                return None
            for message in self._waiting[hello.rank]:
                worker.send_bytes(message)
            self._waiting[hello.rank].clear()
            self._workers[hello.rank] = worker
            return hello.rank

    def _start(self, rank: int) -> int:
        """Return the number before the first plan that this rank is sent."""
        orders = (_to_worker.decode(message) for message in self._waiting.get(rank, ()))
        numbers = [order.number for order in orders if isinstance(order, Order) and order.number]
        return numbers[0] - 1 if numbers else self.announced

    def _refusal(self, hello: WorkerHello) -> str | None:
        """Return the reason to refuse a worker, or None."""
        theirs = KVLayout.from_json(hello.layout)
        if hello.rank not in self._waiting:
            return f"rank {hello.rank} is not one of the {self._layout.tp_size} ranks"
        if hello.rank in self._workers:
            return f"there is a worker of rank {hello.rank} already"
        if hello.quantisation != self._quantisation:
            return (
                f"the workers' KV is quantised as {hello.quantisation}, the scheduler's configuration says "
                f"{self._quantisation}; name kv_cache_quant_type in the model's quantization_config or --quantization"
            )
        for name in ("block_size", "num_layers", "num_draft_layers", "tp_size", "planes"):
            ours, other = getattr(self._layout, name), getattr(theirs, name)
            if ours != other:
                return f"{name} differs: {other} at the worker, {ours} at the scheduler; give both one configuration"
        return None

    def _handle(self, message: WorkerHello | WorkerReport | Scan | PeerAddress) -> None:
        if isinstance(message, WorkerReport):
            self._events.append(decode_report(message.report))
        elif isinstance(message, Scan):
            self._events.append(decode_scan(message.scan))
        elif isinstance(message, PeerAddress):
            self._events.append(message)


class WorkerLink:
    """Worker's end of the link; its ``layout`` is the scheduler's.

    Raises ``CacheNotReadyError`` if no scheduler answers within ``timeout`` seconds, ``LayoutError`` if the scheduler
    refuses this worker.
    """

    def __init__(
        self, path: Path, rank: int, layout: KVLayout, quantisation: str | None, timeout: float
    ) -> None:
        self._connection = _connect(path, timeout)
        self._connection.send_bytes(_encode(WorkerHello(rank, layout.to_json(), quantisation)))
        try:
            welcome = _to_worker.decode(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise CacheNotReadyError(f"{path}: the scheduler has ended; start the engine again") from error
        if not isinstance(welcome, WorkerWelcome) or welcome.refusal is not None:
            self._connection.close()
            raise LayoutError(
                f"rank {rank}: {getattr(welcome, 'refusal', 'the scheduler is another version')}"
            )
        self.layout = KVLayout.from_json(welcome.layout)
        self._changed = threading.Condition()
        self._received = welcome.number
        self._rank = rank
        self._steps: deque[tuple[int, TransferPlan]] = deque()
        self._batch = 0
        self._go = Go(0, 0)
        self._sending = threading.Lock()
        self._closed = False

    def start(self, submit: Callable[[TransferPlan], None], submit_early: Callable[[], None]) -> None:
        """Start the listening thread.

        It calls ``submit`` with plans that belong to no step, and ``submit_early`` when others wait for no batch.
        """
        arguments = (submit, submit_early)
        threading.Thread(target=self._listen, args=arguments, name="fdcache-plans", daemon=True).start()

    def wait_for(self, number: int, timeout: float) -> None:
        """Wait until the plans up to ``number`` have arrived.

        Raises ``CacheNotReadyError`` if they do not within ``timeout`` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._received >= number, timeout):
                raise CacheNotReadyError(f"plan {number} of the scheduler did not arrive within {timeout} s")
            if self._received < number:
                raise CacheNotReadyError("the scheduler has ended; start the engine again")

    def take(self, number: int, batch: int) -> list[tuple[int, TransferPlan]]:
        """Return, with their numbers, the plans of steps up to ``number`` that were not taken yet, in order.

        ``batch``: number of the batch that takes them, 0 for none.
        """
        with self._changed:
            self._batch = max(self._batch, batch)
            if self._go.batch <= self._batch:
                number = max(number, self._go.number)
            plans = []
            while self._steps and self._steps[0][0] <= number:
                plans.append(self._steps.popleft())
            return plans

    def report(self, reports: Iterable[TransferReport]) -> None:
        """Send reports to the scheduler."""
        for report in reports:
            self._send(_encode(WorkerReport(encode(report))))

    def send_scan(self, scan: StorageScan) -> None:
        """Send the scan of this rank's storage to the scheduler."""
        self._send(_encode(Scan(encode(scan))))

    def send_address(self, address: str) -> None:
        """Send the address at which peers reach this rank to the scheduler."""
        self._send(_encode(PeerAddress(self._rank, address)))

    def close(self) -> None:
        """Disconnect; call it when this rank's copies have ended."""
        self._closed = True
        _shut_down(self._connection)

    def _send(self, message: bytes) -> None:
        with self._sending:
            try:
                self._connection.send_bytes(message)
            except OSError as error:
                if not self._closed:
                    logger.error("the scheduler is no longer connected: %s", error)

    def _listen(self, submit: Callable[[TransferPlan], None], submit_early: Callable[[], None]) -> None:
        try:
            while True:
                order = _to_worker.decode(self._connection.recv_bytes())
                if isinstance(order, Go):
                    with self._changed:
                        self._go = order
                    submit_early()
                    continue
                if not isinstance(order, Order):
                    continue
                plan = decode_plan(order.plan)
                if not order.number:
                    submit(plan)
                    continue
                with self._changed:
                    self._steps.append((order.number, plan))
                    self._received = order.number
                    self._changed.notify_all()
        except (EOFError, OSError):
            with self._changed:
                self._closed = True
                self._changed.notify_all()


def _shut_down(connection: Connection) -> None:
    """Shut a connection down, which wakes its reading thread; closing it would not."""
    with socket.socket(fileno=os.dup(connection.fileno())) as line, suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)


def _connect(path: Path, timeout: float) -> Connection:
    deadline = time.monotonic() + timeout
    while True:
        try:
            return Client(str(path), family="AF_UNIX")
        except OSError as error:
            if time.monotonic() > deadline:
                raise CacheNotReadyError(
                    f"{path}: no scheduler answers: {error}; FD_PLUGINS=fdcache and FDCACHE_RUNTIME_DIR have to be the "
                    "same for the engine and its workers"
                ) from error
            time.sleep(_RETRY_SECONDS)
