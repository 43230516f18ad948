"""Planes of a layout in GPU memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fdcache import _core
from fdcache.devices.base import PlaneBinding
from fdcache.devices.cuda_memory import CudaMemory


class CudaPlanes:
    """Planes of a layout in GPU memory, and the table of their chunks that the kernels read.

    ``local``: the memory is that of the GPU that has the table.
    """

    def __init__(
        self, bindings: Sequence[PlaneBinding], record_bytes: int, memory: CudaMemory, *, local: bool = True
    ) -> None:
        self.bindings = tuple(bindings)
        self.record_bytes = record_bytes
        self.local = local
        self.num_planes = len(bindings)
        self.num_blocks = min(binding.num_blocks for binding in bindings)
        self.table = _core.PlaneTable(
            [binding.address for binding in bindings],
            [binding.stride for binding in bindings],
            [binding.plane.nbytes for binding in bindings],
            [binding.plane.offset for binding in bindings],
            [binding.owner for binding in bindings],
        )
        chunks, first_chunk = _core.swap_chunks(self.table, record_bytes)
        self._chunks = memory.allocate(len(chunks))
        self._chunks.set(np.frombuffer(chunks, np.uint8))
        owned = (self.table, self._chunks)
        self.core = _core.CudaPlanes(self.table, self._chunks.data.ptr, first_chunk, self.num_blocks, owned)
