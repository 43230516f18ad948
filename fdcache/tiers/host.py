"""The host tier: its interface, the tier of one engine's own process, and what workers are told of it.

``RemoteHostTier`` of ``fdcache.service.client`` is the other implementation, over the tier of a service.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from fdcache import _core
from fdcache._core import CopyReservation, PlannedCopies
from fdcache.errors import ConfigurationError, HashingError
from fdcache.hints import GivenHint, HintOutcome
from fdcache.layout import KVLayout
from fdcache.metadata import (
    SLOT_HEADER_BYTES,
    CacheLevel,
    HashArray,
    Int32Array,
    SwapPurpose,
    UInt64Array,
)
from fdcache.plans.blocks import NO_BLOCKS, Blocks
from fdcache.plans.ledger import SwapInFlight
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.fetches import Fetches
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.statistics import Counters, ReadTotals, TierUsage, TrafficMeter


class HostCache(msgspec.Struct, frozen=True):
    """The host memory that every worker makes or maps; plain data, sent to the workers' processes.

    ``server`` is the address of a service, or None for an arena of ``num_blocks`` of the worker's own.
    """

    num_blocks: int = 0
    server: str | None = None

    @classmethod
    def of(cls, settings: CacheSettings, layout: KVLayout) -> HostCache:
        """Return the host tier of the settings. The only place where host memory in bytes becomes blocks.

        Every rank keeps its part of a block. Raises ``ConfigurationError`` for less memory than one block needs.
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


class HostMatch(msgspec.Struct, frozen=True, eq=False):
    """Answer of a look-up: the run of ``blocks`` found, pinned by ``lease`` unless that is 0.

    ``pending``: the block after the run is being copied here. ``fetched``: positions of the run that were read from
    storage for the request. ``fetching``: the request has to wait for its reads, and nothing was looked up;
    ``fetched`` is then the part of its path that is still being read; ``is_last``: no other will be.
    """

    lease: int
    blocks: Blocks = NO_BLOCKS
    pending: bool = False
    fetched: range = range(0)
    fetching: bool = False
    is_last: bool = False

    def __len__(self) -> int:
        return len(self.blocks)


NOTHING = HostMatch(0)
"""A look-up that found nothing and pins nothing."""


class SharedHints(Protocol):
    """Hints for tiers that belong to a service."""

    def give(self, path: HashArray, given: Sequence[GivenHint]) -> list[HintOutcome]:
        """Send hints about blocks of a path; return SENT for each, or why it cannot be sent."""

    def take_outcomes(self) -> list[HintOutcome]:
        """Return what the service has told since the last call."""


class HostTier(Protocol):
    """A tier of host blocks. A service that cannot be reached is a tier with nothing in it: no call raises for it."""

    @property
    def fetches(self) -> Fetches | None:
        """Reads from storage for requests; None without storage."""

    @property
    def hints(self) -> SharedHints | None:
        """Hints for the tiers of a service; None without one."""

    @property
    def service_reads(self) -> ReadTotals | None:
        """Reads of a service from storage; None without one."""

    @property
    def arena(self) -> str | None:
        """Name of the shared arena that slots refer to; None when every worker has its own."""

    @property
    def plan_arena(self) -> str | None:
        """Name of the shared arena that slots of the open plans refer to, also while its session ends."""

    @property
    def host_cache(self) -> HostCache:
        """Settings of the workers' host memory."""

    @property
    def num_blocks(self) -> int:
        """Number of slots known so far."""

    @property
    def copy_room(self) -> int:
        """Most blocks that may be copied to the tier now."""

    @property
    def copy_target(self) -> _core.Tier | _core.OutgoingCopies | None:
        """The native object in which ``CopyOut`` reserves slots; None while there is no service."""

    def copies_reserved(self, planned: PlannedCopies) -> None:
        """Learn which slots were reserved in ``copy_target``."""

    def take_slots(
        self, parents: HashArray, hashes: HashArray, *, below_pending: bool = False
    ) -> CopyReservation | None:
        """Reserve slots for copies of absent blocks, parents first, as ``Tier.reserve_copies``; None without a tier."""

    def take_device_reset(self) -> bool:
        """Return True if an operator asked for a reset of the device tier since the last call."""

    @property
    def pins(self) -> _core.Tier | _core.PinnedRuns:
        """The native object in which ``BlockManager`` looks blocks up and pins them."""

    def match_paths(
        self, paths: Sequence[tuple[HashArray, int]], fetches: Sequence[int] = ()
    ) -> list[HostMatch]:
        """Pin, for each (hashes, start), the leading run of ``hashes`` from ``start`` on; one round trip.

        ``fetches``: the number of each path's fetch from storage, 0 for none.
        """

    def begin_look_up(self) -> None:
        """Prepare ``pins`` for look-ups."""

    def ask(self, paths: Sequence[tuple[HashArray, int]], fetches: Sequence[int]) -> list[HostMatch]:
        """Pin, in one round trip, the runs of paths that ``pins`` cannot answer."""

    def release(self, lease: int) -> bool:
        """Unpin a run; blocks being loaded from it stay pinned until the load ends."""

    def begin_load(self, lease: int, slots: Int32Array) -> None:
        """Pin the source slots of a load that was planned from a run."""

    def end_load(self, slots: Int32Array, hashes: HashArray, copied: HashArray) -> None:
        """Unpin the source slots of a load; ``copied`` is 1 for blocks that every rank has."""

    def discard(self, slots: Int32Array) -> object:
        """Forget the blocks in these slots, which a load still pins: their bytes are wrong."""

    def contains(self, hashes: HashArray) -> HashArray:
        """Return per hash 0 absent, 1 ready, 2 pending; of a shared tier as far as this process knows."""

    def complete(self, slots: Int32Array, copied: HashArray, checksums: UInt64Array) -> HashArray:
        """End copies into slots, parents first; return 1 for blocks that are in the tier, or will be."""

    @property
    def in_use(self) -> int:
        """Number of this engine's pins, holds, leases and slots being written."""

    def own(self, block: bytes, tenant: str) -> None:
        """Assign a first block of paths, and all blocks below it, to a tenant."""

    def report(self, figures: Callable[[], bytes]) -> None:
        """Offer the engine's statistics, a JSON object, to a service."""

    @property
    def traffic(self) -> TrafficMeter:
        """Totals of what the ranks copied."""

    def flush(self) -> None:
        """End of step: send queued completions."""

    def worker_lost(self) -> None:
        """Forget every block if the memory went with a dead rank's process."""

    def reset(self) -> None:
        """Forget every block."""

    def change_layout(self, layout: KVLayout) -> None:
        """Go on with another revision of the model; blocks of the former one are not found any more."""

    def usage(self) -> TierUsage:
        """Return the state of the tier."""

    def record_events(self, capacity: int) -> None:
        """Keep up to ``capacity`` events for ``take_events``."""

    def take_events(self) -> tuple[Any, Any, Any]:
        """Return kinds, hashes and parents of the events since the last call."""

    def verify(self) -> None:
        """Raise ``IntegrityError`` for an invariant that does not hold."""

    def close(self) -> None:
        """Release everything. Idempotent."""


class LocalHostTier(BlockPool):
    """The host tier of one engine, in its scheduler's process; every worker has an arena of its own.

    ``on_evict`` is called with the hashes that leave the tier to make room for copies.
    """

    arena: str | None = None
    plan_arena: str | None = None
    fetches: Fetches | None = None
    hints: SharedHints | None = None
    service_reads: ReadTotals | None = None
    on_evict: Callable[[HashArray], None] | None = None

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
        self.traffic = TrafficMeter()
        self._loaded: set[int] = set()  # leases of runs that were used

    @property
    def host_cache(self) -> HostCache:
        """An arena of each worker's own."""
        return HostCache(num_blocks=self.num_blocks)

    @property
    def num_blocks(self) -> int:
        """Number of slots."""
        return self.stats().slots

    @property
    def copy_room(self) -> int:
        """Number of slots: copies that find no room are dropped one by one."""
        return self.num_blocks

    @property
    def copy_target(self) -> LocalHostTier:
        """The tier itself."""
        return self

    @property
    def pins(self) -> LocalHostTier:
        """The tier itself."""
        return self

    def copies_reserved(self, planned: PlannedCopies) -> None:
        """Call ``on_evict`` for the blocks that made room."""
        if self.on_evict is not None:
            self.on_evict(planned.displaced.hashes)

    def match_paths(
        self, paths: Sequence[tuple[HashArray, int]], fetches: Sequence[int] = ()
    ) -> list[HostMatch]:
        """Pin, for each (hashes, start), the leading run of ``hashes`` from ``start`` on."""
        return [
            self._match(hashes, start, fetches[i] if fetches else 0)
            for i, (hashes, start) in enumerate(paths)
        ]

    def _match(self, hashes: HashArray, start: int, fetch: int) -> HostMatch:
        lease = self.open_lease()
        try:
            run = self.match(lease, hashes, start)
        except ValueError as error:
            super().release(lease)
            raise HashingError(
                f"keys: {error}; a key that was stored below another block than the one before it has to differ"
            ) from error
        pending, stop = run.pending, start + len(run)
        if self.fetches is None:
            fetched = range(0)
        else:
            fetched = self.fetches.fetched(fetch, start, len(run))
            # The prefetch policy has decided how long to wait for a block that is being read.
            pending = pending and not self.fetches.is_reading(hashes[stop].tobytes())
        blocks = Blocks.of_path(hashes, start, run.slots, run.generations) if len(run) else NO_BLOCKS
        return HostMatch(lease, blocks, pending, fetched)

    def reserve_copies(
        self, lease: int, parents: HashArray, hashes: HashArray, below_pending: bool = False
    ) -> CopyReservation:
        """Reserve slots as the native class does, and call ``on_evict``."""
        taken = super().reserve_copies(lease, parents, hashes, below_pending)
        if self.on_evict is not None:
            self.on_evict(taken.evicted.hashes)
        return taken

    def take_slots(
        self, parents: HashArray, hashes: HashArray, *, below_pending: bool = False
    ) -> CopyReservation:
        """Reserve slots that no lease owns."""
        return self.reserve_copies(0, parents, hashes, below_pending)

    def begin_load(self, lease: int, slots: Int32Array) -> None:
        """Hold the source slots, whatever becomes of the lease."""
        self._loaded.add(lease)
        self.hold(slots)

    def release(self, lease: int) -> bool:
        """Unpin a run; the order of eviction learns from one that was loaded."""
        if lease in self._loaded:
            self._loaded.remove(lease)
            return self.finish(lease)
        return super().release(lease)

    def end_load(self, slots: Int32Array, hashes: HashArray, copied: HashArray) -> None:
        """Release the source slots."""
        self.unhold(slots)

    @property
    def in_use(self) -> int:
        """Number of pins, holds, leases and slots being written."""
        figures = self.stats()
        return figures.pins + figures.holds + figures.leases + figures.writing

    def change_layout(self, layout: KVLayout) -> None:
        """Forget every block: they belong to the former weights."""
        self.reset()

    def worker_lost(self) -> None:
        """Forget every block: a part of each went with the worker."""
        self.reset()

    # Of a shared tier only; there is no operator, no quota and no service here.

    def begin_look_up(self) -> None:
        """Do nothing."""

    def ask(self, paths: Sequence[tuple[HashArray, int]], fetches: Sequence[int]) -> list[HostMatch]:
        """Return that nothing was found."""
        return [NOTHING] * len(paths)

    def take_device_reset(self) -> bool:
        """Return False."""
        return False

    def own(self, block: bytes, tenant: str) -> None:
        """Do nothing."""

    def report(self, figures: Callable[[], bytes]) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def complete_copies(
    result: SwapInFlight, device: BlockPool | None, host: HostTier, counters: Counters
) -> None:
    """End a transfer between device and host that every rank has reported.

    Release the host slots that it held and make the blocks that arrived findable. Afterwards ``copied`` is True for the
    blocks that the target tier has. Without a ``device`` its slots are the engine's, which asks for a block again:
    records that could not be loaded are forgotten.
    """
    swap, copied = result.swap, result.flags
    counters.count_copies(swap.purpose, result.num_copied, result.size)
    if swap.purpose is SwapPurpose.LOAD:
        if result.any_corrupt:
            discard_corrupt(result, host, counters)
        if device is not None:
            result.settle(device.complete(swap.dst_block_ids, copied, result.checksums))
        elif not result.is_whole:
            host.discard(swap.src_block_ids[~result.copied])
        host.end_load(swap.src_block_ids, swap.hash_values, copied)
    else:
        result.settle(host.complete(swap.dst_block_ids, copied, result.checksums))


def discard_corrupt(result: SwapInFlight, host: HostTier | BlockPool, counters: Counters) -> None:
    """Forget host records that a copy out of them found corrupt, while it still holds their slots."""
    bad = result.swap.src_block_ids[result.corrupt]
    if len(bad):
        host.discard(bad)
        counters.blocks_corrupt_in_host += len(bad)
