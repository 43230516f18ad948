"""Requests: their tokens and hashes, and the blocks that each one holds between its match and its end."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from fdcache._core import BlockList, MatchRun
from fdcache.errors import IntegrityError, RequestStateError
from fdcache.hashing import MultimodalItem, TokenBlocks, Tokens, root_hash
from fdcache.layout import KVLayout
from fdcache.manager.results import NO_BLOCKS
from fdcache.manager.tiers import Tiers
from fdcache.metadata import HashArray, Int32Array, SwapPurpose
from fdcache.plans.blocks import ROOT, Blocks
from fdcache.plans.ledger import OpenPlan
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.statistics import Counters


class BlockTable:
    """A growing int32 array of device slots."""

    __slots__ = ("_buffer", "_size")

    def __init__(self) -> None:
        self._buffer = np.empty(64, np.int32)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def extend(self, slots: Int32Array) -> None:
        """Append slots."""
        size = self._size + len(slots)
        if size > len(self._buffer):
            grown = np.empty(max(size, 2 * len(self._buffer)), np.int32)
            grown[: self._size] = self._buffer[: self._size]
            self._buffer = grown
        self._buffer[self._size : size] = slots
        self._size = size

    @property
    def slots(self) -> Int32Array:
        """The slots so far, a view that later growth does not change."""
        return self._buffer[: self._size]


class Request:
    """One request of an engine: its tokens, their block hashes, and its block table.

    ::

        request = Request("chat-1", prompt_token_ids, tenant="acme")
        manager.match_prefix([request])
        manager.allocate_device_blocks([(request, request.num_tokens)])
        request.append_tokens([next_token])

    ``prompt``: int32 token ids. ``multimodal``: images and other items that the token ids stand for. ``adapter_id``
    and ``tenant`` keep its blocks apart from those of other adapters and tenants. ``use_cache=False``: reuse no
    blocks and leave none behind. ``device_only``: reuse blocks on the device, load none; the manager sets it when a
    load of the request misses its deadline. ``max_cached_tokens``: the most tokens that a match may return.

    ``num_cached_tokens`` is the length of the matched prefix while the request is matched, else 0.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Tokens,
        *,
        multimodal: Sequence[MultimodalItem] = (),
        adapter_id: str | None = None,
        tenant: str | None = None,
        use_cache: bool = True,
        device_only: bool = False,
        max_cached_tokens: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = len(prompt)
        self.use_cache = use_cache
        self.device_only = device_only
        self.max_cached_tokens = max_cached_tokens
        self.num_cached_tokens = 0
        self._prompt: Tokens = prompt
        self._multimodal = tuple(multimodal)
        self._adapter_id = adapter_id
        self._tenant = tenant
        self._tokens: TokenBlocks | None = None
        self._namespace: tuple[int, bytes, int] | None = None
        self._live: LiveRequest | None = None
        # From the first match to the end, through every match that was deferred or undone:
        self._fetch = 0
        self._hit_blocks = 0
        self._deferred_since: float | None = None

    @property
    def num_tokens(self) -> int:
        """Number of prompt and appended tokens."""
        return self.num_prompt_tokens if self._tokens is None else self._tokens.num_tokens

    @property
    def block_table(self) -> Int32Array:
        """Device slots in path order, shape (blocks,); empty unless the request is matched."""
        return NO_BLOCKS if self._live is None else self._live.table.slots

    @property
    def is_loading(self) -> bool:
        """True from the planning of a load to the ``LoadOutcome`` of ``CacheManager.apply``."""
        return self._live is not None and self._live.is_loading

    @property
    def block_hashes(self) -> HashArray:
        """Hashes of the full blocks so far, shape (blocks, 32); empty before the first match.

        With look-ahead tokens the last full blocks have no hash until the tokens after them are known.
        """
        return np.empty((0, 32), np.uint8) if self._tokens is None else self._tokens.hashes

    def append_tokens(self, tokens: Tokens) -> None:
        """Append accepted generated tokens. Raises ``RequestStateError`` before the first match."""
        if self._tokens is None:
            raise RequestStateError(f"request {self.request_id!r} has to be matched before it gets tokens")
        self._tokens.append(tokens)

    def _bind(
        self, block_size: int, fingerprint: bytes, lookahead: int = 0, former: Set[bytes] = frozenset()
    ) -> TokenBlocks:
        """Return the hashed tokens, made at first use: the keys depend on the layout and the look-ahead.

        A request that is not live and was bound to one of the ``former`` fingerprints is hashed again. Raises
        ``HashingError`` for tokens that cannot be hashed.
        """
        renewed = self._live is None and self._namespace is not None and self._namespace[1] in former
        if self._tokens is None or renewed:
            tokens = TokenBlocks(
                block_size,
                root_hash(fingerprint, self._tenant),
                multimodal=self._multimodal,
                adapter_id=self._adapter_id,
                lookahead=lookahead,
            )
            tokens.append(self._prompt if self._tokens is None else self._tokens.tokens)
            self._tokens = tokens
            self._namespace = (block_size, fingerprint, lookahead)
        elif self._namespace != (block_size, fingerprint, lookahead):
            raise RequestStateError(
                f"request {self.request_id!r} was matched by a manager of another layout or look-ahead; "
                "make a new request"
            )
        return self._tokens


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request between its match and its end: its lease, its block table, and how much of it is published.

    ``host_run`` are the host blocks of its match until their loads are planned. ``is_live`` becomes False when the
    request is released: a load that was planned before then ends without an outcome.
    """

    request: Request
    publishes: bool
    _tokens: TokenBlocks
    _tiers: Tiers
    _block_size: int
    _lease: int
    table: BlockTable = field(default_factory=BlockTable)
    host_run: Blocks | None = None
    is_live: bool = True
    is_loading: bool = False
    _host_lease: int = 0
    _returned_blocks: int = 0
    _committed_blocks: int = 0
    _committed_tokens: int = 0
    _fetched_blocks: int = 0
    _is_counted: bool = False

    # --- match --------------------------------------------------------------------------------------------

    def match_device(self, hashes: HashArray, start: int = 0) -> MatchRun:
        """Pin the leading run of ``hashes`` on the device from block ``start`` on.

        A request counts as one hit of each block, however often it is matched.
        """
        request = self.request
        run = self._tiers.device.match(self._lease, hashes, start, request._hit_blocks)
        stop = start + len(run)
        first = max(start, request._hit_blocks)
        if first < stop:
            request._hit_blocks = stop
            if self._tiers.backups:
                self._tiers.backups.on_match(hashes[first:stop], run.hits[first - start :])
        return run

    def unpin_device(self) -> None:
        """Unpin the device blocks of a match, before it is repeated for fewer blocks."""
        device = self._tiers.device
        device.release(self._lease)
        self._lease = device.open_lease()

    def pin_host(self, lease: int) -> None:
        """Hold the host lease of a match until ``accept_match``, ``drop_host_run`` or ``release``."""
        self._host_lease = lease

    def drop_host_run(self) -> None:
        """Unpin the host blocks of the match: their loads are planned, or they are not needed."""
        self.host_run = None
        if self._host_lease and self._tiers.host:
            self._tiers.host.release(self._host_lease)
            self._host_lease = 0

    def accept_match(self, device_slots: Int32Array, host_run: Blocks | None, fetched_blocks: int) -> int:
        """Begin with these blocks; return how many tokens they cover. ``fetched_blocks`` came from storage."""
        if host_run is None:
            self.drop_host_run()
        self.host_run = host_run
        if len(device_slots):
            self.table.extend(device_slots)
            self._committed_blocks = self._returned_blocks = len(device_slots)
        self._fetched_blocks = fetched_blocks
        request = self.request
        request._deferred_since = None
        request.num_cached_tokens = (len(device_slots) + len(host_run or ())) * self._block_size
        return request.num_cached_tokens

    def deferred_for(self, now: float) -> float:
        """Return the seconds since the request was deferred first; 0.0 starts the clock."""
        request = self.request
        if request._deferred_since is None:
            request._deferred_since = now
        return now - request._deferred_since

    # --- allocate -----------------------------------------------------------------------------------------

    def refresh_host_run(self) -> bool:
        """Take blocks of the host run that others have loaded since the match as device hits.

        Return False when the request has to be matched again: another request is loading the next block, or a reset
        took the run away.
        """
        run = self.host_run
        if run is None or not self.publishes:
            return False
        start = len(self.table)
        found = self.match_device(self._tokens.hashes[: start + len(run)], start)
        if len(found):
            self.table.extend(found.slots)
            self._committed_blocks += len(found)
            if len(found) < len(run):
                self.host_run = run.select(slice(len(found), None))
            else:
                self.drop_host_run()
        return not found.pending

    def count_hits(self, counters: Counters) -> None:
        """Count the request's look-up and the tokens it found in each tier, once."""
        if self._is_counted:
            return
        self._is_counted = True
        on_host = len(self.host_run or ())
        from_storage = min(self._fetched_blocks, on_host)
        counters.lookups += 1
        counters.lookup_tokens += self.request.num_tokens
        counters.device_hit_tokens += self._committed_blocks * self._block_size
        counters.host_hit_tokens += (on_host - from_storage) * self._block_size
        counters.storage_hit_tokens += from_storage * self._block_size

    def take_blocks(self, count: int, plan: StepPlan) -> list[BlockList]:
        """Append ``count`` device blocks, which must be available: those to be loaded, then those to be computed.

        Return the blocks evicted for them.
        """
        stop = len(self.table) + count
        evicted = [self._plan_loads(self.host_run, plan)] if self.host_run else []
        if missing := stop - len(self.table):
            taken = self._tiers.device.reserve(self._lease, missing)
            if taken.missing:
                raise IntegrityError(
                    f"request {self.request.request_id!r}: {taken.missing} available blocks are gone"
                )
            self.table.extend(taken.slots)
            evicted.append(taken.evicted)
        return evicted

    def _plan_loads(self, run: Blocks, plan: StepPlan) -> BlockList:
        """Reserve device blocks for the host run and plan its copies."""
        assert self._tiers.host
        taken = self._tiers.device.reserve_copies(self._lease, run.parents, run.hashes)
        if len(taken) != len(run):
            raise IntegrityError(
                f"request {self.request.request_id!r}: {len(run)} loads got {len(taken)} device blocks"
            )
        self._tiers.host.begin_load(self._host_lease, run.slots)
        self.drop_host_run()
        offset = plan.add(SwapPurpose.LOAD, run, taken.slots, taken.generations)
        plan.loads.append(LoadRange(self, offset, len(run), len(self.table)))
        self.is_loading = True
        self.table.extend(taken.slots)
        return taken.evicted

    def take_added_blocks(self) -> Int32Array:
        """Return the slots added to the block table since the match or the last call."""
        first, self._returned_blocks = self._returned_blocks, len(self.table)
        return self.table.slots[first:] if first < self._returned_blocks else NO_BLOCKS

    # --- commit -------------------------------------------------------------------------------------------

    def commit(self, num_tokens: int) -> None:
        """Publish the full blocks of the first ``num_tokens`` tokens, after the load below them is confirmed."""
        self._committed_tokens = num_tokens
        if self.publishes and not self.is_loading:
            self._publish()

    def end_load(self, copied: int, planned: int) -> None:
        """Count the leading blocks of a load that every rank copied, and publish what waited for all of them."""
        self.is_loading = False
        self._committed_blocks += copied
        if copied < planned:
            self.request.num_cached_tokens = self._committed_blocks * self._block_size
        elif self.publishes:
            self._publish()

    def _publish(self) -> None:
        start, stop = self._committed_blocks, self._committed_tokens // self._block_size
        if start >= stop:
            return  # no block became full, as in most decode steps
        hashes = self._tokens.hashes
        stop = min(stop, len(hashes))  # a block has no hash until its look-ahead tokens are known
        if start >= stop:
            return
        parent = hashes[start - 1].tobytes() if start else ROOT
        status = self._tiers.device.commit(
            self._lease, parent, hashes[start:stop], self.table.slots[start:stop]
        )
        self._committed_blocks = start + len(status)
        tenant, host, backups = self.request._tenant, self._tiers.host, self._tiers.backups
        if tenant is not None and host:
            host.own(hashes[0].tobytes(), tenant)
        if backups and len(status):
            backups.on_commit(hashes[start : start + len(status)], status)

    # --- end ----------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Unpin every block of the request; slots of copies in flight stay held until their reports."""
        self.drop_host_run()
        self._tiers.device.release(self._lease)
        self.is_live = self.is_loading = False
        self.request._live = None
        self.request.num_cached_tokens = 0


@dataclass(frozen=True, slots=True)
class LoadRange:
    """The part of a plan's loads that one request waits for: blocks from ``first_block`` of its path on."""

    owner: LiveRequest
    offset: int
    count: int
    first_block: int


class StepPlan(OpenPlan):
    """The transfers of one scheduler step, and the requests that wait for its loads."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[LoadRange] = []


class LiveRequests:
    """The requests that are matched or running, by id."""

    def __init__(self, settings: CacheSettings, layout: KVLayout, tiers: Tiers) -> None:
        self._caches_prefixes = settings.enable_prefix_caching
        self._lookahead = settings.lookahead_tokens
        self._block_size = layout.block_size
        self._fingerprint = layout.fingerprint
        self._former_fingerprints: set[bytes] = set()
        self._tiers = tiers
        self._fetches = tiers.fetches
        self._by_id: dict[str, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def bind(self, request: Request) -> TokenBlocks:
        """Return the request's tokens, hashed for this layout. Raises ``HashingError``, ``RequestStateError``."""
        return request._bind(self._block_size, self._fingerprint, self._lookahead, self._former_fingerprints)

    def matchable(self, request: Request) -> HashArray:
        """Return the hashes that a match may find: not the last token's block, nor any above the request's limit."""
        tokens = self.bind(request)
        limit = request.num_tokens - 1
        if request.max_cached_tokens is not None:
            limit = min(limit, request.max_cached_tokens)
        return tokens.hashes[: limit // self._block_size]

    def fetch_number(self, request: Request) -> int:
        """Return the number of the request's fetch from storage, the same until the request ends; 0 without one."""
        if self._fetches is not None and not request._fetch:
            request._fetch = self._fetches.number()
        return request._fetch

    def may_prefetch(self, request: Request) -> bool:
        """Return True for a request that is not matched yet and may load blocks."""
        may_reuse = self._caches_prefixes and request.use_cache and not request.device_only
        return may_reuse and request._live is None

    def change_fingerprint(self, fingerprint: bytes) -> None:
        """Hash with another layout from now on; running requests keep their blocks and publish no more."""
        self._former_fingerprints.add(self._fingerprint)
        self._former_fingerprints.discard(fingerprint)
        self._fingerprint = fingerprint
        self.stop_publishing()

    def stop_publishing(self) -> None:
        """Let running requests keep their blocks and publish no more, as after a reset."""
        for live in self._by_id.values():
            live.publishes = False

    # --- checks, before anything changes for any of the requests --------------------------------------------

    def check_match(self, requests: Sequence[Request]) -> None:
        """Raise ``RequestStateError`` or ``HashingError`` for the first request that cannot be matched."""
        seen: dict[str, Request] = {}
        for request in requests:
            if request._live is not None or seen.get(request.request_id) is request:
                raise RequestStateError(
                    f"request {request.request_id!r} is matched or running; finish it before it is matched again"
                )
            if request.request_id in self._by_id or request.request_id in seen:
                raise RequestStateError(f"another request with the id {request.request_id!r} is running")
            self.bind(request)
            seen[request.request_id] = request

    def check_allocate(self, demands: Sequence[tuple[Request, int]]) -> list[tuple[LiveRequest, int]]:
        """Return the demands of live requests.

        Raises ``RequestStateError`` for a request that is not matched or demands fewer tokens than its match found.
        """
        checked = []
        for request, num_tokens in demands:
            live = self._by_id.get(request.request_id)
            if live is None or live.request is not request:
                raise RequestStateError(
                    f"request {request.request_id!r} has to be matched before it gets blocks"
                )
            if num_tokens < request.num_cached_tokens:
                raise RequestStateError(
                    f"request {request.request_id!r}: {num_tokens} tokens are fewer than the "
                    f"{request.num_cached_tokens} that its match found"
                )
            checked.append((live, num_tokens))
        return checked

    def check_commit(self, progress: Sequence[tuple[Request, int]]) -> list[tuple[LiveRequest, int]]:
        """Return the progress of live requests.

        Raises ``RequestStateError`` for a request that does not have so many tokens, or no blocks for them.
        """
        checked = []
        for request, num_tokens in progress:
            live = self._by_id.get(request.request_id)
            blocks = len(live.table) if live is not None and live.request is request else 0
            limit = min(request.num_tokens, blocks * self._block_size)
            if live is None or live.request is not request or not 0 <= num_tokens <= limit:
                raise RequestStateError(
                    f"request {request.request_id!r}: cannot commit {num_tokens} tokens, it has blocks for {limit}"
                )
            checked.append((live, num_tokens))
        return checked

    # --- from match to end --------------------------------------------------------------------------------

    def admit(self, request: Request) -> LiveRequest:
        """Open a lease for a request that is being matched."""
        publishes = request.use_cache and self._caches_prefixes
        tokens = request._tokens or self.bind(request)
        lease = self._tiers.device.open_lease()
        live = LiveRequest(request, publishes, tokens, self._tiers, self._block_size, lease)
        request._live = self._by_id[request.request_id] = live
        return live

    def unmatch(self, request: Request) -> None:
        """Release a matched request; its reads from storage go on."""
        live = self._by_id.get(request.request_id)
        if live is not None and live.request is request:
            del self._by_id[request.request_id]
            live.release()
            request._deferred_since = None

    def defer(self, request: Request) -> None:
        """Release a matched request that waits for another's copy; the time that it waits goes on."""
        since = request._deferred_since
        self.unmatch(request)
        request._deferred_since = since

    def wait_for_reads(self, request: Request) -> None:
        """Release a request that waits for its reads from storage, which the prefetch policy bounds."""
        self.unmatch(request)
        request._deferred_since = None

    def finish(self, request: Request) -> None:
        """Release a request and end its reads from storage; copies in flight hold their slots until reported."""
        if self._fetches is not None and request._fetch:
            self._fetches.end(request._fetch)
            request._fetch = 0
        self.unmatch(request)
        request._hit_blocks = 0
