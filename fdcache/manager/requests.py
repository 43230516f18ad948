"""Request: the cache's view of one engine request."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fdcache.errors import RequestStateError
from fdcache.hashing import MultimodalItem, TokenBlocks, Tokens, root_hash
from fdcache.metadata import HashArray, Int32Array, UInt32Array

if TYPE_CHECKING:
    from fdcache.tiers.fetches import Fetch


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
        """The slots so far; a view that later growth does not change."""
        return self._buffer[: self._size]


@dataclass(slots=True)
class HostRun:
    """Host blocks of a match that wait to be loaded: ``slots[i]`` holds block ``start + i`` of the path."""

    start: int
    slots: Int32Array
    generations: UInt32Array
    unverified: HashArray | None = None

    def __len__(self) -> int:
        return len(self.slots)

    def without(self, count: int) -> HostRun:
        """The run less its first ``count`` blocks."""
        unverified = None if self.unverified is None else self.unverified[count:]
        return HostRun(self.start + count, self.slots[count:], self.generations[count:], unverified)


class Request:
    """Tokens, block hashes and device blocks of one request.

    ``prompt``: token ids. ``multimodal``: items whose content the token ids do not tell. ``adapter_id`` and ``tenant``
    keep their blocks apart from all others. ``use_cache=False``: neither reuses blocks nor leaves any behind.
    ``device_only``: reuses what is on the device and nothing that would have to be loaded; the manager sets it when a
    load of the request is overdue, so that no request waits in vain a second time.
    ``max_cached_tokens``: a match finds no more than these, where an engine cannot begin anywhere.
    The underscored fields belong to the manager.
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
        self._blocks: TokenBlocks | None = None
        self._namespace: tuple[int, bytes, int] | None = None
        self._incarnation = 0
        self._fetch: Fetch | None = None
        self._fetch_number = 0
        self._hit_blocks = 0
        self._reset()

    def _reset(self) -> None:
        """Back to a request that holds nothing; what it held must have been released."""
        self.num_cached_tokens = 0
        self._fetched_blocks = 0
        self._table = BlockTable()
        self._told_blocks = 0
        self._lease = 0
        self._host_lease = 0
        self._host_run: HostRun | None = None
        self._counted = False
        self._publishes = self.use_cache
        self._committed_blocks = 0
        self._reported_tokens = 0
        self._loading = False
        self._deferred_since: float | None = None
        self._incarnation += 1

    def _bind(
        self, block_size: int, fingerprint: bytes, lookahead: int = 0, former: Set[bytes] = frozenset()
    ) -> TokenBlocks:
        """The tokens, made at first use: the keys depend on the layout and on how far its draft layers look ahead.

        A request that holds nothing is hashed anew if it was bound to one of the ``former`` fingerprints. Raises
        ``HashingError`` for tokens that cannot be hashed.
        """
        renewed = not self._lease and self._namespace is not None and self._namespace[1] in former
        if self._blocks is None or renewed:
            tokens = TokenBlocks(
                block_size,
                root_hash(fingerprint, self._tenant),
                multimodal=self._multimodal,
                adapter_id=self._adapter_id,
                lookahead=lookahead,
            )
            tokens.append(self._prompt if self._blocks is None else self._blocks.tokens)
            self._blocks = tokens
            self._namespace = (block_size, fingerprint, lookahead)
        elif self._namespace != (block_size, fingerprint, lookahead):
            raise RequestStateError(
                f"request {self.request_id!r} was matched by a manager of another layout or look-ahead; "
                "make a new request"
            )
        return self._blocks

    @property
    def num_tokens(self) -> int:
        """Prompt and appended tokens."""
        return self.num_prompt_tokens if self._blocks is None else self._blocks.num_tokens

    @property
    def block_table(self) -> Int32Array:
        """Device slots in path order."""
        return self._table.slots

    @property
    def is_loading(self) -> bool:
        """Whether a load of its blocks is planned or under way whose outcome has not been told."""
        return self._loading

    @property
    def block_hashes(self) -> HashArray:
        """Hashes of the full blocks so far, shape (blocks, 32); empty before the first match.

        With a look-ahead a block has a hash once the tokens are there that its KV depends on.
        """
        return np.empty((0, 32), np.uint8) if self._blocks is None else self._blocks.hashes

    def append_tokens(self, tokens: Tokens) -> None:
        """Add accepted generated tokens. Raises ``RequestStateError`` before the first match."""
        if self._blocks is None:
            raise RequestStateError(f"request {self.request_id!r} has to be matched before it gets tokens")
        self._blocks.append(tokens)
