"""What fdcache reads from FastDeploy's requests, by attribute name, and what it writes to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fdcache.hashing import MultimodalItem
from fdcache.hints import HintOutcome
from fdcache.manager.requests import Request
from fdcache.metadata import BlockNode


@dataclass(frozen=True, slots=True)
class MatchedPrefix:
    """Result of ``match_prefix``, stored in ``request._match_result``: device blocks first, then host, then storage.

    With ``deferred`` the blocks are still being read from storage; match the request again in a later step.
    """

    device_nodes: list[BlockNode] = field(default_factory=list)
    matched_host_nums: int = 0
    matched_storage_nums: int = 0
    uncached_block_ids: list[int] = field(default_factory=list)
    deferred: bool = False

    @property
    def device_block_ids(self) -> list[int]:
        """Device blocks that the request can use at once, in path order."""
        return [node.block_id for node in self.device_nodes]

    @property
    def matched_device_nums(self) -> int:
        """Number of blocks found on the device."""
        return len(self.device_nodes)

    @property
    def total_matched_blocks(self) -> int:
        """Number of blocks found in all tiers."""
        return self.matched_device_nums + self.matched_host_nums + self.matched_storage_nums


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """A request of the engine together with the cache's own.

    Attributes:
        outputs: generated tokens that the cache knows.
        blocks: length of the block table that the engine knows.
        outputs_at_match: generated tokens at the time of the match.
        publish_at: number of generated tokens that completes the next block.
        load_failed: its blocks hold wrong bytes, so nothing more of it is published.
        refused_hints: outcomes of hints that could not be read.
    """

    engine_request: Any
    request: Request
    outputs: int
    blocks: int = 0
    outputs_at_match: int = 0
    publish_at: int = 0
    has_blocks: bool = False
    matched: bool = False
    load_failed: bool = False
    refused_hints: Sequence[HintOutcome] = ()


def is_preempted(request: Any) -> bool:
    """Return True if FastDeploy has preempted the request, judged by the name of its status."""
    return getattr(getattr(request, "status", None), "name", None) == "PREEMPTED"


def tokens_of(tokens: Sequence[int] | None) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return token ids as an array; empty for None."""
    return np.asarray([] if tokens is None else tokens, np.int64)


def reuse_before_images(images: Sequence[MultimodalItem], matched: int, block_size: int) -> int:
    """Round ``matched`` tokens down to whole blocks before an image, if the match ends inside one."""
    for image in reversed(images):
        if image.offset < matched < image.offset + image.length:
            matched = image.offset // block_size * block_size
    return matched


def images_of(request: Any) -> tuple[MultimodalItem, ...]:
    """Return the items of ``multimodal_inputs``: ``mm_positions`` (offset, length) with ``mm_hashes``, in order."""
    inputs = getattr(request, "multimodal_inputs", None) or {}
    positions, hashes = inputs.get("mm_positions") or [], inputs.get("mm_hashes") or []
    return tuple(
        MultimodalItem(int(position.offset), int(position.length), name)
        for position, name in zip(positions, hashes, strict=True)
    )
