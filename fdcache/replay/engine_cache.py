"""The device cache of an engine whose model has several groups of layers, with fdcache's tiers below it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from fdcache.errors import IntegrityError
from fdcache.groups import PageColumns, record_keys, state_keys
from fdcache.layout import KVLayout
from fdcache.manager import (
    NO_BLOCK,
    Allocation,
    CacheManager,
    LoadOutcome,
    LoadStatus,
    MatchResult,
    MatchStatus,
    OffloadManager,
    Request,
)
from fdcache.manager.results import AllocationFailure
from fdcache.metadata import (
    CacheLevel,
    HashArray,
    Int32Array,
    StorageScan,
    TransferPlan,
    TransferReport,
)
from fdcache.settings.cache import CacheSettings, StorageTierSettings, WritePolicy
from fdcache.storage.connector import StorageConnector
from fdcache.tiers.host import HostCache
from fdcache.tiers.pool import TreeNode
from fdcache.tiers.statistics import CacheStats, MemoryUsage, TierUsage

_NEXT = 64
"""Device blocks that the engine says it gives away next."""


@dataclass(slots=True, eq=False)
class HeldRequest:
    """What a request holds: its block table, a row for each page and a column for each record and state.

    ``on_device``, ``found``: pages that its match found on the device, and in all. ``committed``: pages that can be
    found by others. ``computed``: tokens that were reported, but not committed while a load is in flight.
    """

    request: Request
    table: Int32Array
    on_device: int
    found: int
    loading: bool = False
    is_loaded: bool = False
    committed: int = 0
    computed: int = 0


@dataclass(slots=True)
class Waiting:
    """Device blocks that plans may still write: those in flight, until ``is_sent`` those of the open step as well."""

    plans: set[int]
    blocks: list[int]
    is_sent: bool = False


class DeviceBlocks:
    """One pool of device blocks for all groups: those in use, those found by key, and the order in which they go."""

    def __init__(self, count: int) -> None:
        self._uses = np.zeros(count, np.int64)
        self._keys: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(count))
        self.evictions = 0

    @property
    def available(self) -> int:
        """Blocks that nobody uses."""
        return len(self._free)

    def next_blocks(self, count: int) -> list[int]:
        """Return those that go next."""
        return [block for block, _ in zip(self._free, range(count), strict=False)]

    def find(self, keys: HashArray) -> Int32Array:
        """Return the block of each key, ``NO_BLOCK`` where there is none."""
        return np.array([self._by_key.get(key.tobytes(), NO_BLOCK) for key in keys], np.int32)

    def use(self, blocks: Iterable[int]) -> None:
        """Keep blocks for one more request."""
        for block in blocks:
            if not self._uses[block]:
                del self._free[block]
            self._uses[block] += 1

    def take(self, count: int) -> Int32Array:
        """Take blocks that nobody uses, and forget what they held."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._uses[block] = 1
            key = self._keys.pop(block, None)
            if key is not None:
                del self._by_key[key]
                self.evictions += 1
        return np.array(taken, np.int32)

    def name(self, block: int, key: bytes) -> None:
        """Make a block findable, unless another one is by this key."""
        if key not in self._by_key and block not in self._keys:
            self._by_key[key], self._keys[block] = block, key

    def give_up(self, blocks: Iterable[int]) -> None:
        """Use blocks no longer; those without a key go first, then the others in this order."""
        for block in blocks:
            self._uses[block] -= 1
            if not self._uses[block]:
                self._free[block] = None
                if block not in self._keys:
                    self._free.move_to_end(block, last=False)

    def usage(self) -> TierUsage:
        """Return counts as those of other tiers; blocks in use count as pinned if they can be found."""
        used = set(np.flatnonzero(self._uses).tolist())
        named = set(self._keys)
        return TierUsage(
            blocks=len(self._uses),
            free=len(self._uses) - len(used | named),
            ready=len(named),
            pins=len(used & named),
            evictions=self.evictions,
        )

    def check(self) -> None:
        """Raise ``IntegrityError`` unless blocks are either in use or free, and keys are of one block."""
        free = set(self._free)
        if free != set(np.flatnonzero(self._uses == 0).tolist()):
            raise IntegrityError("the engine's free blocks are not those that nobody uses")
        if {block: key for key, block in self._by_key.items()} != self._keys:
            raise IntegrityError("the engine's keys are not those of its blocks")


class EngineCache:
    """The calls of a ``CacheManager`` that a replay makes, for groups of layers: an engine's own device cache.

    As in vLLM, the groups share one pool of blocks; a request gives up what is beyond the reach of its layers, and a
    match is the longest length at which every group has what its reach asks for. What the device does not have comes
    from an ``OffloadManager``. A request whose load has failed has to be preempted: it begins with a new match.
    """

    def __init__(self, manager: OffloadManager, layout: KVLayout, device_blocks: int) -> None:
        self.manager = manager
        self._layout = layout
        self._page = layout.block_size
        self._records, self._states = layout.page_records, layout.num_states
        self._columns = PageColumns(layout.groups, layout.block_size)
        self._blocks = DeviceBlocks(device_blocks)
        self._held: dict[str, HeldRequest] = {}
        self._plans: dict[int, int] = {}
        self._waiting: list[Waiting] = []

    # --- requests -----------------------------------------------------------------------------------------

    def begin(self, requests: Sequence[Request]) -> None:
        """Start to read what requests will need from storage."""
        self.manager.begin(requests)

    def match_prefix(self, requests: Sequence[Request]) -> list[MatchResult]:
        """Find the longest prefix of each request, and keep it."""
        return [self._match(request) for request in requests]

    def _match(self, request: Request) -> MatchResult:
        self.manager.prepare([request])
        hashes = request.block_hashes[: (request.num_tokens - 1) // self._page]
        there = self._blocks.find(self._keys(hashes)).reshape(-1, len(self._columns))
        on_device = self._columns.usable(there != NO_BLOCK)
        found = self.manager.match(request, on_device * self._page)
        if found.status is MatchStatus.DEFERRED:
            return MatchResult(request.request_id, MatchStatus.DEFERRED)
        stored, pages = found.from_storage // self._page, on_device + found.num_tokens // self._page
        table = np.full((pages, len(self._columns)), NO_BLOCK, np.int32)
        table[:on_device] = there[:on_device]
        table[~self._columns.needed(pages)] = NO_BLOCK
        if pages > on_device:
            table[on_device:] = NO_BLOCK
        self._blocks.use(_given(table))
        self._held[request.request_id] = HeldRequest(request, table, on_device, pages, committed=on_device)
        return MatchResult(
            request.request_id,
            MatchStatus.MATCHED,
            num_device_blocks=on_device,
            num_host_blocks=pages - on_device - stored,
            num_storage_blocks=stored,
            num_cached_tokens=pages * self._page,
        )

    def can_allocate_device_blocks(self, pages: int) -> bool:
        """Return True if there is room for this many pages."""
        return pages * len(self._columns) <= self._blocks.available

    def allocate_device_blocks(self, demands: Sequence[tuple[Request, int]]) -> list[Allocation]:
        """Give requests the blocks of this many tokens; those of a match are loaded then."""
        return [self._allocate(request, num_tokens) for request, num_tokens in demands]

    def _allocate(self, request: Request, num_tokens: int) -> Allocation:
        held = self._held[request.request_id]
        needed = self._columns.needed(held.found)[held.on_device :]
        loads = held.found > held.on_device and not held.is_loaded
        more = max(-(-num_tokens // self._page) - len(held.table), 0)
        count = more * len(self._columns) + (int(needed.sum()) if loads else 0)
        short = count - self._blocks.available
        if short > 0:
            return Allocation(request.request_id, failure=AllocationFailure.NO_BLOCKS, shortfall=short)
        taken = self._blocks.take(count)
        rows = taken[len(taken) - more * len(self._columns) :]
        self.manager.evicted(rows)
        if loads:
            held.table[held.on_device :][needed] = taken[: len(taken) - len(rows)]
            if not self._load(request, held):
                self._blocks.give_up(rows.tolist())
                return Allocation(request.request_id, failure=AllocationFailure.DEFERRED)
        held.table = np.concatenate((held.table, rows.reshape(more, len(self._columns))))
        return Allocation(request.request_id, block_ids=taken)

    def _load(self, request: Request, held: HeldRequest) -> bool:
        pages = held.table[held.on_device :]
        of_pages, states = pages[:, : self._records].reshape(-1), pages[-1, self._records :]
        held.is_loaded = held.loading = self.manager.load(request, np.concatenate((of_pages, states))) > 0
        return held.loading

    def table_of(self, request: Request) -> Int32Array:
        """Return the block table of a request, a row for each page."""
        return self._held[request.request_id].table

    def commit(self, progress: Iterable[tuple[Request, int]]) -> None:
        """Make the whole pages of computed tokens findable, and offer them, unless a load has not ended."""
        for request, num_tokens in progress:
            held = self._held[request.request_id]
            held.computed = num_tokens
            if not held.loading:
                self._commit(held)

    def _commit(self, held: HeldRequest) -> None:
        request = held.request
        self.manager.prepare([request])
        hashes = request.block_hashes
        pages = min(held.computed // self._page, len(hashes), len(held.table))
        if pages <= held.committed:
            return
        first, tokens = held.committed, pages * self._page
        keys = self._keys(hashes[first:pages])
        for block, key in zip(held.table[first:pages].reshape(-1).tolist(), keys, strict=True):
            if block != NO_BLOCK:
                self._blocks.name(block, key.tobytes())
        table = held.table[:pages, : self._records]
        self.manager.offer(request, tokens, np.ascontiguousarray(table).reshape(-1))
        for page in range(first, pages) if self._states else ():
            self._offer_states(request, held.table[page], page + 1)
        held.committed = pages
        self._leave(held.table[:pages], ~self._columns.needed(pages))

    def _offer_states(self, request: Request, row: Int32Array, pages: int) -> None:
        states = row[self._records :]
        if (states != NO_BLOCK).all():
            above = int(row[self._records - 1]) if self._records else NO_BLOCK
            self.manager.offer_states(request, pages * self._page, np.ascontiguousarray(states), above)

    def _leave(self, table: Int32Array, unneeded: NDArray[np.bool_]) -> None:
        """Give up blocks that no layer needs any more."""
        gone = table[unneeded]
        table[unneeded] = NO_BLOCK
        self._blocks.give_up(gone[gone != NO_BLOCK].tolist())

    def finish(self, requests: Sequence[Request], *, preempted: bool = False) -> None:
        """Give up what requests hold, the end of a prefix first."""
        self.manager.finish(requests, preempted=preempted)
        for request in requests:
            held = self._held.pop(request.request_id, None)
            if held is None:
                continue
            blocks = _given(held.table)[::-1]
            if held.loading:
                self._waiting.append(Waiting(set(self._plans), blocks))
            else:
                self._blocks.give_up(blocks)

    # --- plans and reports --------------------------------------------------------------------------------

    def take_plans(self) -> list[TransferPlan]:
        """Return the plans of a step."""
        if self.manager.settings.write_policy is WritePolicy.WRITE_BACK:
            self.manager.next_evicted(np.array(self._blocks.next_blocks(_NEXT), np.int32))
        plans = self.manager.take_plans()
        for plan in plans:
            self._plans |= dict.fromkeys(plan.plan_ids, self._layout.tp_size)
        for each in self._waiting:
            if not each.is_sent:
                each.is_sent, each.plans = (
                    True,
                    each.plans | {ident for plan in plans for ident in plan.plan_ids},
                )
        self._settle()
        return plans

    def apply(self, reports: Sequence[TransferReport]) -> list[LoadOutcome]:
        """Count reports; return the loads that ended with them."""
        for report in reports:
            self._plans[report.plan_id] -= 1
            if not self._plans[report.plan_id]:
                del self._plans[report.plan_id]
        self._settle()
        return self._ended(self.manager.apply(reports))

    def expire(self) -> list[LoadOutcome]:
        """Return the loads whose deadline has passed."""
        return self._ended(self.manager.expire())

    def _settle(self) -> None:
        """Give up blocks that no plan in flight can write any more."""
        ended = [each for each in self._waiting if each.is_sent and each.plans.isdisjoint(self._plans)]
        for each in ended:
            self._waiting.remove(each)
            self._blocks.give_up(each.blocks)

    def _ended(self, outcomes: list[LoadOutcome]) -> list[LoadOutcome]:
        """Make the pages of requests whose loads have ended well findable, and what was computed behind them."""
        for outcome in outcomes:
            held = self._held.get(outcome.request_id)
            if held is not None and held.loading and outcome.status is LoadStatus.CONFIRMED:
                held.loading = False
                held.computed = max(held.computed, held.found * self._page)
                self._commit(held)
        return outcomes

    def _keys(self, hashes: HashArray) -> HashArray:
        """Return the keys of pages, those of each followed by those of its states."""
        width = hashes.shape[1]
        pages = record_keys(hashes, self._records).reshape(len(hashes), self._records, width)
        states = state_keys(hashes, self._records, self._states).reshape(len(hashes), self._states, width)
        return np.concatenate((pages, states), axis=1).reshape(-1, width)

    # --- the whole cache ----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.manager.close()

    @property
    def host_cache(self) -> HostCache:
        """The argument of every rank's ``CacheController.initialize_host_cache``."""
        return self.manager.host_cache

    @property
    def shared_blocks_in_use(self) -> int:
        """Pins and slots being written of this engine in a service's tier."""
        return self.manager.shared_blocks_in_use

    def restore_storage(self, scans: Sequence[StorageScan]) -> int:
        """Make the blocks in the ranks' local storage findable; return their number."""
        return self.manager.restore_storage(scans)

    def pause(self) -> None:
        """Offer nothing more: no request is running."""

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` naming every invariant that does not hold."""
        self.manager.check_integrity()
        self._blocks.check()

    def get_stats(self) -> CacheStats:
        """Return a snapshot of the tiers, with the engine's blocks as those of the device."""
        return msgspec.structs.replace(self.manager.get_stats(), device=self._blocks.usage())

    def get_memory_usage(self) -> dict[CacheLevel, MemoryUsage]:
        """Return bytes per rank of each tier."""
        device = MemoryUsage.of(self._blocks, self._layout.payload_bytes)
        return {CacheLevel.DEVICE: device, **self.manager.get_memory_usage()}

    def hottest_blocks(self, limit: int) -> list[TreeNode]:
        """Return the hottest blocks of the host tier, each with its ancestors."""
        return self.manager.hottest_blocks(limit)


def _given(table: Int32Array) -> list[int]:
    """Return the blocks of a table, in path order."""
    blocks: list[int] = table[table != NO_BLOCK].tolist()
    return blocks


Cache = CacheManager | EngineCache
"""What a replay's scheduler asks for device blocks."""


def make_cache(
    settings: CacheSettings,
    layout: KVLayout,
    storage: StorageTierSettings,
    lookup: StorageConnector | None,
    reuse_clock: Callable[[], float] | None,
) -> Cache:
    """Return a ``CacheManager``, or with groups of layers an engine's own cache over an ``OffloadManager``."""
    if not layout.groups:
        return CacheManager(settings, layout, storage=storage, lookup=lookup, reuse_clock=reuse_clock)
    manager = OffloadManager(settings, layout, storage=storage, lookup=lookup, reuse_clock=reuse_clock)
    return EngineCache(manager, layout, settings.device_blocks)
