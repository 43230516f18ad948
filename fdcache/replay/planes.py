"""Where a rank's device planes are, and how the model that stands in for the forward pass reaches them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from fdcache.devices.base import Device
from fdcache.devices.cpu import memory_bytes
from fdcache.devices.topology import import_cupy, visible_gpus
from fdcache.layout import KVLayout
from fdcache.metadata import Int32Array
from fdcache.replay.messages import StepOrder
from fdcache.settings.cache import TransferSettings


class DeviceName(StrEnum):
    """What plays the device."""

    CPU = "cpu"
    CUDA = "cuda"


class Planes(Protocol):
    """The planes as NumPy arrays that hold a layer's bytes between ``fetch`` and ``store``."""

    @property
    def arrays(self) -> Sequence[np.ndarray]:
        """One array for each plane of the layout."""

    @property
    def stream(self) -> Any | None:
        """The stream on which ``fetch`` and ``store`` use the planes; None where there is none."""

    def open_step(self, order: StepOrder) -> None:
        """Learn which blocks the step reads and writes."""

    def fetch(self, layer: int) -> None:
        """Bring the layer's bytes of these blocks from the device."""

    def store(self, layer: int) -> None:
        """Bring the written ones back, all there when this returns."""


class HostPlanes:
    """Planes in ordinary memory, used where they are."""

    stream = None

    def __init__(self, tensors: Sequence[np.ndarray]) -> None:
        self.arrays = list(tensors)

    def open_step(self, order: StepOrder) -> None:
        """Nothing to do."""

    def fetch(self, layer: int) -> None:
        """Nothing to do."""

    def store(self, layer: int) -> None:
        """Nothing to do."""


class GpuPlanes:
    """Planes on a GPU and a copy of them for the model; the GPU's bytes are the ones that count."""

    def __init__(self, tensors: Sequence[Any], layout: KVLayout) -> None:
        self._tensors = tensors
        self._layers = [plane.layer for plane in layout.planes]
        self._block_size = layout.block_size
        self._tables: dict[int, Int32Array] = {}
        self._used = self._written = np.empty(0, np.int32)
        self.arrays = [np.zeros(tensor.shape, tensor.dtype) for tensor in tensors]
        with tensors[0].device:
            self.stream = import_cupy().cuda.get_current_stream()

    def open_step(self, order: StepOrder) -> None:
        """Follow the block tables: which blocks are compared, which get tokens."""
        compared, written = [self._used[:0]], [self._used[:0]]
        taken = 0
        for sequence, start, end, keep, grow, verify in order.segments.T.tolist():
            kept = self._tables.get(sequence, self._used[:0])[:keep]
            table = np.concatenate([kept, order.blocks[taken : taken + grow]])
            taken += grow
            self._tables[sequence] = table
            compared.append(table[:verify])
            written.append(table[start // self._block_size : -(-end // self._block_size)])
        self._written = np.unique(np.concatenate(written))
        self._used = np.union1d(np.concatenate(compared), self._written)
        for sequence in order.ends:
            self._tables.pop(sequence, None)

    def fetch(self, layer: int) -> None:
        """Overwrite the copy of these blocks with what the GPU has."""
        for index in self._planes_of(layer):
            with self._tensors[index].device:
                self.arrays[index][self._used] = self._tensors[index][self._used].get()

    def store(self, layer: int) -> None:
        """Overwrite the GPU's bytes of the written blocks, and wait."""
        for index in self._planes_of(layer):
            tensor = self._tensors[index]
            with tensor.device as device:
                tensor[self._written] = import_cupy().asarray(self.arrays[index][self._written])
                device.synchronize()

    def _planes_of(self, layer: int) -> list[int]:
        return [index for index, each in enumerate(self._layers) if each == layer]


def device_bytes(device: DeviceName, ranks: int) -> int:
    """Return the memory of one rank's device; ranks on one GPU or on the CPU have equal parts of it.

    Raises ``DeviceError`` when there is no GPU.
    """
    if device is DeviceName.CPU:
        return memory_bytes(ranks)
    gpus = visible_gpus()
    return min(gpu.memory_bytes for gpu in gpus) // -(-ranks // len(gpus))


def open_gpu(rank: int, settings: TransferSettings) -> Device:
    """The GPU of a rank: ranks take the visible ones in turn. Raises ``DeviceError`` when there is none."""
    from fdcache.devices.cuda import CudaDevice

    gpus = visible_gpus()
    return CudaDevice(gpus[rank % len(gpus)].uuid, settings=settings)
