"""An engine that owns its device cache, with fdcache's host and storage tier below it.

Run it with ``python -m examples.offloading``. The engine keeps its own table of cached device blocks, as vLLM and
SGLang do, and serves three prompts with a common prefix on a device with too few blocks. It prints how many tokens of
each prompt came from the device and from below. The environment configures it, as in ``examples/embedding.py``.
"""

from __future__ import annotations

import sys

import numpy as np

from fdcache import CacheController, KVLayout, LoadOutcome, LoadStatus, MatchStatus, OffloadManager, Request
from fdcache.errors import FdcacheError
from fdcache.settings import Settings

BLOCK = 16
LAYOUT = KVLayout.uniform(
    model="example", revision="1", block_size=BLOCK, num_layers=2, kv_heads=1, head_dim=8, dtype="float16"
)
DEVICE_BLOCKS = 8
DEFAULTS = {
    "FDCACHE_BLOCK_SIZE": BLOCK,
    "FDCACHE_HOST_MEMORY": "1MiB",
    "FDCACHE_WRITE_POLICY": "write_through",
    "FDCACHE_STORAGE_SIZE": "16MiB",
}


class Engine:
    """Engine that serves one request at a time, with a prefix cache of its own: a dictionary from key to block."""

    def __init__(self, settings: Settings) -> None:
        self.manager = OffloadManager.from_settings(LAYOUT, settings)
        self.controller = CacheController.from_settings(LAYOUT, settings)
        self.planes = self.controller.initialize_kv_cache(DEVICE_BLOCKS)
        self.controller.initialize_host_cache(self.manager.host_cache)
        if scan := self.controller.open_storage():
            self.manager.restore_storage([scan])
        self.cached: dict[tuple[int, ...], int] = {}  # all tokens up to the end of a block -> device block
        self.coldest = list(range(DEVICE_BLOCKS))

    def serve(self, name: str, prompt: list[int]) -> str:
        """Serve one prompt and return where its prefix was found."""
        request = Request(name, prompt)
        self.manager.begin([request])
        table = self.find_on_device(prompt)
        on_device = len(table) * BLOCK
        while (found := self.manager.match(request, on_device)).status is MatchStatus.DEFERRED:
            self.run_step()  # its blocks are being read; an engine computes other requests meanwhile
            self.collect_reports()
        table += self.take_blocks(-(-len(prompt) // BLOCK) - len(table), keep=table)
        computed = on_device
        if found.num_tokens:
            first = on_device // BLOCK
            self.manager.load(request, np.array(table[first : first + found.num_tokens // BLOCK], np.int32))
            computed += found.num_tokens
        self.manager.evicted(np.array(table[on_device // BLOCK :], np.int32))
        self.run_step()
        for outcome in self.collect_reports():
            if outcome.status is not LoadStatus.CONFIRMED:
                computed = outcome.recompute_from
        self.compute(table[computed // BLOCK :])
        self.manager.offer(request, len(prompt), np.array(table, np.int32))
        self.manager.finish([request])
        for block in range(len(prompt) // BLOCK):
            self.cached[tuple(prompt[: (block + 1) * BLOCK])] = table[block]
        while self.manager.has_pending_work:
            self.run_step()
            self.collect_reports()
        return f"{name}: {on_device} tokens on the device, {found.num_tokens} below"

    def find_on_device(self, prompt: list[int]) -> list[int]:
        """Return the blocks of the engine's own cache that a prompt can use, short of its last token."""
        table = []
        for end in range(BLOCK, len(prompt), BLOCK):
            block = self.cached.get(tuple(prompt[:end]))
            if block is None:
                break
            table.append(block)
        return table

    def take_blocks(self, count: int, keep: list[int]) -> list[int]:
        """Give the coldest blocks a new content; ``keep`` are used by the request."""
        taken = [block for block in self.coldest if block not in keep][:count]
        self.coldest = [block for block in self.coldest if block not in taken] + taken
        self.cached = {key: block for key, block in self.cached.items() if block not in taken}
        return taken

    def compute(self, blocks: list[int]) -> None:
        """Write keys and values; stands for the forward pass."""
        for plane in self.planes:
            plane[blocks] = np.float16(1)

    def run_step(self) -> None:
        """Submit the step's copies before it computes."""
        for plan in self.manager.take_plans():
            self.controller.submit_swap_tasks(plan).wait_all()

    def collect_reports(self) -> list[LoadOutcome]:
        """Wait for the copies and apply their reports; an engine polls between steps instead."""
        outcomes: list[LoadOutcome] = []
        while reports := self.controller.wait_reports(timeout=10):
            outcomes += self.manager.apply(reports)
        return outcomes

    def close(self) -> None:
        """Wait for copies and release everything."""
        self.controller.shutdown()
        self.manager.close()


def main() -> None:
    """Serve three prompts on a device that holds one of them."""
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
