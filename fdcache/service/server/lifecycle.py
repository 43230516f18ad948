"""Server: starts a service (locks, memory, recovery, storage), runs it, drains it and removes its files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from fdcache.errors import HostMemoryError
from fdcache.machine.memory import huge_page_problem
from fdcache.service.server.arena import Arena, arena_name, find_arenas
from fdcache.service.server.endpoints import endpoints
from fdcache.service.server.loop import ServiceLoop, SocketLock
from fdcache.service.server.preflight import check_arena_dir
from fdcache.service.server.process import notify, notify_status
from fdcache.service.server.service import Service
from fdcache.service.server.storage import ServiceStorage
from fdcache.service.server.views import Views
from fdcache.service.wire.address import make_runtime_dir, require_socket, socket_path
from fdcache.service.wire.liveness import live_processes
from fdcache.settings import Settings
from fdcache.settings.effective import effective_values

log = logging.getLogger("fdcache.service.server")

Progress = Callable[[str, int, int], None]


class Server:
    """One service.

    Example::

        server = Server(Settings.load())
        server.start()
        try:
            server.run()  # until another thread or a signal handler calls server.stop()
        finally:
            server.close()
    """

    def __init__(self, settings: Settings, address: str | None = None) -> None:
        self.settings = settings
        self.endpoints = endpoints(settings, address)
        self._socket = socket_path(self.endpoints.address)
        self.arena = Arena(settings.server.arena_dir, arena_name(self._socket), self.endpoints.address)
        self.service = Service(settings.server, self.arena, self._socket.parent, settings.cache.evicts)
        self.views = Views(self.service, effective_values(settings), settings.fingerprint)
        self.service.answer_tool = self.views.answer
        self.recovered = 0
        self._lock: SocketLock | None = None
        self._loop: ServiceLoop | None = None
        self._drain_until: float | None = None
        self.on_ready: Callable[[], None] = lambda: None
        """Called once by ``run``, when the storage index is loaded."""
        self._is_ready = False

    @property
    def is_serving(self) -> bool:
        """Return True if ``run`` answers requests, or will."""
        return self._loop is not None

    def start(self, progress: Progress = lambda what, done, total: None) -> None:
        """Take the locks, make or recover the arena, and bind the socket. After an error nothing is left behind.

        Raises ``ServiceRunningError`` if another service has this address, ``HostMemoryError`` for too little memory,
        ``ConfigurationError`` and ``StorageError`` for settings that cannot be served.
        """

        def report(what: str, done: int, total: int) -> None:
            notify_status(f"{what}: {done} of {total}")
            progress(what, done, total)

        make_runtime_dir(self._socket.parent)
        require_socket(self._socket)
        self._lock = SocketLock(self._socket)
        try:
            self._open_arena(report)
            self.service.clients.watch_earlier()
            self._open_storage(report)
            # Signals stop the loop from here on, so none can leave the socket behind.
            self._loop = ServiceLoop(self.service, self._socket, self._on_tick)
            self._loop.bind()
        except BaseException:
            self._close_loop()
            self._close_storage()
            self.arena.close()
            self._lock.release()
            self._lock = None
            raise
        log.info(
            "serving at %s: %d bytes in %s, %d blocks recovered",
            self.endpoints.address,
            self.arena.total_bytes,
            self.arena.directory,
            self.recovered,
        )

    def _open_arena(self, progress: Progress) -> None:
        settings = self.settings.server
        check_arena_dir(self.settings)
        found = self.arena.lock()
        wanted = self.settings.cache.host_memory
        if found is not None and settings.recover:
            if not wanted or found.extents == wanted // max(found.extent_bytes, 1):
                self.recovered = self.service.namespaces.recover(self.arena.adopt(found))
                return
            log.warning("the earlier arena is not recovered: its size differs from FDCACHE_HOST_MEMORY")
        if settings.huge_pages and (problem := huge_page_problem(settings.arena_dir)):
            log.warning("%s", problem)
        try:
            self.arena.create(
                wanted,
                settings.extent_size,
                numa_node=settings.numa_node,
                huge_pages=settings.huge_pages,
                progress=lambda done, total: progress("touching memory", done, total),
            )
        except HostMemoryError as error:
            dead = [each for each in find_arenas(settings.arena_dir) if not each.alive]
            if not dead:
                raise
            taken = "; ".join(f"{each.size} of {each.words}: {each.remedy}" for each in dead)
            raise HostMemoryError(f"{error}\ndead arenas in {settings.arena_dir}: {taken}") from error

    def _open_storage(self, progress: Progress) -> None:
        if not self.settings.storage_tier.is_on:
            return
        storage = ServiceStorage(self.settings, make_room=self.service.make_room_for)
        self.service.storage = storage
        storage.start(
            self.service.namespaces.values(),
            lambda done, total: progress("loading the storage index", done, total),
        )

    def _close_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    def _close_storage(self) -> None:
        storage, self.service.storage = self.service.storage, None
        if storage is not None:
            storage.close()

    def run(self) -> None:
        """Serve until ``stop``."""
        assert self._loop is not None
        self._loop.run()

    def _on_tick(self) -> None:
        self._announce_ready()
        self._drain()

    def _announce_ready(self) -> None:
        if self._is_ready or self.service.is_loading:
            return
        self._is_ready = True
        if self._drain_until is None:
            notify("READY=1", f"STATUS=serving at {self.endpoints.address}")
            log.info("ready")
            self.on_ready()

    def stop(self, *, force: bool = False) -> None:
        """Drain, then end ``run``; with ``force``, or when it drains already, end at once. Any thread may call it."""
        if self._loop is None:
            return  # closed already
        if force or self._drain_until is not None:
            self._loop.stop()
            return
        notify("STOPPING=1", f"STATUS=draining {len(self.service.clients)} clients")
        self._drain_until = time.monotonic() + self.settings.server.drain_timeout

    def _drain(self) -> None:
        if self._drain_until is None or self._loop is None:
            return
        if not self.service.draining:
            self._loop.start_draining()
        storage, clients = self.service.storage, len(self.service.clients)
        is_flushed = storage is None or storage.flush(last=not clients)
        if not clients and is_flushed:
            self._loop.stop()
        elif time.monotonic() > self._drain_until:
            if not is_flushed:
                log.warning("FDCACHE_DRAIN_TIMEOUT is over; not everything was written to storage")
            self._loop.stop()

    def close(self) -> None:
        """Remove the socket, the shared memory and the locks."""
        self._close_loop()
        self._close_storage()
        for namespace in self.service.namespaces.values():
            namespace.close()
        self.arena.close()
        for _ in live_processes(self._socket.parent):
            pass  # it removes the live files of dead clients
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def abandon(self) -> None:
        """Release the locks and leave all files, as a killed service does. For tests of recovery."""
        self._close_loop()
        self._close_storage()
        self.arena.abandon()
        if self._lock is not None:
            self._lock.release(remove=False)
            self._lock = None
