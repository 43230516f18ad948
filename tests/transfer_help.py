"""An instance for tests of transfers: a manager and a controller on the CPU, and blocks with known bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fdcache.controller.cache_controller import CacheController
from fdcache.devices.base import Device
from fdcache.manager import CacheManager, Request
from fdcache.manager.handover import PeerTerms
from fdcache.manager.requests import PeerSource
from fdcache.manager.results import LoadOutcome
from fdcache.settings.cache import CacheSettings, TransferSettings
from fdcache.settings.peers import PeerSettings
from fdcache.transfer.conformance import transfer_layout
from fdcache.transfer.statistics import TransferStats
from tests.service_help import until

LAYOUT = transfer_layout()
BLOCK = LAYOUT.block_size


def prompt_of(seed: int, blocks: int, extra: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, blocks * BLOCK + extra).astype(np.int32)


class Instance:
    """One instance of a deployment, with one rank."""

    def __init__(
        self,
        role: str,
        directory: Path,
        name: str,
        *,
        blocks: int = 64,
        host_blocks: int = 0,
        verifies: bool = True,
        wait: float = 20.0,
        rank_settings: TransferSettings | None = None,
        device: Device | None = None,
        stream: Any = None,
        **peers: Any,
    ) -> None:
        options = {"timeout": 20.0, "lease": 2.0, "connector": "ipc", **peers}
        self.settings = PeerSettings(
            role=role, address=f"ipc://{directory}/{name}", directory=directory, **options
        )
        host_memory = host_blocks * LAYOUT.record_bytes
        cache = CacheSettings(device_blocks=blocks, host_memory=host_memory, write_policy="write_through")
        self.manager = CacheManager(cache, LAYOUT, peers=PeerTerms(self.settings, wait))
        self.controller = CacheController(
            rank_settings or TransferSettings(group_layers=1), LAYOUT, device=device
        )
        self.stream = stream
        self.planes = [
            each.reshape(blocks, -1).view(np.uint8)
            for each in self.controller.initialize_kv_cache(blocks, shared=directory)
        ]
        self.controller.initialize_host_cache(self.manager.host_cache)
        address = self.controller.open_transfer(self.settings, verifies=verifies)
        assert address is not None
        self.address = address
        self.outcomes: list[LoadOutcome] = []

    def __enter__(self) -> Instance:
        return self

    def __exit__(self, *_: object) -> None:
        self.controller.shutdown()
        self.manager.close()

    def step(self) -> None:
        """Submit what is planned and apply what was reported."""
        for plan in self.manager.take_plans():
            self.controller.submit_swap_tasks(plan, self.stream)
        self.outcomes += self.manager.apply(self.controller.poll()) + self.manager.expire()

    @property
    def transfers(self) -> TransferStats:
        found = self.controller.transfer_stats()
        assert found is not None
        return found

    @property
    def host_blocks(self) -> int:
        host = self.manager.get_stats().host
        return 0 if host is None else host.ready

    def until(self, condition: Callable[[], object], *others: Instance) -> None:
        """Step, with other instances, until something is true."""

        def stepped() -> bool:
            for each in (self, *others):
                each.step()
            return bool(condition())

        until(stepped, "an instance of a transfer")

    def source(self, transfer: str, attempt: int = 1) -> PeerSource:
        return PeerSource(transfer, (self.address,), attempt)

    def start(self, request: Request) -> int:
        """Match and allocate a request; return the number of its cached tokens."""
        found = self.manager.match_prefix([request])[0]
        assert self.manager.allocate_device_blocks([(request, request.num_tokens)])[0].ok
        return found.num_cached_tokens

    def fetch(self, request: Request, source: PeerSource) -> int:
        """Match a request and allocate it with a fetch; return the number of blocks to come."""
        self.manager.match_prefix([request])
        count = self.manager.fetch([(request, source)])[0]
        assert self.manager.allocate_device_blocks([(request, request.num_tokens)])[0].ok
        self.step()
        return count

    def compute(self, request: Request, transfer: str, first: int = 0, last: int | None = None) -> None:
        """Write blocks layer by layer, as a forward pass does, and publish them."""
        last = len(request.block_hashes) if last is None else last
        for layer in range(LAYOUT.total_layers):
            for index, plane in enumerate(LAYOUT.planes):
                if plane.layer == layer:
                    for block in range(first, last):
                        self.write(index, request.block_table[block], expected(request, block, index))
            self.controller.layer_computed(layer, {transfer: last}, self.stream)
        self.manager.commit([(request, last * BLOCK)])

    def wrong_blocks(self, request: Request, first: int, last: int) -> list[int]:
        """Return the blocks whose bytes are not those that prefill computes."""
        return [
            block
            for block in range(first, last)
            if any(
                not np.array_equal(
                    self.read(index, request.block_table[block]), expected(request, block, index)
                )
                for index in range(LAYOUT.num_planes)
            )
        ]

    def write(self, plane: int, slot: int, data: np.ndarray) -> None:
        """Write a block of a plane."""
        self.planes[plane][slot] = data

    def read(self, plane: int, slot: int) -> np.ndarray:
        """Return a block of a plane."""
        return self.planes[plane][slot]


def expected(request: Request, block: int, plane: int) -> np.ndarray:
    """Return the bytes that computing a block writes into a plane."""
    seed = int.from_bytes(request.block_hashes[block, :8].tobytes(), "little")
    return np.random.default_rng((seed, plane)).integers(0, 256, LAYOUT.planes[plane].nbytes, np.uint8)
