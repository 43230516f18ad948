"""HostCache: the host tier that every worker of an engine has to make or to map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import numpy as np

from fdcache._core import CopyReservation, TierStats
from fdcache.errors import ConfigurationError
from fdcache.layout import KVLayout
from fdcache.metadata import SLOT_HEADER_BYTES, CacheLevel, HashArray, Int32Array, UInt32Array, UInt64Array
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.traffic import Traffic


class HostCache(msgspec.Struct, frozen=True):
    """Plain data, to be sent to a worker's process.

    ``server`` is None for an arena of the worker's own, of ``num_blocks``; else the service's address.
    """

    num_blocks: int = 0
    server: str | None = None

    @classmethod
    def of(cls, settings: CacheSettings, layout: KVLayout) -> HostCache:
        """Return the host tier that the settings describe: host memory in bytes becomes blocks here and nowhere else.

        Every rank keeps its part of a block. Raises ``ConfigurationError`` for host memory that holds not one block.
        """
        if settings.server is not None:
            return cls(server=settings.server)
        memory, block_bytes = settings.host_memory, host_block_bytes(layout)
        if memory and memory < block_bytes:
            raise ConfigurationError(
                f"host_memory: {memory} bytes are less than one block of {block_bytes} bytes; give at least that, or 0"
            )
        return cls(memory // block_bytes)


def host_block_bytes(layout: KVLayout) -> int:
    """Return the host memory of one block: its record and slot header on every rank."""
    return layout.tp_size * (layout.record_bytes + SLOT_HEADER_BYTES)


class TierFigures(msgspec.Struct, frozen=True):
    """The state of a tier in figures; ``writing`` includes ``pending``, ``evictable`` is part of ``ready``."""

    slots: int = 0
    free: int = 0
    writing: int = 0
    ready: int = 0
    pending: int = 0
    evictable: int = 0
    pins: int = 0
    holds: int = 0
    leases: int = 0
    epoch: int = 0
    evictions: int = 0
    quarantined: int = 0
    withheld: int = 0


@dataclass(frozen=True, slots=True)
class HostMatch:
    """The run that was found, pinned by ``lease``; ``pending``: the block after it is being copied here.

    ``unverified`` is 1 for blocks that nobody has read since they were recovered; None: there are none.
    The blocks ``fetched`` of it were read from storage for the request; ``fetching``: some are, and it has to wait.
    """

    lease: int
    slots: Int32Array
    generations: UInt32Array
    pending: bool = False
    unverified: HashArray | None = None
    fetched: range = range(0)
    fetching: bool = False

    def __len__(self) -> int:
        return len(self.slots)

    def first(self, count: int) -> HostMatch:
        """Its first ``count`` blocks."""
        return replace(
            self,
            slots=self.slots[:count],
            generations=self.generations[:count],
            unverified=None if self.unverified is None else self.unverified[:count],
            fetched=range(min(self.fetched.start, count), min(self.fetched.stop, count)),
        )


class SlotsForCopies(Protocol):
    """Slots for those blocks whose ``status`` is 0, in order; or how many are ``missing``, and none taken."""

    @property
    def slots(self) -> Int32Array:
        """The slots taken."""

    @property
    def generations(self) -> UInt32Array:
        """Their generations."""

    @property
    def status(self) -> HashArray:
        """Per hash: 0 a slot was taken, 1 ready, 2 pending, 3 no parent."""

    @property
    def missing(self) -> int:
        """Slots that could not be had."""


class HostTier(Protocol):
    """A tier of host blocks. No call raises for a service that is gone: it is a tier with nothing in it."""

    @property
    def arena(self) -> str | None:
        """The shared arena that slots mean now; None when every worker has its own."""

    @property
    def host_cache(self) -> HostCache:
        """What every worker is told."""

    @property
    def num_blocks(self) -> int:
        """Slots, as far as they are known."""

    @property
    def copy_room(self) -> int:
        """How many blocks may be copied to the tier now, at most."""

    def take_device_reset(self) -> bool:
        """Whether an operator asked for a reset of the device tier since the last call."""

    def match_paths(
        self, paths: Sequence[tuple[HashArray, int]], fetches: Sequence[int] = ()
    ) -> list[HostMatch]:
        """Pin, for each (hashes, start), the leading run of ``hashes`` from ``start`` on; one round trip.

        ``fetches``: for each path the number under which a service reads its blocks from storage, 0 for none.
        """

    def release(self, lease: int) -> bool:
        """Unpin a run; what is being loaded from it stays pinned until the load's end."""

    def begin_load(self, lease: int, slots: Int32Array) -> None:
        """Copies out of these slots of a run begin."""

    def end_load(self, slots: Int32Array, hashes: HashArray, copied: HashArray) -> None:
        """They end; ``copied`` is 1 where every rank has the block."""

    def discard(self, slots: Int32Array) -> object:
        """The bytes in these slots, held by a load, are wrong: nobody is to find them again."""

    def contains(self, hashes: HashArray) -> HashArray:
        """0 absent, 1 ready, 2 pending; of a shared tier as far as this process knows."""

    def reserve_copies(self, lease: int, parents: HashArray, hashes: HashArray) -> SlotsForCopies:
        """Slots for copies of those hashes that are absent and whose parent is there or comes before them."""

    def complete(self, slots: Int32Array, copied: HashArray, checksums: UInt64Array) -> HashArray:
        """The end of copies into slots, parents first; 1 where the block is in the tier, or will be."""

    @property
    def in_use(self) -> int:
        """Pins, holds and leases that this engine has on the tier; slots it is writing."""

    def own(self, block: bytes, tenant: str) -> None:
        """A block below the root, and all that hang below it, are this tenant's."""

    def report(self, figures: Callable[[], bytes]) -> None:
        """Offer the engine's own figures, a JSON object, to a service that shows them to people."""

    @property
    def traffic(self) -> Traffic:
        """What the ranks copied, for whoever hears of it to record; a service shows it to people."""

    def flush(self) -> None:
        """The step is closed: whoever is elsewhere may hear of what has ended."""

    def worker_lost(self) -> None:
        """A rank's process is gone. A tier whose memory went with it forgets everything."""

    def reset(self) -> None:
        """Forget every block."""

    def change_layout(self, layout: KVLayout) -> None:
        """The engine has other weights: what was found or copied before belongs to the layout before."""

    def stats(self) -> TierStats | TierFigures:
        """The state of the tier."""

    def record_events(self, capacity: int) -> None:
        """Keep so many events for ``take_events``."""

    def take_events(self) -> tuple[Any, Any, Any]:
        """Kinds, hashes and parents of what happened since the last call."""

    def verify(self) -> None:
        """Raise ``IntegrityError`` for an invariant that does not hold."""

    def close(self) -> None:
        """Let go of everything; harmless when done before."""


class LocalHostTier(BlockPool):
    """The host tier of one engine, in its scheduler's process; every worker has an arena of its own."""

    arena: str | None = None

    def __init__(
        self,
        level: CacheLevel,
        num_blocks: int,
        eviction: str = "lru",
        *,
        extent: int = 0,
        spare: float = 0.0,
    ) -> None:
        super().__init__(level, num_blocks, eviction, extent=extent, spare=spare)
        self.traffic = Traffic()
        self.on_evict: Callable[[HashArray], None] | None = None
        """Told what left the tier for copies into it; nobody else evicts here."""

    @property
    def host_cache(self) -> HostCache:
        """An arena of each worker's own."""
        return HostCache(num_blocks=self.num_blocks)

    @property
    def num_blocks(self) -> int:
        """Slots of the tier."""
        return self.stats().slots

    @property
    def copy_room(self) -> int:
        """Slots of the tier: what does not fit is dropped, as it always was."""
        return self.num_blocks

    def take_device_reset(self) -> bool:
        """Nobody can ask."""
        return False

    def match_paths(
        self, paths: Sequence[tuple[HashArray, int]], fetches: Sequence[int] = ()
    ) -> list[HostMatch]:
        """Pin, for each (hashes, start), the leading run of ``hashes`` from ``start`` on."""
        matches = []
        for hashes, start in paths:
            lease = self.open_lease()
            run = self.match(lease, hashes, start)
            matches.append(HostMatch(lease, run.slots, run.generations, run.pending))
        return matches

    def reserve_copies(self, lease: int, parents: HashArray, hashes: HashArray) -> CopyReservation:
        """As the native class, and ``on_evict`` is told."""
        taken = super().reserve_copies(lease, parents, hashes)
        if self.on_evict is not None:
            self.on_evict(taken.evicted.hashes)
        return taken

    def begin_load(self, lease: int, slots: Int32Array) -> None:
        """Copies out of these slots begin; they hold them whatever becomes of the lease."""
        self.hold(slots)

    def end_load(self, slots: Int32Array, hashes: HashArray, copied: HashArray) -> None:
        """They end."""
        self.unhold(slots)

    @property
    def in_use(self) -> int:
        """Pins, holds, leases and slots being written."""
        figures = self.stats()
        return figures.pins + figures.holds + figures.leases + figures.writing

    def change_layout(self, layout: KVLayout) -> None:
        """Blocks of the weights before are of no use to anybody."""
        self.reset()

    def own(self, block: bytes, tenant: str) -> None:
        """Tenants have no quotas here."""

    def report(self, figures: Callable[[], bytes]) -> None:
        """There is nobody to show them to."""

    def flush(self) -> None:
        """There is nobody to hear of it."""

    def worker_lost(self) -> None:
        """The worker's part of every block went with it."""
        self.reset()

    def close(self) -> None:
        """Nothing is held outside this process."""


NO_SLOTS = np.empty(0, np.int32)
NO_GENERATIONS = np.empty(0, np.uint32)
NOTHING = HostMatch(0, NO_SLOTS, NO_GENERATIONS)
"""A look-up that found nothing and pins nothing."""
FETCHING_MATCH = HostMatch(0, NO_SLOTS, NO_GENERATIONS, fetching=True)
"""A look-up that has to come again, since its blocks are being read from storage."""
