"""Session: one registration at a service, and the messages that wait to be sent in it."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from fdcache._core import OutgoingCopies, SharedHost, SharedRuns
from fdcache.errors import ProtocolError, ServiceUnavailableError
from fdcache.hashing import NO_TENANT, tenant_key
from fdcache.layout import KVLayout
from fdcache.metadata import Int32Array, UInt32Array
from fdcache.service.client.connection import Connection
from fdcache.service.wire.liveness import Live
from fdcache.service.wire.protocol import (
    Describe,
    DescribedPath,
    LoadEnded,
    Missed,
    Publish,
    Refill,
    Register,
    Registered,
    Request,
)
from fdcache.service.wire.shared_memory import open_runs, open_table
from fdcache.tiers.fetches import FetchTerms
from fdcache.tiers.statistics import ReadTotals

_FIRST_STOCK, _MAX_STOCK = 64, 8192
_STOCKED_RESERVATIONS = 4  # the stock covers this many reservations of the largest size so far
_REGISTER_TIMEOUT = 2.0
_MAX_OWNERS = 1 << 20
MOST_BLOCKS = 1024
"""Of a message with what routers are told."""
_ROOT = bytes(32)

_key = lru_cache(maxsize=65536)(tenant_key)


@dataclass(eq=False, slots=True)
class Session:
    """One registration, from its answer until the service is lost.

    Attributes:
        arena: what plans name: incarnation of the memory, session, and live file of this process.
        copies: copies to the service, and its stock of slots; ``wanted`` slots shall be in stock, ``asked`` are
            requested.
        runs: look-ups in the service's table, and what this process has pinned and unpinned there.
        storage: the service has a storage tier below its host tier.
        is_resetting: a reset is requested; slots granted before it would be useless.
        block_size, wants_notes: tokens of a block; True if the service wants blocks to be described.
        has_forgotten: the service has dropped descriptions of blocks that it had no more.
        unanswered: heartbeats sent since the last message of the service.
    """

    id: int
    arena: str
    copies: OutgoingCopies
    runs: SharedRuns
    storage: bool = False
    wanted: int = _FIRST_STOCK
    asked: int = 0
    is_resetting: bool = False
    figures: list[int] = field(default_factory=list)
    reads: ReadTotals = field(default_factory=ReadTotals)
    unanswered: int = 0
    block_size: int = 0
    wants_notes: bool = False
    has_forgotten: bool = False

    @property
    def num_slots(self) -> int:
        """Size of the whole tier, as far as the service has told."""
        return self.copies.tier_slots

    def needs_slots(self) -> bool:
        """Size the stock for what was reserved; return True when it is low and no slots are requested."""
        self._expect(self.copies.take_asked())
        return not (self.asked or self.is_resetting) and self.copies.stock < (self.wanted + 1) // 2

    def refill(self) -> Refill:
        """Return the request that fills the stock."""
        self.asked = self.wanted - self.copies.stock
        return Refill(self.asked)

    def grant(self, slots: Int32Array, generations: UInt32Array, num_slots: int) -> None:
        """Add slots to the stock; ``num_slots`` is the size of the whole tier now."""
        self.copies.grant(slots, generations)
        self.copies.tier_slots = num_slots
        if len(slots) < self.asked:  # the service has no more: ask again after the next heartbeat
            self.wanted = max(self.copies.stock, 1)
        self.asked = 0

    def count_heartbeat(self) -> None:
        """Count a heartbeat as sent. Slots asked for before one that was answered may be asked for again."""
        if not self.unanswered:
            self.asked = 0  # granted by now, unless the answer found its queue full
        self.unanswered += 1
        self.wanted = max(self.wanted, _FIRST_STOCK)

    def _expect(self, count: int) -> None:
        """Size the stock for reservations of ``count`` slots."""
        self.wanted = min(max(self.wanted, _STOCKED_RESERVATIONS * count), _MAX_STOCK)


class Owners:
    """Tenants of blocks below the root. The oldest entries are dropped; their blocks count as no tenant's."""

    def __init__(self, limit: int = _MAX_OWNERS) -> None:
        self._limit = limit
        self._tenants: OrderedDict[bytes, bytes] = OrderedDict()

    def add(self, block: bytes, tenant: str) -> None:
        """Remember whose block it is; beyond the limit the block that was named longest ago is forgotten."""
        self._tenants[block] = _key(tenant)
        self._tenants.move_to_end(block)
        if len(self._tenants) > self._limit:
            self._tenants.popitem(last=False)

    def of(self, tenants: Iterable[bytes]) -> list[bytes]:
        """Return the blocks of the tenants with these keys."""
        chosen = {*tenants}
        return [block for block, key in self._tenants.items() if key in chosen] if chosen else []

    def keys(self, blocks: Iterable[bytes]) -> bytes:
        """Return the tenant keys of the blocks one after the other; empty when none of them has a tenant."""
        keys = [self._tenants.get(block, NO_TENANT) for block in blocks]
        return b"".join(keys) if any(key is not NO_TENANT for key in keys) else b""


Note = DescribedPath | tuple[bytes, bytes]
"""Blocks of a path, or kinds and hashes of what came to and left the device."""


_Later = Callable[[], Iterable[Request]]


class Outbox:
    """Messages that wait to be sent. Any thread adds, one sends; ``lock`` keeps their order.

    What is noted for routers is sent before the next message, together; it wakes nobody.

    The ``host`` counts misses, and knows which copies and loads have ended. These are sent before the next message, or
    with the next heartbeat.
    """

    def __init__(self, host: SharedHost) -> None:
        self.lock = threading.RLock()
        self._messages: deque[tuple[Session, Request | _Later]] = deque()
        self._notes: deque[tuple[Session, Note]] = deque()
        self._host = host
        self.misses = host.misses
        self.owners = Owners()

    def __bool__(self) -> bool:
        return bool(self._messages) or self._host.has_reports

    def add(self, session: Session, body: Request | _Later) -> None:
        """Queue a message, or a function that returns messages when they are sent. What happened so far goes before it.

        It is dropped when the session ends first.
        """
        with self.lock:
            self.add_ended(session)
            self.add_misses(session)
            self._messages.append((session, body))

    def note(self, session: Session, note: Note) -> None:
        """Queue what routers are to be told: at most a message's worth."""
        self._notes.append((session, note))

    def add_ended(self, session: Session) -> None:
        """Queue what the service has to be told of copies and loads that have ended."""
        with self.lock:
            if not self._host.has_reports:
                return
            self.add_misses(session)
            for slots, parents, hashes, copied, checksums in self._host.take_reports():
                if parents is None:
                    self._messages.append((session, LoadEnded(slots, hashes, copied)))
                else:
                    tenants = self.owners.keys(_roots(parents, hashes))
                    body = Publish(slots, parents, hashes, copied, checksums, tenants)
                    self._messages.append((session, body))

    def add_misses(self, session: Session) -> None:
        """Queue the misses counted so far: they must precede any publish of those blocks."""
        with self.lock:
            if self.misses:
                self._messages.append((session, Missed(*self.misses.take())))

    def drop_misses(self) -> None:
        """Drop the misses: they belong to no session."""
        self.misses.clear()

    def clear(self) -> None:
        """Drop messages of earlier sessions."""
        self._messages.clear()
        self._notes.clear()

    def take_messages(self) -> Iterator[tuple[Session, Request]]:
        """Yield the queued messages in order."""
        while self._messages:
            session, body = self._messages.popleft()
            yield from self._take_notes()  # those queued before it
            for message in body() if callable(body) else (body,):
                yield session, message
        yield from self._take_notes()

    def _take_notes(self) -> Iterator[tuple[Session, Describe]]:
        """Yield what is noted, up to ``MOST_BLOCKS`` blocks of paths and of the device in a message."""
        while self._notes:
            session, paths, kinds, hashes = self._notes[0][0], list[DescribedPath](), b"", b""
            described = told = 0
            while self._notes and self._notes[0][0] is session:
                note = self._notes[0][1]
                if isinstance(note, DescribedPath):
                    described += len(note.hashes) // len(_ROOT)
                    if paths and described > MOST_BLOCKS:
                        break
                    paths.append(note)
                else:
                    told += len(note[0])
                    if kinds and told > MOST_BLOCKS:
                        break
                    kinds, hashes = kinds + note[0], hashes + note[1]
                self._notes.popleft()
            yield session, Describe(paths, kinds, hashes)


def _roots(parents: bytes, hashes: bytes) -> Iterator[bytes]:
    """Yield the hashes of blocks below the root."""
    for i in range(0, len(hashes), len(_ROOT)):
        if parents[i : i + len(_ROOT)] == _ROOT:
            yield hashes[i : i + len(_ROOT)]


def open_session(
    connection: Connection, layout: KVLayout, live: Live, terms: FetchTerms, *, events: bool, forgotten: int
) -> Session:
    """Register a layout; ``connection`` belongs to the new session from now on. ``events``: subscribe to them.

    ``forgotten``: number of the last deletion of which the device has nothing.

    Raises ``RefusedError``, ``ProtocolError``, and ``ServiceUnavailableError`` also when the service's memory cannot
    be opened here.
    """
    connection.session = 0
    name = f"{layout.model}:{os.getpid()}"
    request = Register(layout.to_json().encode(), live, name, events, terms, forgotten)
    answer, _ = connection.call(request, _REGISTER_TIMEOUT)
    if not isinstance(answer, Registered):
        raise ProtocolError(f"expected the answer to a registration, got {type(answer).__name__}")
    geometry = answer.geometry
    try:
        table = open_table(Path(geometry.table_path), geometry.table_bytes)
        runs = open_runs(table, Path(answer.ring))
    except OSError as error:
        raise ServiceUnavailableError(
            f"{geometry.table_path}: {error}; give this process the service's FDCACHE_ARENA_DIR"
        ) from error
    connection.session = answer.session
    arena = f"{geometry.incarnation:x}/{answer.session:x}/{live.path}"
    copies = OutgoingCopies(table)
    copies.tier_slots = answer.num_slots
    return Session(
        answer.session,
        arena,
        copies,
        runs,
        answer.storage,
        block_size=layout.block_size,
        wants_notes=answer.notes,
    )
