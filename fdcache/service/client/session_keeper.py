"""SessionKeeper: the thread that keeps a session at a service open, and what the log tells while there is none."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import zmq

from fdcache._core import MissLog, SharedHost
from fdcache.errors import ProtocolError, RefusedError, ServiceUnavailableError
from fdcache.layout import KVLayout
from fdcache.service.client.connection import Connection
from fdcache.service.client.session import Outbox, Session, open_session
from fdcache.service.wire.address import client_dir
from fdcache.service.wire.arrays import hashes_from, int32_from, uint8_from, uint32_from
from fdcache.service.wire.liveness import LiveFile
from fdcache.service.wire.protocol import (
    Alive,
    Answer,
    Bye,
    DescribeAgain,
    Events,
    Forget,
    Forgotten,
    Granted,
    Heartbeat,
    Hinted,
    HintResult,
    Publish,
    Published,
    Recall,
    Refused,
    Request,
)
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.fetches import FetchTerms
from fdcache.tiers.pool import EVENT_CLEARED
from fdcache.tiers.statistics import Traffic, TrafficMeter

logger = logging.getLogger(__name__)

_FIRST_INTERVAL, _LONGEST_INTERVAL = 60.0, 3600.0


class Absence:
    """The time in which a service gives no session: a warning when it begins, others at ever longer intervals.

    Each attempt is a line of level DEBUG.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._since: float | None = None
        self._reason: type[Exception] | None = None
        self._interval, self._next = _FIRST_INTERVAL, 0.0

    def goes_on(self, error: Exception) -> None:
        """Count an attempt that failed; another kind of reason is told at once."""
        now = time.monotonic()
        if self._since is None:
            self._since, self._interval = now, _FIRST_INTERVAL
            logger.warning(
                "no session at the service; until there is one the engine computes what it would have found there and "
                "stores nothing there; it asks again by itself: %s",
                error,
            )
        elif now >= self._next or self._reason is not type(error):
            self._interval = min(2 * self._interval, _LONGEST_INTERVAL)
            logger.warning("still no session at the service, for %.0f s: %s", now - self._since, error)
        else:
            logger.debug("no session at the service: %s", error)
            return
        self._reason, self._next = type(error), now + self._interval

    def ends(self) -> None:
        """Log the return of a service that was away."""
        if self._since is not None:
            seconds = time.monotonic() - self._since
            logger.warning("there is a session at the service %s again, after %.0f s", self._address, seconds)
            self._since = None


_BYE_TIMEOUT = 1.0
_HEARTBEAT_SECONDS = 1.0
_MAX_UNANSWERED = 5  # heartbeats without an answer before the service counts as gone
_POLL_MS = 50  # longest delay of a queued message
_MOST_HINT_RESULTS = 8192  # of more the oldest are dropped
_MIN_BACKOFF, _MAX_BACKOFF = 0.05, 2.0


class Progress:
    """Figures of the engine, and totals of its copies; heartbeats carry the totals since their session began."""

    def __init__(self, misses: MissLog) -> None:
        self.traffic = TrafficMeter()
        self._misses = misses
        self._figures = b"{}"
        self._wants_figures = True
        self._sent = self._sent_before = (
            Traffic(),
            0,
        )  # totals at the last heartbeat, and at the session's begin

    def report(self, figures: Callable[[], bytes]) -> None:
        """Offer the engine's figures, a JSON object, for the next heartbeat; called once between two heartbeats."""
        if self._wants_figures:
            self._wants_figures = False
            self._figures = figures()

    def begin_session(self) -> None:
        """Count from here: an earlier session has what was sent so far."""
        self._sent_before = self._sent

    def heartbeat(self, device_resets: int, heard: int) -> Heartbeat:
        """Return the heartbeat of an engine that has applied ``device_resets`` resets of its device tier.

        ``heard``: the number of the last deletion that it was told of.
        """
        self._sent = (self.traffic.copy(), self._misses.in_flight)
        traffic, misses = self._sent_before
        self._wants_figures = True
        return Heartbeat(
            self._figures, device_resets, self._sent[0].since(traffic), self._sent[1] - misses, heard
        )


class SessionKeeper:
    """Keeps a session open from a thread: registers, sends what is queued, refills the stock, reconnects.

    A new session begins once neither a copy nor a load of the one before is in flight, so that the service may give all
    slots of the old one to others. The ``host`` finds and reserves nothing while no session is open.

    Attributes:
        session: the open session; None without a service.
        leaving: a session that ends with a goodbye once nothing of it is in flight.
        lock: held while a session begins or ends, and while messages are queued.
        greet: called by the thread in each new session until it returns True, to tell what the service cannot know.
    """

    def __init__(
        self,
        settings: CacheSettings,
        layout: KVLayout,
        host: SharedHost,
        terms: FetchTerms,
    ) -> None:
        assert settings.server is not None
        self._layout = layout
        self._host = host
        self._terms = terms
        self._address = settings.server
        self._absence = Absence(settings.server)
        self._live = LiveFile(client_dir(settings.server))
        self.session: Session | None = None
        self.leaving: Session | None = None
        self.greet: Callable[[], bool] = lambda: True
        self.outbox = Outbox(host)
        self.progress = Progress(host.misses)
        self._events: deque[Events] = deque(maxlen=settings.event_buffer)
        self._hint_results: deque[HintResult] = deque(maxlen=_MOST_HINT_RESULTS)
        self._device_resets = self._device_resets_taken = 0  # orders of the service since it began
        self._heard = self._forgotten = 0  # numbers of deletions
        self._deleted: deque[Forget] = deque()
        self.lock = self.outbox.lock
        self._connected = threading.Condition(self.lock)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="fdcache-session", daemon=True)
        self._thread.start()
        self.wait_connected(max(settings.rpc_timeout, 1.0))

    @property
    def listening(self) -> Session | None:
        """The session whose messages the service accepts: the open one, or the one about to end."""
        return self.session or self.leaving

    def wait_connected(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for a session; return True if there is one."""
        with self._connected:
            return self._connected.wait_for(lambda: self.session is not None, timeout)

    def flush(self) -> None:
        """Wake the thread if messages are queued or slots are needed; it wakes by itself soon after."""
        session = self.session
        if self.outbox or (session is not None and session.needs_slots()):
            self._wake_thread()

    def lose(self, session: Session, reason: str) -> None:
        """End a session at once: the service did not answer, or does not know it."""
        with self.lock:
            if self.session is session:
                logger.warning("session at the service lost: %s", reason)
                self.session = self.leaving = None
                self._host.end_session()
        self._wake_thread()

    def leave(self, session: Session) -> None:
        """End a session with a goodbye once nothing of it is in flight."""
        with self.lock:
            if self.session is session:
                self.session, self.leaving = None, session
                self._host.end_session()
        self._wake_thread()

    def change_layout(self, layout: KVLayout) -> None:
        """Leave the session and begin the next one with this layout."""
        with self.lock:
            self._layout = layout
            if self.session is not None:
                self.leave(self.session)
            elif not self.leaving:
                self.outbox.drop_misses()

    def return_stock(self, session: Session, first: int = 0) -> None:
        """Give the slots of the stock from ``first`` on back."""
        slots = session.copies.give_up_stock(first)
        if count := len(slots):
            none_copied, no_hashes = bytes(count), b"\xfe" * 32 * count  # neither the root nor UNKNOWN
            self.outbox.add(
                session, Publish(slots.tobytes(), no_hashes, no_hashes, none_copied, bytes(8 * count))
            )

    def take_device_reset(self) -> bool:
        """Return True if a reset of the device tier was ordered since the last call; the service hears of it."""
        if self._device_resets == self._device_resets_taken:
            return False
        self._device_resets_taken = self._device_resets
        self._wake_thread()
        return True

    def take_deleted(self) -> list[Forget]:
        """Return what the service has told to forget since the last call."""
        taken = []
        while self._deleted:
            taken.append(self._deleted.popleft())
        return taken

    def forgot(self, number: int) -> None:
        """Report that nothing is left of what was deleted up to this number."""
        with self.lock:
            self._forgotten = number
            if (session := self.listening) is not None:
                self.outbox.add(session, Forgotten(number))
        self._wake_thread()

    def record_events(self, capacity: int) -> None:
        """Keep the newest ``capacity`` batches of events."""
        self._events = deque(self._events, maxlen=capacity)

    def take_events(self) -> list[Events]:
        """Return the batches of events since the last call."""
        taken = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    def take_hint_results(self) -> list[HintResult]:
        """Return what the service has told of hints since the last call."""
        taken = []
        while self._hint_results:
            taken.append(self._hint_results.popleft())
        return taken

    def close(self) -> None:
        """Say goodbye and end the thread; no session is open then. Idempotent, and harmless in a forked child."""
        if self._closing or os.getpid() != self._pid:
            return
        self._closing = True
        self._wake_thread()
        self._thread.join()
        os.close(self._wake)
        with self.lock:
            self.session = self.leaving = None
            self._host.end_session()
        if self._is_drained():
            self._live.close()

    def _wake_thread(self) -> None:
        if not self._closing or self._thread.is_alive():
            os.eventfd_write(self._wake, 1)

    def _is_drained(self) -> bool:
        """Return True if nothing of this engine is written to or read from the arena, and all ends are queued."""
        with self.lock:
            if self._host.blocks_in_flight or self._host.slots_loading:
                return False
            if (session := self.listening) is None:
                self._host.drop_reports()
            else:
                self.outbox.add_ended(session)
            return True

    # --- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        connection = Connection(self._address)
        poller = zmq.Poller()
        poller.register(connection.socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        backoff, retry_at, heartbeat_at = _MIN_BACKOFF, 0.0, 0.0
        greeted: Session | None = None
        try:
            while not self._closing:
                now = time.monotonic()
                if self.listening is None and now >= retry_at and self._is_drained():
                    if self._register(connection):
                        backoff, heartbeat_at = _MIN_BACKOFF, 0.0
                    else:
                        retry_at = time.monotonic() + backoff * random.uniform(0.5, 1.0)
                        backoff = min(2 * backoff, _MAX_BACKOFF)
                if (current := self.session) is not greeted and self.greet():
                    greeted = current
                self._send_queued(connection)
                if (ended := self.leaving) is not None and self._is_drained():
                    self._say_goodbye(connection, ended)
                    self.leaving = None
                if (session := self.listening) is not None and now >= heartbeat_at:
                    self._send_heartbeat(connection, session)
                    heartbeat_at = now + _HEARTBEAT_SECONDS
                ready = dict(poller.poll(_POLL_MS))
                if self._wake in ready:
                    with suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                self._receive(connection)
            if (last := self.listening) is not None:
                if self._is_drained():
                    self._say_goodbye(connection, last)
                else:
                    self._send_queued(connection)
        finally:
            connection.close()

    def _register(self, connection: Connection) -> bool:
        """Open a session and return True; without a service, return False."""
        layout = self._layout
        try:
            wants_events = self._events.maxlen != 0
            session = open_session(
                connection,
                layout,
                self._live.live,
                self._terms,
                events=wants_events,
                forgotten=self._forgotten,
            )
        except (ServiceUnavailableError, RefusedError, ProtocolError) as error:
            self._absence.goes_on(error)
            return False
        self._absence.ends()
        with self._connected:
            self.outbox.clear()
            self.progress.begin_session()
            if layout is not self._layout:
                self.leaving = session  # the layout changed in the meantime
                return True
            self.session = session
            self._host.begin_session(session.runs, session.copies)
            self._connected.notify_all()
        return True

    def _send_queued(self, connection: Connection) -> None:
        if (current := self.listening) is not None:
            self.outbox.add_ended(current)
        for session, body in self.outbox.take_messages():
            self._send(connection, session, body)
        if (current := self.listening) is not None:
            current.runs.flush()
        if (current := self.session) is not None and current.needs_slots():
            self._send(connection, current, current.refill())

    def _send_heartbeat(self, connection: Connection, session: Session) -> None:
        if session.unanswered >= _MAX_UNANSWERED:
            self.lose(session, f"{self._address}: {session.unanswered} heartbeats were not answered")
            return
        if session is self.session:
            session.count_heartbeat()
        self.outbox.add_misses(session)
        self._send(connection, session, self.progress.heartbeat(self._device_resets_taken, self._heard))

    def _say_goodbye(self, connection: Connection, session: Session) -> None:
        """Send the rest of a session of which nothing is in flight, and end it."""
        self.outbox.add_misses(session)
        self._send_queued(connection)
        self._send(connection, session, self.progress.heartbeat(self._device_resets_taken, self._heard))
        try:
            connection.call(Bye(), _BYE_TIMEOUT)
        except (ServiceUnavailableError, RefusedError, ProtocolError) as error:
            logger.info("no goodbye to the service: %s", error)  # it will see this process end

    def _send(self, connection: Connection, session: Session, body: Request) -> None:
        if session is not self.listening:
            return
        try:
            connection.send(body)
        except ServiceUnavailableError as error:
            self.lose(session, str(error))

    def _receive(self, connection: Connection) -> None:
        while (session := self.session) is not None:
            try:
                got = connection.receive(0)
                if got is None:
                    return
                session.unanswered = 0
                self._handle(session, got[1])
            except ProtocolError as error:
                self.lose(session, str(error))

    def _handle(self, session: Session, answer: Answer) -> None:
        if isinstance(answer, Granted):
            slots = int32_from(answer.slots, "slots")
            generations = uint32_from(answer.generations, "generations", len(slots))
            with self.lock:
                session.grant(slots, generations, answer.num_slots)
        elif isinstance(answer, Published):
            session.copies.acknowledge(hashes_from(answer.hashes))
        elif isinstance(answer, Events):
            if (uint8_from(answer.kinds, "kinds") >= EVENT_CLEARED).any():
                self.return_stock(session)  # copies into slots granted before a reset are not kept
            self._events.append(answer)
        elif isinstance(answer, Hinted):
            self._hint_results.extend(answer.results)
        elif isinstance(answer, Recall):
            self.return_stock(session, answer.first)
        elif isinstance(answer, Forget):
            self._hear(answer)
        elif isinstance(answer, DescribeAgain):
            session.has_forgotten = True
        elif isinstance(answer, Alive):
            session.figures, session.reads = answer.figures, answer.reads
            self._device_resets = answer.device_resets
        elif isinstance(answer, Refused):
            self._handle_refusal(session, answer)

    def _hear(self, order: Forget) -> None:
        if order.number > self._heard:  # it may come twice
            self._heard = order.number
            self._deleted.append(order)

    def _handle_refusal(self, session: Session, answer: Refused) -> None:
        if answer.code == "draining":
            self.leave(session)
        elif answer.code == "no_session":
            self.lose(session, answer.message)
        else:
            session.copies.drop_unacknowledged()
