"""The ranks of one instance of a replay of prefill and decode: their controllers, and a model that computes on all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fdcache._core import PatternModel
from fdcache.controller.cache_controller import CacheController
from fdcache.layout import KVLayout
from fdcache.manager import CacheManager
from fdcache.metadata import TransferPlan, TransferReport
from fdcache.replay.devices import DeviceName, GpuPlanes, HostPlanes, Planes, open_gpu
from fdcache.settings.cache import CopySettings
from fdcache.settings.peers import PeerSettings
from fdcache.transfer.connector import TransferStats


class InstanceRanks:
    """All ranks of an instance, in one process.

    The heads of the model are in ``shards`` equal parts, a multiple of the ranks. Each part has bytes of its own, which
    are the same whichever rank has it; with latent attention all ranks have all of it.
    """

    def __init__(
        self,
        layout: KVLayout,
        transfer: CopySettings,
        manager: CacheManager,
        shards: int,
        shared: Path | None,
        device: DeviceName = DeviceName.CPU,
        first_gpu: int = 0,
    ) -> None:
        self._layout = layout
        gpu = device is DeviceName.CUDA
        self.controllers = [
            CacheController(
                transfer, layout, rank=rank, device=open_gpu(first_gpu + rank, transfer) if gpu else None
            )
            for rank in range(layout.tp_size)
        ]
        self._planes: list[Planes] = []
        self._models: list[PatternModel] = []
        layers = np.array([plane.layer for plane in layout.planes], dtype=np.int32)
        parts = 1 if layout.is_latent else shards // layout.tp_size
        for rank, controller in enumerate(self.controllers):
            tensors = controller.initialize_kv_cache(manager.num_device_blocks, shared=shared)
            planes: Planes = GpuPlanes(tensors, layout) if gpu else HostPlanes(tensors)
            self._planes.append(planes)
            arrays = [each.reshape(each.shape[0], -1).view(np.uint8) for each in planes.arrays]
            controller.initialize_host_cache(manager.host_cache)
            for part in range(parts):
                number = 0 if layout.is_latent else rank * parts + part
                heads = [_part(array, part, parts) for array in arrays]
                model = PatternModel(heads, layers, layout.total_layers, layout.block_size, number)
                self._models.append(model)

    def open_transfer(self, peers: PeerSettings) -> tuple[str, ...]:
        """Begin to answer peers; return the address of each rank."""
        opened = [controller.open_transfer(peers) for controller in self.controllers]
        return tuple(address for address in opened if address is not None)

    def close(self) -> None:
        """End all hand-overs and release the memory."""
        for controller in self.controllers:
            controller.shutdown()

    def begin(self, sequence: int, tokens: NDArray[np.int32]) -> None:
        """Set the tokens of a request."""
        for model in self._models:
            model.begin(sequence, tokens)

    def end(self, sequence: int) -> None:
        """Forget a request."""
        for model in self._models:
            model.end(sequence)
        for planes in self._planes:
            planes.forget(sequence)

    def flip(self, random: np.random.Generator, slots: NDArray[np.int32]) -> None:
        """Change a byte of one of these blocks, in some plane of some rank."""
        planes = self._planes[int(random.integers(len(self._planes)))]
        plane = int(random.integers(len(planes.arrays)))
        nbytes = self._layout.planes[plane].nbytes
        planes.flip(plane, int(slots[int(random.integers(len(slots)))]), int(random.integers(nbytes)))

    def step(
        self,
        plans: Sequence[TransferPlan],
        segments: NDArray[np.int32],
        table: NDArray[np.int32],
        computed: Mapping[str, int],
    ) -> set[tuple[int, int]]:
        """Compute a step layer by layer; return the segments and blocks whose bytes are wrong."""
        ranks = list(zip(self.controllers, self._planes, strict=True))
        counters = [c.submit_swap_tasks(plan, planes.stream) for plan in plans for c, planes in ranks]
        for model in self._models:
            model.prepare(segments, table, 1)
        for planes in self._planes:
            planes.open_step(segments, table)
        wrong: set[tuple[int, int]] = set()
        for layer in range(self._layout.total_layers):
            for counter in counters:
                counter.wait_for_layer(layer)
            for planes in self._planes:
                planes.fetch(layer)
            for model in self._models:
                wrong.update(model.run_layer(layer))
            for controller, planes in ranks:
                planes.store(layer)
                controller.layer_computed(layer, computed, planes.stream)
        return wrong

    def poll(self) -> list[TransferReport]:
        """Return the reports of all ranks since the last call."""
        return [report for controller in self.controllers for report in controller.poll()]

    def stats(self) -> Iterator[TransferStats]:
        """Yield the hand-overs of each rank."""
        for controller in self.controllers:
            if (stats := controller.transfer_stats()) is not None:
                yield stats


def _part(plane: NDArray[np.uint8], part: int, parts: int) -> NDArray[np.uint8]:
    size = plane.shape[1] // parts
    return plane[:, part * size : (part + 1) * size]
