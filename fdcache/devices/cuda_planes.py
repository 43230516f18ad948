"""Planes of a layout in GPU memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fdcache import _core
from fdcache.devices.base import PlaneBinding
from fdcache.devices.cuda_memory import CudaMemory


class CudaPlanes:
    """Planes in GPU memory, or pieces of planes, and the table of their chunks that the kernels read.

    ``local``: the memory is that of the GPU that has the table.
    """

    def __init__(
        self,
        table: _core.PlaneTable,
        num_planes: int,
        num_blocks: int,
        record_bytes: int,
        memory: CudaMemory,
        *,
        bindings: Sequence[PlaneBinding] = (),
        local: bool = True,
    ) -> None:
        self.table = table
        self.num_planes = num_planes
        self.num_blocks = num_blocks
        self.record_bytes = record_bytes
        self.bindings = tuple(bindings)
        self.local = local
        chunks, first_chunk = _core.swap_chunks(table, record_bytes)
        self._chunks = memory.allocate(len(chunks))
        self._chunks.set(np.frombuffer(chunks, np.uint8))
        owned = (table, self._chunks)
        self.core = _core.CudaPlanes(table, self._chunks.data.ptr, first_chunk, num_blocks, owned)

    @classmethod
    def of(cls, bindings: Sequence[PlaneBinding], record_bytes: int, memory: CudaMemory) -> CudaPlanes:
        """Return the planes of a layout, in its order."""
        table = _core.PlaneTable(
            [binding.address for binding in bindings],
            [binding.stride for binding in bindings],
            [binding.plane.nbytes for binding in bindings],
            [binding.plane.offset for binding in bindings],
            [binding.owner for binding in bindings],
        )
        blocks = min(binding.num_blocks for binding in bindings)
        return cls(table, len(bindings), blocks, record_bytes, memory, bindings=bindings)
