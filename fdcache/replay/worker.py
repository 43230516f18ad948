"""One rank of a replay: its controller, and a computation that reads and writes its device planes."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fdcache.controller.cache_controller import CacheController
from fdcache.devices.base import Device
from fdcache.layout import KVLayout
from fdcache.replay.devices import (
    DeviceName,
    FaultyDevice,
    GpuPlanes,
    HostPlanes,
    LoadFaults,
    Planes,
    open_gpu,
)
from fdcache.replay.messages import StepOrder, StepResult
from fdcache.replay.models import make_model
from fdcache.settings.cache import CopySettings, StorageTierSettings, Verify
from fdcache.settings.variable import Group
from fdcache.storage.connector import ConnectorContext
from fdcache.storage.factory import open_storage
from fdcache.tiers.host import HostCache

StartProgress = Callable[[str, int, int], None]
"""Callback with the progress of a rank's start: an activity, the amount done, the total."""


def peak_rss_bytes() -> int:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Parameters of a rank; plain data that can be sent to another process."""

    layout: KVLayout
    transfer: CopySettings
    device_blocks: int
    host: HostCache
    verify_every: int
    faults: LoadFaults
    storage: StorageTierSettings
    storage_options: Group | None
    device: DeviceName = DeviceName.CPU


class RankWorker:
    """One rank, which executes steps as a forward pass would.

    For each layer it waits for that layer's copies, compares the reused blocks, and writes the step's tokens.
    ``on_start`` receives the progress of allocating host memory and of scanning the storage.
    """

    def __init__(self, spec: WorkerSpec, rank: int, on_start: StartProgress | None = None) -> None:
        layout = spec.layout
        device: Device | None = None
        if spec.device is DeviceName.CUDA:
            device = open_gpu(rank, spec.transfer)
        elif spec.faults.rate:
            device = FaultyDevice(spec.faults, layout, rank, spec.transfer)
        self._verify_every = spec.verify_every
        self._layers = layout.total_layers
        self.controller = CacheController(spec.transfer, layout, rank=rank, device=device)
        tensors = self.controller.initialize_kv_cache(spec.device_blocks)
        on_memory = on_start and partial(on_start, f"allocating the host memory of rank {rank}")
        self.controller.initialize_host_cache(spec.host, on_memory)
        context = ConnectorContext(
            layout,
            rank // layout.replicas,
            spec.storage,
            spec.storage_options,
            verify=spec.transfer.verify is not Verify.OFF,
            on_progress=on_start and partial(on_start, f"scanning the storage of rank {rank}"),
        )
        keeps = spec.host.num_blocks and not rank % layout.replicas
        storage = open_storage(context) if keeps else None
        self._scan = self.controller.initialize_storage(storage) if storage is not None else None
        gpu = spec.device is DeviceName.CUDA
        self.planes: Planes = GpuPlanes(tensors, layout) if gpu else HostPlanes(tensors)
        self._model = make_model(self.planes.arrays, layout, rank)

    def execute(self, order: StepOrder) -> StepResult:
        """Submit the step's plans, compute its tokens layer by layer, and return the result."""
        model = self._model
        for sequence, tokens in order.begins:
            model.begin(sequence, tokens)
        stream = self.planes.stream
        counters = [self.controller.submit_swap_tasks(plan, stream) for plan in order.plans]
        verified = model.prepare(order.segments, order.blocks, self._verify_every)
        self.planes.open_step(order.segments, order.blocks)
        differing: list[tuple[int, int]] = []
        for layer in range(self._layers):
            for counter in counters:
                counter.wait_for_layer(layer)
            self.planes.fetch(layer)
            differing += model.run_layer(layer)
            self.planes.store(layer)
        for sequence in order.ends:
            model.end(sequence)
            self.planes.forget(sequence)
        scan, self._scan = self._scan, None
        return StepResult(
            verified,
            differing,
            self.controller.poll(),
            peak_rss_bytes(),
            scan,
            self.controller.storage_stats(),
        )

    def close(self) -> None:
        """Wait for the copies in flight and release all memory."""
        self.controller.shutdown()
