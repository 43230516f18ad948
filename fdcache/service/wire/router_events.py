"""Events for routers, in the form of vLLM 0.33, and how the blocks of a tier become runs in them.

A message has the frames topic, sequence number (8 bytes, big endian) and an ``EventBatch`` in msgpack. Field names,
order and tags are those that vLLM has; ``cache_salt`` is Dynamo's, which others ignore.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fdcache.metadata import CacheLevel

MEDIUM = {CacheLevel.DEVICE: "GPU", CacheLevel.HOST: "CPU", CacheLevel.STORAGE: "STORAGE"}
MOST_IN_RUN = 512
"""Blocks of one event."""
_UINT32 = np.dtype([("tag", "u1"), ("value", ">u4")])
"""A number in msgpack."""
END = (-1).to_bytes(8, "big", signed=True)
"""Number of the message that ends an answer of the replay socket."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Events of one moment, ``ts`` seconds since the epoch."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class RouterBlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    """Blocks of one path, in order, came to a tier. ``extra_keys`` has an entry for each."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int] | msgspec.Raw
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    cache_salt: str | None = None


class RouterBlockRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    """Blocks left a tier."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True):
    """Every tier is empty."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What the blocks of one request have in common for routers."""

    lora_name: str | None = None
    lora_id: int | None = None
    salt: str | None = None
    session: str | None = None


class RouterBlock(NamedTuple):
    """A block as routers know it: ``name`` and ``parent`` are its hash and that of the block before it.

    ``tokens`` are a list, or the bytes of int32. ``extra``: what its hash covers beside the tokens, as vLLM's
    ``extra_keys``. ``ahead``: tokens beyond it that its hash covers.
    """

    name: Any
    parent: Any
    tokens: list[int] | bytes
    origin: Origin
    extra: tuple[Any, ...] | None = None
    group: int | None = None
    ahead: list[int] | None = None


def runs_of(blocks: Iterable[RouterBlock]) -> Iterator[list[RouterBlock]]:
    """Yield runs of blocks that each follow the one before, for one event each."""
    run: list[RouterBlock] = []
    for block in blocks:
        if run:
            last = run[-1]
            is_next = block.parent == last.name and block.group == last.group and len(run) < MOST_IN_RUN
            if not is_next or (block.origin is not last.origin and block.origin != last.origin):
                yield run
                run = []
        run.append(block)
    if run:
        yield run


def fields_of(run: list[RouterBlock], medium: str, block_size: int) -> dict[str, Any]:
    """Return the fields of the ``RouterBlockStored`` of a run; those that say nothing are left out."""
    first, origin = run[0], run[0].origin
    fields: dict[str, Any] = {
        "block_hashes": [block.name for block in run],
        "parent_block_hash": first.parent,
        "token_ids": _tokens_of(run),
        "block_size": block_size,
        "lora_id": origin.lora_id,
        "medium": medium,
        "lora_name": origin.lora_name,
    }
    more = {
        "extra_keys": [block.extra for block in run] if any(block.extra for block in run) else None,
        "group_idx": first.group,
        "session_id": origin.session,
        "lookahead_token_ids": [block.ahead for block in run] if first.ahead is not None else None,
        "cache_salt": origin.salt,
    }
    return fields | {name: value for name, value in more.items() if value is not None}


def _tokens_of(run: list[RouterBlock]) -> list[int] | msgspec.Raw:
    """Return the tokens of a run; bytes are written as msgpack at once, which takes a tenth of the time of a list."""
    if isinstance(run[0].tokens, bytes):
        tokens = np.frombuffer(b"".join(block.tokens for block in run), "<u4")  # type: ignore[misc]
        written = np.empty(len(tokens), _UINT32)
        written["tag"], written["value"] = 0xCE, tokens
        return msgspec.Raw(struct.pack(">BI", 0xDD, len(tokens)) + written.tobytes())
    return [token for block in run for token in block.tokens]
