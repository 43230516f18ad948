"""The host arena of one worker: records in extents of equal size, and a table of their slot headers."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache.devices.base import Device, PinnedMemory
from fdcache.errors import HostMemoryError
from fdcache.layout import KVLayout
from fdcache.machine.memory import available_memory
from fdcache.machine.shared_files import JoinedMemory
from fdcache.metadata import EXTENT_BYTES, SLOT_HEADER_BYTES
from fdcache.plans.ledger import Blocks

_TOUCH_THREADS = 8
_LOG_INTERVAL = 5.0
_READY = 2
"""State of the header of a record that is whole."""

Progress = Callable[[int, int], None]
"""Called with the number of bytes that are ready and the number there will be."""

logger = logging.getLogger(__name__)


class HostArena:
    """``num_blocks`` record slots in memory of this process, allocated and pinned at once.

    Extents lie on the device's NUMA node, if it has one. ``shared``: a file in place of that, for memory that the
    workers have in common which name it. Raises ``HostMemoryError`` if the machine or a control group
    lacks the memory, or it cannot be pinned; nothing stays allocated then.
    """

    epoch = 0
    """Constant: the extents never change."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: Device,
        progress: Progress | None = None,
        shared: Path | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.fingerprint = layout.fingerprint
        record_bytes = layout.record_bytes
        per_extent = min(max(EXTENT_BYTES // record_bytes, 1), num_blocks)
        num_extents = -(-num_blocks // per_extent)
        extent_bytes = per_extent * record_bytes
        header_bytes = num_blocks * SLOT_HEADER_BYTES
        self._joined: JoinedMemory | None = None
        allocate: Callable[[int, int | None], _Memory] = _allocate
        if shared is None:
            _check_budget(num_blocks, record_bytes, num_extents * extent_bytes)
        else:
            self._joined = JoinedMemory(shared, header_bytes + num_extents * extent_bytes)
            allocate = _parts_of(self._joined)
        extents: list[_Memory] = []
        pinned: list[PinnedMemory] = []
        logged = time.monotonic()
        for index in range(num_extents):
            extents.append(allocate(extent_bytes, device.numa_node))
            pinned.append(device.pin_memory(extents[-1].address, extent_bytes, extents[-1]))
            if progress is not None:
                progress((index + 1) * extent_bytes, num_extents * extent_bytes)
            if time.monotonic() - logged >= _LOG_INTERVAL:
                logged = time.monotonic()
                logger.info("host arena: %d of %d extents ready", index + 1, num_extents)
        headers = allocate(header_bytes, device.numa_node)
        logger.info("host arena: %d blocks in %d extents ready", num_blocks, num_extents)
        self.extents = tuple(extents)
        self.pinned = tuple(pinned)
        self.table = _core.RecordTable(
            [extent.address for extent in self.extents],
            per_extent,
            record_bytes,
            [headers.address + i * per_extent * SLOT_HEADER_BYTES for i in range(num_extents)],
            num_blocks,
            (self.extents, self.pinned, headers),
        )

    def close(self) -> None:
        """Leave memory that others share. The last reference frees the memory."""
        if self._joined is not None:
            self._joined.close()


def intact_records(table: _core.RecordTable, layout: KVLayout, blocks: Blocks) -> NDArray[np.bool_]:
    """Return a mask of the blocks whose slots have their records with the bytes of their checksums."""
    offsets = [plane.offset for plane in layout.planes]
    sizes = [plane.nbytes for plane in layout.planes]
    intact = np.zeros(len(blocks), np.bool_)
    for at, block in enumerate(blocks):
        header = table.header(block.slot)
        is_its = header.is_valid and header.state == _READY and header.hash == block.hash
        intact[at] = (
            is_its
            and header.generation == block.generation
            and _core.record_checksum(table.record(block.slot), offsets, sizes) == header.payload_checksum
        )
    return intact


class _Memory(Protocol):
    """A range of memory, kept alive by this object."""

    @property
    def address(self) -> int:
        """Its address in this process."""

    @property
    def nbytes(self) -> int:
        """Its size."""


@dataclass(frozen=True, slots=True)
class _Part:
    address: int
    nbytes: int
    whole: object


def _parts_of(memory: JoinedMemory) -> Callable[[int, int | None], _Memory]:
    """Return a function that gives out the parts of a memory, one after the other."""
    offset = 0

    def take(nbytes: int, _node: int | None) -> _Memory:
        nonlocal offset
        part = _Part(memory.address + offset, nbytes, memory.data)
        offset += nbytes
        return part

    return take


def _allocate(nbytes: int, node: int | None) -> _Memory:
    try:
        memory = _core.HostMemory(nbytes)
        if node is not None:
            memory.prefer_node(node)
        memory.populate(min(_TOUCH_THREADS, os.cpu_count() or 1))
    except MemoryError as error:
        raise HostMemoryError(
            f"the system refused {nbytes} bytes of host memory; ask for fewer host blocks, or raise the limits "
            "on this process's memory (ulimit -v, vm.overcommit_memory)"
        ) from error
    return memory


def _check_budget(num_blocks: int, record_bytes: int, record_total: int) -> None:
    needed = record_total + num_blocks * SLOT_HEADER_BYTES
    budget = available_memory()
    if needed > budget.nbytes:
        fitting = budget.nbytes // (record_bytes + SLOT_HEADER_BYTES)
        raise HostMemoryError(
            f"{num_blocks} host blocks need {needed} bytes, but only {budget.nbytes} are left "
            f"({budget.limit}); ask for at most {fitting} blocks or raise that limit"
        )
