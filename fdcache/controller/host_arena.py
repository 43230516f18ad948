"""The host arena of one worker: records in equal extents and, beside them, a table of slot headers."""

from __future__ import annotations

import os

from fdcache import _core
from fdcache.controller.memory_budget import available_memory
from fdcache.errors import HostMemoryError
from fdcache.layout import KVLayout
from fdcache.metadata import TransferPlan

EXTENT_BYTES = 64 << 20
"""Most bytes of an extent, unless one record needs more. No record and no copy crosses two extents."""

HEADER_BYTES = 128
_TOUCH_THREADS = 4


class HostArena:
    """``num_blocks`` record slots in memory of this process, all of it there from the start.

    Raises ``HostMemoryError`` when the machine or a control group does not have the memory; nothing is kept
    then.
    """

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.fingerprint = layout.fingerprint
        record_bytes = layout.record_bytes
        per_extent = min(max(EXTENT_BYTES // record_bytes, 1), num_blocks)
        num_extents = -(-num_blocks // per_extent)
        _check_budget(num_blocks, record_bytes, num_extents * per_extent * record_bytes)
        try:
            self.extents = tuple(_core.HostMemory(per_extent * record_bytes) for _ in range(num_extents))
            headers = _core.HostMemory(num_blocks * HEADER_BYTES)
            for memory in (*self.extents, headers):
                memory.populate(min(_TOUCH_THREADS, os.cpu_count() or 1))
        except MemoryError as error:
            raise HostMemoryError(
                f"the system refused {num_blocks} host blocks of {record_bytes} bytes; ask for fewer, "
                "or raise the limits on this process's memory (ulimit -v, vm.overcommit_memory)"
            ) from error
        self.table = _core.RecordTable(
            [extent.address for extent in self.extents],
            per_extent,
            record_bytes,
            [headers.address + i * per_extent * HEADER_BYTES for i in range(num_extents)],
            num_blocks,
            (self.extents, headers),
        )

    def prepare(self, plan: TransferPlan) -> str | None:
        """All of it is there already."""
        return None

    def close(self) -> None:
        """The memory goes with the last reference to it."""


def _check_budget(num_blocks: int, record_bytes: int, record_total: int) -> None:
    needed = record_total + num_blocks * HEADER_BYTES
    budget = available_memory()
    if needed > budget.nbytes:
        fitting = budget.nbytes // (record_bytes + HEADER_BYTES)
        raise HostMemoryError(
            f"{num_blocks} host blocks need {needed} bytes, but only {budget.nbytes} are left "
            f"({budget.limit}); ask for at most {fitting} blocks or raise that limit"
        )
