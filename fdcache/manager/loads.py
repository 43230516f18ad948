"""Requests of an engine with a device cache of its own, and their loads into its device blocks.

``_core.Loads`` knows the parts of all loads, their plans, deadlines and ends. ``EngineLoads`` plans those into device
blocks that the engine has chosen, for a ``Tracked`` request. Those of a ``CacheManager`` are planned by
``_core.BlockManager`` once the request is matched, and before that by ``loads_ahead``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache._core import DevicePath, Load, LoadPart, Loads
from fdcache.errors import PlanError, RequestStateError
from fdcache.groups import record_keys
from fdcache.layout import KVLayout
from fdcache.manager.keyed import KeyedRequest, OffloadRequest
from fdcache.manager.requests import PeerSource
from fdcache.metadata import NO_BLOCK, HashArray, Int32Array, SwapPurpose, UInt32Array
from fdcache.plans.ledger import ROOT, UNKNOWN, OpenPlan
from fdcache.tiers.host import Found, HostTier
from fdcache.tiers.statistics import Counters


def device_ids_of(values: object, *, with_none: bool = False, distinct: bool = False) -> Int32Array:
    """Return device blocks as an int32 array; ``with_none``: ``NO_BLOCK`` may be among them.

    Raises ``PlanError`` for anything else; ``distinct``: if a device block is listed twice, too.
    """
    least = NO_BLOCK if with_none else 0
    if isinstance(values, np.ndarray) and _core.are_block_ids(values, least, distinct):
        return values
    try:
        given = np.asarray(values)
        ids = np.ascontiguousarray(given, np.int32)
    except (TypeError, ValueError, OverflowError) as error:
        raise PlanError(
            f"device_ids: {error}; pass the numbers of device blocks as an int32 array"
        ) from error
    are_integers = given.dtype.kind in "iu" or not given.size
    if not (are_integers and np.array_equal(ids, given) and _core.are_block_ids(ids, least)):
        raise PlanError(f"device_ids must be a list of device blocks, int32 numbers from {least} on")
    if distinct and not _core.are_block_ids(ids, NO_BLOCK, distinct=True):
        raise PlanError("device_ids: each device block can take one block; one is listed twice")
    return ids


def table_of(values: object) -> Int32Array:
    """Return a block table as an array, of which only the part that is used is looked at. Raises ``PlanError``."""
    return values if isinstance(values, np.ndarray) else device_ids_of(values, with_none=True)


def count_of(name: str, value: SupportsIndex) -> int:
    """Return a number of tokens. Raises ``RequestStateError``."""
    try:
        count = index(value)
    except TypeError:
        count = -1
    if count < 0:
        raise RequestStateError(f"{name} has to be an int from 0 on, got {value!r}")
    return count


@dataclass(slots=True, eq=False)
class EngineLoad:
    """A load of a request into the device blocks ``ids`` of the engine, some of which may be ``NO_BLOCK``.

    ``after``: plans in flight that copy out what the device blocks held. ``pages``: those that are loaded. ``lease``
    pins what was found for it until it ends. ``counted``: tokens that count as hits, in the host tier and in storage.
    """

    request: OffloadRequest
    ids: Int32Array
    load: Load
    after: tuple[int, ...]
    pages: range = range(0)
    lease: int = 0
    counted: tuple[int, int] = (0, 0)

    @property
    def unplanned(self) -> Int32Array:
        """The device blocks that no plan loads."""
        return self.ids[self.load.planned - self.load.first :]


@dataclass(frozen=True, slots=True, eq=False)
class PeerRun:
    """Blocks of the first ``num_tokens`` tokens of a prompt that a peer has. The last one need not be full.

    ``keys`` are those of the path, of which the peer has what is ``needed``; None: all. With ``most_pages`` pages on
    the device, or more, the rest is sooner computed. ``peer_keys``: those of the peer, if its layout is another.
    """

    source: PeerSource
    keys: HashArray
    num_tokens: int
    most_pages: int
    needed: NDArray[np.bool_] | None = None
    peer_keys: HashArray | None = None

    @property
    def hashes(self) -> HashArray:
        """The keys of what the peer has."""
        return self.keys if self.needed is None else self.keys[self.needed]

    def place(self, at: int) -> int:
        """Return where in the hand-over the part of the path begins that begins at ``at``."""
        return at if self.needed is None else int(np.count_nonzero(self.needed[:at]))

    def fits(self, at: int, ids: Int32Array) -> bool:
        """Return True if the engine has blocks for what is needed of the path from ``at`` on, and for nothing else."""
        return self.needed is None or np.array_equal(ids != NO_BLOCK, self.needed[at : at + len(ids)])


class Tracked:
    """A request between its arrival and its end.

    ``found`` is the kept answer of the host tier, for blocks from ``start`` on; ``arena`` names the memory that its
    slots refer to. ``coming`` blocks after them, or with nothing found after the device's, are being read from storage.
    ``device_blocks`` is the number that the engine had when it asked last, ``load`` the load whose outcome was not
    taken. ``peer`` has what is neither on the device nor below it, until that is fetched or declined. Everything here
    counts records, of which a page has some for each group of layers. ``end``: in a layout with states, the pages at
    whose end are those that were found, or that are read from storage; 0 for none. ``ended_by``: the group of layers
    that ended the last match.
    """

    __slots__ = (
        "_keys",
        "arena",
        "asked_at",
        "coming",
        "counted_blocks",
        "deferred_since",
        "device_blocks",
        "device_pages",
        "end",
        "ended_by",
        "fetch",
        "found",
        "found_at",
        "is_counted",
        "is_stale",
        "limit",
        "load",
        "path",
        "peer",
        "request",
        "start",
    )

    def __init__(self, request: OffloadRequest) -> None:
        self.request = request
        self._keys: HashArray = np.empty((0, 32), np.uint8)
        self.found: Found | None = None
        self.start = 0
        self.coming = 0
        self.limit = 0
        self.arena: str | None = None
        self.asked_at = self.found_at = 0.0
        self.device_blocks = self.device_pages = self.end = 0
        self.deferred_since: float | None = None
        self.ended_by: int | None = None
        self.fetch = 0
        self.path: DevicePath | None = None
        self.load: EngineLoad | None = None
        self.peer: PeerRun | None = None
        self.counted_blocks = 0
        self.is_counted = False
        self.is_stale = False

    @property
    def parent(self) -> bytes:
        """The key of the block before the first one."""
        if not isinstance(self.request, KeyedRequest):
            return ROOT
        return UNKNOWN if self.request.parent is None else self.request.parent

    def matchable(self, block_size: int, whole_prompt: bool) -> HashArray:
        """Return the hashes of the blocks that a match may find: not that of the last token unless ``whole_prompt``."""
        request = self.request
        if isinstance(request, KeyedRequest):
            return request.block_hashes
        most = request.num_tokens - (not whole_prompt)
        if request.max_cached_tokens is not None:
            most = min(most, request.max_cached_tokens)
        return request.block_hashes[: max(most, 0) // block_size]

    def keys_of_pages(self, records: int) -> HashArray:
        """Return the keys of the records of the request's pages, each of which has ``records``."""
        hashes = self.request.block_hashes
        if records == 1:
            return hashes
        have = len(self._keys) // records if records else len(hashes)
        if have < len(hashes):
            self._keys = np.concatenate((self._keys, record_keys(hashes[have:], records)))
        return self._keys

    @property
    def lease(self) -> int:
        """The lease of ``found``, 0 without one."""
        return self.found.lease if self.found is not None else 0

    @property
    def remaining(self) -> int:
        """Number of blocks beyond those on the device that were found or are coming."""
        if self.found is None:
            return 0
        return max(self.start + len(self.found) + self.coming - self.device_blocks, 0)

    @property
    def from_peer(self) -> int:
        """Number of blocks after the remaining ones that a peer has."""
        if self.found is None or self.peer is None or self.device_pages >= self.peer.most_pages:
            return 0
        return max(len(self.peer.keys) - self.device_blocks - self.remaining, 0)

    @property
    def from_storage(self) -> int:
        """How many of the remaining blocks that were found were read from storage for the request."""
        if self.found is None:
            return 0
        first = self.device_blocks - self.start
        return max(self.found.fetched.stop - max(self.found.fetched.start, first), 0)

    def take(self, count: int) -> Found:
        """Return the first ``count`` of the remaining blocks, as far as they were found."""
        found = self.found
        assert found is not None
        first = self.device_blocks - self.start
        stop = min(first + count, len(found))
        return found if not first and count == len(found) else found.part(min(first, stop), stop)

    def count_lookup(self, counters: Counters, layout: KVLayout) -> None:
        """Count the request as looked up, once."""
        if not self.is_counted:
            self.is_counted = True
            counters.lookups += 1
            counters.lookup_tokens += self.request.num_tokens
            counters.device_hit_tokens += self.device_pages * layout.block_size
            if self.ended_by is not None:
                counters.count_end(layout.groups[self.ended_by].reach)

    def deferred_for(self, now: float) -> float:
        """Return the seconds since the request was first deferred, which is now if it was not."""
        if self.deferred_since is None:
            self.deferred_since = now
        return now - self.deferred_since


@dataclass(slots=True, eq=False)
class EngineFetch:
    """The last part of a load, which a peer has; see ``PlannedFetch``. ``pages``: those before it."""

    run: PeerRun
    loading: EngineLoad
    part: LoadPart
    pages: int
    slots: Int32Array
    generations: UInt32Array
    given_up: bool = False

    @property
    def first(self) -> int:
        """The place of its first block in the hand-over."""
        return self.run.place(self.part.first)

    @property
    def source(self) -> PeerSource:
        """The hand-over that is fetched."""
        return self.run.source

    @property
    def is_waited_for(self) -> bool:
        """False once the load has ended, as it does when its request has."""
        return self.loading.load.is_in_flight and not self.given_up


Look = Callable[[EngineLoad], tuple[Found, bool]]
"""Pins the blocks of a load that have been read since its last part; False if no others are waited for."""


class EngineLoads:
    """Loads into device blocks of an engine, by number.

    A request that begins anew may load again before its former load has ended.
    """

    def __init__(self, layout: KVLayout, host: HostTier, loads: Loads, counters: Counters) -> None:
        self._page_tokens, self._groups = layout.block_size, max(layout.page_records, 1)
        self._states = layout.num_states
        self._may_lack = bool(layout.groups)
        self._host = host
        self._loads = loads
        self._counters = counters
        self._by_number: dict[int, EngineLoad] = {}
        self._fetches: list[EngineFetch] = []

    def plan(
        self, request: OffloadRequest, first: int, ids: Int32Array, run: Found, plan: OpenPlan
    ) -> EngineLoad:
        """Plan a load into ``ids`` of the ``run`` on the host, and of what follows it once that has been read."""
        load = self._loads.begin(first, first + len(ids))
        loading = self._by_number[load.number] = EngineLoad(request, ids, load, plan.after)
        if len(run):
            self._add_part(loading, run, plan)
        return loading

    def withdraw(self, loading: EngineLoad, step: OpenPlan, ahead: OpenPlan) -> bool:
        """Withdraw a load from the plan that is open; False if it was sent: then it ends by itself."""
        withdrawn = self._loads.withdraw(loading.load)
        if withdrawn is None:
            return False
        offset, count, is_ahead = withdrawn
        slots = (ahead if is_ahead else step).remove(SwapPurpose.LOAD, offset, count)
        self._host.index.cancel_load(slots)
        self._fetches = [each for each in self._fetches if each.loading is not loading]
        on_host, in_storage = loading.counted
        self.count_hits(loading, -on_host, -in_storage)
        self.end(loading)
        del self._by_number[loading.load.number]
        return True

    def count_hits(self, loading: EngineLoad, on_host: int, in_storage: int) -> None:
        """Count tokens that a load brings."""
        loading.counted = loading.counted[0] + on_host, loading.counted[1] + in_storage
        self._counters.host_hit_tokens += on_host
        self._counters.storage_hit_tokens += in_storage

    def end(self, loading: EngineLoad) -> None:
        """Unpin what was found for a load that has ended."""
        if loading.lease:
            self._host.index.release(loading.lease)

    def fetch_rest(self, loading: EngineLoad, run: PeerRun) -> None:
        """Plan to fetch what no plan loads, as the last part of a load."""
        load = loading.load
        rest = loading.ids[load.planned - load.first :]
        slots = rest[rest != NO_BLOCK]
        part, generations = self._loads.take_rest(load, len(slots)), np.zeros(len(slots), np.uint32)
        self._fetches.append(EngineFetch(run, loading, part, part.first // self._groups, slots, generations))

    def give_up_fetches(self, request: OffloadRequest) -> None:
        """Do not ask a peer for what is planned for a request."""
        for each in self._fetches:
            each.given_up |= each.loading.request is request

    def take_fetches(self) -> list[EngineFetch]:
        """Return what is planned to be fetched from peers since the last call."""
        fetches, self._fetches = self._fetches, []
        return fetches

    def plan_parts(self, plan: OpenPlan, look: Look) -> None:
        """Plan to load what has been read since.

        The device blocks of a load that was cut off since, or is over, may belong to others by now.
        """
        for load in self._loads.open:
            if load.is_open:
                self._plan_part(self._by_number[load.number], plan, look)

    def _plan_part(self, loading: EngineLoad, plan: OpenPlan, look: Look) -> None:
        found, waits = look(loading)
        if len(found):
            plan.after = tuple(dict.fromkeys((*plan.after, *loading.after, loading.load.plan)))
            self._counters.storage_hit_tokens += self._tokens_of_next(loading, len(found))
            self._add_part(loading, found, plan)
        if found.lease:
            self._host.index.release(found.lease)
        if not waits:
            self._loads.cut_off(loading.load, "blocks did not come from storage in time")

    def _tokens_of_next(self, loading: EngineLoad, num_records: int) -> int:
        """Return the tokens of the next records of a load: those of its pages. States come after these."""
        load = loading.load
        left = max(load.first + len(loading.ids) - self._states - load.planned, 0)
        return min(num_records, left) // self._groups * self._page_tokens

    def _add_part(self, loading: EngineLoad, run: Found, plan: OpenPlan) -> None:
        load = loading.load
        stop = load.planned + len(run)
        ids = loading.ids[load.planned - load.first : stop - load.first]
        if self._may_lack and not (is_wanted := ids != NO_BLOCK).all():
            blocks, ids = run.blocks.select(is_wanted), ids[is_wanted]
            self._host.index.begin_load(run.lease, blocks.slots)
            offset = plan.add(SwapPurpose.LOAD, blocks, ids, None)
        else:
            self._host.index.begin_load_of(run.run)
            offset = plan.add_run(SwapPurpose.LOAD, run.run, run.path, run.start, ids, None)
        self._loads.add(load, stop, offset, len(ids), plan.is_ahead)
        if load.is_open:
            self._counters.blocks_loaded_ahead += len(ids)

    def take_ended(self) -> list[EngineLoad]:
        """Return the loads that have ended since the last call."""
        if not self._loads.has_ended:
            return []
        ended = [self._by_number.pop(load.number) for load in self._loads.take_ended()]
        for loading in ended:
            self.end(loading)
        return ended

    def loads_of(self, plan: int) -> dict[tuple[str, int], bool]:
        """Return (request id, number) of the loads of which a plan in flight has blocks; True: their last."""
        return {
            (loading.request.request_id, number): is_last
            for number, is_last in self._loads.loads_of(plan)
            if (loading := self._by_number.get(number)) is not None
        }
