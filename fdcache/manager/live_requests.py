"""The requests that hold blocks: which they are, what may be asked for them, and what they give back."""

from __future__ import annotations

from collections.abc import Sequence

from fdcache.errors import RequestStateError
from fdcache.hashing import TokenBlocks
from fdcache.layout import KVLayout
from fdcache.manager.requests import Request
from fdcache.manager.tiers import Tiers
from fdcache.metadata import HashArray


class LiveRequests:
    """Every request between its match and its end."""

    def __init__(self, layout: KVLayout, tiers: Tiers, lookahead: int) -> None:
        self._block_size = layout.block_size
        self._lookahead = lookahead
        self._fingerprint = layout.fingerprint
        self._former_fingerprints: set[bytes] = set()
        self._device = tiers.device
        self._host = tiers.host
        self._prefetcher = tiers.prefetcher
        self._by_id: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def bind(self, request: Request) -> TokenBlocks:
        """The request's tokens, hashed for this layout. Raises ``HashingError``, ``RequestStateError``."""
        return request._bind(self._block_size, self._fingerprint, self._lookahead, self._former_fingerprints)

    def matchable(self, request: Request) -> HashArray:
        """The hashes of the blocks that a match may find: short of the last token, and of the request's limit."""
        tokens = self.bind(request)
        limit = request.num_tokens - 1
        if request.max_cached_tokens is not None:
            limit = min(limit, request.max_cached_tokens)
        return tokens.hashes[: limit // self._block_size]

    def change_fingerprint(self, fingerprint: bytes) -> None:
        """From now on keys are those of another layout; running requests keep their blocks and publish no more."""
        self._former_fingerprints.add(self._fingerprint)
        self._former_fingerprints.discard(fingerprint)
        self._fingerprint = fingerprint
        self.stop_publishing()

    def stop_publishing(self) -> None:
        """After a reset: running requests keep their blocks, nobody will find them any more."""
        for request in self._by_id.values():
            request._publishes = False

    # --- what may be asked for them ------------------------------------------------------------------------

    def check_match(self, requests: Sequence[Request]) -> None:
        """Raise for the first request that cannot be matched, before anything changes for any of them."""
        seen: dict[str, Request] = {}
        for request in requests:
            if request._lease or seen.get(request.request_id) is request:
                raise RequestStateError(
                    f"request {request.request_id!r} is matched or running; finish it before it is matched again"
                )
            if request.request_id in self._by_id or request.request_id in seen:
                raise RequestStateError(f"another request with the id {request.request_id!r} is running")
            self.bind(request)
            seen[request.request_id] = request

    def check_allocate(self, demands: Sequence[tuple[Request, int]]) -> None:
        """As ``check_match``, for requests that cannot be given so many tokens' blocks."""
        for request, num_tokens in demands:
            if self._by_id.get(request.request_id) is not request:
                raise RequestStateError(
                    f"request {request.request_id!r} has to be matched before it gets blocks"
                )
            if num_tokens < request.num_cached_tokens:
                raise RequestStateError(
                    f"request {request.request_id!r}: {num_tokens} tokens are fewer than the "
                    f"{request.num_cached_tokens} that its match found"
                )

    def check_commit(self, progress: Sequence[tuple[Request, int]]) -> None:
        """As ``check_match``, for requests that have no blocks or not so many tokens."""
        for request, num_tokens in progress:
            limit = min(request.num_tokens, len(request._table) * self._block_size)
            if self._by_id.get(request.request_id) is not request or not 0 <= num_tokens <= limit:
                raise RequestStateError(
                    f"request {request.request_id!r}: cannot commit {num_tokens} tokens, it has blocks for {limit}"
                )

    # --- what they hold ------------------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """From now on it may hold blocks."""
        self._by_id[request.request_id] = request
        request._lease = self._device.open_lease()

    def drop_host_run(self, request: Request) -> None:
        """Unpin the host blocks of its match: their loads are planned, or nobody wants them."""
        request._host_run = None
        if self._host and request._host_lease:
            self._host.release(request._host_lease)
            request._host_lease = 0

    def let_go(self, request: Request) -> None:
        """Release what a match pinned; its reads from storage go on."""
        if self._by_id.get(request.request_id) is not request:
            return
        del self._by_id[request.request_id]
        self.drop_host_run(request)
        self._device.release(request._lease)
        request._reset()

    def defer(self, request: Request) -> None:
        """As ``let_go``; it has been waiting for another's copy since it was deferred first."""
        since = request._deferred_since
        self.let_go(request)
        request._deferred_since = since

    def finish(self, request: Request) -> None:
        """Give back everything the request holds; copies under way keep their slots until they are reported."""
        if self._prefetcher:
            self._prefetcher.release(request)
        self.let_go(request)
        request._hit_blocks = 0
