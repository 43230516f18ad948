"""Requests: their tokens and hashes, and the blocks that each one holds between its match and its end.

The state of a request and the work of a step are native (``RequestState``, ``BlockManager``). This module adds what
only requests with a host or storage tier have: runs of host blocks, their loads, reads from storage, and the news that
the write policies follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from fdcache._core import AdvanceResult, BlockManager, RequestState
from fdcache.errors import IntegrityError, RequestStateError
from fdcache.hashing import MultimodalItem, Tokens, encode_text, make_extra_keys
from fdcache.layout import KVLayout
from fdcache.manager.tiers import Tiers
from fdcache.metadata import HashArray, Int32Array, SwapPurpose, UInt32Array
from fdcache.plans.blocks import Blocks, joined
from fdcache.plans.ledger import OpenPlan
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.statistics import Counters


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
    load of the request misses its deadline. ``max_cached_tokens``: the most tokens that a match may return.

    ``block_table`` and ``block_hashes`` are views of native arrays, which later growth does not change.

    Raises ``HashingError`` for a tenant, an adapter or multimodal items that cannot be hashed.
    """

    _fetch = 0
    _deferred_since: float | None = None
    _host_run: Blocks | None = None
    _host_lease = 0
    _fetched_blocks = 0
    _peer: PeerSource | None = None
    _peer_blocks = 0
    _sends = 0
    _is_finishing = False

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
        super().__init__(
            request_id,
            prompt,
            None if tenant is None else encode_text("tenant", tenant),
            make_extra_keys(adapter_id, multimodal) if multimodal or adapter_id is not None else None,
            use_cache,
            device_only,
            max_cached_tokens,
        )

    def __repr__(self) -> str:
        state = "running" if self.is_live else "not matched"
        return f"<Request {self.request_id!r}: {self.num_tokens} tokens, {self.num_blocks} blocks, {state}>"


class PeerSource(msgspec.Struct, frozen=True):
    """A hand-over that decode may fetch: its name, and the address of each rank of the prefill instance.

    ``attempt`` is higher for each repetition by the same or another decode process.
    """

    transfer: str
    addresses: tuple[str, ...]
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class PlannedFetch:
    """Blocks of one request to fetch from a peer into these slots."""

    source: PeerSource
    run: Blocks
    slots: Int32Array
    generations: UInt32Array
    load: LoadRange


class StepPlan(OpenPlan):
    """The transfers of one scheduler step, the requests that wait for its loads, and what they fetch from peers."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[LoadRange] = []
        self.fetches: list[PlannedFetch] = []


class LiveRequests:
    """The requests that are matched or running, by id, and the device blocks that they hold."""

    def __init__(self, settings: CacheSettings, layout: KVLayout, tiers: Tiers, counters: Counters) -> None:
        self._caches_prefixes = settings.enable_prefix_caching
        self._block_size = layout.block_size
        self._tiers = tiers
        self._fetches = tiers.fetches
        self._counters = counters
        self._live: dict[str, Request] = {}
        backups = tiers.backups
        self._blocks = BlockManager(
            tiers.device,
            layout.block_size,
            layout.fingerprint,
            settings.lookahead_tokens,
            settings.enable_prefix_caching,
            follow_stored=backups is not None and backups.follows_commits,
            follow_evicted=backups is not None,
            follow_owners=tiers.host is not None,
            follow_hits=backups.follows_hits if backups else 0,
        )

    def __len__(self) -> int:
        return len(self._live)

    def prepare(self, request: Request) -> None:
        """Hash the tokens of a request, unless they are hashed. Raises ``HashingError``, ``RequestStateError``."""
        self._blocks.prepare(request)

    def matchable(self, request: Request) -> HashArray:
        """Return the hashes that a match may find: not the last token's block, nor any above the request's limit."""
        self._blocks.prepare(request)
        return request.block_hashes[: self._blocks.matchable(request)]

    def publishes(self, request: Request) -> bool:
        """Return True for a live request whose blocks can be found by others, and which finds those of others."""
        return self._blocks.publishes(request)

    def fetch_number(self, request: Request) -> int:
        """Return the number of the request's fetch from storage, the same until the request ends; 0 without one."""
        if self._fetches is not None and not request._fetch:
            request._fetch = self._fetches.number()
        return request._fetch

    def may_prefetch(self, request: Request) -> bool:
        """Return True for a request that is not matched yet and may load blocks."""
        may_reuse = self._caches_prefixes and request.use_cache and not request.device_only
        return may_reuse and not request.is_live

    def change_fingerprint(self, fingerprint: bytes) -> None:
        """Hash with another layout from now on; running requests keep their blocks and publish no more."""
        self._blocks.change_fingerprint(fingerprint)

    def stop_publishing(self) -> None:
        """Let running requests keep their blocks and publish no more, as after a reset."""
        self._blocks.stop_publishing()

    def count(self, counters: Counters) -> None:
        """Add what the native side has counted."""
        found = self._blocks.stats
        counters.lookups += found.lookups
        counters.lookup_tokens += found.lookup_tokens
        counters.device_hit_tokens += found.device_hit_tokens
        counters.allocation_failures += found.allocation_failures

    # --- match --------------------------------------------------------------------------------------------

    def check_match(self, requests: list[Request]) -> None:
        """Raise ``RequestStateError`` or ``HashingError`` for the first request that cannot be matched."""
        self._blocks.check_match(requests, self._live)

    def match_all(self, requests: list[Request]) -> None:
        """Check requests and pin their blocks on the device. Without copies in flight to it, nothing is pending."""
        self._blocks.match_all(requests, self._live)

    def match_device(self, request: Request, limit: int) -> bool:
        """Begin a request with the leading run of its first ``limit`` blocks on the device, and pin it.

        Return True if another request is loading the block after the run. A request counts as one hit of each block,
        however often it is matched.
        """
        pending = self._blocks.match(request, limit, self._live)
        self._pass_on(None)
        return pending

    def shorten(self, request: Request, limit: int) -> bool:
        """Match a request again, up to ``limit`` blocks."""
        pending = self._blocks.shorten(request, limit)
        self._pass_on(None)
        return pending

    def pin_host(self, request: Request, lease: int) -> None:
        """Hold the host lease of a match until ``accept``, ``drop_host_run`` or the request's end."""
        request._host_lease = lease

    def accept(self, request: Request, host_run: Blocks | None, fetched_blocks: int) -> int:
        """Begin with the device blocks pinned and this run; return how many tokens they cover.

        ``fetched_blocks`` of the run came from storage.
        """
        if host_run is None:
            self._drop_host_run(request)
        else:
            request._host_run = host_run
            request._fetched_blocks = fetched_blocks
            self._blocks.accept(request, request.num_blocks + len(host_run))
        request._deferred_since = None
        return request.num_cached_tokens

    def _drop_host_run(self, request: Request) -> None:
        """Unpin the host blocks of the match: their loads are planned, or they are not needed."""
        request._host_run = request._peer = None
        request._peer_blocks = 0
        if request._host_lease and self._tiers.host:
            self._tiers.host.release(request._host_lease)
            request._host_lease = 0

    def expect_from_peer(self, request: Request, source: PeerSource) -> int:
        """Extend a match by the blocks that only a peer has; return their number. Raises ``RequestStateError``."""
        run = request._host_run
        if not request.is_live or request._peer is not None:
            raise RequestStateError(f"request {request.request_id!r}: fetch follows a match, once")
        start = request.num_blocks + (0 if run is None else len(run))
        stop = len(self.matchable(request))
        if start >= stop or not self.publishes(request) or request.device_only:
            return 0
        positions = np.arange(start, stop, dtype=np.int32)
        above = Blocks.of_path(request.block_hashes, start, positions, np.zeros(stop - start, np.uint32))
        request._host_run = above if run is None else joined(run, above)
        request._peer, request._peer_blocks = source, stop - start
        self._blocks.accept(request, stop)
        return stop - start

    def begin_send(self, request: Request) -> None:
        """Keep the blocks of a request until as many calls of ``end_send``."""
        request._sends += 1

    def end_send(self, request: Request) -> None:
        """Release a request that has finished meanwhile."""
        request._sends -= 1
        if not request._sends and request._is_finishing:
            request._is_finishing = False
            self.finish(request)

    def is_finishing(self, request: Request) -> bool:
        """Return True for a request that has finished, and whose blocks are still being sent."""
        return request._is_finishing

    def deferred_for(self, request: Request, now: float) -> float:
        """Return the seconds since the request was deferred first; 0.0 starts the clock."""
        if request._deferred_since is None:
            request._deferred_since = now
        return now - request._deferred_since

    # --- allocate -----------------------------------------------------------------------------------------

    def check_allocate(self, demands: Iterable[tuple[Request, int]]) -> None:
        """Raise ``RequestStateError`` for a request that is not matched or demands less than its match found."""
        for request, num_tokens in demands:
            self._blocks.check_allocate(request, num_tokens)

    def refresh_host_run(self, request: Request) -> bool:
        """Take blocks of the host run that others have loaded since the match as device hits.

        Return False when the request has to be matched again: another request is loading the next block, or a reset
        took the run away.
        """
        run = request._host_run
        if run is None:
            return True
        if not self._blocks.publishes(request):
            return False
        start = request.num_blocks
        pending = self._blocks.match_more(request, start + len(run))
        self._pass_on(None)
        found = request.num_blocks - start
        if found == len(run):
            self._drop_host_run(request)
        elif found:
            request._host_run = run.select(slice(found, None))
            request._peer_blocks = min(request._peer_blocks, len(run) - found)
        return not pending

    def allocate(self, request: Request, num_tokens: int, plan: StepPlan) -> int:
        """Extend the block table to ``num_tokens`` tokens; return how many blocks are missing, then nothing changes.

        Plan the loads of the host run, and the copies of evicted blocks.
        """
        run = request._host_run
        if run is not None:
            wanted = -(-num_tokens // self._block_size) - request.num_blocks
            if (missing := wanted - self._tiers.device.available) > 0:
                self._counters.allocation_failures += 1
                return missing
            self._count_host_hits(request, run)
            self._plan_loads(request, run, plan)
        missing = self._blocks.allocate(request, num_tokens)
        if missing and run is not None:
            raise IntegrityError(f"request {request.request_id!r}: {missing} available blocks are gone")
        # Copies of evicted blocks hold slots that were evictable: every slot is taken before the first copy is planned.
        self._pass_on(plan)
        return missing

    def take_added_blocks(self, request: Request) -> Int32Array:
        """Return the slots added to the block table since the match or the last call."""
        return self._blocks.take_added(request)

    def _count_host_hits(self, request: Request, run: Blocks) -> None:
        run = run.select(slice(len(run) - request._peer_blocks))
        if self._blocks.count_hits(request):
            from_storage = min(request._fetched_blocks, len(run))
            self._counters.host_hit_tokens += (len(run) - from_storage) * self._block_size
            self._counters.storage_hit_tokens += from_storage * self._block_size

    def _plan_loads(self, request: Request, run: Blocks, plan: StepPlan) -> None:
        """Reserve device blocks for the run, and plan its copies from the host and its fetch from a peer."""
        first = request.num_blocks
        taken = self._blocks.reserve_copies(request, run.parents, run.hashes)
        if len(taken) != len(run):
            raise IntegrityError(
                f"request {request.request_id!r}: {len(run)} loads got {len(taken)} device blocks"
            )
        count = len(run) - request._peer_blocks
        if request._peer is not None and request._peer_blocks:
            load = LoadRange(
                self, request, request.lease, 0, request._peer_blocks, first + count, is_fetch=True
            )
            above = run.select(slice(count, None))
            fetch = PlannedFetch(request._peer, above, taken.slots[count:], taken.generations[count:], load)
            plan.fetches.append(fetch)
        if count:
            assert self._tiers.host
            below = run.select(slice(count))
            self._tiers.host.begin_load(request._host_lease, below.slots)
            has_fetch = count < len(run)
            offset = plan.add(SwapPurpose.LOAD, below, taken.slots[:count], taken.generations[:count])
            plan.loads.append(
                LoadRange(self, request, request.lease, offset, count, first, has_fetch=has_fetch)
            )
        self._drop_host_run(request)

    # --- advance and commit -------------------------------------------------------------------------------

    def advance(
        self,
        requests: Sequence[Request],
        tokens: Tokens | Sequence[int | Tokens],
        uncomputed_tokens: int,
        plan: StepPlan | None,
    ) -> AdvanceResult:
        """Append tokens, extend the block tables, publish full blocks. Without ``plan`` no table is extended."""
        result = self._blocks.advance(requests, tokens, uncomputed_tokens, plan is not None)
        self._pass_on(plan)
        return result

    def commit(self, progress: list[tuple[Request, int]]) -> None:
        """Publish the full blocks of the first tokens of each request, after the loads below them are confirmed.

        Raises ``RequestStateError`` for more tokens than a request, or its block table, has.
        """
        self._blocks.commit(progress)
        self._pass_on(None)

    def end_load(self, request: Request, copied: int, planned: int) -> None:
        """Count the leading blocks of a load that every rank copied, and publish what waited for all of them."""
        self._blocks.end_load(request, copied, planned)
        self._pass_on(None)

    def _pass_on(self, plan: StepPlan | None) -> None:
        """Tell the write policies and the host tier what the last call did."""
        if not self._blocks.has_followed:
            return
        stored, hit, evicted, owners = self._blocks.take_followed()
        backups, host = self._tiers.backups, self._tiers.host
        if backups is not None:
            for hashes in (hit, stored):
                if hashes is not None:
                    backups.enqueue(hashes)
            if evicted is not None:
                assert plan is not None
                backups.on_evict([evicted], plan)
        if host is not None:
            for block, tenant in owners:
                host.own(block, tenant)

    # --- end ----------------------------------------------------------------------------------------------

    def unmatch(self, request: Request) -> None:
        """Release a matched request; its reads from storage go on. Copies in flight hold their slots until reported."""
        if self._blocks.release(request, self._live):
            self._drop_host_run(request)
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
        """Release a request and end its reads from storage; copies in flight hold their slots until reported.

        A request whose blocks are being sent to a peer is released with the end of the last send.
        """
        if request._sends:
            request._is_finishing = True
            return
        if self._fetches is not None and request._fetch:
            self._fetches.end(request._fetch)
            request._fetch = 0
        self.unmatch(request)
        self._blocks.forget_hits(request)


@dataclass(frozen=True, slots=True)
class LoadRange:
    """The part of a plan's loads that one request waits for: blocks from ``first_block`` of its path on.

    ``lease`` is that of the request when the load was planned. ``is_fetch``: from a peer. ``has_fetch``: the blocks
    above are fetched, so that the outcome comes with the end of both.
    """

    requests: LiveRequests
    request: Request
    lease: int
    offset: int
    count: int
    first_block: int
    is_fetch: bool = False
    has_fetch: bool = False

    @property
    def is_waited_for(self) -> bool:
        """False once the request was released: the load ends without an outcome then."""
        return self.request.lease == self.lease

    def end(self, copied: int) -> None:
        """Count the leading blocks that every rank copied."""
        self.requests.end_load(self.request, copied, self.count)
