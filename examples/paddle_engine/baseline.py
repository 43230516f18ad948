"""What fdcache is compared with: blocks from a plain free list."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from examples.paddle_engine.config import EngineConfig
from examples.paddle_engine.kv_cache import Prompt
from fdcache import LoadOutcome, TransferPlan, TransferReport
from fdcache.metadata import StorageScan


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
