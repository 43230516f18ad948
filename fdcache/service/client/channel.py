"""Session: one registration at a service, and what this process copies there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import RLock

import numpy as np

from fdcache._core import OutgoingCopies
from fdcache.metadata import HashArray, Int32Array, UInt32Array
from fdcache.service.wire.protocol import Events, Heartbeat, Missed, Request
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
