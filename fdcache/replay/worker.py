"""RankWorker: one rank's controller and the computation that reads and writes its device planes."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from fdcache.controller.cache_controller import CacheController
from fdcache.devices.base import Device
from fdcache.layout import KVLayout
from fdcache.replay._pattern import PatternModel
from fdcache.replay.faults import FaultyDevice, LoadFaults
from fdcache.replay.messages import StepOrder, StepResult
from fdcache.replay.planes import DeviceName, GpuPlanes, HostPlanes, Planes, open_gpu
from fdcache.settings.cache import MooncakeSettings, StorageTierSettings, TransferSettings, Verify
from fdcache.storage.context import ConnectorContext
from fdcache.storage.factory import open_storage
from fdcache.tiers.host import HostCache

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""


def peak_rss_bytes() -> int:
    """The most memory that this process had at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a rank is built from; plain data, so that it can be sent to a process."""

    layout: KVLayout
    transfer: TransferSettings
    device_blocks: int
    host: HostCache
    verify_every: int
    faults: LoadFaults
    storage: StorageTierSettings
    mooncake: MooncakeSettings
    device: DeviceName = DeviceName.CPU


class RankWorker:
    """Executes steps in the order given, as a forward pass would.

    For each layer it waits for that layer's copies, compares the reused blocks, and writes the step's tokens.
    ``on_start`` is told how much of its host memory is there, and how much of its storage was scanned.
    """

    def __init__(self, spec: WorkerSpec, rank: int, on_start: Progress | None = None) -> None:
        layout = spec.layout
        device: Device | None = None
        if spec.device is DeviceName.CUDA:
            device = open_gpu(rank, spec.transfer)
        elif spec.faults.rate:
            device = FaultyDevice(spec.faults, layout, rank, spec.transfer)
        self._verify_every = spec.verify_every
        self._layers = layout.total_layers
        self._controller = CacheController(spec.transfer, layout, rank=rank, device=device)
        tensors = self._controller.initialize_kv_cache(spec.device_blocks)
        taking = on_start and partial(on_start, f"taking the host memory of rank {rank}")
        self._controller.initialize_host_cache(spec.host, taking)
        context = ConnectorContext(
            layout,
            rank,
            spec.storage,
            spec.mooncake,
            verify=spec.transfer.verify is not Verify.OFF,
            on_progress=on_start and partial(on_start, f"scanning the storage of rank {rank}"),
        )
        storage = open_storage(context) if spec.host.num_blocks else None
        self._scan = self._controller.initialize_storage(storage) if storage is not None else None
        gpu = spec.device is DeviceName.CUDA
        self._planes: Planes = GpuPlanes(tensors, layout) if gpu else HostPlanes(tensors)
        self._model = PatternModel(
            [array.reshape(array.shape[0], -1).view(np.uint8) for array in self._planes.arrays],
            np.array([plane.layer for plane in layout.planes], dtype=np.int32),
            layout.total_layers,
            layout.block_size,
            rank,
        )

    def execute(self, order: StepOrder) -> StepResult:
        """Submit the step's plans, compute its tokens layer by layer, and say what came of it."""
        model = self._model
        for sequence, tokens in order.begins:
            model.begin(sequence, tokens)
        stream = self._planes.stream
        counters = [self._controller.submit_swap_tasks(plan, stream) for plan in order.plans]
        verified = model.prepare(order.segments, order.blocks, self._verify_every)
        self._planes.open_step(order)
        differing: list[tuple[int, int]] = []
        for layer in range(self._layers):
            for counter in counters:
                counter.wait_for_layer(layer)
            self._planes.fetch(layer)
            differing += model.run_layer(layer)
            self._planes.store(layer)
        for sequence in order.ends:
            model.end(sequence)
        scan, self._scan = self._scan, None
        return StepResult(
            verified,
            differing,
            self._controller.poll(),
            peak_rss_bytes(),
            scan,
            self._controller.storage_stats(),
        )

    def close(self) -> None:
        """Wait for the copies in flight and give all memory back."""
        self._controller.shutdown()
