"""The network of a replay of several nodes: relays that can be cut, and namespaces where the kernel allows them."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, TypeVar

_NEW_NETWORK = 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1
_CHUNK = 1 << 16
_HERE = "127.0.0.1"
_CALL_SECONDS = 30.0
_NO_ROOM = b"HTTP/1.1 507 Insufficient Storage\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

Value = TypeVar("Value")


def _system_call(name: str, *arguments: int) -> None:
    """Make a system call that moves the calling thread alone. Raises ``OSError``."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def enter_namespace(path: str) -> None:
    """Move the calling thread, and the processes that it starts, to a namespace. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _system_call("setns", descriptor, _NEW_NETWORK)
    finally:
        os.close(descriptor)


class NetworkNamespace:
    """A network with nothing but a loopback of its own. It ends with the last process and descriptor in it.

    Raises ``OSError`` where the kernel does not let this process make one.
    """

    def __init__(self) -> None:
        self._descriptor = _in_a_thread(self._make)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @staticmethod
    def _make() -> int:
        _system_call("unshare", _NEW_NETWORK)
        with socket.socket() as probe:
            request = struct.pack("16sH14x", b"lo", 0)
            flags = struct.unpack("16sH14x", fcntl.ioctl(probe, _GET_FLAGS, request))[1]
            fcntl.ioctl(probe, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    def close(self) -> None:
        """Leave it to the processes in it."""
        os.close(self._descriptor)


def _in_a_thread(make: Callable[[], Value]) -> Value:
    """Call a function in a thread that ends with it."""
    made: list[Value] = []
    failed: list[OSError] = []

    def run() -> None:
        try:
            made.append(make())
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


@contextmanager
def _inside(namespace: NetworkNamespace | None) -> Iterator[None]:
    """Make sockets in a namespace, which stay there."""
    if namespace is None:
        yield
        return
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter_namespace(namespace.path)
        try:
            yield
        finally:
            _system_call("setns", own, _NEW_NETWORK)
    finally:
        os.close(own)


class Relay:
    """A port in one namespace behind which is an address of another one.

    Faults, each by those who want it: ``cut``: nothing comes through, and nobody is told. ``slow``: each 64 KiB take
    ``slowness`` seconds. ``full``: requests of HTTP to store something are answered with 507.
    """

    slowness = 0.02

    def __init__(
        self, address: tuple[str, int], source: NetworkNamespace | None, target: NetworkNamespace | None
    ) -> None:
        self._address, self._source, self._target = address, source, target
        self._faults: set[tuple[str, int]] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self.port = 0
        self._server: asyncio.Server | None = None

    def change(self, fault: str, by: int, *, on: bool) -> None:
        """Begin or end a fault; called in the network's thread."""
        (self._faults.add if on else self._faults.discard)((fault, by))
        if self.has("cut"):
            self._passes.clear()
        else:
            self._passes.set()

    def has(self, fault: str) -> bool:
        """True while somebody wants this fault."""
        return any(name == fault for name, _ in self._faults)

    async def open(self) -> None:
        """Listen."""
        with _inside(self._source):
            listener = socket.create_server((_HERE, 0))
        self.port = listener.getsockname()[1]
        self._server = await asyncio.start_server(self._serve, sock=listener)

    def close(self) -> None:
        """Listen no more; called in the network's thread."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            await self._passes.wait()
            with _inside(self._target):
                there = socket.socket()
            there.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(there, self._address)
                to_read, to_write = await asyncio.open_connection(sock=there)
            except BaseException:
                there.close()
                writer.transport.abort()
                raise
            await self._pump_both(reader, writer, to_read, to_write)

    async def _pump_both(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        to_read: asyncio.StreamReader,
        to_write: asyncio.StreamWriter,
    ) -> None:
        """Pass bytes both ways until one side ends; then end the other, as a connection does."""
        ways = [
            asyncio.ensure_future(self._pump(reader, to_write, writer)),
            asyncio.ensure_future(self._pump(to_read, writer, None)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for each in ways:
            each.cancel()
        for end in (writer, to_write):
            end.close()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        asker: asyncio.StreamWriter | None,
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._passes.wait()
                if self.has("slow"):
                    await asyncio.sleep(self.slowness)
                if asker is not None and self.has("full") and data.startswith(b"PUT "):
                    await _refuse(data, reader, asker)
                    return
                writer.write(data)
                await writer.drain()


async def _refuse(head: bytes, reader: asyncio.StreamReader, asker: asyncio.StreamWriter) -> None:
    """Take what was to be stored, and say that there is no room."""
    headers, _, body = head.partition(b"\r\n\r\n")
    found = [line for line in headers.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    left = int(found[0].partition(b":")[2]) - len(body) if found else 0
    while left > 0 and (data := await reader.read(_CHUNK)):
        left -= len(data)
    asker.write(_NO_ROOM)
    await asker.drain()


class Network:
    """The namespaces of nodes, or this machine's network if they are not allowed, and the relays between them."""

    def __init__(self, nodes: int) -> None:
        self.namespaces: list[NetworkNamespace | None] = []
        self._relays: list[Relay] = []
        self._make_namespaces(nodes)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fdcache-network", daemon=True)
        self._thread.start()

    def _make_namespaces(self, nodes: int) -> None:
        try:
            for _ in range(nodes):
                self.namespaces.append(NetworkNamespace())
        except OSError:
            for made in self.namespaces:
                if made is not None:
                    made.close()
            self.namespaces = [None] * nodes

    @property
    def is_isolated(self) -> bool:
        """True if each node has a network namespace of its own."""
        return None not in self.namespaces

    def path_of(self, node: int) -> str | None:
        """Return the path by which processes enter the namespace of a node."""
        namespace = self.namespaces[node]
        return None if namespace is None else namespace.path

    def free_port(self, node: int) -> int:
        """Return a port that nobody uses in the namespace of a node."""

        def find() -> int:
            with _inside(self.namespaces[node]), closing(socket.create_server((_HERE, 0))) as probe:
                return int(probe.getsockname()[1])

        return _in_a_thread(find)

    def relay(self, source: int, address: tuple[str, int], target: int | None = None) -> Relay:
        """Open a port for one node; behind it is an address in the namespace of another, or of this process."""
        relay = Relay(address, self.namespaces[source], None if target is None else self.namespaces[target])
        self._call(relay.open())
        self._relays.append(relay)
        return relay

    def change(self, change: Callable[[], None]) -> None:
        """Change relays."""

        async def call() -> None:
            change()

        self._call(call())

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_SECONDS)

    def close(self) -> None:
        """End every connection."""

        async def end() -> None:
            for relay in self._relays:
                relay.close()
            rest = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
            for each in rest:
                each.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for each in self.namespaces:
            if each is not None:
                each.close()
