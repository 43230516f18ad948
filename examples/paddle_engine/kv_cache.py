"""Where sequences get their blocks: everything that fdcache's scheduler side is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    """What a user asks for. ``images``: items whose placeholders are among the tokens."""

    name: str
    tokens: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    images: tuple[MultimodalItem, ...] = ()


class FdcacheBlocks:
    """The blocks of fdcache. Sequences are named by their prompt's name."""

    def __init__(self, engine: EngineConfig) -> None:
        layout, settings = engine.layout, engine.settings
        self.manager = CacheManager.from_settings(layout, settings, device_bytes=engine.device_bytes)
        self._requests: dict[str, Request] = {}

    @property
    def host_cache(self) -> HostCache:
        """What every rank is told of the host tier."""
        return self.manager.host_cache

    def restore(self, scans: Sequence[StorageScan]) -> int:
        """Take up what the ranks found in their storage; returns the number of blocks."""
        return self.manager.restore_storage(scans) if scans else 0

    def admit(self, prompt: Prompt) -> int | None:
        """Find the cached prefix of a new or resumed sequence, in tokens; None: it waits for blocks on their way here
        and is to be asked for in a later step.
        """
        request = self._requests.get(prompt.name)
        if request is None:
            request = Request(prompt.name, list(prompt.tokens), multimodal=prompt.images)
            self._requests[prompt.name] = request
            self.manager.prefetch([request])
        match = self.manager.match_prefix([request])[0]
        return match.num_cached_tokens if match.status is MatchStatus.MATCHED else None

    def grow(self, name: str, num_tokens: int) -> bool:
        """Let the block table cover so many tokens, and the first time plan the loads; False: there is no room."""
        return self.manager.allocate_device_blocks([(self._requests[name], num_tokens)])[0].ok

    def has_room(self, num_blocks: int) -> bool:
        """Whether so many blocks are free, or can be made free."""
        return self.manager.can_allocate_device_blocks(num_blocks)

    def block_table(self, name: str) -> NDArray[np.int32]:
        """The sequence's blocks, in order."""
        return self._requests[name].block_table

    def is_loading(self, name: str) -> bool:
        """Whether blocks of the sequence are on their way and might not arrive."""
        return self._requests[name].is_loading

    def take_plans(self) -> list[TransferPlan]:
        """Close the step: what the ranks have to copy in it."""
        return self.manager.take_plans()

    def apply(self, reports: Sequence[TransferReport]) -> list[LoadOutcome]:
        """Take the ranks' reports, and look for plans that are overdue; the loads that ended."""
        return self.manager.apply(reports) + self.manager.expire()

    def append(self, name: str, tokens: Sequence[int], num_computed: int) -> None:
        """Add accepted tokens; those before ``num_computed`` have their KV on every rank."""
        request = self._requests[name]
        request.append_tokens(list(tokens))
        self.manager.commit([(request, num_computed)])

    def release(self, name: str, *, resumes: bool) -> None:
        """Give the blocks back, at the end or, when the sequence ``resumes``, until it is admitted again."""
        self.manager.request_finish([self._requests[name]])
        if not resumes:
            del self._requests[name]

    def close(self) -> None:
        """Say goodbye to the service, if there is one, when the workers have ended."""
        self.manager.close()


class FreshBlocks:
    """The calls of ``FdcacheBlocks`` with no cache: a free list. Everything is computed."""

    host_cache = None

    def __init__(self, engine: EngineConfig) -> None:
        self._block_size = engine.block_size
        self._free = list(range(engine.device_blocks))
        self._tables: dict[str, list[int]] = {}

    def restore(self, scans: Sequence[StorageScan]) -> int:
        """There are none."""
        return 0

    def admit(self, prompt: Prompt) -> int | None:
        """Nothing is cached."""
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
        """Whether so many blocks are free."""
        return num_blocks <= len(self._free)

    def block_table(self, name: str) -> NDArray[np.int32]:
        """The sequence's blocks."""
        return np.array(self._tables[name], np.int32)

    def is_loading(self, name: str) -> bool:
        """Nothing is ever loaded."""
        return False

    def take_plans(self) -> list[TransferPlan]:
        """Nothing is ever copied."""
        return []

    def apply(self, reports: Sequence[TransferReport]) -> list[LoadOutcome]:
        """There are none."""
        return []

    def append(self, name: str, tokens: Sequence[int], num_computed: int) -> None:
        """Nobody keeps them."""

    def release(self, name: str, *, resumes: bool) -> None:
        """Back to the free list."""
        self._free.extend(self._tables.pop(name))

    def close(self) -> None:
        """Nobody to say goodbye to."""
