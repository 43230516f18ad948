"""Server: starts a service (locks, memory, recovery, storage), runs it, drains it and ends it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from fdcache.errors import HostMemoryError
from fdcache.machine.memory import huge_page_problem, node_cores
from fdcache.service.server.arena import Arena, Manifest, MemoryKind, arena_name
from fdcache.service.server.arenas import find_arenas
from fdcache.service.server.endpoints import endpoints
from fdcache.service.server.event_publisher import EventPublisher
from fdcache.service.server.loop import ServiceLoop, SocketLock
from fdcache.service.server.preflight import check_arena_dir
from fdcache.service.server.process import notify, notify_status
from fdcache.service.server.router_feed import RouterFeeds
from fdcache.service.server.service import Service
from fdcache.service.server.storage import ServiceStorage
from fdcache.service.server.views import Views
from fdcache.service.wire.address import make_runtime_dir, require_socket, socket_path
from fdcache.service.wire.liveness import live_processes
from fdcache.settings import Settings
from fdcache.settings.effective import effective_values

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]


class Server:
    """One service.

    Example::

        with Server(Settings.load()) as server:
            server.start()
            server.run()  # until another thread or a signal handler calls server.stop()
    """

    def __init__(self, settings: Settings, address: str | None = None) -> None:
        self.settings = settings
        self.endpoints = endpoints(settings, address)
        self._socket = socket_path(self.endpoints.address)
        kind = MemoryKind(settings.server.numa_node, settings.server.huge_pages)
        name = arena_name(self._socket)
        self.arena = Arena(settings.server.arena_dir, name, self.endpoints.address, kind)
        self.service = Service(settings.server, self.arena, self._socket.parent, settings.cache.eviction)
        self.views = Views(self.service, effective_values(settings), settings.fingerprint)
        self.service.answer_tool = self.views.slices
        self.service.drive_commands = self.views.control.tick
        self.recovered = 0
        self._found: Manifest | None = None
        self._lock: SocketLock | None = None
        self._loop: ServiceLoop | None = None
        self._is_started = False
        self._has_failed = False
        self._drain_until: float | None = None
        self.on_ready: Callable[[], None] = lambda: None
        """Called once by ``run``, when the storage index is loaded."""
        self._is_ready = False

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._has_failed |= kind is not None
        self.close()

    @property
    def is_serving(self) -> bool:
        """Return True if ``run`` answers requests, or will."""
        return self._is_started and self._loop is not None

    def bind(self) -> None:
        """Take the locks and the address, and check what a start needs. No memory of an earlier service is touched.

        Raises ``ServiceRunningError`` if another service has this address, ``ConfigurationError``, ``HostMemoryError``
        and ``StorageError`` for settings that cannot be served.
        """
        try:
            make_runtime_dir(self._socket.parent)
            require_socket(self._socket)
            self._lock = SocketLock(self._socket)
            check_arena_dir(self.settings)
            if self.settings.server.numa_node is not None:
                node_cores(self.settings.server.numa_node)
            self._found = self.arena.lock()
            self.service.clients.watch_earlier()
            if self.settings.storage_tier.is_on:
                self.service.storage = ServiceStorage(self.settings, make_room=self.service.make_room_for)
            self._open_feeds()
            self._loop = ServiceLoop(self.service, self._socket, self._on_tick)
            self._loop.bind()
        except BaseException:
            self._fail()
            raise

    def start(self, progress: Progress = lambda what, done, total: None) -> None:
        """Make or recover the arena, and begin to open the storage; ``bind`` before that unless it was done.

        After an error the memory of an earlier service stays, and nothing else is left behind. Raises what ``bind``
        does, and ``HostMemoryError`` for too little memory.
        """

        def report(what: str, done: int, total: int) -> None:
            notify_status(f"{what}: {done} of {total}")
            progress(what, done, total)

        if self._loop is None:
            self.bind()
        try:
            self._open_arena(lambda done, total: report("touching memory", done, total))
            self.service.deletions.load()
            if self.service.storage is not None:
                self.service.storage.start(
                    self.service.namespaces.values(),
                    lambda done, total: report("loading the storage index", done, total),
                )
            self._is_started = True  # signals stop the loop from here on
        except BaseException:
            self._fail()
            raise
        log.info(
            "serving at %s: %d bytes in %s, %d blocks recovered",
            self.endpoints.address,
            self.arena.total_bytes,
            self.arena.directory,
            self.recovered,
        )

    def _open_feeds(self) -> None:
        """Bind the addresses for routers, if there are any."""
        settings, storage = self.settings.server, self.service.storage
        address, replay = _address(settings.kv_events), _address(settings.kv_events_replay)
        if address is None:
            return
        local = storage is not None and storage.settings.connector == "local"
        folder = storage.settings.directory if storage is not None and local else self.arena.directory
        prefix = "fdcache" if local else self.arena.prefix
        feeds = RouterFeeds(
            EventPublisher(address, replay),
            lambda layout: folder / f"{prefix}-{layout.fingerprint.hex()[:16]}.notes",
            has_storage=local,
        )
        self.service.namespaces.feeds = feeds
        if storage is not None:
            storage.feeds = feeds

    def _close_feeds(self) -> None:
        feeds, self.service.namespaces.feeds = self.service.namespaces.feeds, None
        if feeds is not None:
            feeds.close()

    def _fail(self) -> None:
        self._has_failed = True
        self.close()

    def _open_arena(self, progress: Callable[[int, int], None]) -> None:
        settings, found = self.settings.server, self._found
        if settings.huge_pages and (problem := huge_page_problem(settings.arena_dir)):
            log.warning("%s", problem)
        wanted = self.settings.cache.host_memory
        try:
            if (
                found is not None
                and settings.recover
                and (wanted or found.extent_bytes) >= found.extent_bytes
            ):
                self._recover(found, wanted // found.extent_bytes, progress)
                return
            if found is not None and settings.recover:
                log.warning(
                    "the earlier arena is not recovered: FDCACHE_HOST_MEMORY is less than one of its extents of %d "
                    "bytes",
                    found.extent_bytes,
                )
            self.arena.create(wanted, progress)
        except HostMemoryError as error:
            dead = [each for each in find_arenas(settings.arena_dir) if not each.alive]
            if not dead:
                raise
            taken = "; ".join(f"{each.size} of {each.words}: {each.remedy}" for each in dead)
            raise HostMemoryError(f"{error}\ndead arenas in {settings.arena_dir}: {taken}") from error

    def _recover(self, found: Manifest, wanted: int, progress: Callable[[int, int], None]) -> None:
        """Take over an earlier arena, and give it ``wanted`` extents; 0: as many as it had."""
        assigned = self.arena.adopt(found)
        extents = wanted or found.extents
        if self.arena.manifest.extents < extents:
            self.arena.grow(extents, progress)
        has_writers = bool(self.service.clients.earlier)
        self.recovered = self.service.namespaces.recover(assigned, extents, has_writers=has_writers)

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
        try:
            self._loop.run()
        except BaseException:
            self._has_failed = True
            raise

    def _on_tick(self) -> None:
        if time.monotonic() >= self.views.page.trends.due:
            self.views.page.trends.record()
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
        """Remove the socket and the locks. The memory stays for the next service to recover.

        It is removed if ``FDCACHE_DISCARD`` asks for that and no error has ended this service, and if an error has
        ended the start that created it.
        """
        self._close_loop()
        self._close_storage()
        self._close_feeds()
        for namespace in self.service.namespaces.values():
            namespace.close()
        is_unused = self.arena.is_new and not self._is_started
        is_discarded = is_unused or (self.settings.server.discard and not self._has_failed)
        if self._is_started and not is_discarded:
            log.info("%d bytes stay in %s for the next start", self.arena.total_bytes, self.arena.directory)
        self._is_started = False
        self.arena.close(discard=is_discarded)
        if self._lock is None:
            return
        for _ in live_processes(self._socket.parent):
            pass  # it removes the live files of dead clients
        self._lock.release()
        self._lock = None

    def abandon(self) -> None:
        """Release the locks and leave all files, as a killed service does. For tests of recovery."""
        self._close_loop()
        self._close_storage()
        self._close_feeds()
        self.arena.close()
        if self._lock is not None:
            self._lock.release(remove=False)
            self._lock = None


def _address(text: str) -> str | None:
    return None if text.lower() in {"off", "none", ""} else text
