"""Blocks of the sequences: all calls of fdcache's manager, and a free list to compare it with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from examples.paddle_engine.batch import Chunk
from examples.paddle_engine.config import EngineConfig
from fdcache import (
    CacheManager,
    LoadOutcome,
    MatchStatus,
    MultimodalItem,
    Request,
    TransferPlan,
    TransferReport,
)
from fdcache.metadata import StorageScan
from fdcache.tiers.host import HostCache


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a user. ``images`` are items whose placeholders are among the tokens."""

    name: str
    tokens: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    images: tuple[MultimodalItem, ...] = ()


class FdcacheBlocks:
    """Blocks managed by fdcache. Sequences are named by their prompt's name."""

    def __init__(self, engine: EngineConfig) -> None:
        layout, settings = engine.layout, engine.settings
        self.manager = CacheManager.from_settings(layout, settings, device_bytes=engine.device_bytes)
        self._requests: dict[str, Request] = {}

    @property
    def host_cache(self) -> HostCache:
        """Description of the host tier for the ranks."""
        return self.manager.host_cache

    def restore(self, scans: Sequence[StorageScan]) -> int:
        """Restore the blocks in the ranks' storage; return their number."""
        return self.manager.restore_storage(scans) if scans else 0

    def admit(self, prompt: Prompt) -> int | None:
        """Return the cached prefix of a new or resumed sequence in tokens.

        None: its blocks are still being read; call it again in a later step.
        """
        request = self._requests.get(prompt.name)
        if request is None:
            request = Request(prompt.name, list(prompt.tokens), multimodal=prompt.images)
            self._requests[prompt.name] = request
            self.manager.prefetch([request])
        match = self.manager.match_prefix([request])[0]
        return match.num_cached_tokens if match.status is MatchStatus.MATCHED else None

    def grow(self, name: str, num_tokens: int) -> bool:
        """Extend the block table to cover ``num_tokens`` tokens; the first time also plan the loads. False: no room."""
        return self.manager.allocate_device_blocks([(self._requests[name], num_tokens)])[0].ok

    def has_room(self, num_blocks: int) -> bool:
        """Return True if that many blocks are free or can be evicted."""
        return self.manager.can_allocate_device_blocks(num_blocks)

    def block_table(self, name: str) -> NDArray[np.int32]:
        """Return the sequence's blocks, in order."""
        return self._requests[name].block_table

    def is_loading(self, name: str) -> bool:
        """Return True while a load of the sequence is not confirmed."""
        return self._requests[name].is_loading

    def take_plans(self) -> list[TransferPlan]:
        """Close the step and return its plans for the ranks."""
        return self.manager.take_plans()

    def apply(self, reports: Sequence[TransferReport]) -> list[LoadOutcome]:
        """Apply the ranks' reports, expire overdue plans, and return the outcomes of loads."""
        return self.manager.apply(reports) + self.manager.expire()

    def observe(self, chunks: Sequence[Chunk], seconds: float, *, waited: bool) -> None:
        """Report the time of a step; ``waited``: its layers waited for loads."""
        found = [(self._requests[chunk.sequence], chunk) for chunk in chunks]
        computed = [(request, chunk.start, min(chunk.stop, request.num_tokens)) for request, chunk in found]
        self.manager.observe_prefill(computed, seconds, waited=waited)

    def append(self, name: str, tokens: Sequence[int], num_computed: int) -> None:
        """Append accepted tokens; the first ``num_computed`` tokens have their KV on every rank."""
        request = self._requests[name]
        request.append_tokens(list(tokens))
        self.manager.commit([(request, num_computed)])

    def release(self, name: str, *, resumes: bool) -> None:
        """Release the blocks, at the end or, if the sequence ``resumes``, until it is admitted again."""
        self.manager.request_finish([self._requests[name]])
        if not resumes:
            del self._requests[name]

    def close(self) -> None:
        """Disconnect from the service, if any; call it after the workers have ended."""
        self.manager.close()


class FreshBlocks:
    """Same interface as ``FdcacheBlocks``, but only a free list: nothing is cached."""

    host_cache = None

    def __init__(self, engine: EngineConfig) -> None:
        self._block_size = engine.block_size
        self._free = list(range(engine.device_blocks))
        self._tables: dict[str, list[int]] = {}

    def restore(self, scans: Sequence[StorageScan]) -> int:
        """Return nothing: there are no copies."""
        return 0

    def admit(self, prompt: Prompt) -> int | None:
        """Return 0: nothing is cached."""
        self._tables[prompt.name] = []
        return 0

    def grow(self, name: str, num_tokens: int) -> bool:
        """Take blocks from the free list."""
        table = self._tables[name]
        missing = -(-num_tokens // self._block_size) - len(table)
        if missing > len(self._free):
            return False
        table.extend(self._free.pop() for _ in range(missing))
        return True

    def has_room(self, num_blocks: int) -> bool:
        """Return True if that many blocks are free."""
        return num_blocks <= len(self._free)

    def block_table(self, name: str) -> NDArray[np.int32]:
        """Return the sequence's blocks."""
        return np.array(self._tables[name], np.int32)

    def is_loading(self, name: str) -> bool:
        """Return False: nothing is ever loaded."""
        return False

    def take_plans(self) -> list[TransferPlan]:
        """Return []: nothing is ever copied."""
        return []

    def apply(self, reports: Sequence[TransferReport]) -> list[LoadOutcome]:
        """Return nothing: there are no copies."""
        return []

    def observe(self, chunks: Sequence[Chunk], seconds: float, *, waited: bool) -> None:
        """Do nothing: nothing could be loaded instead."""

    def append(self, name: str, tokens: Sequence[int], num_computed: int) -> None:
        """Do nothing: tokens are not cached."""

    def release(self, name: str, *, resumes: bool) -> None:
        """Return the blocks to the free list."""
        self._free.extend(self._tables.pop(name))

    def close(self) -> None:
        """Do nothing: there is no service."""
