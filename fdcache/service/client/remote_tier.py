"""Whose blocks are: tenants by block, for blocks below the root."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from fdcache.errors import ProtocolError, RefusedError, ServiceUnavailableError
from fdcache.hashing import NO_TENANT, tenant_key
from fdcache.layout import KVLayout
from fdcache.metadata import HashArray, Int32Array, UInt32Array, UInt64Array
from fdcache.service.client.channel import Session
from fdcache.service.client.lookups import PinnedRuns, RemoteFetches, RemoteLookups
from fdcache.service.client.session import SessionKeeper
from fdcache.service.wire.connection import Connection
from fdcache.service.wire.frames import hashes_from
from fdcache.service.wire.protocol import TIER_FIGURES, Ask, FetchTerms, LoadEnded, Publish
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.host import (
    NO_GENERATIONS,
    NO_SLOTS,
    NOTHING,
    HostCache,
    HostMatch,
    SlotsForCopies,
    TierFigures,
)
from fdcache.tiers.traffic import Traffic

_MOST = 1 << 20
_key = lru_cache(maxsize=65536)(tenant_key)


class Owners:
    """Tenants of blocks below the root. Bounded: those told longest ago are forgotten first, and are nobody's."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._tenants: OrderedDict[bytes, bytes] = OrderedDict()

    def add(self, block: bytes, tenant: str) -> None:
        """This block is this tenant's."""
        self._tenants[block] = _key(tenant)
        self._tenants.move_to_end(block)
        if len(self._tenants) > self._most:
            self._tenants.popitem(last=False)

    def of(self, blocks: Iterable[bytes]) -> bytes:
        """The keys of the blocks' tenants, one after the other; nothing where all are nobody's."""
        keys = [self._tenants.get(block, NO_TENANT) for block in blocks]
        return b"".join(keys) if any(key is not NO_TENANT for key in keys) else b""


_NO_EVENTS = (np.empty(0, np.uint8), np.empty((0, 32), np.uint8), np.empty((0, 32), np.uint8))


@dataclass(frozen=True, slots=True)
class NoSlots:
    """What there is of a service that is gone."""

    missing: int
    slots: Int32Array = field(default_factory=lambda: NO_SLOTS)
    generations: UInt32Array = field(default_factory=lambda: NO_GENERATIONS)
    status: HashArray = field(default_factory=lambda: np.empty(0, np.uint8))


class RemoteHostTier:
    """The host tier of the service at ``settings.server``. Calls are the manager's, under its lock."""

    def __init__(self, settings: CacheSettings, layout: KVLayout, terms: FetchTerms | None = None) -> None:
        assert settings.server is not None
        self._timeout = settings.rpc_timeout
        self._fingerprint = layout.fingerprint
        self._owners = Owners()
        self._reset_owed = False
        self._line = Connection(settings.server)
        self._runs = PinnedRuns(self._unpin)
        self._keeper = SessionKeeper(
            settings, layout, lambda: self._runs.slots_loading > 0, terms or FetchTerms()
        )
        self.fetches = RemoteFetches(self._keeper)
        self._lookups = RemoteLookups(self._line, self._keeper, self._runs, self.fetches, self._timeout)

    @property
    def host_cache(self) -> HostCache:
        """What workers attach with."""
        return HostCache(num_blocks=self.num_blocks, server=self._line.address)

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
        return session.copies.stock if session else 0

    # --- look-ups -----------------------------------------------------------------------------------------

    def match_paths(
        self, paths: Sequence[tuple[HashArray, int]], fetches: Sequence[int] = ()
    ) -> list[HostMatch]:
        """One round trip for those of which something is there or may be stored, none when there are none.

        Without an answer in time nothing is found, and the session is over.
        """
        if self._reset_owed:
            self.settle_reset()
        session = self._keeper.session
        if session is None or self._reset_owed:
            return [NOTHING] * len(paths)
        return self._lookups.match(session, paths, fetches)

    def release(self, lease: int) -> bool:
        """Unpin a run; what is being loaded from it stays pinned until the load's end."""
        return self._runs.release(lease)

    def _unpin(self, session: Session, lease: int) -> None:
        self._keeper.outbox.release(session, lease)

    def begin_load(self, lease: int, slots: Int32Array) -> None:
        """Copies out of these slots of a run begin."""
        self._runs.begin_load(lease, slots)

    def end_load(self, slots: Int32Array, hashes: HashArray, copied: HashArray) -> None:
        """They end. The service hears of those that failed, and of the first success of a recovered block."""
        with self._keeper.lock:
            session = self._keeper.heard
            theirs = self._runs.end_load(slots)
            if session and theirs is session and (session.recovered or not copied.all()):
                self._keeper.outbox.tell(
                    session, LoadEnded(slots.tobytes(), hashes.tobytes(), copied.tobytes())
                )

    def discard(self, slots: Int32Array) -> None:
        """The service drops what a load could not use when it hears of the load's end."""

    # --- copies -------------------------------------------------------------------------------------------

    def contains(self, hashes: HashArray) -> HashArray:
        """What the service's table says, and this engine's own copies: a wrong guess costs a copy, never a byte."""
        session = self._keeper.session
        if session is None or self._reset_owed:
            return np.zeros(len(hashes), np.uint8)
        return session.copies.contains(hashes)

    def reserve_copies(self, lease: int, parents: HashArray, hashes: HashArray) -> SlotsForCopies:
        """Slots from the stock; no round trip."""
        session = self._keeper.session
        if session is None or self._reset_owed:
            return NoSlots(len(hashes))
        taken = session.copies.reserve(parents, hashes)
        session.expect(len(taken) + taken.missing)
        return taken

    def complete(self, slots: Int32Array, copied: HashArray, checksums: UInt64Array) -> HashArray:
        """The service hears of it in the background and makes the blocks findable below READY parents."""
        latest = self._keeper.latest
        if latest is None or not len(slots):
            return copied
        with self._keeper.lock:
            # While copies are under way no session follows theirs: the present one, if there is one, is theirs.
            session = self._keeper.heard
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
                    tenants=self._owners.of(row.tobytes() for row in roots),
                )
                self._keeper.outbox.tell(session, body)
        return copied

    # --- the tier as a whole ------------------------------------------------------------------------------

    def worker_lost(self) -> None:
        """The service's memory outlives any worker."""

    def reset(self) -> None:
        """Let the service forget every block of this layout. Until it has, nothing is found."""
        self._reset_owed = True
        if (session := self._keeper.session) is not None:
            session.copies.drop_unacknowledged()
        self.settle_reset()

    def settle_reset(self) -> None:
        """Ask for the reset that is owed; without the service it stays owed, and nothing is found."""
        session = self._keeper.session
        if session is None:
            return
        session.is_resetting = True
        self._keeper.return_stock(session)
        self._line.session = session.number
        tiers = ("host", "storage") if session.storage else ("host",)
        try:
            for tier in tiers:
                body = Ask("reset", {"tier": tier, "namespace": self._fingerprint.hex()[:16]})
                self._line.call(body, max(self._timeout, 1.0))
            self._reset_owed = False
        except (ServiceUnavailableError, RefusedError, ProtocolError) as error:
            self._keeper.lose(session, str(error))
        finally:
            session.is_resetting = False
        self._keeper.flush()

    def change_layout(self, layout: KVLayout) -> None:
        """Register with another layout once nothing of this one is under way; until then nothing is found."""
        self._fingerprint = layout.fingerprint
        self._reset_owed = False
        self._keeper.change_layout(layout)

    def stats(self) -> TierFigures:
        """As of the last heartbeat."""
        session = self._keeper.session
        if session is None:
            return TierFigures()
        return TierFigures(**dict(zip(TIER_FIGURES, session.figures, strict=False)))

    def record_events(self, capacity: int) -> None:
        """Keep so many of the service's events."""
        self._keeper.inbox.record_events(capacity)

    def take_events(self) -> tuple[HashArray, HashArray, HashArray]:
        """Kinds, hashes, parents of the events since the last call."""
        batches = self._keeper.inbox.take_events()
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
        return len(self._runs) + self._runs.slots_loading + self._keeper.copying

    def report(self, figures: Callable[[], bytes]) -> None:
        """Figures of the engine, a JSON object, that go with the next heartbeat."""
        self._keeper.progress.report(figures)

    def own(self, block: bytes, tenant: str) -> None:
        """A block below the root, and all that hang below it, are this tenant's; told with the block."""
        self._owners.add(block, tenant)

    @property
    def traffic(self) -> Traffic:
        """What the ranks copied; goes with the next heartbeat."""
        return self._keeper.progress.traffic

    def flush(self) -> None:
        """Let the service hear of what has ended, and ask it for slots; nobody waits for that."""
        self._keeper.flush()

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
