"""EngineClient: blocking look-ups, loads and stores of blocks over an ``OffloadManager``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from itertools import count
from types import TracebackType

from fdcache.errors import HashingError
from fdcache.hints import Hint, HintOutcome
from fdcache.layout import KVLayout
from fdcache.manager.device_contents import device_ids_of
from fdcache.manager.keyed import KeyedRequest, checked_keys
from fdcache.manager.offload import OffloadManager
from fdcache.manager.results import LoadOutcome
from fdcache.metadata import HashArray, Int32Array, TransferPlan, TransferReport
from fdcache.plans.blocks import ROOT
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.tiers.events import CacheEvent
from fdcache.tiers.host import HostCache

Execute = Callable[[TransferPlan], Sequence[TransferReport]]
"""Executes a plan on every rank and returns their reports."""


class EngineClient:
    """Loads and stores blocks whose device slots the engine manages, one call at a time.

    ```python
    with EngineClient(CacheSettings(server="ipc:///run/fdcache/fdcache.sock"), layout, execute) as client:
        found = client.lookup(hashes)
        loaded = client.load(hashes[:found], device_slots[:found])
        client.store(hashes, device_slots[loaded:], start=loaded)
    ```

    ``hashes`` is a path from the root, shape (blocks, 32), as ``Request.block_hashes`` has it; a call is about its
    blocks from ``start`` on, and ``slots`` are their device slots. ``execute`` runs a plan on the ranks' controllers,
    which were given ``host_cache``. Threads may share a client. Without the service every look-up misses and nothing
    is stored. An engine whose scheduler must not wait for copies, or that wants what is only in storage, uses
    ``OffloadManager`` itself. Raises ``HashingError`` for other hashes and ``start``, ``PlanError`` for other slots.
    """

    def __init__(self, settings: CacheSettings, layout: KVLayout, execute: Execute) -> None:
        layout.require_one_group("EngineClient")
        settings = settings.model_copy(update={"write_policy": WritePolicy.WRITE_THROUGH})
        self._manager = OffloadManager(settings, layout)
        self._execute = execute
        self._names = count(1)
        self._lock = threading.RLock()

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def layout(self) -> KVLayout:
        """The present layout."""
        return self._manager.layout

    @property
    def host_cache(self) -> HostCache:
        """Argument of every rank's ``CacheController.initialize_host_cache``."""
        return self._manager.host_cache

    @property
    def store_room(self) -> int:
        """Blocks that a store can take now; a service grants more in the background."""
        return self._manager.store_room

    def lookup(self, hashes: HashArray, start: int = 0) -> int:
        """Return the number of leading blocks found from ``start`` on. They count as used and are not pinned."""
        hashes = _from(hashes, start)
        with self._lock:
            request = self._request(hashes, None)
            found = self._manager.match(request, 0).num_tokens
            self._manager.finish(request)
            return found // self.layout.block_size

    def touch(self, hashes: HashArray) -> None:
        """Mark blocks as used, because the engine reuses them from its own cache: they are evicted last."""
        self.lookup(hashes)

    def load(self, hashes: HashArray, slots: Int32Array, start: int = 0) -> int:
        """Copy blocks into device slots; return how many leading ones every rank has. The other slots are garbage."""
        hashes, slots = _from(hashes, start), device_ids_of(slots)
        with self._lock:
            request = self._request(hashes[: len(slots)], None)
            found = self._manager.match(request, 0).num_tokens // self.layout.block_size
            planned = self._manager.load(request, slots[:found])
            try:
                outcomes = self._run()
            finally:
                self._manager.finish(request)
            return outcomes[0].recompute_from // self.layout.block_size if planned else 0

    def store(
        self, hashes: HashArray, slots: Int32Array, start: int = 0, *, tenant: str | None = None
    ) -> int:
        """Copy blocks out of device slots and return how many were copied; blocks already stored are skipped.

        They count against the quota of ``tenant``, which must be the one in the hashes.
        """
        run, slots = _from(hashes, start), device_ids_of(slots)
        parent = hashes[start - 1].tobytes() if start else ROOT
        with self._lock:
            request = self._request(run[: len(slots)], parent, tenant)
            before = self._manager.get_stats().counters.blocks_backed_up
            try:
                self._manager.offer(request, request.num_tokens, slots)
                self._run()
            finally:
                self._manager.finish(request)
                self._manager.forget(slots)
            return self._manager.get_stats().counters.blocks_backed_up - before

    def hint(self, hashes: HashArray, hints: Sequence[Hint]) -> list[HintOutcome]:
        """Tell what is known of the reuse of a path that was stored, such as ``[Hint.release()]``.

        Return the outcome of each hint; what becomes of one that keeps blocks follows from ``hint_outcomes``.
        """
        return self._manager.hint(self._request(hashes, ROOT), hints)

    def hint_outcomes(self) -> list[HintOutcome]:
        """Return the outcomes of hints whose time is over, each once: kept, or evicted early and why."""
        return self._manager.take_hint_outcomes()

    def events(self) -> list[CacheEvent]:
        """Return events of the layout's tier since the last call; needs ``settings.event_buffer``."""
        return self._manager.take_events()

    def reset(self) -> None:
        """Forget every block of this layout, for all its engines; until that is done every look-up misses."""
        with self._lock:
            self._manager.reset_cache()

    def change_revision(self, revision: str) -> KVLayout:
        """Switch to other weights; return the layout whose fingerprint the hashes begin with from now on.

        Blocks of the former weights are never found again; blocks of this revision are shared with all its engines.
        Every look-up misses until the service knows. Raises ``LayoutError`` if the revision does not change.
        """
        with self._lock:
            self._manager.change_revision(revision)
            return self.layout

    def close(self) -> None:
        """Leave the service. Shut the ranks' controllers down first."""
        self._manager.close()

    def _request(self, keys: HashArray, parent: bytes | None, tenant: str | None = None) -> KeyedRequest:
        name = f"call {next(self._names)}"
        return KeyedRequest(name, keys, self.layout.block_size, parent=parent, tenant=tenant)

    def _run(self) -> list[LoadOutcome]:
        """Execute plans until none is left; a rank that does not report one has copied nothing."""
        outcomes: list[LoadOutcome] = []
        while plans := self._manager.take_plans():
            for plan in plans:
                reports: Sequence[TransferReport] = ()
                try:
                    reports = self._execute(plan)
                finally:
                    missing = set(range(self.layout.tp_size)) - {report.rank for report in reports}
                    refused = [TransferReport.refusal(plan, rank, "no report") for rank in sorted(missing)]
                    outcomes += self._manager.apply([*reports, *refused])
        return outcomes


def _from(hashes: HashArray, start: int) -> HashArray:
    """Return the hashes from ``start`` on."""
    hashes = checked_keys(hashes)
    if start not in range(len(hashes) + 1):
        raise HashingError(f"start has to be a position of the {len(hashes)} hashes, got {start!r}")
    return hashes[start:]


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

    async def hint(self, hashes: HashArray, hints: Sequence[Hint]) -> list[HintOutcome]:
        """See ``EngineClient.hint``."""
        return await asyncio.to_thread(self._client.hint, hashes, hints)

    async def hint_outcomes(self) -> list[HintOutcome]:
        """See ``EngineClient.hint_outcomes``."""
        return await asyncio.to_thread(self._client.hint_outcomes)

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
