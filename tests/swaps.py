"""Layouts, plans and a worker with device and host memory, for tests of the worker side."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache.controller.cache_controller import CacheController
from fdcache.devices.base import Device
from fdcache.devices.cpu import CpuDevice
from fdcache.layout import KVLayout
from fdcache.metadata import CacheLevel, CacheSwapMetadata, SwapPurpose, TransferPlan, TransferReport
from fdcache.settings.cache import CopySettings
from fdcache.tasks import CpuEvent

Pairs = Sequence[tuple[int, int]]

PATIENCE = 60.0
"""Seconds to wait for what must happen; a busy machine may need many."""


def uniform_layout(**changes: Any) -> KVLayout:
    options: dict[str, Any] = {
        "model": "m",
        "revision": "r",
        "num_layers": 4,
        "block_size": 4,
        "kv_heads": 1,
        "head_dim": 8,
        "dtype": "bfloat16",
    }
    return KVLayout.uniform(**(options | changes))


def block_hash(name: object) -> NDArray[np.uint8]:
    return np.frombuffer(hashlib.sha256(repr(name).encode()).digest(), np.uint8)


def host_slot_hash(slot: int) -> NDArray[np.uint8]:
    """Return the hash that ``swap`` gives to a block in host slot ``slot``."""
    return block_hash(("host", slot))


def swap(purpose: SwapPurpose, pairs: Pairs, *, generation: int | Sequence[int] = 1) -> CacheSwapMetadata:
    """Return a transfer of (source, destination) pairs; a block's hash is derived from its host slot."""
    source = np.array([pair[0] for pair in pairs], np.int32)
    target = np.array([pair[1] for pair in pairs], np.int32)
    levels = (CacheLevel.HOST, CacheLevel.DEVICE)
    if purpose is not SwapPurpose.LOAD:
        levels = (CacheLevel.DEVICE, CacheLevel.HOST)
    host = source if purpose is SwapPurpose.LOAD else target
    generations = np.empty(len(pairs), np.uint32)
    generations[:] = generation
    hashes = np.array([host_slot_hash(slot) for slot in host.tolist()], np.uint8).reshape(-1, 32)
    return CacheSwapMetadata(
        purpose=purpose,
        src_type=levels[0],
        dst_type=levels[1],
        src_block_ids=source,
        dst_block_ids=target,
        src_generations=generations,
        dst_generations=generations,
        hash_values=hashes,
        parent_hashes=np.zeros_like(hashes),
    )


def plan(
    plan_id: int = 1,
    *,
    evict: Pairs | None = None,
    load: Pairs | None = None,
    backup: Pairs | None = None,
    generation: int = 1,
    after: tuple[int, ...] = (),
) -> TransferPlan:
    def made(purpose: SwapPurpose, pairs: Pairs | None) -> CacheSwapMetadata | None:
        return None if pairs is None else swap(purpose, pairs, generation=generation)

    return TransferPlan(
        plan_id=plan_id,
        evictions=made(SwapPurpose.EVICT, evict),
        loads=made(SwapPurpose.LOAD, load),
        backups=made(SwapPurpose.BACKUP, backup),
        after=after,
    )


class Worker:
    """Controller with memory; device blocks hold random bytes.

    ``idle`` is a stream on which nothing computes, for the plans of tests that compute nothing.
    """

    idle: Any = None

    def __init__(
        self,
        layout: KVLayout | None = None,
        *,
        device_blocks: int = 8,
        host_blocks: int = 8,
        device: Device | None = None,
        rank: int = 0,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        self.layout = layout or uniform_layout()
        options = {"drain_timeout": PATIENCE, "layer_timeout": PATIENCE} | settings
        self.controller = CacheController(CopySettings(**options), self.layout, rank=rank, device=device)
        self.tensors = self.controller.initialize_kv_cache(device_blocks)
        self.controller.initialize_host_cache(host_blocks)
        self.rng = np.random.default_rng(seed)
        for slot in range(device_blocks):
            self.scramble(slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.controller.shutdown()

    def scramble(self, slot: int) -> list[bytes]:
        """Overwrite a device block with random bytes; return them by plane."""
        self.set_block(
            slot, [self.rng.integers(0, 256, p.nbytes, dtype=np.uint8) for p in self.layout.planes]
        )
        return self.block(slot)

    def set_block(self, slot: int, planes: Sequence[NDArray[np.uint8]]) -> None:
        """Overwrite a device block with these bytes, synchronously."""
        for tensor, plane, data in zip(self.tensors, self.layout.planes, planes, strict=True):
            tensor[slot] = data.view(tensor.dtype).reshape(plane.shape)

    def block(self, slot: int) -> list[bytes]:
        return [np.ascontiguousarray(tensor[slot]).tobytes() for tensor in self.tensors]

    def record(self, slot: int) -> NDArray[np.uint8]:
        assert self.controller.host_arena is not None
        return self.controller.host_arena.table.record(slot)

    def run(self, submitted: TransferPlan, compute_stream: Any = None) -> TransferReport:
        """Submit a plan, wait for its layers and return its report."""
        stream = self.idle if compute_stream is None else compute_stream
        self.controller.submit_swap_tasks(submitted, stream).wait_all()
        return self.report()

    def report(self) -> TransferReport:
        reports = self.controller.wait_reports(PATIENCE)
        assert len(reports) == 1
        return reports[0]


class Gate:
    """Stream blocked by an event: work that waits for the stream waits for ``open``."""

    def __init__(self) -> None:
        device = CpuDevice()
        self.stream = device.create_stream()
        self._event = CpuEvent()
        self.stream.wait_event(self._event)

    def open(self) -> None:
        self._event.set()


def header_of(worker: Worker, slot: int) -> _core.SlotHeader:
    assert worker.controller.host_arena is not None
    return worker.controller.host_arena.table.header(slot)
