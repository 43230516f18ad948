"""The client of Mooncake Store, with deadlines.

The client library takes no deadline, and a call cannot be interrupted: with a master or a node that is stopped it
lasts up to a minute. So each call runs on a thread of its own and is given up at its deadline, which opens a circuit
breaker.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fdcache.errors import ConnectorNotFoundError, StorageError, StorageGoneError
from fdcache.integrations.mooncake.variables import MooncakeSettings
from fdcache.settings.kinds import is_port, parse_list, parse_size
from fdcache.storage.breaker import CircuitBreaker
from fdcache.storage.connector import Outcome

T = TypeVar("T")

_LOOPBACK = ("localhost", "127.", "::1")
_MASTER_CONNECT_SECONDS = 1.0
_NEWEST_PYTHON = (3, 13)
"""The newest version of Python for which the client's package has wheels; the extra is empty above it."""

_NO_SPACE = -200
_BAD_SIZE = -600
_NOT_READY = -703
_NOT_FOUND = -704
_EXISTS = -705
_TRANSFER = -800
_RPC = -900
_RPC_LATE = -901

_OUTCOMES = {
    _NOT_FOUND: Outcome.MISS,
    _NOT_READY: Outcome.MISS,
    _BAD_SIZE: Outcome.CORRUPT,
    _TRANSFER: Outcome.PEER_GONE,
    _RPC: Outcome.PEER_GONE,
    _RPC_LATE: Outcome.PEER_GONE,
}
_MESSAGES = {
    _NO_SPACE: "the store has no room",
    _TRANSFER: "the node that holds the record does not answer",
    _RPC: "the master does not answer",
    _RPC_LATE: "the master does not answer in time",
}


def outcome_of(code: int) -> Outcome:
    """Return the outcome that a negative return code stands for."""
    return _OUTCOMES.get(code, Outcome.ERROR)


def describe(code: int) -> str:
    """Return the message for a negative return code."""
    return f"mooncake: {_MESSAGES.get(code, 'the store failed')} (code {code})"


def is_stored(code: int) -> bool:
    """Return True when a put left the record in the store."""
    return code in (0, _EXISTS)


# --- setting a client up ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Arguments of the client's setup, from the settings and the configuration file."""

    local_hostname: str
    metadata_server: str
    master: str
    segment_bytes: int
    buffer_bytes: int
    protocol: str
    device: str
    tcp_connection_pool: bool
    log_level: int

    @classmethod
    def resolve(cls, settings: MooncakeSettings, rank: int | None) -> ClientOptions:
        """Read the file at ``config_path``, which goes before the variables.

        Raises ``StorageError`` naming the value that is wrong, ``StorageGoneError`` when the master's name cannot be
        resolved.
        """
        given = _read_file(settings.config_path) if settings.config_path else {}

        def value(otherwise: object, *names: str) -> Any:
            return next((given[name] for name in names if name in given), otherwise)

        master = str(value(settings.master, "master_server_addr", "master_server_address") or "")
        if not master:
            raise StorageError(
                "FDCACHE_STORAGE=mooncake needs MOONCAKE_MASTER_SERVER_ADDR, such as master:50051"
            )
        devices = value(settings.rdma_devices, "rdma_devices", "device_name")
        devices = parse_list(devices) if isinstance(devices, str) else tuple(devices)
        try:
            segment = parse_size(value(settings.global_segment_size, "global_segment_size"))
            buffer = parse_size(value(settings.local_buffer_size, "local_buffer_size"))
        except ValueError as error:
            raise StorageError(f"{settings.config_path}: {error}") from error
        return cls(
            local_hostname=_local_name(str(value(settings.local_hostname, "local_hostname") or ""), master),
            metadata_server=str(value(settings.metadata_server, "metadata_server")),
            master=master,
            segment_bytes=segment if rank is not None else 0,
            buffer_bytes=buffer,
            protocol=str(value(settings.protocol, "protocol")),
            device=devices[(rank or 0) % len(devices)] if devices else "",
            tcp_connection_pool=settings.tcp_connection_pool,
            log_level=settings.log_level,
        )


def _read_file(path: Path) -> dict[str, Any]:
    try:
        given = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StorageError(f"MOONCAKE_CONFIG_PATH: {path} cannot be read: {error}") from error
    if not isinstance(given, dict):
        raise StorageError(f"MOONCAKE_CONFIG_PATH: {path} must hold one JSON object")
    return given


def _local_name(name: str, master: str) -> str:
    """Return the address at which other nodes reach this one; a loopback name would hide its records from them."""
    if not name:
        return _address_towards(master)
    if name.startswith(_LOOPBACK) and not master.startswith(_LOOPBACK):
        raise StorageError(
            f"MOONCAKE_LOCAL_HOSTNAME={name} is this machine on every node; set an address that other nodes can "
            f"reach, or leave it empty to use the address towards {master}"
        )
    return name


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not is_port(port):
        raise StorageError(
            f"MOONCAKE_MASTER_SERVER_ADDR={address}: write host and port, such as master:50051"
        )
    return host, int(port)


def _address_towards(master: str) -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_split(master))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StorageGoneError(f"MOONCAKE_MASTER_SERVER_ADDR={master} cannot be resolved: {error}") from error


def load_client() -> Any:
    """Import the client's package. Raises ``ConnectorNotFoundError`` with the remedy when that fails."""
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ConnectorNotFoundError(
            f"FDCACHE_STORAGE=mooncake: the Mooncake client cannot be loaded ({error}); "
            f"{remedy_without_client(sys.version_info[:2])}"
        ) from error


def remedy_without_client(python: tuple[int, int]) -> str:
    """Return what makes the client's package available to a version of Python."""
    if python > _NEWEST_PYTHON:
        newest = ".".join(map(str, _NEWEST_PYTHON))
        return (
            f"its package has no wheel for Python {python[0]}.{python[1]}: use Python {newest}, or build it"
        )
    return "install it with `pip install fdcache[mooncake]`, on Debian also libibverbs1 libnuma1 libcurl4"


def _connect(options: ClientOptions) -> Any:
    """Set a client up. Raises ``StorageGoneError`` for a master that does not answer."""
    try:
        with socket.create_connection(_split(options.master), _MASTER_CONNECT_SECONDS):
            pass  # the client itself keeps trying a dead master for a minute and a half
    except OSError as error:
        raise StorageGoneError(
            f"mooncake: the master at {options.master} does not answer: {error}"
        ) from error
    # The C++ client reads these from the environment only.
    os.putenv("GLOG_minloglevel", str(options.log_level))
    os.putenv("MC_TCP_ENABLE_CONNECTION_POOL", str(int(options.tcp_connection_pool)))
    client = load_client().MooncakeDistributedStore()
    code = client.setup(
        options.local_hostname,
        options.metadata_server,
        options.segment_bytes,
        options.buffer_bytes,
        options.protocol,
        options.device,
        options.master,
    )
    if code:
        raise StorageGoneError(f"mooncake: setup with the master at {options.master} failed with code {code}")
    return client


# --- deadlines ----------------------------------------------------------------------------------------------


class CallOverdueError(Exception):
    """A call was given up at its deadline; ``call`` is still running and uses its memory until it ends."""

    def __init__(self, call: Future[Any]) -> None:
        super().__init__("no answer before the deadline")
        self.call = call


class LaneBlockedError(Exception):
    """The lane is busy: with other callers, or with a call that was given up and has not returned."""


class CallLane:
    """A thread that makes one call at a time, for which a caller waits no longer than its timeout.

    While a call that was given up is still running, the lane refuses all others at once: the memory that they share
    is still in use.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._turn = threading.Lock()
        self._overdue: Future[Any] | None = None

    @contextmanager
    def turn(self, timeout: float) -> Iterator[None]:
        """Hold the right to make calls. Raises ``LaneBlockedError`` when it is not free within ``timeout`` seconds."""
        if not self._turn.acquire(timeout=timeout):
            raise LaneBlockedError("other calls took all of the time")
        try:
            if self._overdue is not None and not self._overdue.done():
                raise LaneBlockedError("an earlier call has not returned yet")
            yield
        finally:
            self._turn.release()

    def call(self, function: Callable[[], T], timeout: float) -> T:
        """Make a call within a turn. Raises ``CallOverdueError`` when it has not ended after ``timeout`` seconds."""
        future = self._thread.submit(function)
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done():
                return future.result()
            self._overdue = future
            raise CallOverdueError(future) from None

    def ask(self, function: Callable[[], T], timeout: float) -> T:
        """Take a turn and make one call. Raises the errors of both."""
        with self.turn(timeout):
            return self.call(function, timeout)

    def close(self) -> None:
        """Wait for the current call; no further call may be made."""
        self._thread.shutdown()


class MooncakeClient:
    """One client of the store and the memory registered with it; reconnects by itself.

    ``timeout`` is the most seconds that setting a client up may take. Raises ``ConnectorNotFoundError`` without the
    client's package.
    """

    def __init__(self, options: ClientOptions, breaker: CircuitBreaker, timeout: float) -> None:
        self.breaker = breaker
        self._options = options
        self._timeout = timeout
        self._lock = threading.Lock()
        self._regions: list[tuple[int, int]] = []
        self._store: Any = None
        self._closed = False
        self._setup = CallLane("fdcache-mooncake-setup")
        self._questions = CallLane("fdcache-mooncake")

    @property
    def is_up(self) -> bool:
        """True when a client is set up and the last call did not fail."""
        return self._store is not None and self.breaker.reason is None

    @property
    def store(self) -> Any:
        """The library's object; valid after ``reach`` returned None."""
        return self._store

    def reach(self) -> str | None:
        """Set a client up if there is none; return why that is not possible, or None."""
        with self._lock:
            if self._closed:
                return "mooncake: closed"
            if (reason := self.breaker.refuses()) is not None:
                return reason
            if self._store is None:
                try:
                    self._store = self._set_up()
                except StorageGoneError as error:
                    self.breaker.failed(str(error))
                    return str(error)
                for region in self._regions:
                    self._register(*region)
            return None

    def _set_up(self) -> Any:
        try:
            return self._setup.ask(partial(_connect, self._options), self._timeout)
        except CallOverdueError as error:
            error.call.add_done_callback(_close_late_client)
            raise StorageGoneError(_no_answer(self._timeout)) from None
        except LaneBlockedError as error:
            raise StorageGoneError(f"mooncake: {error}") from None

    def register(self, address: int, nbytes: int) -> None:
        """Register memory with this client and every later one. Raises ``StorageError``."""
        with self._lock:
            self._regions.append((address, nbytes))
            if self._store is not None:
                self._register(address, nbytes)

    def unregister(self, address: int, nbytes: int) -> None:
        """Undo ``register``."""
        with self._lock:
            self._regions.remove((address, nbytes))
            if self._store is not None:
                self._store.unregister_buffer(address)

    def _register(self, address: int, nbytes: int) -> None:
        code = self._store.register_buffer(address, nbytes)
        if code:
            raise StorageError(f"mooncake: {nbytes} bytes of host records cannot be registered (code {code})")

    def ask(self, question: Callable[[Any], T], timeout: float) -> T:
        """Make a call that touches no registered memory. Raises ``StorageGoneError`` when no answer comes in time."""
        try:
            return self._questions.ask(partial(question, self._store), timeout)
        except (CallOverdueError, LaneBlockedError):
            reason = _no_answer(timeout)
            self.breaker.failed(reason)
            raise StorageGoneError(reason) from None

    def close(self) -> None:
        """Leave the store; records in this client's segment are lost. No call may be using registered memory."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            store, self._store = self._store, None
        self._setup.close()
        self._questions.close()
        if store is not None:
            for address, _ in self._regions:
                store.unregister_buffer(address)
            store.close()


def _no_answer(timeout: float) -> str:
    return f"mooncake: no answer within {timeout:.3g} s"


def _close_late_client(setup: Future[Any]) -> None:
    with suppress(StorageGoneError):
        setup.result().close()
