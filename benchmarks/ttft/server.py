"""A server of one sequence at a time, or a batch of decodes, with its KV in fdcache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.ttft.model import Model, Shape
from benchmarks.ttft.recompute import ThrottledStorage
from fdcache import (
    CacheController,
    CacheManager,
    CacheSettings,
    CopySettings,
    LayerDoneCounter,
    LoadStatus,
    MatchStatus,
    Request,
)
from fdcache.manager.cost import NO_PRIORS, Priors
from fdcache.metadata import SLOT_HEADER_BYTES
from fdcache.settings.cache import StorageTierSettings
from fdcache.storage.connector import ConnectorContext, PlacedStorage
from fdcache.storage.factory import open_storage
from fdcache.storage.slab_format import file_name

Row = dict[str, Any]


def prompt(shape: Shape, length: int, seed: int) -> Tokens:
    """Return a prompt of random tokens."""
    return np.random.default_rng(seed).integers(0, shape.vocab, length)


def timed(work: Callable[..., object], *arguments: object) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


Tokens = NDArray[np.int64]
PREFILL_CHUNK = 8192


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A token, and the margin of its logit over the second best."""

    token: int
    margin: float


@dataclass(slots=True)
class Spent:
    """Seconds of the engine's thread in the manager, in the controller, and in the model."""

    manager: float = 0.0
    controller: float = 0.0
    computing: float = 0.0


class Server:
    """Model, manager and controller in one process. ``device``: ``cuda`` or ``cpu``."""

    def __init__(
        self,
        shape: Shape,
        device: str,
        *,
        device_blocks: int,
        host_blocks: int,
        max_positions: int,
        write_policy: str = "write_through",
        storage: Path | None = None,
        load_or_recompute: str = "always",
        eviction: str = "lru",
        priors: Priors = NO_PRIORS,
    ) -> None:
        self.shape = shape
        self._priors = priors
        self.layout = shape.layout()
        self.torch_device = device
        self._make_settings = partial(
            CacheSettings,
            device_blocks=device_blocks,
            host_memory=host_blocks * (self.layout.record_bytes + SLOT_HEADER_BYTES),
            write_policy=write_policy,
            load_or_recompute=load_or_recompute,
            eviction=eviction,
        )
        self._settings = self._make_settings()
        self._storage_tier = StorageTierSettings()
        if storage:
            size = 4 * host_blocks * self.layout.record_bytes
            self._storage_tier = StorageTierSettings(
                connector="local",
                directory=storage,
                size=size,
                prefetch_policy="wait_complete",
                timeout=300.0,
            )
        self.manager = self._make_manager()
        self.controller = CacheController(CopySettings(), self.layout, device=_fdcache_device(device))
        planes = [
            torch.zeros((device_blocks, *plane.shape), dtype=torch.bfloat16, device=device)
            for plane in self.layout.planes
        ]
        self.controller.register_kv_cache(planes)
        if host_blocks:
            self.controller.initialize_host_cache(host_blocks)
        context = ConnectorContext(self.layout, 0, self._storage_tier)
        found = open_storage(context)
        self._storage = ThrottledStorage(found) if isinstance(found, PlacedStorage) else None
        if self._storage and (scan := self.controller.initialize_storage(self._storage)):
            self.manager.restore_storage([scan])
        self.model = Model(shape, device, planes, max_positions)
        self.stream: Any = torch.cuda.current_stream() if device == "cuda" else None
        self.spent = Spent()
        self.reused = 0
        """Tokens that the last prompt reused."""
        self._names = 0

    @property
    def storage(self) -> ThrottledStorage:
        """The storage tier's files."""
        assert self._storage is not None
        return self._storage

    @property
    def storage_path(self) -> Path:
        """The file of the storage tier."""
        assert self._storage_tier.directory is not None
        return self._storage_tier.directory / file_name(self.layout.fingerprint, 0)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.torch_device == "cuda":
            torch.cuda.synchronize()

    def arrive(self, prompt: Tokens) -> Request:
        """Make a request and hash its tokens, as the threads that tokenize do beside the steps."""
        self._names += 1
        request = Request(str(self._names), prompt)
        self.manager.prepare([request])
        return request

    def request(self, prompt: Tokens, *, use_cache: bool = True) -> Request:
        """Match a new request, waiting until its blocks in storage are read."""
        self._names += 1
        return self.match(Request(str(self._names), prompt, use_cache=use_cache))

    def match(self, request: Request) -> Request:
        """Match a request, waiting until its blocks in storage are read."""
        with self.manager_time():
            self.manager.begin([request])
            match = self.manager.match_prefix([request])[0]
        while match.status is not MatchStatus.MATCHED:
            self.submit()
            self.collect(wait=0.002)  # a read that is late is not waited for
            match = self.manager.match_prefix([request])[0]
        return request

    def allocate(self, request: Request, num_tokens: int) -> None:
        """Allocate blocks for ``num_tokens`` tokens."""
        with self.manager_time():
            allocation = self.manager.allocate_device_blocks([(request, num_tokens)])[0]
        if not allocation.ok:
            raise RuntimeError(f"{allocation.shortfall} device blocks too few")

    def submit(self) -> list[LayerDoneCounter]:
        """Close the step and submit its plans."""
        with self.manager_time():
            plans = self.manager.take_plans()
        with self._controller_time():
            return [self.controller.submit_swap_tasks(plan, self.stream) for plan in plans]

    def compute(
        self, request: Request, prompt: Tokens, counters: Iterable[LayerDoneCounter] = ()
    ) -> FirstToken:
        """Prefill the tokens that are not cached; return the first token."""
        return self.prefill(prompt, request.num_cached_tokens, request.block_table, tuple(counters))

    def prefill(
        self, prompt: Tokens, start: int, blocks: NDArray[np.int32], counters: Iterable[LayerDoneCounter] = ()
    ) -> FirstToken:
        """Prefill from token ``start`` on into ``blocks``; return the first token."""
        table = torch.from_numpy(blocks.astype(np.int64)).to(self.torch_device)
        tokens = torch.from_numpy(prompt).to(self.torch_device)

        def wait(layer: int) -> None:
            for counter in counters:
                counter.wait_for_layer(layer, stream=self.stream)

        for first in range(start, len(prompt), PREFILL_CHUNK):
            chunk = tokens[first : first + PREFILL_CHUNK]
            logits = self.model.prefill(chunk, first, table, wait if first == start else _no_wait)
        best = logits.float().topk(2)
        scores = best.values.tolist()
        return FirstToken(int(best.indices[0]), scores[0] - scores[1])

    def finish(self, done: list[tuple[Request, int]]) -> None:
        """Commit the given number of tokens of each request, and finish them."""
        with self.manager_time():
            self.manager.commit(done)
            self.manager.finish([request for request, _ in done])

    def first_token(self, prompt: Tokens, *, use_cache: bool = True) -> tuple[float, FirstToken]:
        """Return the seconds from arrival to first token, and the token; then wait for all copies."""
        self.synchronize()
        start = time.perf_counter()
        request = self.request(prompt, use_cache=use_cache)
        self.allocate(request, len(prompt))
        waits, counters, computing = request.is_loading, self.submit(), time.perf_counter()
        token = self.compute(request, prompt, counters)
        seconds = time.perf_counter() - start
        spent, self.reused = time.perf_counter() - computing, request.num_cached_tokens
        computed = len(prompt) - self.reused
        self.manager.observe_prefill(
            [(request, self.reused, len(prompt))],
            spent,
            waited=waits,
            steps=-(-computed // PREFILL_CHUNK),
        )
        self.settle()
        self.finish([(request, len(prompt))])
        self.settle()
        return seconds, token

    def collect(self, *, wait: float = 0.0) -> None:
        """Apply the reports so far, or the next within ``wait`` seconds. Raises ``RuntimeError`` if a load failed."""
        with self._controller_time():
            reports = self.controller.wait_reports(wait) if wait else self.controller.poll()
        with self.manager_time():
            outcomes = self.manager.apply(reports)
        for outcome in outcomes:
            if outcome.status is not LoadStatus.CONFIRMED:
                raise RuntimeError(f"a load ended {outcome.status.value}: {outcome.error_message}")

    @contextmanager
    def manager_time(self) -> Iterator[None]:
        """Count the block's time as the manager's."""
        start = time.perf_counter()
        yield
        self.spent.manager += time.perf_counter() - start

    @contextmanager
    def _controller_time(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.spent.controller += time.perf_counter() - start

    def settle(self) -> None:
        """Wait until every copy has ended and no backup is queued."""
        while True:
            self.submit()
            stats = self.manager.get_stats()
            if not (stats.plans_in_flight or stats.queued_backups or stats.queued_stores):
                return
            self.collect(wait=60.0)

    def forget_device(self) -> None:
        """Empty the device tier; the host tier stays."""
        self.manager.sleep()
        self.manager.wakeup()

    def _make_manager(self, *, loads_ahead: bool = True) -> CacheManager:
        return CacheManager(
            self._settings,
            self.layout,
            storage=self._storage_tier,
            priors=self._priors,
            loads_ahead=loads_ahead,
        )

    def forget_all_but_storage(self, *, loads_ahead: bool = True, **settings: str) -> None:
        """Start with a new manager that knows only the blocks in storage; ``settings`` replace those until now."""
        self._settings = self._make_settings(**settings) if settings else self._settings
        self.manager = self._make_manager(loads_ahead=loads_ahead)
        self.manager.restore_storage([self.storage.scan()])

    def close(self) -> None:
        """Wait for copies and release everything."""
        self.settle()
        self.controller.shutdown()


def _no_wait(layer: int) -> None:
    """Do nothing: the first chunk has waited for all blocks."""


def _fdcache_device(device: str) -> Any:
    if device == "cpu":
        return None
    from fdcache.devices.cuda import CudaDevice

    return CudaDevice(torch.cuda.current_device())
