"""The service's thread: it polls the socket and the storage, and calls the service."""

from __future__ import annotations

import logging
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from fdcache.errors import ConfigurationError, ProtocolError, ServiceRunningError
from fdcache.service.server.lock_file import open_locked
from fdcache.service.server.queues import SendQueues, Sent
from fdcache.service.server.service import Service
from fdcache.service.wire.address import SCHEME, require_socket, socket_problem
from fdcache.service.wire.protocol import MAX_FRAME, Answer, Refused, decode_request_frame, encode_answer

log = logging.getLogger("fdcache.service.server")

_TICK_SECONDS = 0.05
_MAX_BATCH = 256
_QUEUED_BY_ZMQ = 4
"""Messages of up to ``MAX_FRAME`` that ZeroMQ keeps for a client in each direction. What does not fit waits there."""
_MOST_RESERVED = 256
"""Descriptors that are kept for files, at most an eighth of the limit."""
_DESCRIPTORS = Path("/proc/self/fd")


def _descriptors_in_use(limit: int) -> int:
    """Return how many descriptors are open: the folder's size since Linux 6.2, its entries before."""
    try:
        return _DESCRIPTORS.stat().st_size or sum(1 for _ in _DESCRIPTORS.iterdir())
    except OSError:
        return limit  # none is left to read the folder


class SocketLock:
    """Lock file of a socket. ZeroMQ would bind over a live socket, so the lock is taken first."""

    def __init__(self, socket: Path) -> None:
        self._path = socket.with_name(socket.name + ".lock")
        try:
            self._fd = open_locked(self._path)
        except BlockingIOError:
            raise ServiceRunningError(
                f"{socket}: the service with process id {self._owner()} serves this address; stop it or use another "
                "--socket"
            ) from None
        except OSError as error:
            raise ConfigurationError(
                f"{self._path}: the lock of the socket cannot be opened: {error.strerror}; move it away, or choose "
                "another --socket"
            ) from error
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            self.release()
            raise ConfigurationError(
                f"{self._path}: the lock of the socket cannot be written: {error.strerror}; make room there, or choose "
                "another --socket"
            ) from error

    def _owner(self) -> str:
        try:
            return self._path.read_text(errors="replace").strip() or "unknown"
        except OSError:  # it ends, and has removed the file
            return "unknown"

    def release(self, *, remove: bool = True) -> None:
        """Release the lock. ``remove=False`` leaves the file, as a killed process does."""
        if remove:
            self._path.unlink(missing_ok=True)
        os.close(self._fd)


class ServiceLoop:
    """Receives requests and sends answers until ``stop``. ``on_tick`` is called 20 times a second."""

    def __init__(self, service: Service, socket: Path, on_tick: Callable[[], None] = lambda: None) -> None:
        self.service = service
        self._on_tick = on_tick
        self._socket_path = socket
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUED_BY_ZMQ)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUED_BY_ZMQ)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self._hidden_path = socket.with_name(socket.name + ".hidden")
        self._is_hidden = False
        self._faults: set[type[Exception]] = set()
        self._queues = SendQueues(self._socket)

    def bind(self) -> None:
        """Create the socket, for this user only."""
        require_socket(self._socket_path)  # ZeroMQ would remove any file that is there
        former = os.umask(0o177)
        try:
            self._socket.bind(f"{SCHEME}{self._socket_path}")
        finally:
            os.umask(former)

    def run(self) -> None:
        """Serve until ``stop``."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        storage = self.service.storage
        if storage is not None:
            poller.register(storage.wake_fd, zmq.POLLIN)
        tick_at = 0.0
        while not self._stopping.is_set():
            now = time.monotonic()
            if now >= tick_at:
                self.service.tick(self._send_notice)
                self._accept_while_descriptors_last()
                if self.service.tools.has_full:
                    self.service.tools.retry()
                self._on_tick()
                tick_at = now + _TICK_SECONDS
            ready = dict(poller.poll(self._milliseconds_until(tick_at - now)))
            if storage is not None and storage.wake_fd in ready:
                os.eventfd_read(storage.wake_fd)
                self.service.work()
            for _ in range(_MAX_BATCH):
                if not self._serve_one():
                    break
            if self._queues.waiting:
                self._queues.flush()
            if self.service.tools.turns:
                self.service.tools.work(self._send_part)
                self._send_urgent_events()

    def _milliseconds_until(self, tick: float) -> int:
        """Return how long to wait for messages; the next tick is due in ``tick`` seconds."""
        if self.service.tools.turns:
            return 0
        return 1 if self._queues.waiting and self._queues.is_draining else max(0, int(tick * 1000))

    def _accept_while_descriptors_last(self) -> None:
        """Hide the socket from new clients while descriptors are short: ZeroMQ ends the process that has none for one.

        It stays bound, since ``unbind`` would end the connections of all clients.
        """
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        in_use = _descriptors_in_use(limit)
        reserved = min(_MOST_RESERVED, limit // 8) if limit >= 0 else 0
        try:
            if not self._is_hidden and 0 <= limit <= in_use + reserved:
                self._socket_path.rename(self._hidden_path)
                self._is_hidden = True
                log.warning(
                    "%d file descriptors are in use: new clients are refused until there are fewer; raise the limit "
                    "of open files",
                    in_use,
                )
            elif self._is_hidden and not 0 <= limit <= in_use + 2 * reserved:
                self._hidden_path.rename(self._socket_path)
                self._is_hidden = False
                log.info("new clients are taken again")
        except OSError as error:  # tried again at the next tick
            log.debug("the socket of the service cannot be moved: %s", error)

    def start_draining(self) -> None:
        """Refuse new clients and ask every client to finish and leave."""
        self.service.draining = True
        for client in self.service.clients.values():
            self._send_notice(client.identity, Refused("draining", "the service is shutting down"))

    def stop(self) -> None:
        """End ``run``. May be called by any thread or signal handler."""
        self._stopping.set()
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close and remove the socket."""
        self._socket.close()
        os.close(self._wake)
        self._hidden_path.unlink(missing_ok=True)
        if socket_problem(self._socket_path) is None:
            self._socket_path.unlink(missing_ok=True)

    def _serve_one(self) -> bool:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        try:
            self._answer(frames[0], frames)
        except Exception as error:
            # A fault of the service with one message. It must not end the loop, which serves others.
            if type(error) not in self._faults:
                self._faults.add(type(error))  # logged once: a client may repeat it any number of times
                log.exception("a message failed")
        return True

    def _answer(self, identity: bytes, frames: list[bytes]) -> None:
        number = session = 0
        try:
            if len(frames) != 2:
                raise ProtocolError(f"{len(frames) - 1} frames where 1 is expected")
            frame = decode_request_frame(frames[1])
            number, session = frame.id, frame.session
            answer = self.service.handle(identity, frame)
        except ProtocolError as error:
            self.service.totals.refused += 1
            answer = Refused("malformed", str(error))
        if answer is None:  # a tool's question, which is answered in its turn
            return
        self._send_urgent_events()
        if not self._send(identity, number, answer):
            self.service.on_undelivered(session, answer)

    def _send_urgent_events(self) -> None:
        if self.service.has_urgent_events:
            self.service.send_events(self._send_notice)

    def _send(self, identity: bytes, number: int, answer: Answer) -> bool:
        """Send without waiting. Return False if the client's queue is full or the client is gone."""
        return self._queues.send(identity, encode_answer(number, answer)) is Sent.TAKEN

    def _send_part(self, identity: bytes, number: int, answer: Answer) -> Sent:
        self._send_urgent_events()
        return self._queues.send(identity, encode_answer(number, answer), may_wait=False)

    def _send_notice(self, identity: bytes, answer: Answer) -> bool:
        return self._send(identity, 0, answer)
