"""A prefill and a decode instance on GPUs, for the times of a hand-over: ``python -m benchmarks.pd gpu``.

Prefill spins instead of computing, so that its layers take as long as those of a model.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.swap.worker import make_layout
from fdcache.controller.cache_controller import CacheController
from fdcache.devices.cuda import CudaDevice
from fdcache.machine.calibration import Calibration
from fdcache.manager import CacheManager, Request
from fdcache.manager.requests import PeerSource
from fdcache.settings.cache import CacheSettings, TransferSettings
from fdcache.settings.peers import PeerSettings
from fdcache.transfer.handovers import Handovers, PeerTerms

PLANE_KIB = 128
BLOCKS = 128
"""Prompts have 8192 tokens, whose keys and values are 1 GiB."""
GROUP_LAYERS = 4
_POOL = 4 * BLOCKS
LAYER_US = (1000, 10_000)
_ROUNDS = 5
_PATIENCE = 30.0
_NAP = 1e-4
"""Seconds between two looks; a loop without a pause would keep the interpreter from the threads that hand over."""

_SPIN = """extern "C" __global__ void spin(long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}"""


class Instance:
    """One rank with its manager, and a stream that computes."""

    def __init__(self, role: str, gpu: int, directory: Path, *, verifies: bool, connector: str) -> None:
        import cupy

        self.layout = make_layout(PLANE_KIB)
        settings = PeerSettings(role=role, connector=connector, address=f"ipc://{directory}/{role}")
        self.manager = CacheManager(CacheSettings(device_blocks=_POOL), self.layout)
        self.handovers = Handovers(self.manager, PeerTerms(settings, _PATIENCE))
        device = CudaDevice(gpu, calibration=Calibration())
        self.controller = CacheController(
            TransferSettings(first_group_layers=GROUP_LAYERS, group_layers=GROUP_LAYERS),
            self.layout,
            device=device,
        )
        self.tensors = self.controller.initialize_kv_cache(_POOL)
        self.controller.initialize_host_cache(self.manager.host_cache)
        self.address = self.controller.open_transfer(settings, verifies=verifies)
        self._device = cupy.cuda.Device(gpu)
        with self._device:
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self._kernel = cupy.RawKernel(_SPIN, "spin")
            self._kernel.compile()

    def close(self) -> None:
        """End it."""
        self.controller.shutdown()
        self.manager.close()

    def step(self) -> list[Any]:
        """Submit what is planned; return the outcomes of what was reported."""
        for plan in self.manager.take_plans():
            self.controller.submit_swap_tasks(plan, self.stream)
        return [*self.manager.apply(self.controller.poll()), *self.manager.expire()]

    def step_until(self, is_true: Callable[[], object]) -> None:
        """Step until something is true."""
        deadline = time.monotonic() + _PATIENCE
        while not is_true():
            self.step()
            time.sleep(_NAP)
            if time.monotonic() > deadline:
                raise TimeoutError("the hand-over does not end")

    def _request(self, seed: int) -> Request:
        size = BLOCKS * self.layout.block_size + 5
        tokens = np.random.default_rng(seed).integers(0, 50_000, size).astype(np.int32)
        return Request(f"r{seed}", tokens)

    def prefill(self, seed: int, layer_us: int) -> float:
        """Compute a prompt and hand it over; return when its last layer was computed."""
        request = self._request(seed)
        manager = self.manager
        manager.match_prefix([request])
        manager.allocate_device_blocks([(request, request.num_tokens)])
        self.handovers.send([(request, request.request_id)])
        self.step()
        for layer in range(self.layout.total_layers):
            with self._device, self.stream:
                self._kernel((1,), (1,), (1000 * layer_us,))
            self.controller.layer_computed(layer, {request.request_id: BLOCKS}, self.stream)
        self.stream.synchronize()
        computed = time.monotonic()
        manager.commit([(request, BLOCKS * self.layout.block_size)])
        manager.finish([request])
        return computed

    def await_sends(self) -> None:
        """Step until nothing is sent any more."""
        self.step_until(lambda: not self._stats().transfers)
        self.step()

    def decode(self, seed: int, address: str) -> tuple[float, float]:
        """Fetch a prompt; return when its first group was there, and when the whole of it was."""
        request = self._request(seed)
        self.manager.match_prefix([request])
        self.handovers.fetch([(request, PeerSource(request.request_id, (address,), 1))])
        self.manager.allocate_device_blocks([(request, request.num_tokens)])
        first: float | None = None
        outcomes: list[Any] = []
        while not outcomes:
            time.sleep(_NAP)
            outcomes = self.step()
            if first is None and self._stats().connector.read_bytes:
                first = time.monotonic()
        done = time.monotonic()
        if outcomes[0].error_message is not None:
            raise RuntimeError(outcomes[0].error_message)
        self.manager.finish([request])
        return first or done, done

    def _stats(self) -> Any:
        stats = self.controller.transfer_stats()
        assert stats is not None
        return stats


@dataclass(frozen=True)
class Times:
    """Medians, in seconds: the first group was there that long before the last layer was computed, all of it after."""

    first_before: float
    all_after: float


def measure_hand_overs(
    ask: Callable[..., str], gpu: int, layer_us: int, *, verifies: bool, connector: str = "ipc"
) -> Times:
    """Hand prompts over from the instance behind ``ask`` to one on this GPU."""
    with tempfile.TemporaryDirectory() as directory:
        address = ask("open", f"{directory} {int(verifies)} {connector}")
        mine = Instance("decode", gpu, Path(directory), verifies=verifies, connector=connector)
        before, after = [], []
        for seed in range(_ROUNDS + 1):
            ask("compute", f"{seed} {layer_us}")
            first, done = mine.decode(seed, address)
            computed = float(ask("computed", "-"))
            before.append(computed - first)
            after.append(done - computed)
        ask("close", "-")
        mine.close()
    return Times(statistics.median(before[1:]), statistics.median(after[1:]))
