"""KeyedRequest: a request whose block keys the engine makes itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fdcache import _core
from fdcache.errors import HashingError, RequestStateError
from fdcache.hints import Hint, HintOutcome
from fdcache.manager.requests import Request
from fdcache.metadata import HashArray
from fdcache.plans.ledger import ROOT

_KEY_BYTES = 32


class KeyedRequest:
    """A request of an engine that names its blocks by keys of its own, for an ``OffloadManager``.

    ::

        request = KeyedRequest("chat-1", keys, layout.block_size)
        request = KeyedRequest("chat-1", keys_of_the_tail, layout.block_size, parent=key_of_the_block_before)

    ``keys``: uint8, shape (blocks, 32), of whole blocks; each covers everything that its block's KV depends on. The
    layout's ``revision`` has to name the scheme that makes them: a key means another block under another scheme.

    The run may begin anywhere in a prompt. ``parent`` is the key of the block before it: 32 zero bytes for a run from
    the beginning, None where the engine does not know it. Numbers of tokens count from the first key on. A run without
    a known parent is stored, found and read from storage like any other; it is joined to the block before it once a
    match or an offer shows that one.

    ``hints`` and ``hint_outcomes``: as for ``Request``; all blocks count as prompt.

    Raises ``HashingError`` for keys that are not 32 bytes each, and for those of zeros or of ones alone: they stand for
    the beginning of a prompt, and for an unknown parent.
    """

    hints: Sequence[Hint] = ()
    hint_outcomes: Sequence[HintOutcome] = ()

    def __init__(
        self,
        request_id: str,
        keys: HashArray,
        block_size: int,
        *,
        parent: bytes | None = ROOT,
        tenant: str | None = None,
        use_cache: bool = True,
        device_only: bool = False,
    ) -> None:
        if parent is not None and not (isinstance(parent, bytes) and len(parent) == _KEY_BYTES):
            raise HashingError(f"parent: a key is {_KEY_BYTES} bytes, got {parent!r}")
        if block_size < 1:
            raise HashingError(f"block_size has to be at least 1, got {block_size}")
        self.request_id = request_id
        self.block_hashes = checked_keys(keys)
        self.parent = parent
        self.tenant = tenant
        self.use_cache = use_cache
        self.device_only = device_only
        self._block_size = block_size

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the blocks that have a key."""
        return len(self.block_hashes) * self._block_size

    @property
    def num_prompt_tokens(self) -> int:
        """The same: keys do not tell prompt and output apart."""
        return self.num_tokens

    def append_keys(self, keys: HashArray) -> None:
        """Append the keys of further blocks. Raises ``HashingError``."""
        self.block_hashes = np.concatenate((self.block_hashes, checked_keys(keys)))


OffloadRequest = Request | KeyedRequest
"""A request of an ``OffloadManager``."""


def not_a_request(value: object) -> RequestStateError:
    """Return the error for anything but a request."""
    return RequestStateError(f"request has to be a Request or KeyedRequest, got {type(value).__name__}")


def checked_keys(keys: Any) -> HashArray:
    """Return keys as a contiguous array. Raises ``HashingError`` for anything else."""
    if (
        not isinstance(keys, np.ndarray)
        or keys.dtype != np.uint8
        or keys.ndim != 2
        or keys.shape[1] != _KEY_BYTES
    ):
        raise HashingError(f"keys must be a uint8 array of shape (blocks, {_KEY_BYTES})")
    checked: HashArray = np.ascontiguousarray(keys)
    if _core.has_reserved_keys(checked):
        raise HashingError(
            "keys: a row is all zero or all ones, which stand for the start of a prompt and for an unknown parent"
        )
    return checked
