"""RemoteHostTier: the host tier of a service, as one scheduler process sees it.

Only a look-up waits for the service, one round trip a scheduler step and at most ``rpc_timeout``. Everything
else is local: copies go into slots granted in advance, what is there is what was seen, and the ends of copies
are told in the background. A service that is gone is a tier with nothing in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fdcache.errors import ProtocolError, RefusedError, ServiceUnavailableError
from fdcache.layout import KVLayout
from fdcache.metadata import HashArray, Int32Array, UInt32Array, UInt64Array
from fdcache.node.arrays import hashes_from, int32_from, uint8_from, uint32_from
from fdcache.node.connection import Connection
from fdcache.node.protocol import (
    FETCHING,
    TIER_FIGURES,
    Answer,
    Ask,
    FetchTerms,
    LoadEnded,
    Match,
    Matched,
    Publish,
)
from fdcache.node.traffic import Traffic
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.host_cache import HostCache
from fdcache.tiers.host_tier import FETCHING_MATCH, NO_GENERATIONS, NO_SLOTS, NOTHING, HostMatch, TierFigures
from fdcache.tiers.knowledge import ABSENT, PENDING, READY, Knowledge, keys_of
from fdcache.tiers.owners import Owners
from fdcache.tiers.remote_fetches import RemoteFetches, numbers_of
from fdcache.tiers.runs import PinnedRuns, within_limits
from fdcache.tiers.session import SessionKeeper
from fdcache.tiers.stock import Session

_ROOT = bytes(32)
IS_READY, IS_PENDING, NO_PARENT = 1, 2, 3
_NO_EVENTS = (np.empty(0, np.uint8), np.empty((0, 32), np.uint8), np.empty((0, 32), np.uint8))


@dataclass(frozen=True, slots=True)
class RemoteSlots:
    """Slots taken from the stock, or how many it lacks."""

    slots: Int32Array
    generations: UInt32Array
    status: HashArray
    missing: int = 0


class RemoteHostTier:
    """The host tier of the service at ``settings.server``. Calls are the manager's, under its lock."""

    def __init__(self, settings: CacheSettings, layout: KVLayout, terms: FetchTerms | None = None) -> None:
        assert settings.server is not None
        self._timeout = settings.rpc_timeout
        self._fingerprint = layout.fingerprint
        self._knowledge = Knowledge()
        self._copies: dict[int, tuple[Session, bytes, bytes]] = {}  # by slot: hash and parent
        self._owners = Owners()
        self._reset_owed = False
        self._line = Connection(settings.server)
        self._runs = PinnedRuns(self._unpin)
        self._keeper = SessionKeeper(
            settings, layout, self._knowledge, self._is_drained, terms or FetchTerms()
        )
        self.fetches = RemoteFetches(self._keeper)

    @property
    def host_cache(self) -> HostCache:
        """What workers attach with."""
        return HostCache(num_blocks=self.num_blocks, server=self._line.address, engine=self._keeper.live.path)

    @property
    def arena(self) -> str | None:
        """Names session and memory; a worker that sees another one than before attaches again."""
        session = self._keeper.session
        return session.arena if session else "none"

    @property
    def connected(self) -> bool:
        """Whether the service answers."""
        return self._keeper.session is not None

    def wait_connected(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the service."""
        return self._keeper.wait_connected(timeout)

    @property
    def num_blocks(self) -> int:
        """Slots that the service has given this layout so far."""
        session = self._keeper.session
        return session.num_slots if session else 0

    @property
    def copy_room(self) -> int:
        """Slots in stock; more are under way when it is low."""
        session = self._keeper.session
        return len(session.stock) if session else 0

    # --- look-ups -----------------------------------------------------------------------------------------

    def match_paths(
        self, paths: Sequence[tuple[HashArray, int]], fetches: Sequence[int] = ()
    ) -> list[HostMatch]:
        """One round trip; without an answer in time nothing is found, and the session is over."""
        session = self._keeper.session
        if self._reset_owed:
            self.settle_reset()
            session = self._keeper.session
        if session is None or self._reset_owed:
            return [NOTHING] * len(paths)
        paths = within_limits(paths)
        body = Match(
            counts=np.array([len(hashes) for hashes, _ in paths], np.int32).tobytes(),
            starts=np.array([start for _, start in paths], np.int32).tobytes(),
            hashes=b"".join(hashes.tobytes() for hashes, _ in paths),
            fetches=numbers_of(fetches),
        )
        self._line.session = session.number
        try:
            answer, others = self._line.call(body, self._timeout)
            for late in others:
                self._give_back(session, late)
            if not isinstance(answer, Matched):
                raise ProtocolError(f"a look-up was answered by {type(answer).__name__}")
            return self._matches(session, paths, fetches, answer)
        except (ServiceUnavailableError, RefusedError, ProtocolError) as error:
            draining = isinstance(error, RefusedError) and error.code == "draining"
            self._keeper.lose(session, str(error), goodbye=draining)
            return [NOTHING] * len(paths)

    def _matches(
        self,
        session: Session,
        paths: Sequence[tuple[HashArray, int]],
        fetches: Sequence[int],
        answer: Matched,
    ) -> list[HostMatch]:
        counts = int32_from(answer.counts, "counts", len(paths)).tolist()
        slots = int32_from(answer.slots, "slots", sum(counts))
        generations = uint32_from(answer.generations, "generations", len(slots))
        unverified = uint8_from(answer.unverified, "unverified")
        fetched, states = int32_from(answer.fetched, "fetched").tolist(), list(answer.states)
        self.fetches.learn(session, fetches, states)
        matches, end = [], 0
        for i, ((hashes, start), lease, count) in enumerate(zip(paths, answer.leases, counts, strict=True)):
            first, end = end, end + count
            if states and states[i] == FETCHING:
                matches.append(FETCHING_MATCH)
                continue
            if start + count < len(hashes) and self._is_coming(hashes[start + count]):
                self._keeper.in_flight_misses += 1
            self._knowledge.found(hashes, start, count)
            if not lease:
                matches.append(NOTHING)
                continue
            own = self._runs.add(session, lease)
            marks = unverified[first:end] if len(unverified) else None
            matches.append(
                HostMatch(
                    own,
                    slots[first:end],
                    generations[first:end],
                    unverified=marks,
                    fetched=fetched[i] if fetched else 0,
                )
            )
        return matches

    def _is_coming(self, block: HashArray) -> bool:
        return self._knowledge.state(block.tobytes()) == PENDING

    def _give_back(self, session: Session, late: Answer) -> None:
        if isinstance(late, Matched):
            for lease in late.leases:
                self._keeper.release(session, lease)

    def release(self, lease: int) -> bool:
        """Unpin a run; what is being loaded from it stays pinned until the load's end."""
        return self._runs.release(lease)

    def _unpin(self, session: Session, lease: int) -> None:
        self._keeper.release(session, lease)

    def begin_load(self, lease: int, slots: Int32Array) -> None:
        """Copies out of these slots of a run begin."""
        self._runs.begin_load(lease, slots)

    def end_load(self, slots: Int32Array, hashes: HashArray, copied: HashArray) -> None:
        """They end. The service hears of those that failed, and of the first success of a recovered block."""
        session = self._keeper.session
        theirs = self._runs.end_load(slots)
        if session and theirs is session and (session.recovered or not copied.all()):
            self._keeper.tell(session, LoadEnded(slots.tobytes(), hashes.tobytes(), copied.tobytes()))

    def discard(self, slots: Int32Array) -> None:
        """The service drops what a load could not use when it hears of the load's end."""

    # --- copies -------------------------------------------------------------------------------------------

    def contains(self, hashes: HashArray) -> HashArray:
        """As far as this process knows: a wrong guess costs a copy, never a wrong byte."""
        return self._knowledge.presence(hashes)

    def reserve_copies(self, lease: int, parents: HashArray, hashes: HashArray) -> RemoteSlots:
        """Slots from the stock; no round trip."""
        session = self._keeper.session
        status = bytearray(len(hashes))
        keys, above = keys_of(hashes), keys_of(parents)
        state = self._knowledge.state
        wanted: list[tuple[bytes, bytes]] = []
        fresh: set[bytes] = set()
        for i, (key, parent) in enumerate(zip(keys, above, strict=True)):
            if (known := state(key)) != ABSENT or key in fresh:
                status[i] = IS_READY if known == READY else IS_PENDING
            elif parent in fresh or parent == _ROOT or state(parent) == READY:
                fresh.add(key)
                wanted.append((key, parent))
            else:
                status[i] = NO_PARENT
        marks = np.frombuffer(status, np.uint8)
        taken = self._keeper.take(session, len(wanted)) if session else None
        if session is None or taken is None:
            missing = len(wanted) - (len(session.stock) if session else 0)
            return RemoteSlots(NO_SLOTS, NO_GENERATIONS, marks, missing=missing)
        for (slot, _), (key, parent) in zip(taken, wanted, strict=True):
            self._copies[slot] = (session, key, parent)
        self._knowledge.set(fresh, PENDING)
        slots = np.array([slot for slot, _ in taken], np.int32)
        return RemoteSlots(slots, np.array([generation for _, generation in taken], np.uint32), marks)

    def complete(self, slots: Int32Array, copied: HashArray, checksums: UInt64Array) -> HashArray:
        """The service hears of it in the background and makes the blocks findable below READY parents."""
        ended = [self._copies.pop(slot) for slot in slots.tolist()]
        if not ended:
            return np.asarray(copied, np.uint8)
        session = ended[0][0]
        arrived = copied.tolist()
        self._knowledge.set((key for (_, key, _), good in zip(ended, arrived, strict=True) if good), READY)
        self._knowledge.set(
            (key for (_, key, _), good in zip(ended, arrived, strict=True) if not good), ABSENT
        )
        if session is self._keeper.session:
            self._keeper.tell(
                session,
                Publish(
                    slots=slots.tobytes(),
                    parents=b"".join([parent for _, _, parent in ended]),
                    hashes=b"".join([key for _, key, _ in ended]),
                    copied=np.asarray(copied, np.uint8).tobytes(),
                    checksums=(checksums if len(checksums) else np.zeros(len(slots), np.uint64)).tobytes(),
                    tenants=self._owners.of(key for _, key, parent in ended if parent == _ROOT),
                ),
            )
        return np.asarray(copied, np.uint8)

    def _is_drained(self) -> bool:
        """Whether no copy of this engine into or out of the arena is under way."""
        return not self._copies and not self._runs.slots_loading

    # --- the tier as a whole ------------------------------------------------------------------------------

    def worker_lost(self) -> None:
        """The service's memory outlives any worker."""

    def reset(self) -> None:
        """Let the service forget every block of this layout. Until it has, nothing is found."""
        self._reset_owed = True
        self._knowledge.clear()
        self.settle_reset()

    def settle_reset(self) -> None:
        """Ask for the reset that is owed; without the service it stays owed, and nothing is found."""
        session = self._keeper.session
        if session is None:
            return
        self._line.session = session.number
        tiers = ("host", "storage") if session.storage else ("host",)
        try:
            for tier in tiers:
                body = Ask("reset", {"tier": tier, "namespace": self._fingerprint.hex()[:16]})
                self._line.call(body, max(self._timeout, 1.0))
            self._reset_owed = False
            self._keeper.return_stock(session)
        except (ServiceUnavailableError, RefusedError, ProtocolError) as error:
            self._keeper.lose(session, str(error))

    def change_layout(self, layout: KVLayout) -> None:
        """Register with another layout once nothing of this one is under way; until then nothing is found."""
        self._fingerprint = layout.fingerprint
        self._reset_owed = False
        self._knowledge.clear()
        self._keeper.change_layout(layout)

    def stats(self) -> TierFigures:
        """As of the last heartbeat."""
        session = self._keeper.session
        if session is None:
            return TierFigures()
        return TierFigures(**dict(zip(TIER_FIGURES, session.figures, strict=False)))

    def record_events(self, capacity: int) -> None:
        """Keep so many of the service's events."""
        self._keeper.record_events(capacity)

    def take_events(self) -> tuple[HashArray, HashArray, HashArray]:
        """Kinds, hashes, parents of the events since the last call."""
        batches = self._keeper.take_events()
        if not batches:
            return _NO_EVENTS
        return (
            np.concatenate([np.frombuffer(batch.kinds, np.uint8) for batch in batches]),
            np.concatenate([hashes_from(batch.hashes) for batch in batches]),
            np.concatenate([hashes_from(batch.parents) for batch in batches]),
        )

    @property
    def in_use(self) -> int:
        """Runs pinned and blocks being copied."""
        return len(self._runs) + self._runs.slots_loading + len(self._copies)

    def report(self, figures: Callable[[], bytes]) -> None:
        """Figures of the engine, a JSON object, that go with the next heartbeat."""
        if self._keeper.wants_figures:
            self._keeper.wants_figures = False
            self._keeper.figures = figures()

    def own(self, block: bytes, tenant: str) -> None:
        """A block below the root, and all that hang below it, are this tenant's; told with the block."""
        self._owners.add(block, tenant)

    @property
    def traffic(self) -> Traffic:
        """What the ranks copied; goes with the next heartbeat."""
        return self._keeper.traffic

    def take_device_reset(self) -> bool:
        """Whether the service asked for a reset of the device tier since the last call."""
        return self._keeper.take_device_reset()

    def verify(self) -> None:
        """Nothing of the tier is here; the service checks itself."""

    def close(self) -> None:
        """Say goodbye; what is still being copied stays this process's until it ends."""
        self._keeper.close()
        if not self._line.socket.closed:
            self._line.close()
