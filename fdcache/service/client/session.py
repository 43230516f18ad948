"""The beginning of a session: a service hears who comes, and its table of what is there is mapped."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from fdcache._core import OutgoingCopies
from fdcache.errors import ProtocolError, RefusedError, ServiceUnavailableError
from fdcache.layout import KVLayout
from fdcache.service.client.channel import Inbox, Outbox, Progress, Session
from fdcache.service.wire.address import client_dir
from fdcache.service.wire.connection import Connection
from fdcache.service.wire.frames import hashes_from, int32_from, uint8_from, uint32_from
from fdcache.service.wire.liveness import LiveFile
from fdcache.service.wire.presence import open_table
from fdcache.service.wire.protocol import (
    Alive,
    Answer,
    Bye,
    Events,
    FetchTerms,
    Granted,
    Heartbeat,
    Live,
    Publish,
    Published,
    Recall,
    Refill,
    Refused,
    Register,
    Registered,
    Release,
    Request,
)
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.pool import EVENT_CLEARED

_TIMEOUT = 2.0


def register(line: Connection, layout: KVLayout, live: Live, terms: FetchTerms, *, events: bool) -> Session:
    """A new session, which ``line`` speaks in from now on. ``events``: it is told what comes and goes.

    Raises ``RefusedError``, ``ProtocolError``, and ``ServiceUnavailableError`` also when the service's memory cannot
    be seen from here.
    """
    line.session = 0
    answer, _ = line.call(
        Register(
            layout=layout.to_json().encode(),
            live=live,
            name=f"{layout.model}:{os.getpid()}",
            events=events,
            fetches=terms,
        ),
        _TIMEOUT,
    )
    if not isinstance(answer, Registered):
        raise ProtocolError(f"a registration was answered by {type(answer).__name__}")
    geometry = answer.geometry
    try:
        table = open_table(Path(geometry.table_path), geometry.table_bytes)
    except OSError as error:
        raise ServiceUnavailableError(
            f"{geometry.table_path}: {error}; this process needs the service's FDCACHE_ARENA_DIR"
        ) from error
    line.session = answer.session
    arena = f"{geometry.incarnation:x}/{answer.session:x}/{live.path}"
    return Session(answer.session, arena, answer.num_slots, OutgoingCopies(table), answer.storage)


_HEARTBEAT = 1.0
_PAUSE_MS = 50  # so long what is to be told waits at most
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.05, 2.0
_MOST_UNHEARD = 5  # signs of life without an answer: the service is gone


class SessionKeeper:
    """Registers, refills, reconnects. ``session`` is None while there is no service to speak to; ``leaving`` is one
    that ends with a goodbye once nothing of it is under way.

    A new session begins only once nothing of the one before, ``latest``, is under way, neither a copy nor a load
    (``is_loading``): so the service may give all its slots to others.
    """

    def __init__(
        self, settings: CacheSettings, layout: KVLayout, is_loading: Callable[[], bool], terms: FetchTerms
    ) -> None:
        assert settings.server is not None
        self._layout = layout
        self._is_loading = is_loading
        self._terms = terms
        self._address = settings.server
        self._live = LiveFile(client_dir(settings.server))
        self.session: Session | None = None
        self.latest: Session | None = None
        self.last_error = ""
        self.progress = Progress()
        self.inbox = Inbox(settings.event_buffer)
        self.outbox = Outbox()
        self.lock = self.outbox.lock
        """Held while something ends and is told: the thread takes no end of a session for reached in between."""
        self._connected = threading.Condition(self.lock)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        self.leaving: Session | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="fdcache-session", daemon=True)
        self._thread.start()
        self.wait_connected(max(settings.rpc_timeout, 1.0))

    @property
    def live(self) -> Live:
        """This process's proof of life."""
        return self._live.live

    def wait_connected(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for a session; whether there is one."""
        with self._connected:
            return self._connected.wait_for(lambda: self.session is not None, timeout)

    def flush(self) -> None:
        """Now is a good time for the thread to tell what there is to tell; without this it comes to it by itself."""
        session = self.session
        if self.outbox or (session is not None and session.is_short):
            self._poke()

    def lose(self, session: Session, reason: str, *, goodbye: bool = False) -> None:
        """The service did not answer, or does not know the session: it is over.

        ``goodbye``: the service asked for an end and is told once nothing is under way any more.
        """
        with self.lock:
            if self.session is session:
                self.session = None
                self.leaving = session if goodbye else None
                self.last_error = reason
        self._poke()

    def change_layout(self, layout: KVLayout) -> None:
        """Leave the session, and begin the next one with this layout."""
        with self.lock:
            self._layout = layout
            if (session := self.session) is not None:
                self.lose(session, "the layout changes", goodbye=True)
            elif not self.leaving:
                self.outbox.forget_absent()

    @property
    def heard(self) -> Session | None:
        """The session in which the service takes what is told: the present one, or one that is about to end."""
        return self.session or self.leaving

    @property
    def copying(self) -> int:
        """Blocks being copied to the service."""
        return self.latest.copies.in_flight if self.latest else 0

    def _is_drained(self) -> bool:
        """Whether nothing of this engine is written to or read from the arena."""
        return not self.copying and not self._is_loading()

    def take_device_reset(self) -> bool:
        """Whether a reset of the device tier was asked for since the last call."""
        if not self.inbox.take_device_reset():
            return False
        self._poke()
        return True

    def close(self) -> None:
        """Say goodbye and end the thread; harmless when done before, and in a forked child."""
        if self._closing or os.getpid() != self._pid:
            return
        self._closing = True
        self._poke()
        self._thread.join()
        os.close(self._wake)
        if self._is_drained():
            self._live.close()

    def _poke(self) -> None:
        if not self._closing or self._thread.is_alive():
            os.eventfd_write(self._wake, 1)

    # --- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        line = Connection(self._address)
        poller = zmq.Poller()
        poller.register(line.socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        backoff, retry_at, beat_at = _FIRST_BACKOFF, 0.0, 0.0
        try:
            while not self._closing:
                now = time.monotonic()
                if self.session is None and not self.leaving and now >= retry_at and self._is_drained():
                    if self._register(line):
                        backoff, beat_at = _FIRST_BACKOFF, 0.0
                    else:
                        retry_at = time.monotonic() + backoff * random.uniform(0.5, 1.0)
                        backoff = min(2 * backoff, _LONGEST_BACKOFF)
                self._flush(line)
                if (ended := self.leaving) is not None and self._has_drained():
                    self._part(line, ended)
                    self.leaving = None
                if (heard := self.heard) is not None and now >= beat_at:
                    self._beat(line, heard)
                    beat_at = now + _HEARTBEAT
                ready = dict(poller.poll(_PAUSE_MS))
                if self._wake in ready:
                    _drain(self._wake)
                self._receive(line)
            if (last := self.heard) is not None:
                if self._has_drained():
                    self._part(line, last)
                else:
                    self._flush(line)
        finally:
            line.close()

    def _has_drained(self) -> bool:
        with self.lock:
            return self._is_drained()

    def _heartbeat(self) -> Heartbeat:
        return self.progress.heartbeat(self.inbox.device_resets_taken)

    def _beat(self, line: Connection, session: Session) -> None:
        if session.unheard >= _MOST_UNHEARD:
            self.lose(session, f"{self._address}: {session.unheard} signs of life were not answered")
            return
        if session is self.session:
            session.beat()
        self.outbox.tell_absent(session)
        self._send(line, session, self._heartbeat())

    def _register(self, line: Connection) -> bool:
        layout = self._layout
        try:
            session = register(line, layout, self._live.live, self._terms, events=self.inbox.wants_events)
        except (ServiceUnavailableError, RefusedError, ProtocolError) as error:
            self.last_error = str(error)
            return False
        with self._connected:
            self.outbox.forget_told()
            self.progress.begin_session()
            if layout is not self._layout:
                self.leaving = session  # it changed meanwhile
                return True
            self.session = self.latest = session
            self._connected.notify_all()
        return True

    def _flush(self, line: Connection) -> None:
        for session, body in self.outbox.take_messages():
            self._send(line, session, body)
        leases = self.outbox.take_releases(self.session)
        if leases and (current := self.session) is not None:
            self._send(line, current, Release(leases))
        if (current := self.session) is not None and current.is_short:
            self._send(line, current, Refill(current.ask()))

    def _send(self, line: Connection, session: Session, body: Request) -> None:
        if session is not self.heard:
            return
        try:
            line.send(body)
        except ServiceUnavailableError as error:
            self.lose(session, str(error))

    def _receive(self, line: Connection) -> None:
        while (session := self.session) is not None:
            try:
                got = line.receive(0)
            except ProtocolError as error:
                self.lose(session, str(error))
                return
            if got is None:
                return
            session.unheard = 0
            self._take(session, got[1])

    def _take(self, session: Session, answer: Answer) -> None:
        if isinstance(answer, Granted):
            slots = int32_from(answer.slots, "slots")
            generations = uint32_from(answer.generations, "generations", len(slots))
            with self.lock:
                session.grant(slots, generations, answer.num_slots)
        elif isinstance(answer, Published):
            session.copies.acknowledge(hashes_from(answer.hashes))
        elif isinstance(answer, Events):
            self._learn(session, answer)
        elif isinstance(answer, Recall):
            self.return_stock(session, answer.first)
        elif isinstance(answer, Alive):
            session.figures = answer.figures
            self.inbox.device_resets = answer.device_resets
        elif isinstance(answer, Refused) and answer.code in {"no_session", "draining"}:
            self.lose(session, answer.message, goodbye=answer.code == "draining")
        elif isinstance(answer, Refused):
            session.copies.drop_unacknowledged()

    def _learn(self, session: Session, events: Events) -> None:
        if (uint8_from(events.kinds, "kinds") >= EVENT_CLEARED).any():
            self.return_stock(session)  # what is copied into slots granted before a reset is not kept
        self.inbox.add(events)

    def return_stock(self, session: Session, first: int = 0) -> None:
        """Give the slots of the stock from ``first`` on back."""
        slots = session.copies.give_up_stock(first)
        count = len(slots)
        if count:
            nothing, no_hash = bytes(count), b"\xff" * 32 * count
            self.outbox.tell(session, Publish(slots.tobytes(), no_hash, no_hash, nothing, bytes(8 * count)))

    def _part(self, line: Connection, session: Session) -> None:
        """Nothing of the session is under way any more: tell what there is to tell, and say goodbye."""
        self.outbox.tell_absent(session)
        self._flush(line)
        self._send(line, session, self._heartbeat())
        try:
            line.call(Bye(), 1.0)
        except (ServiceUnavailableError, RefusedError, ProtocolError) as error:
            self.last_error = str(error)  # it will see this process end


def _drain(eventfd: int) -> None:
    try:
        os.eventfd_read(eventfd)
    except BlockingIOError:
        return
