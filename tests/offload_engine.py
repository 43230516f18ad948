"""Engines that own their device cache, over an OffloadManager: blocks hold bytes that follow from their hashes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache.block_owners import BlockOwners
from fdcache.controller.cache_controller import CacheController
from fdcache.devices.base import ArenaRecords, DevicePlanes, PlannedCopy
from fdcache.devices.cpu import CpuDevice
from fdcache.groups import record_keys, state_keys
from fdcache.layout import KVLayout
from fdcache.manager import NO_BLOCK, LoadOutcome, OffloadManager, Request
from fdcache.manager.keyed import OffloadRequest
from fdcache.metadata import (
    CacheStatus,
    CacheSwapMetadata,
    HashArray,
    SwapPurpose,
    TransferPlan,
    TransferReport,
)
from fdcache.settings.cache import (
    CacheSettings,
    CopySettings,
    PrefetchPolicy,
    StorageTierSettings,
    WritePolicy,
)
from fdcache.storage.slab import SlabStore
from fdcache.tasks import CpuEvent
from tests.faults import FailingLoadsDevice, _Paused
from tests.storage_help import MIB
from tests.swaps import PATIENCE, uniform_layout

BLOCK = 4
LAYOUT = uniform_layout(block_size=BLOCK, num_layers=2)


class GatedDevice(FailingLoadsDevice):
    """Holds each backup until ``open`` while ``is_gated``; the positions that ``choose`` picks of a load fail."""

    def __init__(self, choose: Callable[[CacheSwapMetadata], Sequence[int]] = lambda swap: []) -> None:
        super().__init__(choose)
        self.is_gated = False
        self.pause_at = 0
        self.ranges: list[tuple[int, int]] = []
        self.gates: list[CpuEvent] = []
        self.resume = CpuEvent()

    def copy_blocks(self, planes: DevicePlanes, arena: ArenaRecords, swap: CacheSwapMetadata) -> PlannedCopy:
        copy = super().copy_blocks(planes, arena, swap)
        if not self.is_gated or swap.purpose is not SwapPurpose.BACKUP:
            return copy
        self.resume = CpuEvent()
        self.gates.append(self.resume)
        return _Paused(copy, self, 0)  # type: ignore[arg-type]

    def open(self) -> None:
        """Let every backup so far go on."""
        for gate in self.gates:
            gate.set()
        self.gates.clear()


def expected(layout: KVLayout, block_hash: bytes, rank: int = 0) -> list[np.ndarray]:
    """Return the planes of a block: bytes that follow from its hash, its rank and the plane."""
    planes = []
    for number, plane in enumerate(layout.planes):
        row = np.resize(np.frombuffer(block_hash, np.uint8), plane.nbytes)
        planes.append(row ^ np.uint8((37 * number + 101 * rank) % 256))
    return planes


class OffloadEngine:
    """A manager and its ranks in this process, and the device blocks of an engine that tests fill and compare."""

    def __init__(
        self,
        *,
        layout: KVLayout = LAYOUT,
        device_blocks: int = 16,
        host_blocks: int = 32,
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        folder: Path | None = None,
        device: Callable[[], CpuDevice] = GatedDevice,
        manager: OffloadManager | None = None,
        prefetch: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE,
        store: Callable[..., SlabStore] = SlabStore,
        streams: bool = False,
        **settings: Any,
    ) -> None:
        self.now = 0.0
        self.layout, self.owners = layout, BlockOwners(layout)
        memory = host_blocks * layout.record_ranks * (layout.record_bytes + 128)
        if "server" not in settings:
            settings["host_memory"] = memory
        storage = StorageTierSettings(prefetch_policy=prefetch)
        if folder is not None:
            storage = StorageTierSettings(
                connector="local", directory=folder, size=4 * MIB, prefetch_policy=prefetch, retry_after=0.0
            )
        cache = CacheSettings(write_policy=policy, **settings)
        self.manager = manager or OffloadManager(
            cache, layout, storage=storage, clock=lambda: self.now, loads_ahead=streams
        )
        self.devices = [device() for _ in range(layout.tp_size)]
        transfer = CopySettings(drain_timeout=PATIENCE, layer_timeout=PATIENCE)
        self.ranks = [
            CacheController(transfer, layout, rank=rank, device=self.devices[rank])
            for rank in range(layout.tp_size)
        ]
        self.tensors = [rank.initialize_kv_cache(device_blocks) for rank in self.ranks]
        for rank in self.ranks:
            rank.initialize_host_cache(self.manager.host_cache)
        self.restored = 0
        self._own_states: dict[bytes, HashArray] = {}
        self.stores: list[SlabStore] = []
        self._folder, self._store = folder, store
        if folder is not None:
            self.stores = [self.opened_store(rank) for rank in range(0, layout.tp_size, layout.replicas)]
            self.restore()

    def opened_store(self, rank: int) -> SlabStore:
        """Open the storage of a rank that begins."""
        record_rank = rank // self.layout.replicas
        opened = self._store(
            self._folder, self.layout, rank=record_rank, size=4 * MIB, threads=2, retry_after=0.0
        )
        self.ranks[rank].initialize_storage(opened)
        return opened

    def restore(self) -> None:
        """Make findable what the ranks' storage holds."""
        self.restored = self.manager.restore_storage([store.scan() for store in self.stores])

    # --- a step -------------------------------------------------------------------------------------------

    def submit(self, plans: Sequence[TransferPlan]) -> list[Any]:
        return [rank.submit_swap_tasks(plan) for plan in plans for rank in self.ranks]

    def step(self) -> list[TransferPlan]:
        """Take the plans, and wait until the step may compute."""
        plans = self.manager.take_plans()
        for counter in self.submit(plans):
            counter.wait_all()
        return plans

    def reports(self) -> list[TransferReport]:
        return [report for rank in self.ranks for report in rank.wait_reports(PATIENCE)]

    def collect(self) -> list[LoadOutcome]:
        return self.manager.apply(self.reports())

    def settle(self) -> list[LoadOutcome]:
        """Take plans and apply reports until nothing is left to copy."""
        outcomes: list[LoadOutcome] = []
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            plans = self.step()
            outcomes += self.collect()
            if not plans and not self.manager.has_pending_work:
                return outcomes
            if not plans:
                time.sleep(0.001)  # a service has to grant slots
        raise AssertionError("copies never end")

    # --- bytes --------------------------------------------------------------------------------------------

    def compute(self, request: Request, ids: Sequence[int], first: int = 0) -> None:
        """Fill device blocks as the step of blocks ``first`` and on does."""
        for block_id, key in zip(ids, self.keys(request)[first:], strict=False):
            if block_id != NO_BLOCK:
                self.fill(int(block_id), key.tobytes())

    def keys(self, request: OffloadRequest) -> HashArray:
        """Return the keys of the records of a request's pages."""
        return record_keys(request.block_hashes, self.layout.page_records)

    def state_keys(self, request: OffloadRequest, pages: int) -> HashArray:
        """Return the keys of the states at the end of this many pages, none without states.

        They stand for those of all ranks: of states that each has of its own they are the first one's.
        """
        shape = self.layout.page_records, self.layout.num_states
        keys = state_keys(request.block_hashes[pages - 1 : pages], *shape)
        if not self.owners.are_apart:
            return keys
        of_ranks = keys.reshape(-1, self.layout.replicas, 32)
        self._own_states |= {each[0].tobytes(): each for each in of_ranks}
        return of_ranks[:, 0]

    def _expected(self, block_hash: bytes, rank: int) -> list[np.ndarray]:
        record_rank, share = divmod(rank, self.layout.replicas)
        own = self._own_states.get(block_hash)
        return expected(self.layout, block_hash if own is None else own[share].tobytes(), record_rank)

    def fill(self, block_id: int, block_hash: bytes | None) -> None:
        for rank, tensors in enumerate(self.tensors):
            planes = [] if block_hash is None else self._expected(block_hash, rank)
            for number, tensor in enumerate(tensors):
                row = tensor[block_id].reshape(-1).view(np.uint8)
                row[:] = planes[number] if planes else 0xEE

    def holds(self, request: OffloadRequest, ids: Sequence[int], first: int = 0) -> bool:
        """Return True if the device blocks have the bytes of the request's blocks from ``first`` on."""
        return self.hold_keys(ids, self.keys(request)[first:])

    def hold_keys(self, ids: Sequence[int], keys: HashArray) -> bool:
        """Return True if the device blocks have the bytes of the blocks with these keys."""
        return all(
            np.array_equal(tensor[int(block_id)].reshape(-1).view(np.uint8), plane)
            for block_id, key in zip(ids, keys, strict=False)
            if block_id != NO_BLOCK
            for rank, tensors in enumerate(self.tensors)
            for tensor, plane in zip(tensors, self._expected(key.tobytes(), rank), strict=True)
        )

    def wrong_records(self) -> int:
        """Return how many records of an own host tier differ from what their hashes stand for; 0 for a service's."""
        host: Any = self.manager._host
        wrong = 0
        if host.pool is None:
            return wrong
        for node in host.nodes(range(host.num_blocks)):
            if node.cache_status is not CacheStatus.HOST:
                continue
            for rank, controller in enumerate(self.ranks):
                arena: Any = controller._parts.arena
                record = arena.table.record(node.block_id)
                planes = expected(self.layout, node.hash_value, rank // self.layout.replicas)
                wrong += any(
                    not np.array_equal(record[plane.offset : plane.offset + plane.nbytes], row)
                    for plane, row in zip(self.layout.planes, planes, strict=True)
                )
        return wrong

    # --- whole requests -----------------------------------------------------------------------------------

    def stored(self, name: str, tokens: Sequence[int], ids: Sequence[int], **options: Any) -> Request:
        """Compute a prompt in these device blocks, store it, and end the request."""
        request = Request(name, list(tokens), **options)
        self.manager.begin([request])
        self.manager.evicted(np.array(ids, np.int32))
        self.step()
        self.manager.offer(request, len(tokens), np.array(ids, np.int32))
        self.compute(request, ids)
        self.settle()
        self.manager.finish([request])
        return request

    def close(self) -> None:
        """End, and check that nothing is pinned or in flight."""
        for device in self.devices:
            if isinstance(device, GatedDevice):
                device.is_gated = False
                device.open()
        self.settle()
        self.manager.check_integrity()
        stats = self.manager.get_stats()
        assert (stats.plans_in_flight, stats.live_requests) == (0, 0)
        assert self.manager._host.in_use == 0
        for rank in self.ranks:
            rank.shutdown()
        self.manager.close()


def prompt(*families: int, tail: int = 1) -> list[int]:
    """Return a prompt of one block for each number, and ``tail`` more tokens."""
    return [family for family in families for _ in range(BLOCK)] + [99] * tail


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.fixture
def offload_engine() -> Iterator[OffloadEngine]:
    """An engine with the default sizes; a module that needs it names it ``engine``."""
    engine = OffloadEngine()
    yield engine
    engine.close()


def begun(engine: OffloadEngine, name: str, tokens: list[int], **options: Any) -> Request:
    """Return a request that has arrived."""
    request = Request(name, tokens, **options)
    engine.manager.begin([request])
    return request


def loaded(engine: OffloadEngine, request: OffloadRequest, into: np.ndarray) -> LoadOutcome:
    """Load a request's blocks into device blocks; return the outcome."""
    assert engine.manager.load(request, into) == len(into)
    engine.step()
    (outcome,) = engine.collect()
    return outcome
