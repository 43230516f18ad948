"""An instance for tests of transfers: a manager and a controller on the CPU, and blocks with known bytes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from fdcache.controller.cache_controller import CacheController
from fdcache.devices.base import Device
from fdcache.errors import TransferNotFoundError
from fdcache.manager import CacheManager, Request
from fdcache.manager.requests import PeerSource
from fdcache.manager.results import LoadOutcome
from fdcache.settings.cache import CacheSettings, CopySettings
from fdcache.settings.peers import PeerSettings
from fdcache.testing.transfer import transfer_layout
from fdcache.transfer.connector import TransferStats
from fdcache.transfer.handovers import Handovers, PeerTerms
from fdcache.transfer.nixl import find_nixl
from tests.service_help import until

LAYOUT = transfer_layout()
BLOCK = LAYOUT.block_size


def prompt_of(seed: int, blocks: int, extra: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, blocks * BLOCK + extra).astype(np.int32)


class Steps(Protocol):
    """What goes on step by step."""

    def step(self) -> None:
        """Do what there is to do."""


class Instance:
    """One instance of a deployment."""

    def __init__(
        self,
        role: str,
        directory: Path,
        name: str,
        *,
        blocks: int = 64,
        ranks: int = 1,
        host_blocks: int = 0,
        verifies: bool = True,
        wait: float = 120.0,
        keeps_asking: bool = True,
        server: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        rank_settings: CopySettings | None = None,
        device: Device | None = None,
        stream: Any = None,
        **peers: Any,
    ) -> None:
        options = {
            "address": f"ipc://{directory}/{name}",
            "timeout": 120.0,
            "lease": 120.0,
            "connector": "ipc",
        }
        self.settings = PeerSettings(role=role, directory=directory, **{**options, **peers})
        layout = LAYOUT if ranks == 1 else dataclasses.replace(LAYOUT, tp_size=ranks)
        cache = CacheSettings(
            device_blocks=blocks,
            host_memory=host_blocks * layout.record_bytes,
            server=server,
            write_policy="write_through",
        )
        self.manager = CacheManager(cache, layout, clock=clock)
        self.handovers = Handovers(self.manager, PeerTerms(self.settings, wait, keeps_asking))
        self.ranks: list[CacheController] = []
        self.rank_planes: list[list[np.ndarray]] = []
        self.addresses: list[str] = []
        for rank in range(ranks):
            controller = CacheController(
                rank_settings or CopySettings(group_layers=1), layout, rank=rank, device=device
            )
            tensors = controller.initialize_kv_cache(blocks, shared=directory)
            self.rank_planes.append([each.reshape(blocks, -1).view(np.uint8) for each in tensors])
            controller.initialize_host_cache(self.manager.host_cache)
            address = controller.open_transfer(self.settings, verifies=verifies)
            assert address is not None
            self.addresses.append(address)
            self.ranks.append(controller)
        self.controller, self.planes, self.address = self.ranks[0], self.rank_planes[0], self.addresses[0]
        self.stream = stream
        self.outcomes: list[LoadOutcome] = []

    def __enter__(self) -> Instance:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.ranks:
            each.shutdown()
        self.manager.close()

    def step(self) -> None:
        """Submit what is planned and apply what was reported."""
        for plan in self.manager.take_plans():
            for each in self.ranks:
                each.submit_swap_tasks(plan, self.stream)
        for each in self.ranks:
            self.outcomes += self.manager.apply(each.poll())
        self.outcomes += self.manager.expire()

    @property
    def transfers(self) -> TransferStats:
        found = self.controller.transfer_stats()
        assert found is not None
        return found

    @property
    def results(self) -> list[str]:
        """How the hand-overs of all ranks have ended."""
        counts = self.manager.get_stats().handovers
        return [each.result for each in counts for _ in range(each.transfers)]

    @property
    def is_clean(self) -> bool:
        """True if no plan is in flight and no request holds blocks."""
        self.manager.check_integrity()
        return not self.manager.get_stats().plans_in_flight and not len(self.manager._requests)

    @property
    def host_blocks(self) -> int:
        host = self.manager.get_stats().host
        return 0 if host is None else host.ready

    def until(self, condition: Callable[[], object], *others: Steps) -> None:
        """Step, with others, until something is true."""

        def stepped() -> bool:
            self.step()
            for each in others:
                each.step()
            return bool(condition())

        until(stepped, "an instance of a transfer")

    def source(self, transfer: str, attempt: int = 1) -> PeerSource:
        return PeerSource(transfer, tuple(self.addresses), attempt)

    def start(self, request: Request) -> int:
        """Match and allocate a request; return the number of its cached tokens."""
        found = self.manager.match_prefix([request])[0]
        assert self.manager.allocate_device_blocks([(request, request.num_tokens)])[0].failure is None
        return found.num_cached_tokens

    def fetch(self, request: Request, source: PeerSource) -> int:
        """Match a request and allocate it with a fetch; return the number of blocks to come."""
        self.manager.match_prefix([request])
        count = self.handovers.fetch([(request, source)])[0]
        assert self.manager.allocate_device_blocks([(request, request.num_tokens)])[0].failure is None
        self.step()
        return count

    def compute(self, request: Request, transfer: str, first: int = 0, last: int | None = None) -> None:
        """Write blocks layer by layer, as a forward pass does, and publish them."""
        last = len(request.block_hashes) if last is None else last
        for layer in range(LAYOUT.total_layers):
            for rank, planes in enumerate(self.rank_planes):
                for index, plane in enumerate(LAYOUT.planes):
                    if plane.layer == layer:
                        for block in range(first, last):
                            data = expected(request, block, index, rank)
                            self.write(planes[index], request.block_table[block], data)
                self.ranks[rank].layer_computed(layer, {transfer: last}, self.stream)
        self.manager.commit([(request, last * BLOCK)])

    def wrong_blocks(self, request: Request, first: int, last: int) -> list[int]:
        """Return the blocks whose bytes are not those that prefill computes."""
        return [
            block
            for block in range(first, last)
            if any(
                not np.array_equal(
                    self.read(plane, request.block_table[block]), expected(request, block, index, rank)
                )
                for rank, planes in enumerate(self.rank_planes)
                for index, plane in enumerate(planes)
            )
        ]

    def write(self, plane: Any, slot: int, data: np.ndarray) -> None:
        """Write a block of a plane."""
        plane[slot] = data

    def read(self, plane: Any, slot: int) -> np.ndarray:
        """Return a block of a plane."""
        found: np.ndarray = plane[slot]
        return found


def expected(request: Request, block: int, plane: int, rank: int = 0) -> np.ndarray:
    """Return the bytes that computing a block writes into a plane of a rank."""
    seed = int.from_bytes(request.block_hashes[block, :8].tobytes(), "little")
    return np.random.default_rng((seed, plane, rank)).integers(0, 256, LAYOUT.planes[plane].nbytes, np.uint8)


def require_nixl() -> None:
    """Skip the test without NIXL."""
    try:
        find_nixl()
    except TransferNotFoundError:
        pytest.skip("NIXL is not installed")
