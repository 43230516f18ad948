"""Chained block hashes: the keys of every tier.

    root = root_hash(layout.fingerprint)
    hashes = hash_blocks(prompt_tokens, layout.block_size, parent=root)     # shape (blocks, 32)

A block's hash covers its tokens, everything before it, and whatever else determines its KV: model and layout (the
fingerprint), tenant, adapter, multimodal items, and the tokens after it if draft layers look ahead. docs/format.md
defines every byte.
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
"""Token ids: list or tuple of int, or a one-dimensional int32 or int64 array. Each must fit an int32."""


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image, clip or the like, whose placeholders are the tokens [offset, offset + length) of a request.

        MultimodalItem(offset=12, length=576, hash="sha256:...")

    ``hash`` identifies the content; a text and bytes are never equal.

    Raises:
        HashingError: a field is out of range.
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
    """Tokens of one request and the hashes of its full blocks.

        blocks = TokenBlocks(64, root_hash(layout.fingerprint))
        blocks.append(prompt_tokens)
        blocks.hashes     # shape (num_blocks, 32)

    ``append`` takes an int or ``Tokens`` and hashes the blocks that become full. If it raises ``HashingError``, it
    changes nothing. With ``lookahead`` a block's hash covers that many tokens after it, and exists once they do.
    ``hashes`` and ``tokens`` (num_tokens,) are read-only snapshots without a copy; they stay valid and unchanged
    while the request grows.

    Raises:
        HashingError: a bad block size, root or look-ahead, or items that overlap or are out of order.
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
        super().__init__(block_size, root, make_extra_keys(adapter_id, multimodal), lookahead)


def root_hash(fingerprint: bytes, tenant: str | None = None) -> bytes:
    """Return the parent hash (32 bytes) of first blocks: one chain for each layout fingerprint and tenant."""
    return _core.root_hash(fingerprint, encode_text("tenant", tenant))


def tenant_key(tenant: str | None) -> bytes:
    """Return 16 bytes that identify a tenant without its name; zeros for no tenant."""
    name = encode_text("tenant", tenant)
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
    """Return the hashes of the full blocks in ``tokens``, shape (blocks, 32).

    Args:
        tokens: token ids from token ``start`` of the request on. An incomplete block at the end is left out.
        block_size: tokens of a block.
        parent: hash of the block before ``start``; the root if ``start`` is 0.
        start: position of the first token, a multiple of ``block_size``.
        adapter_id: LoRA adapter or the like.
        multimodal: items of the request, in order, without overlaps.
        lookahead: tokens after a block that its hash covers.

    Raises:
        HashingError: a token is not a 32-bit integer; the message names the first one.
    """
    return _core.hash_blocks(
        tokens, block_size, parent, start, make_extra_keys(adapter_id, multimodal), lookahead
    )


def make_extra_keys(adapter_id: str | None, items: Sequence[MultimodalItem]) -> _core.ExtraKeys:
    """Return the native form of what a request's hashes cover. Raises ``HashingError``."""
    converted = []
    for item in items:
        if not isinstance(item, MultimodalItem):
            raise HashingError(f"multimodal must hold MultimodalItem, got {item!r}")
        is_text = isinstance(item.hash, str)
        data = item.hash if isinstance(item.hash, bytes) else _text("multimodal hash", item.hash)
        converted.append((item.offset, item.length, data, is_text))
    return _core.ExtraKeys(encode_text("adapter_id", adapter_id), converted)


def encode_text(name: str, value: str | None) -> bytes | None:
    """Return text as UTF-8. Raises ``HashingError`` naming the argument."""
    return None if value is None else _text(name, value)


def _text(name: str, value: str) -> bytes:
    if not isinstance(value, str):
        raise HashingError(f"{name} must be text, got {value!r}")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise HashingError(f"{name} must be text that UTF-8 can encode, got {value!r}") from error


SGLANG = "sglang "
"""Beginning of the revision of a layout whose blocks have the keys of SGLang."""


def sglang_keys(
    tokens: Sequence[int],
    page_size: int,
    *,
    adapter: str | None = None,
    salt: str | None = None,
    above: bytes = b"",
) -> HashArray:
    """Return the keys that SGLang gives to the whole pages of a prompt, or of its part below the page of this key.

    ``adapter`` and ``salt`` are the ``extra_key`` and ``cache_salt`` of its requests.
    """
    if not above and (adapter is not None or salt is not None):
        above = _sglang_seed(adapter, salt)
    words = np.asarray(tokens, np.uint32).astype("<u4")
    keys = np.empty((len(words) // page_size, 32), np.uint8)
    for page in range(len(keys)):
        above = hashlib.sha256(above + words[page * page_size : (page + 1) * page_size].tobytes()).digest()
        keys[page] = np.frombuffer(above, np.uint8)
    return keys


def _sglang_seed(*parts: str | None) -> bytes:
    digest = hashlib.sha256(b"sglang-cache-namespace-v1")
    for part in parts:
        encoded = b"" if part is None else part.encode()
        digest.update(b"\0" if part is None else b"\1" + len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()
