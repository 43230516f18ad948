"""Engines that own their device caches and hand blocks over, in this process or in one elsewhere.

    python -m tests.handover_engine FOLDER ADDRESS KEY

runs one that decodes. It reads lines ``name seed blocks address`` and answers each with how the fetch has ended.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fdcache.controller.cache_controller import CacheController
from fdcache.layout import KVLayout
from fdcache.manager import LoadOutcome, OffloadManager, Request
from fdcache.manager.requests import PeerSource
from fdcache.metadata import Int32Array
from fdcache.settings.cache import CacheSettings, CopySettings
from fdcache.settings.peers import PeerSettings
from fdcache.transfer.engine_handovers import EngineHandovers
from fdcache.transfer.handovers import PeerTerms
from tests.service_help import until
from tests.transfer_help import BLOCK, LAYOUT, prompt_of

DEVICE_BLOCKS = 64


class Engine:
    """An engine with device blocks of its own, above an ``OffloadManager``."""

    def __init__(
        self,
        role: str,
        directory: Path,
        name: str,
        *,
        wait: float = 60.0,
        blocks: int = DEVICE_BLOCKS,
        layout: KVLayout = LAYOUT,
        **peers: Any,
    ) -> None:
        options = {"address": f"ipc://{directory}/{name}", "timeout": 60.0, "lease": 60.0, "connector": "ipc"}
        self.settings = PeerSettings(role=role, directory=directory, **{**options, **peers})
        cache = CacheSettings(host_memory=32 * layout.record_bytes, write_policy="write_through")
        self.manager = OffloadManager(cache, layout)
        self.handovers = EngineHandovers(self.manager, PeerTerms(self.settings, wait), blocks)
        self.controller = CacheController(CopySettings(group_layers=1), layout)
        tensors = self.controller.initialize_kv_cache(blocks, shared=directory)
        self.planes = [each.reshape(blocks, -1).view(np.uint8) for each in tensors]
        self.controller.initialize_host_cache(self.manager.host_cache)
        address = self.controller.open_transfer(self.settings)
        assert address is not None
        self.address = address
        self.outcomes: list[LoadOutcome] = []
        self.ended: list[str] = []
        self._free = list(range(1, blocks))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.controller.shutdown()
        self.manager.close()

    def step(self) -> None:
        """Submit what is planned and apply what was reported."""
        for plan in self.manager.take_plans():
            self.controller.submit_swap_tasks(plan).wait_all()
        reports = self.controller.poll()
        self.ended += [each.handover.result for each in reports if each.handover is not None]
        self.outcomes += self.manager.apply(reports)

    def until(self, condition: Callable[[], object], *others: Engine) -> None:
        """Step, with others, until something is true."""

        def stepped() -> bool:
            for each in (self, *others):
                each.step()
            return bool(condition())

        until(stepped, "an engine")

    def allocate(self, num_tokens: int) -> Int32Array:
        """Return free device blocks for so many tokens."""
        return np.array([self._free.pop() for _ in range(-(-num_tokens // BLOCK))], np.int32)

    def compute(self, request: Request) -> Int32Array:
        """Return a block table with the bytes of a prompt, of which the last block need not be full."""
        table = self.allocate(request.num_tokens)
        self.manager.prepare([request])
        for block, device in enumerate(table):
            for index, plane in enumerate(self.planes):
                plane[device] = bytes_of(request, block, index)
        return table

    def source(self, transfer: str) -> PeerSource:
        return PeerSource(transfer, (self.address,))

    def send(self, request: Request, transfer: str) -> Int32Array:
        """Compute a request and hand it over under this name; return its block table."""
        table = self.compute(request)
        assert self.handovers.send(request, transfer, request.num_tokens, table) == len(table)
        self.manager.finish([request])
        return table

    def is_right(self, request: Request, table: Int32Array, first: int = 0) -> bool:
        """Return True if blocks have the bytes that prefill has computed."""
        return all(
            np.array_equal(plane[table[block]], bytes_of(request, block, index))
            for block in range(first, len(table))
            for index, plane in enumerate(self.planes)
        )

    @property
    def host_blocks(self) -> int:
        """Blocks in host memory."""
        host = self.manager.get_stats().host
        return 0 if host is None else host.ready

    @property
    def is_clean(self) -> bool:
        """True if nothing is in flight, held or tracked."""
        self.manager.check_integrity()
        stats = self.manager.get_stats()
        return not (self.manager.has_pending_work or stats.live_requests or stats.held_blocks)


def bytes_of(request: Request, block: int, plane: int) -> np.ndarray:
    """Return the bytes of a block of a prompt, which follow from its tokens."""
    tokens = request.tokens[: (block + 1) * BLOCK]
    seed = [int(tokens.sum()) % 2**32, len(tokens), plane]
    return np.random.default_rng(seed).integers(0, 256, LAYOUT.planes[plane].nbytes, np.uint8)


def say(*words: object) -> None:
    """Write a line to the standard output."""
    sys.stdout.write(f"{' '.join(map(str, words))}\n")
    sys.stdout.flush()


def main(folder: str, address: str, key: str) -> None:
    """Fetch what the lines of the standard input name."""
    with Engine("decode", Path(folder), "elsewhere", address=address, key=key, lease=5.0) as decode:
        say("ready")
        for line in sys.stdin:
            name, seed, blocks, peer = line.split()
            request = Request(f"of-{name}", prompt_of(int(seed), int(blocks)))
            begun = time.monotonic()
            decode.outcomes.clear()
            decode.handovers.fetch(request, PeerSource(name, (peer,)))
            table = decode.allocate(decode.manager.match(request, 0).num_tokens)
            decode.manager.load(request, table)
            decode.until(lambda: decode.outcomes)
            right = decode.is_right(request, table)
            decode.manager.finish([request])
            decode.until(lambda: decode.is_clean)
            decode._free += table.tolist()
            seconds = time.monotonic() - begun
            outcome = decode.outcomes[0]
            say(outcome.status, right, f"{seconds:.1f}", outcome.error_message)


if __name__ == "__main__":
    main(*sys.argv[1:])
