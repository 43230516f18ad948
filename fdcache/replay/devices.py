"""Devices of the ranks: planes on the CPU or a GPU as the model accesses them, and a CPU device whose loads fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import msgspec
import numpy as np

from fdcache.devices.base import (
    ArenaRecords,
    Device,
    DevicePlanes,
    PlannedCopy,
    Stream,
    enqueue_each,
)
from fdcache.devices.cpu import CpuDevice, memory_bytes
from fdcache.devices.topology import import_cupy, visible_gpus
from fdcache.layout import KVLayout
from fdcache.metadata import CacheSwapMetadata, Int32Array, SwapPurpose, TransferResult
from fdcache.settings.cache import CopySettings, Verify
from fdcache.tasks import CpuEvent, Event

_FLIPPED = 0x10
"""Bits that ``flip`` changes."""


class DeviceName(StrEnum):
    """Kinds of devices that a replay can use."""

    CPU = "cpu"
    CUDA = "cuda"


class Planes(Protocol):
    """Device planes as NumPy arrays, valid for a layer between ``fetch`` and ``store``."""

    @property
    def arrays(self) -> Sequence[np.ndarray]:
        """One array per plane of the layout."""

    @property
    def stream(self) -> Any | None:
        """Stream on which ``fetch`` and ``store`` use the planes; None on the CPU."""

    def open_step(self, segments: Int32Array, blocks: Int32Array) -> None:
        """Record the blocks that the step reads and writes; see ``StepOrder``."""

    def forget(self, sequence: int) -> None:
        """Forget the block table of a sequence."""

    def fetch(self, layer: int) -> None:
        """Copy the layer's part of these blocks from the device."""

    def store(self, layer: int) -> None:
        """Copy the layer's part of the written blocks to the device, and wait."""

    def flip(self, plane: int, block: int, byte: int) -> None:
        """Change one byte on the device."""


class HostPlanes:
    """Planes in CPU memory, used in place."""

    stream = None

    def __init__(self, tensors: Sequence[np.ndarray]) -> None:
        self.arrays = list(tensors)

    def open_step(self, segments: Int32Array, blocks: Int32Array) -> None:
        """Do nothing: the planes are used in place."""

    def forget(self, sequence: int) -> None:
        """Do nothing: the planes are used in place."""

    def fetch(self, layer: int) -> None:
        """Do nothing: the planes are used in place."""

    def store(self, layer: int) -> None:
        """Do nothing: the planes are used in place."""

    def flip(self, plane: int, block: int, byte: int) -> None:
        """Change one byte."""
        _bytes_of(self.arrays[plane])[block, byte] ^= _FLIPPED


class GpuPlanes:
    """Planes on a GPU, with a copy in CPU memory for the model."""

    def __init__(self, tensors: Sequence[Any], layout: KVLayout) -> None:
        self._tensors = tensors
        self._layers = [plane.layer for plane in layout.planes]
        self._block_size = layout.block_size
        self._columns = layout.page_records + layout.num_states
        self._tables: dict[int, Int32Array] = {}
        self._used = self._written = np.empty(0, np.int32)
        self.arrays = [np.zeros(tensor.shape, tensor.dtype) for tensor in tensors]
        with tensors[0].device:
            self.stream = import_cupy().cuda.get_current_stream()

    def open_step(self, segments: Int32Array, blocks: Int32Array) -> None:
        """Record the blocks that the step compares and those that get tokens; track the block tables."""
        compared, written = [self._used[:0]], [self._used[:0]]
        rows = blocks.reshape(-1, self._columns)
        taken = 0
        for sequence, start, end, keep, grow, verify in segments.T.tolist():
            kept = self._tables.get(sequence, rows[:0])[:keep]
            table = np.concatenate([kept, rows[taken : taken + grow]])
            taken += grow
            self._tables[sequence] = table
            compared.append(table[:verify].reshape(-1))
            written.append(table[start // self._block_size : -(-end // self._block_size)].reshape(-1))
        self._written = _there(np.concatenate(written))
        self._used = np.union1d(_there(np.concatenate(compared)), self._written)

    def forget(self, sequence: int) -> None:
        """Forget the block table of a sequence."""
        self._tables.pop(sequence, None)

    def fetch(self, layer: int) -> None:
        """Copy these blocks from the GPU."""
        for index in self._planes_of(layer):
            with self._tensors[index].device:
                self.arrays[index][self._used] = self._tensors[index][self._used].get()

    def store(self, layer: int) -> None:
        """Copy the written blocks to the GPU, and wait."""
        for index in self._planes_of(layer):
            tensor = self._tensors[index]
            with tensor.device as device:
                tensor[self._written] = import_cupy().asarray(self.arrays[index][self._written])
                device.synchronize()

    def flip(self, plane: int, block: int, byte: int) -> None:
        """Change one byte on the GPU."""
        tensor = self._tensors[plane]
        with tensor.device as device:
            content = tensor[block : block + 1].get()
            _bytes_of(content)[0, byte] ^= _FLIPPED
            tensor[block : block + 1] = import_cupy().asarray(content)
            device.synchronize()

    def _planes_of(self, layer: int) -> list[int]:
        return [index for index, each in enumerate(self._layers) if each == layer]


def _there(blocks: Int32Array) -> Int32Array:
    """Return the blocks that an engine has, each once."""
    return np.unique(blocks[blocks >= 0])


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(array.shape[0], -1).view(np.uint8)


def device_bytes(device: DeviceName, ranks: int) -> int:
    """Return the memory of one rank's device in bytes; ranks that share a device get equal parts.

    Raises ``DeviceError`` if there is no GPU.
    """
    if device is DeviceName.CPU:
        return memory_bytes(ranks)
    gpus = visible_gpus()
    return min(gpu.memory_bytes for gpu in gpus) // -(-ranks // len(gpus))


def open_gpu(rank: int, settings: CopySettings) -> Device:
    """Open the GPU of a rank; ranks take the visible GPUs in turn. Raises ``DeviceError`` if there is none."""
    from fdcache.devices.cuda import CudaDevice

    gpus = visible_gpus()
    return CudaDevice(gpus[rank % len(gpus)].uuid, settings=settings)


@dataclass(frozen=True, slots=True)
class LoadFaults:
    """Injected failures: the share of loads that fail, from 0 to 1, and the seed that selects them."""

    rate: float = 0.0
    seed: int = 0


class FaultyDevice(CpuDevice):
    """CPU device that stops some loads in the middle of some blocks, and reports these blocks as failed."""

    def __init__(self, faults: LoadFaults, layout: KVLayout, rank: int, transfer: CopySettings) -> None:
        super().__init__(copy_threads=transfer.copy_threads, verify=transfer.verify is Verify.ALL)
        self._rate = faults.rate
        self._random = np.random.default_rng((faults.seed, rank))
        self._layers = [plane.layer for plane in layout.planes]

    def copy_blocks(self, planes: DevicePlanes, arena: ArenaRecords, swap: CacheSwapMetadata) -> PlannedCopy:
        """Return a batch of copies; some loads are chosen to fail."""
        if swap.to_host or self._random.random() >= self._rate:
            return super().copy_blocks(planes, arena, swap)
        fails = self._random.random(len(swap)) < 0.5
        fails[self._random.integers(len(swap))] = True
        layer = int(self._random.integers(self._layers[-1] + 1))
        failing, sound = np.flatnonzero(fails), np.flatnonzero(~fails)
        return _StoppingCopy(
            whole=super().copy_blocks(planes, arena, _select(swap, sound)) if len(sound) else None,
            stopped=super().copy_blocks(planes, arena, _select(swap, failing)),
            failed=failing.astype(np.int32),
            sound=sound.astype(np.int32),
            layer=layer,
            first_plane=self._layers.index(layer),
            num_planes=len(self._layers),
        )


class _StoppingCopy:
    """Batch of copies some of whose blocks are copied only up to ``first_plane``."""

    is_certain = False

    def __init__(
        self,
        whole: PlannedCopy | None,
        stopped: PlannedCopy,
        failed: Int32Array,
        *,
        sound: Int32Array,
        layer: int,
        first_plane: int,
        num_planes: int,
    ) -> None:
        self._whole = whole
        self._stopped = stopped
        self._failed = failed
        self._sound = sound
        self._layer = layer
        self._first_plane = first_plane
        self._num_planes = num_planes
        self.done = CpuEvent()

    @property
    def started(self) -> bool:
        """True once a copy has started."""
        return self._stopped.started or (self._whole is not None and self._whole.started)

    def enqueue(self, stream: Stream, first_plane: int, last_plane: int) -> None:
        """Enqueue a range of planes; the failing blocks only up to the plane at which they stop."""
        if self._whole is not None:
            self._whole.enqueue(stream, first_plane, last_plane)
        if first_plane < self._first_plane:
            self._stopped.enqueue(stream, first_plane, min(last_plane, self._first_plane))
        if last_plane == self._num_planes:
            self.done.record(stream)

    def enqueue_groups(self, stream: Stream, ranges: Sequence[tuple[int, int]]) -> list[Event]:
        """Enqueue ranges of planes one after the other; return an event for each."""
        return enqueue_each(self, stream, ranges, CpuEvent)

    def cancel(self) -> bool:
        """Return False: these copies always run."""
        return False

    def result(self, start: int = 0, stop: int | None = None) -> TransferResult:
        """Return the result of positions [start, stop), with the failed ones and the layer at which they stopped."""
        count = len(self._failed) + len(self._sound)
        stop = count if stop is None else stop
        whole = None if self._whole is None else self._whole.result()
        failed = self._failed if whole is None else np.union1d(self._failed, self._sound[whole.failed])
        failed = failed[(failed >= start) & (failed < stop)].astype(np.int32) - np.int32(start)
        num_copied = stop - start - len(failed)
        share = num_copied / max(len(self._sound) - (0 if whole is None else len(whole.failed)), 1)
        return TransferResult(
            purpose=SwapPurpose.LOAD,
            failed=failed,
            checksums=np.empty(0, dtype=np.uint64),
            copied_bytes=0 if whole is None else round(whole.copied_bytes * share),
            seconds=0.0 if whole is None else whole.seconds * share,
            error_message=f"injected: {len(self._failed)} blocks stopped before layer {self._layer}"
            if len(failed)
            else None,
        )


def _select(swap: CacheSwapMetadata, index: np.ndarray) -> CacheSwapMetadata:
    return msgspec.structs.replace(
        swap,
        src_block_ids=swap.src_block_ids[index],
        dst_block_ids=swap.dst_block_ids[index],
        src_generations=swap.src_generations[index],
        dst_generations=swap.dst_generations[index],
        hash_values=swap.hash_values[index],
        parent_hashes=swap.parent_hashes[index],
        unverified=None if swap.unverified is None else swap.unverified[index],
    )
