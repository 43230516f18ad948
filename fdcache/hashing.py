"""Chained block hashes: the keys of every tier.

A block's hash covers its tokens, everything before it, and what else decides its KV: model and layout (the
fingerprint), tenant, adapter, multimodal items, and the tokens after it where draft layers look ahead. docs/format.md
writes every byte down.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache.errors import HashingError
from fdcache.metadata import HashArray

TENANT_BYTES = 16
NO_TENANT = bytes(TENANT_BYTES)

Tokens: TypeAlias = "Sequence[int] | NDArray[np.int32] | NDArray[np.int64] | array[int]"
"""Token ids: list or tuple of int, or a one-dimensional int32 or int64 array; each must fit an int32."""


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image, clip or the like whose placeholders are the tokens [offset, offset + length) of a request.

    ``hash`` identifies its content; text and bytes never count as equal. Raises ``HashingError``.
    """

    offset: int
    length: int
    hash: str | bytes

    def __post_init__(self) -> None:
        for name, value, least in (("offset", self.offset, 0), ("length", self.length, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**62:
                raise HashingError(f"multimodal {name} must be an int of at least {least}, got {value!r}")
        if not isinstance(self.hash, str | bytes) or not self.hash:
            raise HashingError(f"multimodal hash must be non-empty text or bytes, got {self.hash!r}")


class TokenBlocks(_core.TokenBlocks):
    """The tokens of one request and the hashes of its full blocks, growing at the end.

    With ``lookahead`` a block's hash covers that many tokens after it, and is there once they are. ``append`` takes
    an int or ``Tokens`` and hashes the blocks that it completes; a call that raises ``HashingError`` changes nothing.
    ``hashes`` (num_blocks, 32) and ``tokens`` (num_tokens,) are read-only snapshots that copy nothing and stay valid
    and unchanged while the request grows.

    Raises ``HashingError`` for a bad block size, root or look-ahead, or items that overlap or are out of order.
    """

    __slots__ = ()

    def __init__(
        self,
        block_size: int,
        root: bytes,
        *,
        adapter_id: str | None = None,
        multimodal: Sequence[MultimodalItem] = (),
        lookahead: int = 0,
    ) -> None:
        super().__init__(block_size, root, _extra_keys(adapter_id, multimodal), lookahead)


def root_hash(fingerprint: bytes, tenant: str | None = None) -> bytes:
    """The 32 bytes that stand before the first block: one chain for each layout fingerprint and tenant."""
    return _core.root_hash(fingerprint, _encode("tenant", tenant))


def tenant_key(tenant: str | None) -> bytes:
    """The 16 bytes that stand for a tenant where its name is nobody's business; zeros for no tenant."""
    name = _encode("tenant", tenant)
    return NO_TENANT if name is None else hashlib.sha256(b"fdcache.tenant.1" + name).digest()[:TENANT_BYTES]


def hash_blocks(
    tokens: Tokens,
    block_size: int,
    *,
    parent: bytes,
    start: int = 0,
    adapter_id: str | None = None,
    multimodal: Sequence[MultimodalItem] = (),
    lookahead: int = 0,
) -> HashArray:
    """The hashes of the full blocks in ``tokens``, shape (blocks, 32).

    ``tokens`` begin at token ``start`` of the request, a multiple of ``block_size``; ``parent`` is the hash
    of the block before them, or the root when ``start`` is 0. With ``lookahead`` a hash covers that many tokens
    after its block. Blocks whose tokens are not all there are left out. Raises ``HashingError`` naming the first
    token that is not an integer of 32 bits.
    """
    return _core.hash_blocks(
        tokens, block_size, parent, start, _extra_keys(adapter_id, multimodal), lookahead
    )


def get_block_hash_extra_keys(
    items: Sequence[MultimodalItem] | None, start: int, end: int, mm_idx: int
) -> tuple[int, list[str | bytes]]:
    """The keys of the items that the block of tokens [start, end) meets, searching from item ``mm_idx`` on.

    Also returns the index from which to search for the next block. An item that crosses ``end`` is met again
    by the next block; one that ends at ``start``, or starts at ``end``, is outside.
    """
    if not items:
        return mm_idx, []
    if mm_idx < 0:
        raise HashingError(f"mm_idx must be at least 0, got {mm_idx}")
    index, found = _extra_keys(None, items).block_items(start, end, mm_idx)
    return index, [items[position].hash for position in found]


def _extra_keys(adapter_id: str | None, items: Sequence[MultimodalItem]) -> _core.ExtraKeys:
    converted = []
    for item in items:
        if not isinstance(item, MultimodalItem):
            raise HashingError(f"multimodal must hold MultimodalItem, got {item!r}")
        is_text = isinstance(item.hash, str)
        data = item.hash if isinstance(item.hash, bytes) else _text("multimodal hash", item.hash)
        converted.append((item.offset, item.length, data, is_text))
    return _core.ExtraKeys(_encode("adapter_id", adapter_id), converted)


def _encode(name: str, value: str | None) -> bytes | None:
    return None if value is None else _text(name, value)


def _text(name: str, value: str) -> bytes:
    if not isinstance(value, str):
        raise HashingError(f"{name} must be text, got {value!r}")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise HashingError(f"{name} must be text that UTF-8 can encode, got {value!r}") from error
