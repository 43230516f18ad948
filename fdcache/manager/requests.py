"""Requests: their tokens and hashes, and the blocks that each one holds between its match and its end.

The state of a request and the work of a step are native (``RequestState``, ``BlockManager``). This module adds what
only requests with a host or storage tier have: runs of host blocks, their loads, reads from storage, and the news that
the write policies follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from fdcache import tracing
from fdcache._core import (
    AdvanceResult,
    AllocationForms,
    BlockManager,
    LoadPart,
    Loads,
    MatchForms,
    RequestState,
)
from fdcache.hashing import MultimodalItem, Tokens, encode_text, hash_blocks, make_extra_keys, root_hash
from fdcache.hints import Hint, HintOutcome
from fdcache.layout import KVLayout
from fdcache.manager.results import Allocation, LoadOutcome, MatchResult, load_forms
from fdcache.manager.tiers import Tiers
from fdcache.metadata import HashArray, Int32Array, UInt32Array
from fdcache.plans.ledger import OpenPlan
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.host import Found, PathNote
from fdcache.tiers.statistics import Counters

Unanswered = tuple[int, int]
"""A request that a service has to be asked about: first block, and number of leading blocks."""


NO_TOKEN = np.iinfo(np.int32).min
"""In the hash of a block that is handed over and not full: no token has this id."""


class Request(RequestState):
    """One request of an engine: its tokens, their block hashes, and its block table.

    ::

        request = Request("chat-1", prompt_token_ids, tenant="acme")
        manager.match_prefix([request])
        manager.allocate_device_blocks([(request, request.num_tokens)])
        manager.advance([request], [next_token])

    ``prompt``: int32 token ids. ``multimodal``: images and other items that the token ids stand for. ``adapter_id``
    and ``tenant`` keep its blocks apart from those of other adapters and tenants. ``use_cache=False``: reuse no
    blocks and leave none behind. ``device_only``: reuse blocks on the device, load none; the manager sets it when a
    load of the request misses its deadline. ``max_cached_tokens``: the most tokens that a match may return. ``hints``:
    what the client knows of the reuse of its blocks, which the manager takes when the request ends, also if it is set
    later; ``hint_outcomes`` are the answers.

    ``block_table`` and ``block_hashes`` are views of native arrays, which later growth does not change.

    Raises ``HashingError`` for a tenant, an adapter or multimodal items that cannot be hashed.
    """

    _fetch = 0
    tenant: str | None = None
    adapter_name: str | None = None
    """Name of the adapter for routers, where ``adapter_id`` says more than that."""
    _keys: tuple[str | None, Sequence[MultimodalItem]] = (None, ())
    _unasked: PeerSource | None = None
    _sends = 0
    _is_finishing = False
    hints: Sequence[Hint] = ()
    hint_outcomes: Sequence[HintOutcome] = ()

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
        hints: Sequence[Hint] = (),
    ) -> None:
        super().__init__(
            request_id,
            prompt,
            None if tenant is None else encode_text("tenant", tenant),
            make_extra_keys(adapter_id, multimodal) if multimodal or adapter_id is not None else None,
            use_cache,
            device_only,
            max_cached_tokens,
        )
        self.tenant = tenant
        if multimodal or adapter_id is not None:
            self._keys = (adapter_id, multimodal)
        if hints:
            self.hints = hints

    def hashes_for(self, layout: KVLayout, lookahead: int) -> HashArray:
        """Return the hashes that an instance of another layout has for its full blocks."""
        adapter_id, multimodal = self._keys
        return hash_blocks(
            self.tokens,
            layout.block_size,
            parent=root_hash(layout.fingerprint, self.tenant),
            adapter_id=adapter_id,
            multimodal=multimodal,
            lookahead=lookahead,
        )

    def hashes_to(
        self, num_tokens: int, layout: KVLayout, lookahead: int, of_blocks: HashArray | None = None
    ) -> HashArray:
        """Return the hashes of the blocks of the first ``num_tokens`` tokens, for a hand-over of all of them.

        ``of_blocks``: those of its full blocks in this layout, by default its own. Those that no block of a tier has,
        as their block is not full or the tokens after it are unknown, are hashes of blocks filled up with ``NO_TOKEN``.
        """
        size = layout.block_size
        known = self.block_hashes if of_blocks is None else of_blocks
        full = known[: max(num_tokens - lookahead, 0) // size]
        start = len(full) * size
        if start >= num_tokens:
            return full
        tail = np.full(-(-(num_tokens - start) // size) * size + lookahead, NO_TOKEN, np.int32)
        tail[: num_tokens - start] = self.tokens[start:num_tokens]
        adapter_id, multimodal = self._keys
        rest = hash_blocks(
            tail,
            size,
            parent=full[-1].tobytes() if len(full) else root_hash(layout.fingerprint, self.tenant),
            start=start,
            adapter_id=adapter_id,
            multimodal=multimodal,
            lookahead=lookahead,
        )
        return np.concatenate((full, rest))

    @property
    def note(self) -> PathNote:
        """What its blocks depend on beside its tokens."""
        adapter_id, items = self._keys
        if not items:
            return PathNote(self.tenant, self.adapter_name or adapter_id)
        names = [
            (each.offset, each.length, each.hash if isinstance(each.hash, str) else each.hash.hex())
            for each in items
        ]
        return PathNote(self.tenant, self.adapter_name or adapter_id, names)

    def __repr__(self) -> str:
        state = "running" if self.is_live else "not matched"
        return f"<Request {self.request_id!r}: {self.num_tokens} tokens, {self.num_blocks} blocks, {state}>"


class PeerSource(msgspec.Struct, frozen=True):
    """A hand-over that decode may fetch: its name, and the address of each rank of the prefill instance.

    ``attempt`` is higher for each repetition by the same or another decode process. ``is_ahead``: prefill may begin to
    compute it only now.
    """

    transfer: str
    addresses: tuple[str, ...]
    attempt: int = 1
    is_ahead: bool = False


@dataclass(slots=True, eq=False)
class PlannedFetch:
    """Blocks of one request from ``first_block`` on to fetch from a peer into these slots.

    ``lease`` is that of the request when the fetch was planned. ``has_load``: the same plan loads the blocks below.
    ``given_up`` before the peer was asked: it is told that they are not wanted.
    """

    source: PeerSource
    request: Request
    lease: int
    part: LoadPart
    slots: Int32Array
    generations: UInt32Array
    given_up: bool = False

    @property
    def first(self) -> int:
        """The place of its first block in the hand-over."""
        return self.part.first

    @property
    def is_waited_for(self) -> bool:
        """False once the request was released: the fetch ends without an outcome then."""
        return self.request.lease == self.lease


LoadLimit = Callable[[str, int, int, int, bytes], int]
"""Returns how many blocks are worth loading, given request id, tokens, blocks on the device and on the host, and the
hash of the last of these."""


class LiveRequests:
    """The requests that are matched or running, by id, and the device blocks that they hold."""

    def __init__(self, settings: CacheSettings, layout: KVLayout, tiers: Tiers, counters: Counters) -> None:
        self._caches_prefixes = settings.enable_prefix_caching
        self._tiers = tiers
        self._fetches = tiers.fetches
        self._live: dict[str, Request] = {}
        self._sources: dict[str, PeerSource] = {}  # of requests that will fetch, until their allocation
        self._num_sends = 0
        self._planned: list[PlannedFetch] = []
        copies = tiers.copies
        self._blocks = BlockManager(
            tiers.own_device,
            layout.block_size,
            layout.fingerprint,
            settings.lookahead_tokens,
            settings.enable_prefix_caching,
            follow_stored=copies is not None and copies.follows_commits,
            follow_evicted=copies is not None,
            follow_owners=tiers.host is not None and tiers.host.service is not None,
            follow_hits=copies.follows_hits if copies is not None else 0,
            host=tiers.host.index if tiers.host is not None else None,
        )

        self.loads: Loads = self._blocks.loads
        """What the requests load."""
        self._load_forms = load_forms(layout)

    def __len__(self) -> int:
        return len(self._live)

    def prepare(self, request: Request) -> None:
        """Hash the tokens of a request, unless they are hashed. Raises ``HashingError``, ``RequestStateError``."""
        self._blocks.prepare(request)

    def matchable(self, request: Request) -> HashArray:
        """Return the hashes that a match may find: not the last token's block, nor any above the request's limit."""
        self._blocks.prepare(request)
        return request.block_hashes[: self._blocks.matchable(request)]

    def fetch_number(self, request: Request) -> int:
        """Return the number of the request's fetch from storage, the same until the request ends; 0 without one."""
        if self._fetches is not None and not request._fetch:
            request._fetch = self._fetches.number("" if tracing.spans is None else request.request_id)
        return request._fetch

    def may_prefetch(self, request: Request) -> bool:
        """Return True for a request that is not matched yet and may load blocks."""
        may_reuse = self._caches_prefixes and request.use_cache and not request.device_only
        return may_reuse and not request.is_live

    def change_fingerprint(self, fingerprint: bytes) -> None:
        """Hash with another layout from now on; running requests keep their blocks and publish no more."""
        self._blocks.change_fingerprint(fingerprint)

    def forget_found(self, reason: str) -> None:
        """Stop running requests from publishing, as after a reset; they keep their blocks."""
        self._blocks.stop_publishing()

    def count(self, counters: Counters) -> None:
        """Add what the native side has counted."""
        found = self._blocks.stats
        counters.lookups += found.lookups
        counters.lookup_tokens += found.lookup_tokens
        counters.device_hit_tokens += found.device_hit_tokens
        counters.host_hit_tokens += found.host_hit_tokens
        counters.storage_hit_tokens += found.storage_hit_tokens
        counters.deferred_lookups += found.deferred
        counters.allocation_failures += found.allocation_failures

    # --- match --------------------------------------------------------------------------------------------

    def check_match(self, requests: list[Request]) -> None:
        """Raise ``RequestStateError`` or ``HashingError`` for the first request that cannot be matched."""
        self._blocks.check_match(requests, self._live)

    def match(
        self,
        requests: Sequence[Request],
        forms: MatchForms,
        clock: Callable[[], float],
        is_reading: Callable[[bytes], bool] | None = None,
        storage_use: list[int] | None = None,
        worth_loading: LoadLimit | None = None,
    ) -> list[MatchResult | Unanswered]:
        """Begin requests with their longest cached prefix, or defer them; see ``BlockManager.match``.

        A request counts as one hit of each block, however often it is matched until it ends.
        """
        found = self._blocks.match(requests, self._live, forms, clock, is_reading, storage_use, worth_loading)
        if self._blocks.has_followed:
            self._pass_on(None)
        return found

    def answer(
        self,
        request: Request,
        match: Found,
        forms: MatchForms,
        clock: Callable[[], float],
        worth_loading: LoadLimit | None = None,
    ) -> MatchResult:
        """End a match with what a service has found and pinned."""
        result = self._blocks.answer(
            request,
            self._live,
            forms,
            clock,
            match.run,
            (match.fetched.start, match.fetched.stop),
            worth_loading,
        )
        assert isinstance(result, MatchResult)
        return result

    def set_from_storage(self, request: Request, blocks: int) -> None:
        """Count blocks of a request's host run as read from storage."""
        self._blocks.set_from_storage(request, blocks)

    def set_loaded_ahead(self, request: Request, from_host: int, from_storage: int) -> None:
        """Count blocks of a request on the device as hits of the tiers that they were loaded from for it."""
        self._blocks.set_loaded_ahead(request, from_host, from_storage)

    def expect_from_peer(self, request: Request, source: PeerSource) -> int:
        """Extend a match by the blocks that only a peer has; return their number. Raises ``RequestStateError``."""
        count = self._blocks.expect_from_peer(request)
        request._unasked = source if count else None
        if count:
            self._sources[request.request_id] = source
        return count

    def begin_send(self, request: Request) -> None:
        """Keep the blocks of a request until as many calls of ``end_send``."""
        request._sends += 1
        self._num_sends += 1

    def end_send(self, request: Request) -> None:
        """Release a request that has finished meanwhile."""
        request._sends -= 1
        self._num_sends -= 1
        if not request._sends and request._is_finishing:
            request._is_finishing = False
            self.finish([request])

    @property
    def is_sending(self) -> bool:
        """True if blocks of some request are being sent."""
        return self._num_sends > 0

    def is_finishing(self, request: Request) -> bool:
        """Return True for a request that has finished, and whose blocks are still being sent."""
        return request._is_finishing

    # --- allocate -----------------------------------------------------------------------------------------

    def allocate(
        self, demands: list[tuple[Request, int]], plan: OpenPlan, forms: AllocationForms
    ) -> list[Allocation]:
        """Extend the block tables, and plan the loads of host runs and the copies of evicted blocks.

        Raises ``RequestStateError`` for a request that is not matched or demands less than its match found.
        """
        given: list[Allocation] = self._blocks.allocate(demands, plan.loads, self._live, forms)
        if self._sources:
            self._plan_fetches()
        # Copies of evicted blocks hold slots that were evictable: every slot is taken before the first copy is planned.
        if self._blocks.has_followed:
            self._pass_on(plan)
        return given

    def _plan_fetches(self) -> None:
        for request_id, lease, part, slots, generations in self._blocks.take_fetches():
            source, request = self._sources.pop(request_id), self._live[request_id]
            request._unasked = None
            self._planned.append(PlannedFetch(source, request, lease, part, slots, generations))

    def give_up_fetch(self, request: Request) -> None:
        """Do not ask a peer for blocks that an allocation has planned to fetch."""
        for each in self._planned:
            each.given_up |= each.request is request

    def take_unasked(self, request: Request) -> PeerSource | None:
        """Return the peer that a request would fetch from, once, if it got no room for that so far."""
        source, request._unasked = request._unasked, None
        return source

    def take_fetches(self) -> list[PlannedFetch]:
        """Return what allocations have planned to fetch from peers since the last call."""
        fetches, self._planned = self._planned, []
        return fetches

    # --- advance and commit -------------------------------------------------------------------------------

    def advance(
        self,
        requests: Sequence[Request],
        tokens: Tokens | Sequence[int | Tokens],
        uncomputed_tokens: int,
        plan: OpenPlan | None,
    ) -> AdvanceResult:
        """Append tokens, extend the block tables, publish full blocks. Without ``plan`` no table is extended."""
        result = self._blocks.advance(requests, tokens, uncomputed_tokens, plan is not None)
        if self._blocks.has_followed:
            self._pass_on(plan)
        return result

    def commit(self, progress: list[tuple[Request, int]]) -> None:
        """Publish the full blocks of the first tokens of each request, after the loads below them are confirmed.

        Raises ``RequestStateError`` for more tokens than a request, or its block table, has.
        """
        self._blocks.commit(progress)
        if self._blocks.has_followed:
            self._pass_on(None)

    # --- loads --------------------------------------------------------------------------------------------

    def load_of(self, request: Request) -> int:
        """Return the number of the load that a request waits for; 0 for none."""
        return request.load

    def take_outcomes(self) -> list[LoadOutcome]:
        """Return the ends of loads that requests wait for, each once, and publish what waited for them."""
        if not self.loads.has_ended:
            return []
        outcomes: list[LoadOutcome] = self._blocks.take_outcomes(self._load_forms)
        if self._blocks.has_followed:
            self._pass_on(None)
        return outcomes

    def _pass_on(self, plan: OpenPlan | None) -> None:
        """Tell the write policies and the host tier what the last call did."""
        copies, host = self._tiers.copies, self._tiers.host
        if copies is not None:
            copies.enqueue_from(self._blocks)
            if not self._blocks.has_followed:
                return
        evicted, owners = self._blocks.take_followed()
        if evicted is not None:
            assert copies is not None and plan is not None
            copies.evict(evicted, plan)
        if host is not None and host.service is not None:
            for block, tenant in owners:
                host.service.own(block, tenant)

    # --- end ----------------------------------------------------------------------------------------------

    def unmatch(self, request: Request) -> None:
        """Release a matched request; its reads from storage go on. Copies in flight hold their slots until reported."""
        self._sources.pop(request.request_id, None)
        self._blocks.release(request, self._live)

    def wait_for_reads(self, request: Request) -> None:
        """Release a request that waits for its reads from storage, which the prefetch policy bounds."""
        self._blocks.wait_for_reads(request, self._live)

    def finish(self, requests: list[Request]) -> None:
        """Release requests and end their reads from storage; copies in flight hold their slots until reported.

        A request whose blocks are being sent to a peer is released with the end of the last send.
        """
        if self._num_sends:
            for request in requests:
                if request._sends:
                    request._is_finishing = True
            requests = [request for request in requests if not request._sends]
        if self._fetches is not None:
            for request in requests:
                if request._fetch:
                    self._fetches.end(request._fetch)
                    request._fetch = 0
        if self._sources:
            for request in requests:
                self._sources.pop(request.request_id, None)
        self._blocks.finish(requests, self._live)
