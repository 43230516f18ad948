"""The shortest engine that uses fdcache: one process, one rank, NumPy arrays as the device.

Run it with ``python -m examples.embedding``. It serves three prompts with a common prefix on a device with too few
blocks, and prints where each prompt's prefix was found. The environment configures it, for example
``FDCACHE_HOST_MEMORY=0`` or ``FDCACHE_STORAGE=local FDCACHE_STORAGE_DIR=/tmp/blocks``.
"""

from __future__ import annotations

import sys

import numpy as np

from fdcache import (
    CacheController,
    CacheManager,
    KVLayout,
    LayerDoneCounter,
    MatchStatus,
    Request,
)
from fdcache.devices.cpu import memory_bytes
from fdcache.errors import FdcacheError
from fdcache.settings import Settings

LAYOUT = KVLayout.uniform(
    model="example", revision="1", block_size=16, num_layers=2, kv_heads=1, head_dim=8, dtype="float16"
)


DEFAULTS = {
    "FDCACHE_DEVICE_BLOCKS": 8,
    "FDCACHE_HOST_MEMORY": "1MiB",
    "FDCACHE_WRITE_POLICY": "write_through",
    "FDCACHE_STORAGE_SIZE": "16MiB",
}


class Engine:
    """Engine that serves one request at a time: match, allocate, submit the plan, compute, report, commit, finish."""

    def __init__(self, settings: Settings) -> None:
        self.manager = CacheManager.from_settings(LAYOUT, settings, device_bytes=memory_bytes)
        self.controller = CacheController.from_settings(LAYOUT, settings)
        self.planes = self.controller.initialize_kv_cache(self.manager.num_device_blocks)
        self.controller.initialize_host_cache(self.manager.host_cache)
        if scan := self.controller.open_storage():
            self.manager.restore_storage([scan])

    def serve(self, name: str, prompt: list[int]) -> str:
        """Serve one prompt and return where its prefix was found."""
        request = Request(name, prompt)
        self.manager.begin([request])
        while (match := self.manager.match_prefix([request])[0]).status is MatchStatus.DEFERRED:
            self.submit_plans()  # its blocks are being read; an engine computes other requests meanwhile
            self.collect_reports()
        allocation = self.manager.allocate_device_blocks([(request, len(prompt))])[0]
        if not allocation.ok:
            self.manager.finish([request])
            return f"{name}: {allocation.shortfall} blocks too few"
        counters = self.submit_plans()
        for layer in range(LAYOUT.total_layers):
            for counter in counters:
                counter.wait_for_layer(layer)
            self.compute(layer, request, match.num_cached_tokens)
        self.collect_reports()
        self.manager.commit([(request, len(prompt))])
        self.manager.finish([request])
        self.submit_plans()  # a step without requests: copies to the host, by the write policy
        self.collect_reports()
        found = f"{match.num_device_blocks} blocks on the device, {match.num_host_blocks} on the host"
        return f"{name}: {found}, {match.num_storage_blocks} in storage"

    def compute(self, layer: int, request: Request, start: int) -> None:
        """Write this layer's keys and values of every block from token ``start`` on; stands for attention."""
        for slot in request.block_table[start // LAYOUT.block_size :]:
            for plane in self.planes[2 * layer : 2 * layer + 2]:
                plane[slot] = np.float16(layer)

    def submit_plans(self) -> list[LayerDoneCounter]:
        """Submit the step's copies before the step computes."""
        return [self.controller.submit_swap_tasks(plan) for plan in self.manager.take_plans()]

    def collect_reports(self) -> None:
        """Wait for the copies and apply their reports; an engine polls between steps instead."""
        while reports := self.controller.wait_reports(timeout=10):
            self.manager.apply(reports)

    def close(self) -> None:
        """Wait for copies and release everything."""
        self.controller.shutdown()
        self.manager.close()


def main() -> None:
    """Serve three prompts on a device that by default holds one of them."""
    system = list(range(64))
    try:
        engine = Engine(Settings.load(defaults=DEFAULTS))
    except FdcacheError as error:
        sys.exit(f"error: {error}")
    print(engine.serve("first", [*system, *range(100, 140)]))
    print(engine.serve("second", [*system, *range(200, 240)]))
    print(engine.serve("first again", [*system, *range(100, 140)]))
    engine.close()


if __name__ == "__main__":
    main()
