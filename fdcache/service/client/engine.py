"""EngineClient: a service's host tier for engines with a prefix cache of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from itertools import count
from types import TracebackType

import numpy as np

from fdcache.layout import KVLayout
from fdcache.metadata import (
    CacheLevel,
    CacheSwapMetadata,
    HashArray,
    Int32Array,
    SwapPurpose,
    TransferPlan,
    TransferReport,
    UInt64Array,
)
from fdcache.plans.blocks import Blocks, parents_of
from fdcache.plans.ledger import make_swap
from fdcache.service.client.remote_tier import RemoteHostTier
from fdcache.settings.cache import CacheSettings
from fdcache.tiers.events import CacheEvent, events_of
from fdcache.tiers.host import HostCache
from fdcache.tiers.pool import RESERVED

Execute = Callable[[TransferPlan], Sequence[TransferReport]]
"""Executes a plan on every rank and returns their reports."""


class EngineClient:
    """Loads and stores blocks whose device slots the engine manages.

    ```python
    with EngineClient(CacheSettings(server="ipc:///run/fdcache/fdcache.sock"), layout, execute) as client:
        found = client.lookup(hashes)
        loaded = client.load(hashes[:found], device_slots[:found])
        client.store(hashes, device_slots[loaded:], start=loaded)
    ```

    ``hashes`` is a path from the root, shape (blocks, 32), as ``Request.block_hashes`` has it; a call is about its
    blocks from ``start`` on, and ``slots`` are their device slots. ``execute`` runs a plan on the ranks' controllers,
    which were given ``host_cache``. Threads may share a client. Without the service every look-up misses and nothing
    is stored.
    """

    def __init__(self, settings: CacheSettings, layout: KVLayout, execute: Execute) -> None:
        self.layout = layout
        self._host = RemoteHostTier(settings, layout)
        self._block_size = layout.block_size
        self._ranks = layout.tp_size
        self._execute = execute
        self._plan_ids = count(1)
        self._lock = threading.RLock()

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def host_cache(self) -> HostCache:
        """Argument of every rank's ``CacheController.initialize_host_cache``."""
        return self._host.host_cache

    @property
    def store_room(self) -> int:
        """Blocks that a store can take now; the service grants more in the background."""
        return self._host.copy_room

    def lookup(self, hashes: HashArray, start: int = 0) -> int:
        """Return the number of leading blocks found from ``start`` on. They count as used and are not pinned."""
        with self._lock:
            (found,) = self._host.match_paths([(hashes, start)])
            self._host.release(found.lease)
            return len(found)

    def touch(self, hashes: HashArray) -> None:
        """Mark blocks as used, because the engine reuses them from its own cache: they are evicted last."""
        self.lookup(hashes)

    def load(self, hashes: HashArray, slots: Int32Array, start: int = 0) -> int:
        """Copy blocks into device slots; return how many leading ones every rank has. The other slots are garbage."""
        with self._lock:
            path = np.ascontiguousarray(hashes[: start + len(slots)])
            (found,) = self._host.match_paths([(path, start)])
            size = len(found)
            if not size:
                self._host.release(found.lease)
                return 0
            blocks, none = found.blocks, np.zeros(size, np.uint32)
            swap = make_swap(SwapPurpose.LOAD, blocks, np.ascontiguousarray(slots[:size], np.int32), none)
            self._host.begin_load(found.lease, blocks.slots)
            self._host.release(found.lease)
            copied = np.zeros(size, np.uint8)
            try:
                copied, _ = self._run(swap)
            finally:
                self._host.end_load(blocks.slots, blocks.hashes, copied)
            return size if copied.all() else int(np.argmin(copied))

    def store(
        self, hashes: HashArray, slots: Int32Array, start: int = 0, *, tenant: str | None = None
    ) -> int:
        """Copy blocks out of device slots and return how many were copied; blocks already stored are skipped.

        They count against the quota of ``tenant``, which must be the one in the hashes.
        """
        stop = start + len(slots)
        mine, parents = hashes[start:stop], parents_of(hashes, start, stop)
        with self._lock:
            if tenant is not None and start == 0 and len(mine):
                self._host.own(mine[0].tobytes(), tenant)
            room = min(len(mine), self._host.copy_room)
            taken = self._host.take_slots(parents[:room], mine[:room])
            if taken is None or taken.missing:
                return 0
            chosen = np.flatnonzero(taken.status == RESERVED)
            if not len(chosen):
                return 0
            device_slots = np.ascontiguousarray(slots[:room][chosen], np.int32)
            none = np.zeros(len(chosen), np.uint32)
            source = Blocks(device_slots, none, mine[chosen], parents[chosen])
            swap = make_swap(SwapPurpose.BACKUP, source, taken.slots, taken.generations)
            copied, checksums = np.zeros(len(chosen), np.uint8), np.empty(0, np.uint64)
            try:
                copied, checksums = self._run(swap)
            finally:
                self._host.complete(taken.slots, copied, checksums)
                self._host.flush()
            return int(copied.sum())

    def events(self) -> list[CacheEvent]:
        """Return events of the layout's tier since the last call; needs ``settings.event_buffer``."""
        with self._lock:
            return list(events_of(self._host, CacheLevel.HOST, self._block_size))

    def reset(self) -> None:
        """Forget every block of this layout, for all its engines; until that is done every look-up misses."""
        with self._lock:
            self._host.reset()

    def change_revision(self, revision: str) -> KVLayout:
        """Switch to other weights; return the layout whose fingerprint the hashes begin with from now on.

        Blocks of the former weights are never found again; blocks of this revision are shared with all its engines.
        Every look-up misses until the service knows. Raises ``LayoutError`` if the revision does not change.
        """
        with self._lock:
            self.layout = self.layout.with_revision(revision)
            self._host.change_layout(self.layout)
            return self.layout

    def close(self) -> None:
        """Leave the service. Shut the ranks' controllers down first."""
        self._host.close()

    def _run(self, swap: CacheSwapMetadata) -> tuple[HashArray, UInt64Array]:
        """Copy; return 1 for each block that every rank copied, and rank 0's checksums."""
        is_load = swap.purpose is SwapPurpose.LOAD
        plan = TransferPlan(
            plan_id=next(self._plan_ids),
            arena=self._host.arena,
            loads=swap if is_load else None,
            backups=None if is_load else swap,
        )
        copied = np.ones(len(swap), np.uint8)
        checksums = np.empty(0, np.uint64)
        reports = self._execute(plan)
        if {report.rank for report in reports} != set(range(self._ranks)):
            copied[:] = 0
        for report in reports:
            self._host.traffic.record(report)
            for result in report.results:
                if result.purpose is swap.purpose:
                    copied[result.failed] = 0
                    checksums = result.checksums if report.rank == 0 else checksums
        return copied, checksums


class AsyncEngineClient:
    """``EngineClient`` for asyncio: each call runs in a thread, so that the event loop is not blocked."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def lookup(self, hashes: HashArray, start: int = 0) -> int:
        """See ``EngineClient.lookup``."""
        return await asyncio.to_thread(self._client.lookup, hashes, start)

    async def touch(self, hashes: HashArray) -> None:
        """See ``EngineClient.touch``."""
        await asyncio.to_thread(self._client.touch, hashes)

    async def load(self, hashes: HashArray, slots: Int32Array, start: int = 0) -> int:
        """See ``EngineClient.load``."""
        return await asyncio.to_thread(self._client.load, hashes, slots, start)

    async def store(
        self, hashes: HashArray, slots: Int32Array, start: int = 0, *, tenant: str | None = None
    ) -> int:
        """See ``EngineClient.store``."""
        return await asyncio.to_thread(self._client.store, hashes, slots, start, tenant=tenant)

    async def events(self) -> list[CacheEvent]:
        """See ``EngineClient.events``."""
        return await asyncio.to_thread(self._client.events)

    async def reset(self) -> None:
        """See ``EngineClient.reset``."""
        await asyncio.to_thread(self._client.reset)

    async def change_revision(self, revision: str) -> KVLayout:
        """See ``EngineClient.change_revision``."""
        return await asyncio.to_thread(self._client.change_revision, revision)

    async def close(self) -> None:
        """See ``EngineClient.close``."""
        await asyncio.to_thread(self._client.close)
