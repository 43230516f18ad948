"""RemoteHostTier: the host tier of a service, as an engine uses it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np

from fdcache._core import CopyReservation, OutgoingCopies, PinnedRuns, PlannedCopies
from fdcache.errors import ProtocolError, RefusedError, ServiceUnavailableError
from fdcache.hashing import NO_TENANT, tenant_key
from fdcache.layout import KVLayout
from fdcache.metadata import HashArray, Int32Array, UInt64Array
from fdcache.plans.blocks import Blocks
from fdcache.service.client.connection import Connection
from fdcache.service.client.hints import RemoteHints
from fdcache.service.client.holds import RemoteFetches
from fdcache.service.client.session import Outbox, Session, SessionKeeper
from fdcache.service.wire.protocol import (
    FETCHING,
    FETCHING_LAST,
    MAX_BLOCKS,
    MAX_PATHS,
    Ask,
    LoadEnded,
    Match,
    Matched,
    Publish,
    hashes_from,
    int32_from,
    int64_from,
    uint8_from,
    uint32_from,
)
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.fetches import FetchTerms
from fdcache.tiers.host import (
    NOTHING,
    HostCache,
    HostMatch,
)
from fdcache.tiers.pool import PENDING
from fdcache.tiers.statistics import ReadTotals, TierUsage, TrafficMeter

_MAX_OWNERS = 1 << 20
_NO_EVENTS = (np.empty(0, np.uint8), np.empty((0, 32), np.uint8), np.empty((0, 32), np.uint8))

_key = lru_cache(maxsize=65536)(tenant_key)


class Owners:
    """Tenants of blocks below the root. The oldest entries are dropped; their blocks count as no tenant's."""

    def __init__(self, limit: int = _MAX_OWNERS) -> None:
        self._limit = limit
        self._tenants: OrderedDict[bytes, bytes] = OrderedDict()

    def add(self, block: bytes, tenant: str) -> None:
        """Set the tenant of a block."""
        self._tenants[block] = _key(tenant)
        self._tenants.move_to_end(block)
        if len(self._tenants) > self._limit:
            self._tenants.popitem(last=False)

    def keys(self, blocks: Iterable[bytes]) -> bytes:
        """Return the tenant keys of the blocks one after the other; empty when none of them has a tenant."""
        keys = [self._tenants.get(block, NO_TENANT) for block in blocks]
        return b"".join(keys) if any(key is not NO_TENANT for key in keys) else b""


class RemoteHostTier:
    """Host tier of the service at ``settings.server``. Its callers take turns.

    ```python
    tier = RemoteHostTier(CacheSettings(server="ipc:///run/fdcache/fdcache.sock"), layout)
    (match,) = tier.match_paths([(hashes, 0)])
    tier.release(match.lease)
    ```

    A look-up finds and pins its blocks in shared memory. Only what that cannot answer goes to the service, in one round
    trip for all paths. Everything else is queued and sent by the thread of ``sessions``.
    """

    def __init__(self, settings: CacheSettings, layout: KVLayout, terms: FetchTerms | None = None) -> None:
        assert settings.server is not None
        self._timeout = settings.rpc_timeout
        self._fingerprint = layout.fingerprint
        self._owners = Owners()
        self._reset_owed = False
        self._connection = Connection(settings.server)
        self._outbox = Outbox()
        self.pins = PinnedRuns(self._outbox.misses)
        self.sessions = SessionKeeper(settings, layout, self._outbox, self.pins, terms or FetchTerms())
        self.fetches = RemoteFetches(self.sessions)
        self.hints = RemoteHints(self.sessions)

    @property
    def host_cache(self) -> HostCache:
        """Description that workers attach with."""
        return HostCache(num_blocks=self.num_blocks, server=self._connection.address)

    @property
    def arena(self) -> str | None:
        """Name of session and memory; a worker attaches again when it changes."""
        session = self.sessions.session
        return session.arena if session else "none"

    @property
    def plan_arena(self) -> str | None:
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

    @property
    def copy_room(self) -> int:
        """Slots in stock; more are requested when it is low."""
        session = self.sessions.session
        return session.copies.stock if session else 0

    # --- look-ups -----------------------------------------------------------------------------------------

    def begin_look_up(self) -> None:
        """Let ``pins`` look up in the open session; without one, or while a reset is owed, nothing is found."""
        if self._reset_owed:
            self._finish_reset()
        session = self.sessions.session
        if session is None or self._reset_owed:
            self.pins.search(None, None)
        else:
            self.pins.search(session.runs, session.copies)

    def match_paths(
        self, paths: Sequence[tuple[HashArray, int]], fetches: Sequence[int] = ()
    ) -> list[HostMatch]:
        """Pin the leading runs of paths, as ``HostTier.match_paths``.

        One round trip asks for the paths that storage may have, and for those of which the table has something that
        cannot be pinned without the service now; none is made when there are no such paths.
        """
        self.begin_look_up()
        matches, asked = [NOTHING] * len(paths), []
        for i, (hashes, start) in enumerate(paths):
            number = fetches[i] if fetches else 0
            lease, found, blocks = self.pins.find(hashes, start, self.fetches.storage_use(number))
            if lease:
                run = Blocks.of_path(hashes, start, found.slots, found.generations, found.unverified)
                matches[i] = HostMatch(lease, run)
            elif blocks:
                asked.append((i, (hashes[:blocks], start), number))
        if asked:
            places, asked_paths, numbers = zip(*asked, strict=True)
            for i, match in zip(places, self.ask(asked_paths, numbers), strict=True):
                matches[i] = match
        return matches

    def ask(self, paths: Sequence[tuple[HashArray, int]], fetches: Sequence[int]) -> list[HostMatch]:
        """Let the service pin runs. Without an answer in time nothing is found, and the session is over."""
        session = self.sessions.session
        if session is None or self._reset_owed:
            return [NOTHING] * len(paths)
        return self._ask(session, _limited(paths), fetches)

    def _ask(
        self, session: Session, paths: Sequence[tuple[HashArray, int]], numbers: Sequence[int]
    ) -> list[HostMatch]:
        body = Match(
            runs=np.array([session.runs.next_number() for _ in paths], np.int64).tobytes(),
            counts=np.array([len(hashes) for hashes, _ in paths], np.int32).tobytes(),
            starts=np.array([start for _, start in paths], np.int32).tobytes(),
            hashes=b"".join(hashes.tobytes() for hashes, _ in paths),
            fetches=np.array(numbers, np.int64).tobytes() if any(numbers) else b"",
        )
        self._connection.session = session.id
        try:
            # An answer that comes later ends with its session, which is lost without it.
            answer, _ = self._connection.call(body, self._timeout)
            if not isinstance(answer, Matched):
                raise ProtocolError(f"expected the answer to a look-up, got {type(answer).__name__}")
            return self._matches(session, paths, numbers, answer)
        except (ServiceUnavailableError, RefusedError, ProtocolError) as error:
            if isinstance(error, RefusedError) and error.code == "draining":
                self.sessions.leave(session)
            else:
                self.sessions.lose(session, str(error))
            return [NOTHING] * len(paths)

    def _matches(
        self,
        session: Session,
        paths: Sequence[tuple[HashArray, int]],
        numbers: Sequence[int],
        answer: Matched,
    ) -> list[HostMatch]:
        runs = int64_from(answer.runs, "runs", len(paths)).tolist()
        counts = int32_from(answer.counts, "counts", len(paths)).tolist()
        slots = int32_from(answer.slots, "slots", sum(counts))
        generations = uint32_from(answer.generations, "generations", len(slots))
        unverified = uint8_from(answer.unverified, "unverified")
        states = list(answer.states)
        fetched = int32_from(answer.fetched, "fetched", 2 * len(states)).reshape(-1, 2).tolist()
        self.fetches.learn(session, numbers, states)
        matches, end = [], 0
        for i, ((hashes, start), run, size) in enumerate(zip(paths, runs, counts, strict=True)):
            first, end = end, end + size
            if states and states[i] in (FETCHING, FETCHING_LAST):
                is_last = states[i] == FETCHING_LAST
                matches.append(HostMatch(0, fetched=range(*fetched[i]), fetching=True, is_last=is_last))
                continue
            if start + size < len(hashes):
                self._count_in_flight_miss(session, hashes[start + size])
            if not run:
                matches.append(NOTHING)
                continue
            marks = unverified[first:end] if len(unverified) else None
            blocks = Blocks.of_path(hashes, start, slots[first:end], generations[first:end], marks)
            part = range(*fetched[i]) if fetched else range(0)
            lease = self.pins.add(session.runs, run, marks is not None)
            matches.append(HostMatch(lease, blocks, fetched=part))
        return matches

    def _count_in_flight_miss(self, session: Session, block: HashArray) -> None:
        if session.copies.contains(block[np.newaxis])[0] == PENDING:
            self._outbox.misses.in_flight += 1

    def release(self, lease: int) -> bool:
        """Unpin a run; what is being loaded from it stays pinned until the load's end."""
        return self.pins.release(lease)

    def begin_load(self, lease: int, slots: Int32Array) -> None:
        """Keep these slots of a run pinned until ``end_load``."""
        self.pins.begin_load(lease, slots)

    def end_load(self, slots: Int32Array, hashes: HashArray, copied: HashArray) -> None:
        """End a load; report to the service unverified blocks that every rank could read, and failures."""
        with self.sessions.lock:
            session = self.sessions.listening
            owner, unverified = self.pins.end_load(slots)
            if session is not None and owner is session.runs and (unverified or 0 in copied.tobytes()):
                body = LoadEnded(slots.tobytes(), hashes.tobytes(), copied.tobytes())
                self._outbox.add(session, body)

    def discard(self, slots: Int32Array) -> None:
        """Do nothing: the service drops bad blocks when it hears of the load's end."""

    # --- copies -------------------------------------------------------------------------------------------

    @property
    def copy_target(self) -> OutgoingCopies | None:
        """The service's table and this engine's own copies: a wrong guess costs a copy, never a byte."""
        session = self.sessions.session
        return None if session is None or self._reset_owed else session.copies

    def contains(self, hashes: HashArray) -> HashArray:
        """Look blocks up in ``copy_target``."""
        target = self.copy_target
        return np.zeros(len(hashes), np.uint8) if target is None else target.contains(hashes)

    def copies_reserved(self, planned: PlannedCopies) -> None:
        """Size the stock for as many slots."""
        if (session := self.sessions.session) is not None:
            session.expect(planned.asked)

    def take_slots(
        self, parents: HashArray, hashes: HashArray, *, below_pending: bool = False
    ) -> CopyReservation | None:
        """Take slots from the stock, without a round trip; None without a service."""
        session = self.sessions.session
        if session is None or self._reset_owed:
            return None
        taken = session.copies.reserve(parents, hashes, below_pending)
        session.expect(len(taken) + taken.missing)
        return taken

    def complete(self, slots: Int32Array, copied: HashArray, checksums: UInt64Array) -> HashArray:
        """Queue the end of copies: the service makes the blocks matchable below READY parents."""
        latest = self.sessions.latest
        if latest is None or not len(slots):
            return copied
        with self.sessions.lock:
            # No session follows while copies are in flight: if there is one now, it is theirs.
            session = self.sessions.listening
            parents, hashes = latest.copies.end(slots, copied, session is not None)
            if session is not None:
                sums = checksums if len(checksums) else np.zeros(len(slots), np.uint64)
                roots = hashes[~parents.any(axis=1)]
                body = Publish(
                    slots=slots.tobytes(),
                    parents=parents.tobytes(),
                    hashes=hashes.tobytes(),
                    copied=copied.tobytes(),
                    checksums=sums.tobytes(),
                    tenants=self._owners.keys(row.tobytes() for row in roots),
                )
                self._outbox.add(session, body)
        return copied

    # --- the tier as a whole ------------------------------------------------------------------------------

    def worker_lost(self) -> None:
        """Do nothing: the service's memory outlives any worker."""

    def reset(self) -> None:
        """Have the service forget every block of this layout. Until it has, nothing is found."""
        self._reset_owed = True
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
        self._connection.session = session.id
        tiers = ("host", "storage") if session.storage else ("host",)
        try:
            for tier in tiers:
                body = Ask("reset", {"tier": tier, "namespace": self._fingerprint.hex()[:16]})
                self._connection.call(body, max(self._timeout, 1.0))
            self._reset_owed = False
        except (ServiceUnavailableError, RefusedError, ProtocolError) as error:
            self.sessions.lose(session, str(error))
        finally:
            session.is_resetting = False
        self.sessions.flush()

    def change_layout(self, layout: KVLayout) -> None:
        """Register with another layout once nothing of this one is in flight; until then nothing is found."""
        self._fingerprint = layout.fingerprint
        self._reset_owed = False
        self.sessions.change_layout(layout)

    def usage(self) -> TierUsage:
        """Return the state of the tier as of the last heartbeat."""
        session = self.sessions.session
        figures = session.figures if session is not None else ()
        return TierUsage(*figures[: len(TierUsage.__struct_fields__)])

    @property
    def service_reads(self) -> ReadTotals | None:
        """Reads of the service from storage, as of the last heartbeat."""
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
        return len(self.pins) + self.pins.slots_loading + self.sessions.blocks_in_flight

    def report(self, figures: Callable[[], bytes]) -> None:
        """Offer the engine's figures, a JSON object, for the next heartbeat."""
        self.sessions.progress.report(figures)

    def own(self, block: bytes, tenant: str) -> None:
        """Set the tenant of a block below the root and of all blocks below it; sent with the block."""
        self._owners.add(block, tenant)

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

    def verify(self) -> None:
        """Do nothing: the service checks its own tier."""

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
