"""A worker on a GPU with a full host cache, and plans with scattered slots or runs of slots."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fdcache.controller.cache_controller import CacheController
from fdcache.devices.cuda import CudaDevice
from fdcache.layout import KVLayout
from fdcache.machine.calibration import Calibration
from fdcache.metadata import CacheLevel, CacheSwapMetadata, SwapPurpose, TransferPlan, TransferReport
from fdcache.settings.cache import CopySettings
from fdcache.tiers.host import HostCache

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
RUN_BYTES = 16 * MIB


def make_layout(plane_kib: int) -> KVLayout:
    """Return a layout with 64 planes: 32 layers of keys and values, or 64 layers of MLA for 72 KiB."""
    common: dict[str, Any] = {"model": "benchmark", "revision": "1", "dtype": "bfloat16"}
    if plane_kib == 72:
        return KVLayout.mla(**common, num_layers=64, block_size=64, latent_dim=576)
    block_size = min(64, plane_kib * 4)
    heads = plane_kib * KIB // (block_size * 128 * 2)
    return KVLayout.uniform(**common, num_layers=32, block_size=block_size, kv_heads=heads, head_dim=128)


def idle_stream(device: CudaDevice) -> Any:
    """Return a stream on which nothing computes."""
    import cupy

    with cupy.cuda.Device(device.gpu.ordinal):
        return cupy.cuda.Stream(non_blocking=True)


@dataclass(frozen=True)
class Pick:
    """Slots of one transfer."""

    device: np.ndarray[Any, Any]
    host: np.ndarray[Any, Any]


class SwapWorker:
    """Controller with ``pool_bytes`` of device blocks and as much host cache, every host slot holding a block.

    ``shared``: name of the host cache that this ``rank`` shares with those that hold the same bytes.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        pool_bytes: int = 2 * GIB,
        calibration: Calibration | None = None,
        gpu: str | int | None = None,
        rank: int = 0,
        shared: str | None = None,
        **options: Any,
    ) -> None:
        settings = CopySettings(drain_timeout=60.0, layer_timeout=60.0, **options)
        self.layout = layout
        self.blocks = pool_bytes // layout.record_bytes
        self.device = CudaDevice(gpu, settings=settings, calibration=calibration)
        self.controller = CacheController(settings, layout, rank=rank, device=self.device)
        self.tensors = self.controller.initialize_kv_cache(self.blocks)
        self.controller.initialize_host_cache(HostCache(self.blocks, name=shared))
        self.random = np.random.default_rng(0)
        self._next = 0
        self._hashes = np.zeros((self.blocks, 32), np.uint8)
        self._hashes[:, :8] = np.arange(self.blocks, dtype=np.int64).view(np.uint8).reshape(-1, 8)
        self.stream = idle_stream(self.device)
        self._fill()

    def _fill(self) -> None:
        import cupy

        for index, tensor in enumerate(self.tensors):
            words = tensor.reshape(-1).view(cupy.uint16)
            words[:] = cupy.arange(words.size, dtype=cupy.uint32).astype(cupy.uint16) * (2 * index + 1)
        cupy.cuda.runtime.deviceSynchronize()
        every = np.arange(self.blocks, dtype=np.int32)
        self.run(evict=Pick(every, every))

    def close(self) -> None:
        self.controller.shutdown()
        self.tensors = []

    def scattered(self, nbytes: int) -> Pick:
        count = nbytes // self.layout.record_bytes
        return Pick(self._sample(count), self._sample(count))

    def in_runs(self, nbytes: int) -> Pick:
        """Pick host slots in runs of ``RUN_BYTES``, in a random order of runs, and random device slots."""
        count = nbytes // self.layout.record_bytes
        length = max(RUN_BYTES // self.layout.record_bytes, 1)
        starts = self.random.permutation(self.blocks // length)[: -(-count // length)] * length
        host = (starts[:, None] + np.arange(length)).reshape(-1)[:count]
        return Pick(self._sample(len(host)), host.astype(np.int32))

    def _sample(self, count: int) -> np.ndarray[Any, Any]:
        return self.random.permutation(self.blocks)[:count].astype(np.int32)

    def plan(
        self, *, load: Pick | None = None, evict: Pick | None = None, backup: Pick | None = None
    ) -> TransferPlan:
        self._next += 1
        return TransferPlan(
            plan_id=self._next,
            loads=self._swap(SwapPurpose.LOAD, load),
            evictions=self._swap(SwapPurpose.EVICT, evict),
            backups=self._swap(SwapPurpose.BACKUP, backup),
        )

    def _swap(self, purpose: SwapPurpose, pick: Pick | None) -> CacheSwapMetadata | None:
        if pick is None:
            return None
        load = purpose is SwapPurpose.LOAD
        levels = (CacheLevel.HOST, CacheLevel.DEVICE) if load else (CacheLevel.DEVICE, CacheLevel.HOST)
        generations = np.ones(len(pick.host), np.uint32)
        return CacheSwapMetadata(
            purpose=purpose,
            src_type=levels[0],
            dst_type=levels[1],
            src_block_ids=pick.host if load else pick.device,
            dst_block_ids=pick.device if load else pick.host,
            src_generations=generations,
            dst_generations=generations,
            hash_values=self._hashes[pick.host],
            parent_hashes=np.zeros((len(pick.host), 32), np.uint8),
        )

    def run(self, **picks: Pick) -> list[float]:
        """Execute one plan; return the seconds of each of its transfers on the GPU."""
        self.controller.submit_swap_tasks(self.plan(**picks), self.stream)
        return self.finish()

    def finish(self) -> list[float]:
        (report,) = self.reports()
        return [result.seconds for result in report.results]

    def reports(self) -> list[TransferReport]:
        """Wait for plans to end; return their reports."""
        reports = self.controller.wait_reports(60.0)
        for report in reports:
            for result in report.results:
                if not result.success:
                    raise RuntimeError(f"a copy failed: {result.error_message}")
        return reports

    def rate(self, way: str, pick: Callable[[int], Pick], nbytes: int, repeats: int = 7) -> float:
        """Return the bytes per second of loads or evictions, the median over different blocks."""
        seconds = [self.run(**{way: pick(nbytes)})[0] for _ in range(repeats + 1)][1:]
        count = nbytes // self.layout.record_bytes
        return count * self.layout.payload_bytes / statistics.median(seconds)

    def rate_both(self, pick: Callable[[int], Pick], nbytes: int, plans: int = 4) -> float:
        """Return the bytes per second of loads and backups of ``nbytes`` at once, by the host's clock.

        Several plans follow each other, so that the ends, with one way idle, weigh little. No block is
        copied twice, so the worker needs memory for ``2 * plans * nbytes``.
        """
        rates = []
        for _ in range(3):
            whole = pick(2 * plans * nbytes)
            parts = [
                Pick(device, host)
                for device, host in zip(
                    np.array_split(whole.device, 2 * plans),
                    np.array_split(whole.host, 2 * plans),
                    strict=True,
                )
            ]
            queue = [
                self.plan(load=load, backup=backup)
                for load, backup in zip(parts[:plans], parts[plans:], strict=True)
            ]
            start = time.perf_counter()
            for plan in queue:
                self.controller.submit_swap_tasks(plan, self.stream)
            left = plans
            while left:
                left -= len(self.reports())
            seconds = time.perf_counter() - start
            rates.append(len(whole.host) * self.layout.payload_bytes / seconds)
        return statistics.median(rates)
