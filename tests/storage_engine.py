"""An engine with storage of its own and a disk that tests can hold up."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from fdcache import _core
from fdcache.controller.cache_controller import CacheController
from fdcache.manager import Allocation, CacheManager, MatchResult, MatchStatus, Request
from fdcache.manager.cost import NO_PRIORS, Priors
from fdcache.metadata import TransferPlan
from fdcache.settings.cache import (
    CacheSettings,
    CopySettings,
    PrefetchPolicy,
    StorageTierSettings,
    Verify,
    WritePolicy,
)
from fdcache.storage.connector import BatchResult, RecordBatch
from fdcache.storage.slab import SlabStore
from tests.service_help import TIMEOUT, until
from tests.storage_help import MIB, storage_layout

LAYOUT = storage_layout()
BLOCK = LAYOUT.block_size
HOST_BLOCKS = 40


class SlowStore(SlabStore):
    """A disk that answers a read once ``gate`` is set, or as many reads as are allowed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._allowed = threading.Semaphore(0)
        self.fails = False
        self.reads: list[int] = []
        super().__init__(*arguments, **options)

    def get(self, batch: RecordBatch, timeout: float, cancel: _core.CancelFlag | None = None) -> BatchResult:
        self.reads.append(len(batch))
        for _ in range(60_000):
            if self.gate.is_set() or self._allowed.acquire(timeout=0.001):
                if self.fails:
                    raise OSError(5, "Input/output error")
                return super().get(batch, timeout, cancel)
        raise AssertionError("the gate stays closed")

    def allow(self, reads: int) -> None:
        """Answer as many reads although the gate is closed."""
        self._allowed.release(reads)


class Engine:
    """A manager and its one rank in this process. Nothing is computed: blocks hold the bytes of the device planes."""

    def __init__(
        self,
        folder: Path,
        *,
        policy: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE,
        verify: Verify = Verify.STORAGE,
        priors: Priors = NO_PRIORS,
        **changes: Any,
    ) -> None:
        self.now = 0.0
        storage = StorageTierSettings(
            connector="local",
            directory=folder,
            size=4 * MIB,
            prefetch_policy=policy,
            prefetch_timeout=1.0,
            retry_after=0.0,
        )
        options = {"device_blocks": 30, "write_policy": WritePolicy.WRITE_THROUGH} | changes
        cache = CacheSettings(host_memory=HOST_BLOCKS * (LAYOUT.record_bytes + 128), **options)
        self.manager = CacheManager(cache, LAYOUT, storage=storage, clock=lambda: self.now, priors=priors)
        self.controller = CacheController(CopySettings(verify=verify), LAYOUT)
        self.tensors = self.controller.initialize_kv_cache(30)
        self.controller.initialize_host_cache(self.manager.num_host_blocks)
        self.store = SlowStore(folder, LAYOUT, rank=0, size=4 * MIB, threads=2, retry_after=0.0)
        scan = self.controller.initialize_storage(self.store)
        assert scan is not None
        self.restored = self.manager.restore_storage([scan])
        self.plans: list[TransferPlan] = []

    def send(self) -> list[TransferPlan]:
        plans = self.manager.take_plans()
        for plan in plans:
            self.plans.append(plan)
            self.controller.submit_swap_tasks(plan)
        return plans

    def settle(self) -> None:
        """Send plans and apply reports until nothing is left to copy."""
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            plans = self.send()
            reports = self.controller.wait_reports(30)
            self.manager.apply(reports)
            if not plans and not reports:
                return
        raise AssertionError("copies never end")

    def compute(self, request: Request, tokens: int) -> None:
        """Fill the request's blocks on the device with bytes that depend on their place in the path."""
        for index, slot in enumerate(request.block_table.tolist()):
            for tensor in self.tensors:
                tensor[slot] = (index * 7 + request.tokens[0]) % 251
        self.manager.commit([(request, tokens)])

    def match(self, request: Request) -> MatchResult:
        return self.manager.match_prefix([request])[0]

    def allocate(self, request: Request) -> Allocation:
        return self.manager.allocate_device_blocks([(request, request.num_tokens)])[0]

    def run(self, name: str, tokens: list[int]) -> MatchResult:
        """Run a whole request, waiting while its match is deferred."""
        request = Request(name, tokens)
        match = self.match(request)
        while match.status is MatchStatus.DEFERRED:
            self.send()
            self.manager.apply(self.controller.wait_reports(30))
            match = self.match(request)
        assert self.allocate(request).ok
        self.settle()
        self.check(request, match.num_cached_tokens // BLOCK)
        self.compute(request, len(tokens))
        self.manager.finish([request])
        self.settle()
        self.manager.check_integrity()
        return match

    def check(self, request: Request, cached: int) -> None:
        for index, slot in enumerate(request.block_table[:cached].tolist()):
            expected = (index * 7 + request.tokens[0]) % 251
            for tensor in self.tensors:
                assert (tensor[slot] == expected).all(), f"block {index} holds something else"

    def close(self) -> None:
        self.store.gate.set()
        self.settle()
        self.manager.check_integrity()
        stats = self.manager.get_stats()
        for tier in (stats.device, stats.host, stats.storage):
            assert tier is not None
            assert tier.pins == tier.holds == tier.leases == 0
            assert tier.writing == tier.quarantined + tier.withheld + tier.orphans
        self.controller.shutdown()


class Disk:
    """A disk that serves one read each time it is told to."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        engine.store.gate.clear()

    def serve(self, reads: int) -> None:
        before = counters(self.engine).blocks_prefetched
        self.engine.store.allow(reads)

        def arrived() -> bool:
            self.engine.manager.apply(self.engine.controller.poll())
            return bool(counters(self.engine).blocks_prefetched == before + 2 * reads)

        until(arrived, "the read is reported")

    def load(self, blocks: int) -> None:
        """Send the plans until so many blocks have been loaded to the device ahead of their request."""

        def loaded() -> bool:
            self.engine.send()
            self.engine.manager.apply(self.engine.controller.poll())
            return bool(counters(self.engine).blocks_loaded == blocks)

        until(loaded, "the load is reported")


def tokens_of(first: int, blocks: int) -> list[int]:
    return [first] * (blocks * BLOCK + 1)


def counters(engine: Engine) -> Any:
    return engine.manager.get_stats().counters


def store_a_path(folder: Path) -> None:
    """Leave a path of 8 blocks that begins with token 1 in a folder."""
    engine = Engine(folder)
    engine.run("first", tokens_of(1, 8))
    assert counters(engine).blocks_stored == 8
    engine.close()
