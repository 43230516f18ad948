"""Time what FdcacheLinker does on the thread of SGLang's scheduler, and on that of its turns, without an engine.

    python -m benchmarks.sglang.calls [--pages 2048] [--layers 1] [--device cpu] [--server ADDRESS] [--cold 48]

A pool of small layers: copies take next to nothing, so that what is left is the bookkeeping. On a machine with few
cores the threads that copy on a CPU take the core of the caller: the last columns are the time of the caller alone, of
which the least is that of a machine that does nothing else. ``--cold``: MiB of other memory that are touched before
each call, as the engine's work between two calls does.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness import machine
from fdcache._core import keys_from_hex
from fdcache.integrations.sglang.device_pools import DevicePages
from fdcache.integrations.sglang.offloads import Offloads, PoolPart
from fdcache.integrations.sglang.pool_tier import PoolTier
from fdcache.integrations.sglang.slots import SlotReader
from fdcache.integrations.sglang.turns import Turns
from fdcache.layout import KVLayout
from fdcache.layout_planes import PlaneKind
from fdcache.metadata import HashArray
from fdcache.settings import Settings, Sourced

ROUNDS = 15


def main() -> None:
    """Print a table of microseconds."""
    options = options_given()
    planes = [
        torch.zeros((2 * options.pages, 256), dtype=torch.uint8, device=options.device)
        for _ in range(2 * options.layers)
    ]
    reader = SlotReader(planes[0].device)
    tier = tier_of(options, planes)
    calls = Calls(np.zeros(options.cold << 20, np.uint8))
    stores = Stores(calls, tier, reader)
    for _ in range(ROUNDS):
        store_and_load(calls, tier, reader, stores, options.pages, waits=options.server is not None)
    stores.turns.close()
    tier.close()
    print(
        f"{machine()}; {options.device}; {options.pages} pages, {options.layers} layers, {options.cold} MiB between"
    )
    print("microseconds: median, most, median and least of the thread's own time")
    for name, times in calls.spent.items():
        own = calls.own[name]
        print(f"{name:24} {median(times):8.0f} {max(times):8.0f} {median(own):8.0f} {min(own):8.0f}")


def tier_of(options: argparse.Namespace, planes: list[torch.Tensor]) -> PoolTier:
    """Return a tier with memory for all rounds, or that of a service."""
    pool = DevicePages("kv", None, planes, (PlaneKind.KEY, PlaneKind.VALUE), range(options.layers), 16)
    layout = KVLayout.of_layers(pool.specs, model="calls", revision="1", block_size=16)
    memory = 2 * ROUNDS * options.pages * (layout.record_bytes + 128)
    where = ("FDCACHE_SERVER", options.server) if options.server else ("FDCACHE_HOST_MEMORY", memory)
    given = {
        where[0]: where[1],
        "FDCACHE_BLOCK_SIZE": 16,
        "FDCACHE_WRITE_POLICY": "write_through",
        "FDCACHE_LOAD_OR_RECOMPUTE": "always",
    }
    arguments = {name: Sourced("benchmark", str(value)) for name, value in given.items()}
    return PoolTier(pool, layout, Settings.load(arguments=arguments), verifies_all=False, stores=True)


class Calls:
    """Times of calls by name: in all, and the thread's own."""

    def __init__(self, other: NDArray[np.uint8]) -> None:
        self._other = other
        self.spent: dict[str, list[float]] = {}
        self.own: dict[str, list[float]] = {}

    def timed(self, name: str, call: Callable[..., Any], *arguments: Any, follows: bool = False) -> Any:
        """Time a call; ``follows``: within the same call of SGLang as the one before, so that nothing is touched."""
        if not follows:
            self._other[::64] += 1
        began, worked = time.perf_counter(), time.thread_time()
        result = call(*arguments)
        self.own.setdefault(name, []).append((time.thread_time() - worked) * 1e6)
        self.spent.setdefault(name, []).append((time.perf_counter() - began) * 1e6)
        return result


class Stores:
    """Offloads as the linker does them: taken and counted by this thread, offered and copied in turns on another."""

    def __init__(self, calls: Calls, tier: PoolTier, reader: SlotReader) -> None:
        self._calls = calls
        self._tier = tier
        self._stream = reader.store_stream
        self._offloads = Offloads({tier.pages.name: tier})
        self.turns = Turns(self._turn, reader.device)

    def _turn(self) -> None:
        timed = partial(self._calls.timed, follows=True)
        reported = timed("turn: reports", self._tier.take_reports)
        self._offloads.take_added()
        if not reported or self._offloads.are_many:
            timed("turn: offer", self._offloads.begin)
        timed("turn: submit", self._tier.turn, self._stream)
        timed("turn: ends", self._offloads.take_ends)

    def store(self, what: str, names: list[str], slots: NDArray[np.int32]) -> None:
        """Store pages, and wait for the end."""
        self._calls.timed(f"{what}: take", self._take, names, slots)
        while not self._calls.timed(f"{what}: step", self._step):
            time.sleep(0.001)
        assert self._offloads.pop()

    def _take(self, names: list[str], slots: NDArray[np.int32]) -> None:
        self._offloads.add([PoolPart(self._tier, names, lambda: slots)], lambda: True, is_whole=True)

    def _step(self) -> int:
        self.turns.ask()
        return self._offloads.num_completed


def store_and_load(
    calls: Calls, tier: PoolTier, reader: SlotReader, stores: Stores, pages: int, *, waits: bool
) -> None:
    """Look pages up that are not there, store them, look them up again, load them, and offer them again."""
    timed, slots = calls.timed, np.arange(pages, dtype=np.int32)
    names = [os.urandom(32).hex() for _ in range(pages)]
    keys = keys_from_hex(names)
    request = timed("absent: begin", tier.look, keys)
    timed("absent: look-up", tier.found, request, follows=True)
    tier.end([request])
    stores.store("offload", names, slots)
    if waits:
        wait_until_found(tier, keys)
    keys = timed("look-up: keys", keys_from_hex, names)
    request = timed("look-up: begin", tier.look, keys, follows=True)
    assert timed("look-up: all there", tier.found, request, follows=True) == pages
    timed("look-up: again", tier.found, request)
    timed("load: plan", tier.plan_load, request, slots)
    timed("load: submit", tier.submit, reader.current_stream(), reader.store_stream)
    assert timed("load: wait and end", tier.outcome, request, time.monotonic() + 5)
    tier.end([request])
    stores.store("offered again", names, slots)


def wait_until_found(tier: PoolTier, keys: HashArray) -> None:
    """Wait for a service to make pages findable, which it does a moment after it has them."""
    found = 0
    while found < len(keys):
        time.sleep(0.001)
        request = tier.look(keys)
        found = tier.found(request)
        tier.end([request])


def options_given() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang.calls", description=__doc__)
    parser.add_argument("--pages", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--server", help="address of a service, whose tier is used")
    parser.add_argument("--cold", type=int, default=0, metavar="MIB", help="memory to touch before each call")
    return parser.parse_args()


if __name__ == "__main__":
    main()
