"""What the stand-in keeps of FastDeploy's requests, and what it reads of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fdcache.hashing import MultimodalItem
from fdcache.manager.requests import Request
from fdcache.metadata import BlockNode


@dataclass(frozen=True, slots=True)
class MatchedPrefix:
    """What ``match_prefix`` leaves in ``request._match_result``; the path is device blocks, then host blocks.

    ``deferred``: its blocks are still being read from storage; match it again in a later step.
    """

    device_nodes: list[BlockNode] = field(default_factory=list)
    matched_host_nums: int = 0
    matched_storage_nums: int = 0
    uncached_block_ids: list[int] = field(default_factory=list)
    deferred: bool = False

    @property
    def device_block_ids(self) -> list[int]:
        """The device blocks that the request may use at once, in path order."""
        return [node.block_id for node in self.device_nodes]

    @property
    def matched_device_nums(self) -> int:
        """Blocks found on the device."""
        return len(self.device_nodes)

    @property
    def total_matched_blocks(self) -> int:
        """Blocks found in all tiers."""
        return self.matched_device_nums + self.matched_host_nums + self.matched_storage_nums


@dataclass(slots=True, eq=False)
class Served:
    """An engine request and the cache's view of it; ``outputs`` of its generated tokens are known to the cache,
    ``blocks`` of its block table to the engine. It was matched with ``begun_with`` outputs, and with ``publish_at`` of
    them the next block is complete.

    ``load_failed``: its blocks hold what they should not, so nothing of it is published any more.
    """

    engine_request: Any
    request: Request
    outputs: int
    blocks: int = 0
    begun_with: int = 0
    publish_at: int = 0
    has_blocks: bool = False
    matched: bool = False
    load_failed: bool = False


def tokens_of(tokens: Sequence[int] | None) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Token ids of any sequence, or none."""
    return np.asarray([] if tokens is None else tokens, np.int64)


def reuse_before_images(images: Sequence[MultimodalItem], matched: int, block_size: int) -> int:
    """How many of ``matched`` tokens may be reused when no reuse may end inside an image: whole blocks before it."""
    for image in reversed(images):
        if image.offset < matched < image.offset + image.length:
            matched = image.offset // block_size * block_size
    return matched


def images_of(request: Any) -> tuple[MultimodalItem, ...]:
    """The items of ``multimodal_inputs``: ``mm_positions`` (offset, length) and ``mm_hashes``, in order."""
    inputs = getattr(request, "multimodal_inputs", None) or {}
    positions, hashes = inputs.get("mm_positions") or [], inputs.get("mm_hashes") or []
    return tuple(
        MultimodalItem(int(position.offset), int(position.length), name)
        for position, name in zip(positions, hashes, strict=True)
    )
