"""RemoteHostTier: the host tier of a service, and what an engine and the service tell each other."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from typing import TypeVar

import msgspec
import numpy as np

from fdcache._core import HostRun, SharedHost
from fdcache.errors import ProtocolError, RefusedError, ServiceUnavailableError
from fdcache.layout import KVLayout
from fdcache.metadata import HashArray
from fdcache.plans.ledger import Mask
from fdcache.service.client.block_notes import BlockNotes
from fdcache.service.client.connection import Connection
from fdcache.service.client.remote_hints import RemoteHints
from fdcache.service.client.session import Session
from fdcache.service.client.session_keeper import SessionKeeper
from fdcache.service.wire.arrays import hashes_from, int32_from, int64_from, uint8_from, uint32_from
from fdcache.service.wire.control_views import PrefetchView
from fdcache.service.wire.protocol import (
    FETCHING,
    FETCHING_LAST,
    MAX_BLOCKS,
    MAX_PATHS,
    NOT_FETCHED,
    Answer,
    Ask,
    EndFetches,
    FindEnd,
    FindStored,
    FoundEnd,
    FoundStored,
    Match,
    Matched,
    Prefetch,
    Request,
    ToolAnswer,
)
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.fetches import FetchTerms, OnDevice
from fdcache.tiers.host import Deleted, Found, HostCache, Reading, nothing
from fdcache.tiers.pool import PENDING
from fdcache.tiers.statistics import ReadTotals, TierUsage, TrafficMeter
from fdcache.tiers.waiting_fetches import ReadJudge

_Answer = TypeVar("_Answer", bound=Answer)

_FRESH_SECONDS, _MOST_ANSWERS = 0.5, 256
"""How long an answer about stored blocks holds, and how many are kept."""


class RemoteFetches:
    """Fetches that a service has for the requests of this process, by number. Messages go in the background."""

    def __init__(
        self,
        sessions: SessionKeeper,
        ask: Callable[[Session, FindStored | FindEnd], FoundStored | FoundEnd | None],
    ) -> None:
        self._sessions = sessions
        self._ask = ask
        self._answers: OrderedDict[bytes, tuple[Session, float, FoundStored | FoundEnd]] = OrderedDict()
        self._numbers = count(1)
        self._known: dict[int, Session] = {}
        self._left: set[int] = set()
        self._names: dict[int, str] = {}

    @property
    def is_on(self) -> bool:
        """True while there is a service with storage."""
        session = self._sessions.session
        return session is not None and session.storage

    def stored(self, hashes: HashArray) -> Mask:
        """Return which of these blocks the service's storage has; an answer holds for a moment."""
        answer = self._recent(FindStored(hashes.tobytes()))
        flags = answer.flags if isinstance(answer, FoundStored) else bytes(len(hashes))
        return np.asarray(np.frombuffer(flags, np.uint8) != 0)

    def last_end(self, hashes: HashArray, first: int) -> int | None:
        """Return after how many pages the service's storage has states; None while the service asks a store."""
        answer = self._recent(FindEnd(hashes.tobytes(), first))
        return answer.pages if isinstance(answer, FoundEnd) else 0

    def _recent(self, question: FindStored | FindEnd) -> FoundStored | FoundEnd | None:
        """Return the service's answer, which holds for a moment once it has one; None without a storage to ask."""
        session, now = self._sessions.session, time.monotonic()
        if session is None or not session.storage:
            return None
        key = msgspec.msgpack.encode(question)
        asked, until, known = self._answers.get(key, (None, 0.0, None))
        if known is not None and asked is session and until >= now:
            return known
        answer = self._ask(session, question)
        if answer is not None and answer != FoundEnd(None):
            self._answers[key] = session, now + _FRESH_SECONDS, answer
            self._answers.move_to_end(key)
            if len(self._answers) > _MOST_ANSWERS:
                self._answers.popitem(last=False)
        return answer

    def number(self, request_id: str = "") -> int:
        """Return a new number, or 0 when the service has no storage."""
        if not self.is_on:
            return 0
        number = next(self._numbers)
        if request_id:
            self._names[number] = request_id
        return number

    def names(self, numbers: Sequence[int]) -> list[str]:
        """Return the ids of the requests with these numbers; nothing if none is known."""
        return [self._names.get(number, "") for number in numbers] if self._names else []

    def begin(
        self, number: int, hashes: HashArray, on_device: OnDevice, judge: ReadJudge | None = None
    ) -> None:
        """Make the service read what is stored of a request's path, unless it knows of the request."""
        session = self._sessions.session
        if session is None or not session.storage or not number or number in self._known:
            return
        if number in self._left:
            return
        start = on_device(hashes)
        if start + len(session.runs.find(hashes, start)) < len(hashes):
            self._known[number] = session
            self._sessions.outbox.add(
                session, Prefetch(number, start, hashes.tobytes(), self._names.get(number, ""))
            )

    def storage_use(self, number: int) -> int:
        """Return 0 without a number, 1 if the service may read blocks for it, 2 if it does."""
        return 0 if not number or number in self._left else 2 if number in self._known else 1

    def __contains__(self, number: int) -> bool:
        """Return True for a request that the service may keep a fetch for."""
        return number in self._known

    def learn(self, session: Session, numbers: Sequence[int], states: Sequence[int]) -> None:
        """Record which of these requests the service keeps a fetch for."""
        for number, state in zip(numbers, states, strict=False):
            if state != NOT_FETCHED:
                self._known[number] = session

    def leave(self, number: int, *, keep: bool) -> None:
        """Make the service forget a request that goes on without its reads."""
        session = self._known.pop(number, None)
        self._left.add(number)
        if session is not None:
            self._sessions.outbox.add(session, EndFetches([number], keep=keep))

    def end(self, number: int) -> None:
        """Make the service forget a request."""
        self._names.pop(number, None)
        self._left.discard(number)
        session = self._known.pop(number, None)
        if session is not None:
            self._sessions.outbox.add(session, EndFetches([number]))


_NO_EVENTS = (np.empty(0, np.uint8), np.empty((0, 32), np.uint8), np.empty((0, 32), np.uint8))


class RemoteHostTier:
    """Host tier of the service at ``settings.server``. Its callers take turns.

    ```python
    tier = RemoteHostTier(CacheSettings(server="ipc:///run/fdcache/fdcache.sock"), layout)
    found = find_and_pin(tier, hashes, 0)
    tier.index.release(found.lease)
    ```

    ``index`` finds and pins blocks in shared memory. Only what that cannot answer goes to the service, in one round
    trip for all paths. Everything else is queued and sent by the thread of ``sessions``.
    """

    pool: None = None
    fetch_table: None = None

    def __init__(self, settings: CacheSettings, layout: KVLayout, terms: FetchTerms | None = None) -> None:
        assert settings.server is not None
        self._timeout = settings.rpc_timeout
        self._fingerprint = layout.fingerprint
        self._reset_owed = False
        self._connection = Connection(settings.server)
        self.index = SharedHost()
        self.sessions = SessionKeeper(settings, layout, self.index, terms or FetchTerms())
        self.fetches = RemoteFetches(self.sessions, self._find)
        self.hints = RemoteHints(self.sessions)
        self.notes = BlockNotes(self.sessions)

    @property
    def service(self) -> RemoteHostTier:
        """The tier itself: a ``HostService``."""
        return self

    @property
    def host_cache(self) -> HostCache:
        """Description that workers attach with."""
        return HostCache(num_blocks=self.num_blocks, server=self._connection.address)

    @property
    def arena(self) -> str:
        """Name of session and memory; a worker attaches again when it changes."""
        session = self.sessions.session
        return session.arena if session else "none"

    @property
    def plan_arena(self) -> str:
        """Name of the session that the open plans have slots of; no other begins before their copies have ended."""
        session = self.sessions.listening
        return session.arena if session else "none"

    @property
    def connected(self) -> bool:
        """True while a session is open."""
        return self.sessions.session is not None

    def wait_connected(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the service; return True if it is there."""
        return self.sessions.wait_connected(timeout)

    @property
    def num_blocks(self) -> int:
        """Slots that the service has given this layout so far."""
        session = self.sessions.session
        return session.num_slots if session else 0

    # --- look-ups -----------------------------------------------------------------------------------------

    def begin_look_up(self) -> None:
        """Make a reset that is still owed; until then nothing is found."""
        if self._reset_owed:
            self._finish_reset()

    def ask(self, paths: Sequence[tuple[HashArray, int]], fetches: Sequence[int]) -> list[Found | Reading]:
        """Ask the service to pin runs. Without an answer in time nothing is found, and the session is over."""
        session = self.sessions.session
        if session is None or self._reset_owed:
            return [nothing()] * len(paths)
        return self._ask(session, _limited(paths), fetches)

    def fetch_from(self, source: str, hashes: HashArray) -> str:
        """Have the service read the blocks of a path from one node first; return why that cannot be, or nothing."""
        session = self.sessions.session
        if session is None:
            return "the service does not answer"
        path = [row.tobytes().hex() for row in hashes]
        body = Ask("prefetch", {"namespace": self._fingerprint.hex()[:16], "hashes": path, "source": source})
        try:
            answer = self._call(session, body, ToolAnswer, max(self._timeout, 1.0))
        except RefusedError as error:
            return str(error)
        except (ServiceUnavailableError, ProtocolError) as error:
            self.sessions.lose(session, str(error))
            return "the service does not answer"
        return msgspec.json.decode(answer.value, type=PrefetchView).refused or ""

    def _find(self, session: Session, question: FindStored | FindEnd) -> FoundStored | FoundEnd | None:
        """Ask what the storage has. Without an answer in time nothing, and the session is over."""
        if self._reset_owed:
            return None
        try:
            if isinstance(question, FindStored):
                stored = self._call(session, question, FoundStored, self._timeout)
                uint8_from(stored.flags, "flags", len(question.hashes) // 32)
                return stored
            end = self._call(session, question, FoundEnd, self._timeout)
            if end.pages is not None and not 0 <= end.pages <= len(question.hashes) // 32:
                raise ProtocolError(f"pages: {end.pages} are not those asked for")
            return end
        except (ServiceUnavailableError, RefusedError, ProtocolError) as error:
            self.sessions.lose(session, str(error))
            return None

    def _call(self, session: Session, body: Request, answer: type[_Answer], timeout: float) -> _Answer:
        """Return what the service answers in this session; another kind of answer is a ``ProtocolError``."""
        self._connection.session = session.id
        got, _ = self._connection.call(body, timeout)
        if not isinstance(got, answer):
            raise ProtocolError(f"expected {answer.__name__}, got {type(got).__name__}")
        return got

    def _ask(
        self, session: Session, paths: Sequence[tuple[HashArray, int]], numbers: Sequence[int]
    ) -> list[Found | Reading]:
        body = Match(
            runs=np.array([session.runs.next_number() for _ in paths], np.int64).tobytes(),
            counts=np.array([len(hashes) for hashes, _ in paths], np.int32).tobytes(),
            starts=np.array([start for _, start in paths], np.int32).tobytes(),
            hashes=b"".join(hashes.tobytes() for hashes, _ in paths),
            fetches=np.array(numbers, np.int64).tobytes() if any(numbers) else b"",
            requests=self.fetches.names(numbers),
        )
        try:
            # An answer that comes later ends with its session, which is lost without it.
            return self._matches(session, paths, numbers, self._call(session, body, Matched, self._timeout))
        except (ServiceUnavailableError, RefusedError, ProtocolError) as error:
            if isinstance(error, RefusedError) and error.code == "draining":
                self.sessions.leave(session)
            else:
                self.sessions.lose(session, str(error))
            return [nothing()] * len(paths)

    def _matches(
        self,
        session: Session,
        paths: Sequence[tuple[HashArray, int]],
        numbers: Sequence[int],
        answer: Matched,
    ) -> list[Found | Reading]:
        runs = int64_from(answer.runs, "runs", len(paths)).tolist()
        counts = int32_from(answer.counts, "counts", len(paths)).tolist()
        slots = int32_from(answer.slots, "slots", sum(counts))
        generations = uint32_from(answer.generations, "generations", len(slots))
        unverified = uint8_from(answer.unverified, "unverified")
        states = list(answer.states)
        fetched = int32_from(answer.fetched, "fetched", 2 * len(states)).reshape(-1, 2).tolist()
        self.fetches.learn(session, numbers, states)
        matches: list[Found | Reading] = []
        end = 0
        for i, ((hashes, start), run, size) in enumerate(zip(paths, runs, counts, strict=True)):
            first, end = end, end + size
            if states and states[i] in (FETCHING, FETCHING_LAST):
                matches.append(Reading(fetched[i][0], fetched[i][1], states[i] == FETCHING_LAST))
                continue
            if start + size < len(hashes):
                self._count_in_flight_miss(session, hashes[start + size])
            if not run:
                matches.append(nothing())
                continue
            marks = unverified[first:end] if len(unverified) else None
            lease = self.index.add(session.runs, run, marks is not None)
            part = range(*fetched[i]) if fetched else range(0)
            pinned = HostRun(lease, slots[first:end], generations[first:end], marks)
            matches.append(Found(pinned, hashes, start, fetched=part))
        return matches

    def _count_in_flight_miss(self, session: Session, block: HashArray) -> None:
        if session.copies.contains(block[np.newaxis])[0] == PENDING:
            self.index.misses.in_flight += 1

    # --- the tier as a whole ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Have the service forget every block of this layout. Until it has, nothing is found."""
        self._set_reset_owed(True)
        if (session := self.sessions.session) is not None:
            session.copies.drop_unacknowledged()
        self._finish_reset()

    def _finish_reset(self) -> None:
        """Ask for the reset that is owed; without the service it stays owed."""
        session = self.sessions.session
        if session is None:
            return
        session.is_resetting = True
        self.sessions.return_stock(session)
        tiers = ("host", "storage") if session.storage else ("host",)
        try:
            for tier in tiers:
                body = Ask("reset", {"tier": tier, "namespace": self._fingerprint.hex()[:16]})
                self._call(session, body, ToolAnswer, max(self._timeout, 1.0))
            self._set_reset_owed(False)
        except (ServiceUnavailableError, RefusedError, ProtocolError) as error:
            self.sessions.lose(session, str(error))
        finally:
            session.is_resetting = False
        self.sessions.flush()

    def _set_reset_owed(self, owed: bool) -> None:
        self._reset_owed = owed
        self.index.set_closed(owed)

    def change_layout(self, layout: KVLayout) -> None:
        """Register with another layout once nothing of this one is in flight; until then nothing is found."""
        self._fingerprint = layout.fingerprint
        self._set_reset_owed(False)
        self.sessions.change_layout(layout)

    def usage(self) -> TierUsage:
        """Return the state of the tier as of the last heartbeat."""
        session = self.sessions.session
        figures = session.figures if session is not None else ()
        return TierUsage(*figures[: len(TierUsage.__struct_fields__)])

    @property
    def reads(self) -> ReadTotals | None:
        """Reads of the service from storage, as of the last heartbeat; None without a session."""
        session = self.sessions.session
        return session.reads if session is not None else None

    def record_events(self, capacity: int) -> None:
        """Keep the newest ``capacity`` batches of the service's events."""
        self.sessions.record_events(capacity)

    def take_events(self) -> tuple[HashArray, HashArray, HashArray]:
        """Return kinds, hashes and parents of the events since the last call."""
        batches = self.sessions.take_events()
        if not batches:
            return _NO_EVENTS
        return (
            np.concatenate([np.frombuffer(batch.kinds, np.uint8) for batch in batches]),
            np.concatenate([hashes_from(batch.hashes) for batch in batches]),
            np.concatenate([hashes_from(batch.parents) for batch in batches]),
        )

    @property
    def in_use(self) -> int:
        """Pinned runs, slots being loaded and blocks being copied."""
        return self.index.runs + self.index.slots_loading + self.index.blocks_in_flight

    def report(self, figures: Callable[[], bytes]) -> None:
        """Offer the engine's figures, a JSON object, for the next heartbeat."""
        self.sessions.progress.report(figures)

    def own(self, block: bytes, tenant: str) -> None:
        """Set the tenant of a block below the root and of all blocks below it; sent with the block."""
        self.sessions.outbox.owners.add(block, tenant)

    @property
    def traffic(self) -> TrafficMeter:
        """Totals of the ranks' copies, for the next heartbeat."""
        return self.sessions.progress.traffic

    def flush(self) -> None:
        """Send queued messages and ask for slots, in the background."""
        self.sessions.flush()

    def take_device_reset(self) -> bool:
        """Return True if the service ordered a reset of the device tier since the last call."""
        return self.sessions.take_device_reset()

    def take_deleted(self) -> Deleted | None:
        """Return what was deleted in the service since the last call, to be forgotten on the device."""
        orders = self.sessions.take_deleted()
        if not orders:
            return None
        keys = [key for order in orders for key in order.tenant_keys]
        owned = self.sessions.outbox.owners.of(keys)
        hashes = hashes_from(b"".join([*(order.hashes for order in orders), *owned]))
        return Deleted(orders[-1].number, hashes, any(order.everything for order in orders))

    def forgot(self, number: int) -> None:
        """Tell the service that nothing is left of what was deleted, up to the deletion with this number."""
        self.sessions.forgot(number)

    def close(self) -> None:
        """Say goodbye; slots that are still being copied stay this process's until it ends."""
        self.sessions.close()
        self._connection.close()


def _limited(paths: Sequence[tuple[HashArray, int]]) -> list[tuple[HashArray, int]]:
    """Cut paths to what one message may ask for; the rest is not looked up."""
    room = MAX_BLOCKS
    cut = []
    for i, (hashes, start) in enumerate(paths):
        take = min(len(hashes), room) if i < MAX_PATHS else 0
        cut.append((hashes[:take], min(start, take)))
        room -= take
    return cut
