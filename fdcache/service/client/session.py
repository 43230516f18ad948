"""Session: one registration at a service, and the thread that keeps one open."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock

import numpy as np
import zmq

from fdcache._core import OutgoingCopies
from fdcache.errors import ProtocolError, RefusedError, ServiceUnavailableError
from fdcache.layout import KVLayout
from fdcache.metadata import HashArray, Int32Array, UInt32Array
from fdcache.service.client.connection import Connection
from fdcache.service.wire.address import client_dir
from fdcache.service.wire.liveness import LiveFile
from fdcache.service.wire.protocol import (
    Alive,
    Answer,
    Bye,
    Events,
    FetchTerms,
    Granted,
    Heartbeat,
    Live,
    Missed,
    Publish,
    Published,
    Recall,
    Refill,
    Refused,
    Register,
    Registered,
    Release,
    Request,
    hashes_from,
    int32_from,
    uint8_from,
    uint32_from,
)
from fdcache.service.wire.shared_memory import open_table
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.pool import EVENT_CLEARED
from fdcache.tiers.traffic import Traffic

FIRST_STOCK = 64
MOST_STOCK = 8192
_STEPS = 4  # the stock is for so many reservations as large as the largest so far


@dataclass(eq=False, slots=True)
class Session:
    """One registration, from its answer until the service is lost.

    ``arena`` is what plans name: the memory's incarnation, the session and this process's live file;
    ``copies`` has the stock of slots, of which ``wanted`` are to be there and ``asked`` are on their way;
    ``is_resetting``: a reset is asked for, and what is granted before it would be of no use;
    ``storage``: whether the service has a storage tier below its host tier; ``unheard``: signs of life sent since
    the service last said anything.
    """

    number: int
    arena: str
    num_slots: int
    copies: OutgoingCopies
    storage: bool = False
    recovered: bool = True
    wanted: int = FIRST_STOCK
    asked: int = 0
    is_resetting: bool = False
    figures: list[int] = field(default_factory=list)
    unheard: int = 0

    @property
    def is_short(self) -> bool:
        """Whether slots have to be asked for, and were not yet."""
        return not (self.asked or self.is_resetting) and self.copies.stock < (self.wanted + 1) // 2

    def ask(self) -> int:
        """How many slots to ask for now, which are then on their way."""
        self.asked = self.wanted - self.copies.stock
        return self.asked

    def grant(self, slots: Int32Array, generations: UInt32Array, num_slots: int) -> None:
        """They came, or as many as there are; ``num_slots`` are those of the whole tier by now."""
        self.copies.grant(slots, generations)
        self.num_slots = num_slots
        if len(slots) < self.asked:  # there is no more to give: be content until the next sign of life
            self.wanted = max(self.copies.stock, 1)
        self.asked = 0

    def beat(self) -> None:
        """A sign of life is sent; after one that was answered, what was asked for before it may be asked for again."""
        if not self.unheard:
            self.asked = 0  # granted by now, unless that found no room in a queue
        self.unheard += 1
        self.wanted = max(self.wanted, FIRST_STOCK)

    def expect(self, count: int) -> None:
        """So many slots were wanted at once: keep enough for the next times."""
        self.wanted = min(max(self.wanted, _STEPS * count), MOST_STOCK)


class Inbox:
    """Events of the tier and orders to reset the device tier. One thread puts in, another takes out."""

    def __init__(self, capacity: int) -> None:
        self._events: deque[Events] = deque()
        self._capacity = 0
        self.device_resets = 0
        """Orders so far, as the service counts them."""
        self.device_resets_taken = 0
        self.record_events(capacity)

    def record_events(self, capacity: int) -> None:
        """Keep the newest ``capacity`` batches of events."""
        self._capacity = capacity
        self._events = deque(self._events, maxlen=capacity or None)

    @property
    def wants_events(self) -> bool:
        """Whether any are kept."""
        return self._capacity > 0

    def add(self, events: Events) -> None:
        """A batch came."""
        if self._capacity:
            self._events.append(events)

    def take_events(self) -> list[Events]:
        """What came since the last call."""
        taken = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    def take_device_reset(self) -> bool:
        """Whether a reset of the device tier was asked for since the last call."""
        if self.device_resets == self.device_resets_taken:
            return False
        self.device_resets_taken = self.device_resets
        return True


_MOST_ABSENT = 4096  # look-ups without an answer that are remembered between two messages


class Outbox:
    """Messages and ends of runs, each of one session. Any thread puts in, one takes out; ``lock`` keeps the order."""

    def __init__(self) -> None:
        self.lock = RLock()
        self._messages: deque[tuple[Session, Request]] = deque()
        self._releases: deque[tuple[Session, int]] = deque()
        self._absent: deque[tuple[bytes, int, bool]] = deque()

    def __bool__(self) -> bool:
        return bool(self._messages or self._releases)

    def tell(self, session: Session, body: Request) -> None:
        """To be sent; dropped when the session ends before."""
        with self.lock:
            self.tell_absent(session)
            self._messages.append((session, body))

    def release(self, session: Session, lease: int) -> None:
        """Give a run back."""
        self._releases.append((session, lease))

    def count_absent(self, first: HashArray, blocks: int, whole: bool) -> None:
        """The data path saw that so many blocks from ``first``, shape (32,), on are not there.

        ``whole``: nothing of the path is. Told before the next thing that is told, or with the next sign of life.
        """
        if len(self._absent) < _MOST_ABSENT:
            self._absent.append((first.tobytes(), blocks, whole))

    def tell_absent(self, session: Session) -> None:
        """Before the blocks are told of that are computed now: after that nobody knows why they were not there."""
        with self.lock:
            if not self._absent:
                return
            absent = [self._absent.popleft() for _ in range(len(self._absent))]
            first = b"".join(key for key, _, _ in absent)
            blocks = np.array([count for _, count, _ in absent], np.int32)
            body = Missed(sum(whole for _, _, whole in absent), first, blocks.tobytes())
            self._messages.append((session, body))

    def forget_absent(self) -> None:
        """There is no session in which they count."""
        self._absent.clear()

    def forget_told(self) -> None:
        """A session begins: nothing of those before it is sent any more."""
        self._messages.clear()
        self._releases.clear()

    def take_messages(self) -> Iterator[tuple[Session, Request]]:
        """What there is, in order."""
        while self._messages:
            yield self._messages.popleft()

    def take_releases(self, session: Session | None) -> list[int]:
        """Leases of this session's runs that were given back; others went with their session."""
        leases = []
        while self._releases:
            its, lease = self._releases.popleft()
            if its is session:
                leases.append(lease)
        return leases


class Progress:
    """Figures of this moment, and totals, which are told from each session's beginning: the service adds them up."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.in_flight_misses = 0
        """Look-ups that ended at a block which this engine was still copying."""
        self._figures = b"{}"
        self._wants_figures = True
        self._told = self._told_before = (
            Traffic(),
            0,
        )  # at the last sign of life, and when the session began

    def report(self, figures: Callable[[], bytes]) -> None:
        """Figures of the engine, a JSON object, for the next sign of life; asked for once between two."""
        if self._wants_figures:
            self._wants_figures = False
            self._figures = figures()

    def begin_session(self) -> None:
        """What was told so far is known; what comes now is told to another session."""
        self._told_before = self._told

    def heartbeat(self, device_resets: int) -> Heartbeat:
        """A sign of life of this moment, from an engine that has taken so many orders to reset its device tier."""
        self._told = (self.traffic.copy(), self.in_flight_misses)
        traffic, misses = self._told_before
        heartbeat = Heartbeat(
            self._figures, device_resets, self._told[0].since(traffic), self._told[1] - misses
        )
        self._wants_figures = True
        return heartbeat


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
        return self.latest.copies.under_way if self.latest else 0

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
            session.copies.answered(hashes_from(answer.hashes))
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
            session.copies.forget_answers()

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
