"""The host tier of an engine: one of its own process, or that of a service.

``HostTier`` is what managers know of either. Its ``index`` is the data path: look-ups, pins, slots for copies and
loads; ``csrc/tier/host_index.hpp`` says what each call promises. ``service`` has what only a service can do, and is
None for an own tier; nothing else tells the two apart.

A manager calls with its lock held. A service that cannot be reached is a tier with nothing in it and without room: no
call raises for it, and what was pinned, reserved or loaded before is ended as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

import msgspec
import numpy as np

from fdcache._core import CopyReservation, HostIndex, HostRun, SwapInFlight
from fdcache.errors import ConfigurationError
from fdcache.hints import GivenHints, HintOutcome, SentHints
from fdcache.layout import KVLayout
from fdcache.metadata import (
    SLOT_HEADER_BYTES,
    CacheLevel,
    HashArray,
    SwapPurpose,
)
from fdcache.plans.ledger import NO_BLOCKS, Blocks
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.fetches import Fetches, FetchTable, FetchTerms
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.statistics import Counters, ReadTotals, TierUsage, TrafficMeter

HOST_TIERS = "fdcache.host_tiers"
"""Entry-point group of the host tiers that a manager shares with others; ``service`` is that of FDCACHE_SERVER."""


class HostCache(msgspec.Struct, frozen=True):
    """The host memory that every worker makes or maps; plain data, sent to the workers' processes.

    ``server`` is the address of a service, or None for an arena of ``num_blocks`` of the worker's own. ``name``: of the
    memory that workers share whose layout has ``replicas``, another one for each engine.
    """

    num_blocks: int = 0
    server: str | None = None
    name: str | None = None

    @classmethod
    def of(cls, settings: CacheSettings, layout: KVLayout, name: str | None = None) -> HostCache:
        """Return the host tier of the settings. The only place where host memory in bytes becomes blocks.

        Every rank keeps its part of a block; those that hold the same keep it once. Raises ``ConfigurationError`` for
        less memory than one block needs.
        """
        if settings.server is not None:
            return cls(server=settings.server)
        memory, block_bytes = settings.host_memory, host_block_bytes(layout)
        if memory and memory < block_bytes:
            raise ConfigurationError(
                f"host_memory: {memory} bytes are less than one block of {block_bytes} bytes; give at least that, or 0"
            )
        return cls(memory // block_bytes, name=name)


def host_block_bytes(layout: KVLayout) -> int:
    """Return the host memory of one block: its records and their slot headers."""
    return layout.record_ranks * (layout.record_bytes + SLOT_HEADER_BYTES)


class Found(msgspec.Struct, frozen=True, eq=False):
    """Answer of a look-up: the blocks of a ``path`` from ``start`` on that are in the slots of a ``run``.

    ``pending``: the block after them is being copied to the host. ``fetched``: positions of those that were read from
    storage for the request.
    """

    run: HostRun
    path: HashArray
    start: int
    pending: bool = False
    fetched: range = range(0)

    def __len__(self) -> int:
        return len(self.run)

    @property
    def lease(self) -> int:
        """Pins the blocks until it is released; 0 for none."""
        return self.run.lease

    @property
    def blocks(self) -> Blocks:
        """The blocks as arrays, made anew each time."""
        return Blocks.of_path(self.path, self.start, *self.run.columns())

    def part(self, first: int, stop: int, fetched: range = range(0)) -> Found:
        """Return the blocks ``first`` to ``stop``, as far as there are any, pinned by the same lease."""
        stop = min(stop, len(self))
        first = min(first, stop)
        return Found(self.run.part(first, stop), self.path, self.start + first, fetched=fetched)


def nothing(*, pending: bool = False) -> Found:
    """Return the answer of a look-up that found nothing and pins nothing."""
    return Found(HostRun(), NO_BLOCKS.hashes, 0, pending=pending)


class Reading(msgspec.Struct, frozen=True):
    """Answer of a service that reads blocks for the request: nothing was looked up.

    ``arrived`` blocks of the path have come, and up to ``stop`` are being read. ``is_last``: no others will be.
    """

    arrived: int
    stop: int
    is_last: bool = False


class SharedHints(Protocol):
    """Hints for tiers that belong to a service."""

    def give(self, path: HashArray, given: GivenHints) -> SentHints:
        """Send hints about blocks of a path, which must not change; return SENT, or why they cannot be sent."""

    def take_outcomes(self) -> list[HintOutcome]:
        """Return what the service has told since the last call."""


class PathNote(msgspec.Struct, frozen=True):
    """What the blocks of a path depend on beside their tokens: ``items`` are offset, length and name of images."""

    tenant: str | None = None
    adapter: str | None = None
    items: list[tuple[int, int, str]] = []


class SharedNotes(Protocol):
    """Descriptions of blocks for a service that tells routers of them."""

    @property
    def is_wanted(self) -> bool:
        """True while there is such a service."""

    @property
    def has_device(self) -> bool:
        """True once the service was told of the device's blocks; False again for the next session."""

    def describe(self, requests: Sequence[Any]) -> None:
        """Describe the blocks of requests, each with a ``note``, that are not described yet."""

    def describe_path(self, hashes: bytes, tokens: bytes, parent: bytes, note: PathNote) -> None:
        """Describe blocks of a path with their tokens in int32, below the block ``parent``; that is empty for none."""

    def on_session(self, tell: Callable[[], bool]) -> None:
        """Call ``tell`` in each new session, from another thread, until it returns True."""

    def tell_device(self, kinds: bytes, hashes: bytes) -> None:
        """Tell which blocks came to and left the device, in order."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """Blocks that were deleted with all below them, or everything, up to the deletion with this number."""

    number: int
    hashes: HashArray
    everything: bool


class HostService(Protocol):
    """What an engine and a service tell each other. Messages go in the background, but for ``ask``."""

    @property
    def hints(self) -> SharedHints:
        """Hints for the tiers of the service."""

    @property
    def notes(self) -> SharedNotes:
        """Descriptions of blocks for the service."""

    @property
    def reads(self) -> ReadTotals | None:
        """Reads of the service from storage, as of the last heartbeat; None without a session."""

    @property
    def arena(self) -> str:
        """Name of the shared arena that slots found now refer to."""

    @property
    def plan_arena(self) -> str:
        """Name of the shared arena that slots of the open plans refer to, also while its session ends."""

    def begin_look_up(self) -> None:
        """Make a reset that is still owed; called before the look-ups of a step."""

    def ask(self, paths: Sequence[tuple[HashArray, int]], fetches: Sequence[int]) -> list[Found | Reading]:
        """Pin, in one round trip, the runs of (hashes, start) that ``index`` cannot answer.

        ``fetches``: the number of each path's fetch from storage, 0 for none.
        """

    def fetch_from(self, source: str, hashes: HashArray) -> str:
        """Have the service read the blocks of a path from one node first; return why that cannot be, or nothing."""

    def own(self, block: bytes, tenant: str) -> None:
        """Assign a first block of paths, and all blocks below it, to a tenant."""

    def report(self, figures: Callable[[], bytes]) -> None:
        """Offer the engine's statistics, a JSON object."""

    def flush(self) -> None:
        """End of step: send what is queued."""

    def take_device_reset(self) -> bool:
        """Return True if an operator asked for a reset of the device tier since the last call."""

    def take_deleted(self) -> Deleted | None:
        """Return what was deleted in the service since the last call, to be forgotten on the device."""

    def forgot(self, number: int) -> None:
        """Tell the service that nothing is left of what was deleted, up to the deletion with this number."""

    def change_layout(self, layout: KVLayout) -> None:
        """Go on with another revision of the model; blocks of the former one are not found any more."""

    def close(self) -> None:
        """Leave the service. Idempotent."""


class HostTier(Protocol):
    """A tier of host blocks; see the head of this module."""

    @property
    def index(self) -> HostIndex:
        """Look-ups, pins, loads, and slots for copies."""

    @property
    def pool(self) -> BlockPool | None:
        """The slots, if they are of this process."""

    @property
    def service(self) -> HostService | None:
        """The service that the tier belongs to, or None."""

    @property
    def fetches(self) -> Fetches | None:
        """Reads from storage for requests, by this process or a service; None without storage."""

    @property
    def fetch_table(self) -> FetchTable | None:
        """``fetches``, if this process reads."""

    @property
    def host_cache(self) -> HostCache:
        """Settings of the workers' host memory."""

    @property
    def num_blocks(self) -> int:
        """Number of slots known so far."""

    @property
    def in_use(self) -> int:
        """Number of this engine's pins, holds, leases and slots being written."""

    @property
    def traffic(self) -> TrafficMeter:
        """Totals of what the ranks copied."""

    def reset(self) -> None:
        """Forget every block."""

    def usage(self) -> TierUsage:
        """Return the state of the tier."""

    def record_events(self, capacity: int) -> None:
        """Keep up to ``capacity`` events for ``take_events``."""

    def take_events(self) -> tuple[Any, Any, Any]:
        """Return kinds, hashes and parents of the events since the last call."""


def shared_host_tier(settings: CacheSettings, layout: KVLayout, terms: FetchTerms) -> HostTier:
    """Return the tier of the service at ``settings.server``."""
    (service,) = entry_points(group=HOST_TIERS, name="service")
    tier: HostTier = service.load()(settings, layout, terms)
    return tier


class LocalHostTier(BlockPool):
    """The host tier of one engine, in its scheduler's process; its workers have the arenas.

    ``name``: of the memory that workers share, if they do; another one for each engine.
    ``on_evict`` is called with the hashes that leave the tier to make room for reads.
    """

    service: HostService | None = None
    fetch_table: FetchTable | None = None
    on_evict: Callable[[HashArray], None] | None = None

    def __init__(
        self,
        level: CacheLevel,
        num_blocks: int,
        eviction: str = "lru",
        *,
        extent: int = 0,
        spare: float = 0.0,
        name: str | None = None,
    ) -> None:
        super().__init__(level, num_blocks, eviction, extent=extent, spare=spare)
        self.name = name
        self.traffic = TrafficMeter()

    @property
    def index(self) -> LocalHostTier:
        """The tier itself."""
        return self

    @property
    def fetches(self) -> FetchTable | None:
        """The reads of this process."""
        return self.fetch_table

    @property
    def pool(self) -> LocalHostTier:
        """The tier itself."""
        return self

    @property
    def host_cache(self) -> HostCache:
        """An arena of each worker's own, or of workers that hold the same bytes."""
        return HostCache(num_blocks=self.num_blocks, name=self.name)

    @property
    def num_blocks(self) -> int:
        """Number of slots."""
        return self.stats().slots

    @property
    def in_use(self) -> int:
        """Number of pins, holds, leases and slots being written."""
        figures = self.stats()
        return figures.pins + figures.holds + figures.leases + figures.writing

    def reserve_copies(
        self,
        lease: int,
        parents: HashArray,
        hashes: HashArray,
        below_pending: bool = False,
        tenant: int = 0,
    ) -> CopyReservation:
        """Reserve slots as the native class does, and call ``on_evict``."""
        taken = super().reserve_copies(lease, parents, hashes, below_pending, tenant)
        if self.on_evict is not None:
            self.on_evict(taken.evicted.hashes)
        return taken


def find_and_pin(host: HostTier, hashes: HashArray, start: int, fetch: int = 0) -> Found | Reading:
    """Pin the leading run of a path from ``start`` on.

    ``fetch``: the number of its fetch from storage, 0 for none. A service is asked, in one round trip, for what its
    storage may have, and for what is there and cannot be pinned without it now. Keys that contradict those stored find
    nothing.
    """
    service, fetches = host.service, host.fetches
    if service is not None:
        service.begin_look_up()
    storage_use = 0 if fetches is None else fetches.storage_use(fetch)
    run, pending, ask_for = host.index.find_and_pin(hashes, start, storage_use)
    if ask_for and service is not None:
        (answer,) = service.ask([(hashes[:ask_for], start)], [fetch])
        return answer
    fetched, stop = range(0), start + len(run)
    if (table := host.fetch_table) is not None:
        fetched = table.fetched(fetch, start, len(run))
        # The prefetch policy has decided how long to wait for a block that is being read.
        pending = pending and not table.is_reading(hashes[stop].tobytes())
    if stop == start:
        return nothing(pending=pending)
    return Found(run, hashes, start, pending, fetched)


def find_only(host: HostTier, hashes: HashArray, start: int) -> Found:
    """Pin the leading run of one path, whatever is being read for it."""
    found = find_and_pin(host, hashes, start)
    assert isinstance(found, Found)
    return found


def find_whole(host: HostTier, hashes: HashArray, start: int) -> Found:
    """Pin the blocks of a path from ``start`` on; nothing unless all of them are there."""
    if len(hashes) <= start:
        return nothing()
    found = find_only(host, hashes, start)
    if start + len(found) == len(hashes):
        return found
    host.index.release(found.lease)
    return nothing()


def complete_copies(
    result: SwapInFlight, device: BlockPool | None, host: HostIndex, counters: Counters
) -> None:
    """End a transfer between device and host that every rank has reported.

    Release the host slots that it held and make the blocks that arrived findable. Afterwards ``copied`` is True for the
    blocks that the target tier has. Without a ``device`` its slots are the engine's, which asks for a block again:
    records that could not be loaded are forgotten.
    """
    swap, copied = result.swap, result.flags
    counters.count_copies(swap.purpose, result.num_copied, result.size)
    if swap.purpose is SwapPurpose.LOAD:
        bad = None if result.is_whole else result.corrupt if device is not None else ~result.copied
        counters.blocks_corrupt_in_host += int(np.count_nonzero(result.corrupt)) if result.any_corrupt else 0
        if device is not None:
            result.settle(device.complete(swap.dst_block_ids, copied, result.checksums))
        host.end_load(
            swap.src_block_ids, swap.hash_values, copied, None if bad is None else bad.view(np.uint8)
        )
    else:
        result.settle(host.complete(swap.dst_block_ids, copied, result.checksums))


def discard_corrupt(result: SwapInFlight, host: BlockPool, counters: Counters) -> None:
    """Forget host records that a copy out of them found corrupt, while it still holds their slots."""
    bad = result.swap.src_block_ids[result.corrupt]
    if len(bad):
        host.discard(bad)
        counters.blocks_corrupt_in_host += len(bad)
