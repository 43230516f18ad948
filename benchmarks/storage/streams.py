"""Measure the time from a request's arrival to the end of its load from storage: loads while later blocks are read.

Three prompts that are stored come in turn: all but a few blocks of each are read and loaded. ``--device own`` is a
manager that owns the device cache, ``engine`` one beside an engine that owns it. Storage is the manager's own, with a
host tier that holds two prompts, or with ``--service`` that of a service in another process. A manager that loads
blocks while later ones are read, and one that loads them afterwards, take turns. Storage is slowed to the given
speeds; 0 is its own. A step takes ``--step`` milliseconds, in which other requests would be computed.

Allowed is 1.15 times the larger of the bytes over what fio reads from the same folder in this run, or over the slower
speed given, and the bytes over the link, plus a step. The link's time is that of a load from the host in this run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import count
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.harness import Report, Row, in_turns
from benchmarks.storage.speed import MIB, layout_of, read_speed
from benchmarks.ttft.recompute import ThrottledStorage
from fdcache._core import CancelFlag
from fdcache.controller.cache_controller import CacheController
from fdcache.manager import CacheManager, LoadOutcome, LoadStatus, MatchStatus, OffloadManager, Request
from fdcache.service.client import Client
from fdcache.service.server import storage_opening
from fdcache.service.server.lifecycle import Server
from fdcache.settings import Settings
from fdcache.settings.cache import (
    CacheSettings,
    CopySettings,
    PrefetchPolicy,
    StorageTierSettings,
    WritePolicy,
)
from fdcache.storage.connector import BatchResult, ConnectorContext, PlacedStorage, RecordBatch
from fdcache.storage.factory import open_storage
from fdcache.storage.slab import SlabStore
from fdcache.storage.slab_format import file_name
from fdcache.tiers.host import host_block_bytes

LAYOUT = layout_of(1024)
PROMPTS = 3
WAIT_COMPLETE = PrefetchPolicy.WAIT_COMPLETE


class Rank:
    """The worker of a manager, whose storage can be slowed; it loads prompts and computes nothing."""

    def __init__(
        self, manager: CacheManager | OffloadManager, blocks: int, storage: StorageTierSettings, step: float
    ) -> None:
        self.manager = manager
        self.controller = CacheController(CopySettings(), LAYOUT)
        self.planes = self.controller.initialize_kv_cache(blocks)
        self.controller.initialize_host_cache(manager.host_cache)
        self.storage: ThrottledStorage | None = None
        if manager.host_cache.server is None and storage.directory is not None:
            self.storage = ThrottledStorage(SlabStore(storage.directory, LAYOUT, rank=0, size=storage.size))
            scan = self.controller.initialize_storage(self.storage)
            assert scan is not None
            manager.restore_storage([scan])
        self._step = step
        self._served = 0

    def request(self, number: int, blocks: int) -> Request:
        """Return a new request with a prompt."""
        self._served += 1
        return Request(str(self._served), [number] * (blocks * LAYOUT.block_size + 1))

    def fill(self, number: int, table: np.ndarray[Any, Any]) -> None:
        """Compute the blocks of a prompt."""
        for plane in self.planes:
            plane[table] = number + 1

    def check(self, number: int, table: np.ndarray[Any, Any]) -> None:
        """Compare the blocks of a prompt with what was computed."""
        assert all((plane[table] == number + 1).all() for plane in self.planes), "the device has other bytes"

    def run_step(self) -> list[LoadOutcome]:
        """Submit the step's plans, wait as long as a step takes, and return the loads that have ended."""
        for plan in self.manager.take_plans():
            self.controller.submit_swap_tasks(plan)
        time.sleep(self._step)
        return self.manager.apply(self.controller.poll())

    def await_outcomes(self) -> None:
        """Run steps until loads end, all of them confirmed."""
        while not (outcomes := self.run_step()):
            pass
        assert all(each.status is LoadStatus.CONFIRMED for each in outcomes), outcomes

    def close(self) -> None:
        """Release everything."""
        self.controller.shutdown()
        self.manager.close()


class Engine(Protocol):
    """Stores prompts and loads them."""

    @property
    def rank(self) -> Rank: ...

    def store(self, number: int, blocks: int) -> None:
        """Compute a prompt, and wait until nothing is left to copy."""

    def load(self, number: int, blocks: int) -> float:
        """Return the seconds until a prompt's blocks are on the device."""


class OwnBlocks:
    """An engine whose device cache belongs to its manager."""

    def __init__(
        self, cache: CacheSettings, storage: StorageTierSettings, step: float, *, streams: bool
    ) -> None:
        self.manager = CacheManager(cache, LAYOUT, storage=storage, loads_ahead=streams)
        self.rank = Rank(self.manager, cache.device_blocks, storage, step)

    def store(self, number: int, blocks: int) -> None:
        request = self.rank.request(number, blocks)
        self.manager.match_prefix([request])
        assert self.manager.allocate_device_blocks([(request, request.num_tokens)])[0].ok
        self.rank.fill(number, request.block_table)
        self.manager.commit([(request, request.num_tokens)])
        self._end(request)

    def load(self, number: int, blocks: int) -> float:
        self.manager.sleep()  # forgets the device
        self.manager.wakeup()
        request = self.rank.request(number, blocks)
        self.manager.prepare([request])
        start = time.perf_counter()
        self.manager.begin([request])
        while (found := self.manager.match_prefix([request])[0]).status is MatchStatus.DEFERRED:
            self.rank.run_step()
        assert found.total_matched_blocks == blocks, found
        assert self.manager.allocate_device_blocks([(request, request.num_tokens)])[0].ok
        if request.is_loading:
            self.rank.await_outcomes()
        seconds = time.perf_counter() - start
        self.rank.check(number, request.block_table[:blocks])
        self._end(request)
        return seconds

    def _end(self, request: Request) -> None:
        self.rank.run_step()
        while (
            (stats := self.manager.get_stats()).plans_in_flight or stats.queued_backups or stats.queued_stores
        ):
            self.rank.run_step()
        self.manager.finish([request])


class EngineBlocks:
    """An engine that owns its device cache."""

    def __init__(
        self, cache: CacheSettings, storage: StorageTierSettings, step: float, *, streams: bool
    ) -> None:
        self.manager = OffloadManager(cache, LAYOUT, storage=storage, loads_ahead=streams)
        self.rank = Rank(self.manager, cache.device_blocks, storage, step)

    def store(self, number: int, blocks: int) -> None:
        request, ids = self.rank.request(number, blocks), np.arange(blocks, dtype=np.int32)
        self.rank.fill(number, ids)
        self.manager.begin([request])
        self.manager.offer(request, request.num_tokens, ids)
        self._end(request)

    def load(self, number: int, blocks: int) -> float:
        request, ids = self.rank.request(number, blocks), np.arange(blocks, dtype=np.int32)
        start = time.perf_counter()
        self.manager.begin([request])
        while (found := self.manager.match(request, 0)).status is MatchStatus.DEFERRED:
            self.rank.run_step()
        assert self.manager.load(request, ids) == blocks, found
        self.rank.await_outcomes()
        seconds = time.perf_counter() - start
        self.rank.check(number, ids)
        self._end(request)
        return seconds

    def _end(self, request: Request) -> None:
        self.manager.finish([request])
        while self.manager.has_pending_work:
            self.rank.run_step()


OWNERS: dict[str, type[OwnBlocks | EngineBlocks]] = {"own": OwnBlocks, "engine": EngineBlocks}


class Slowed(ThrottledStorage):
    """Storage of a service that reads at ``speed`` bytes a second; 0 is its own."""

    def __init__(self, storage: PlacedStorage, speed: Any) -> None:
        super().__init__(storage)
        self._speed = speed

    def get(self, batch: RecordBatch, timeout: float, cancel: CancelFlag | None = None) -> BatchResult:
        """Read blocks as slowly as is wanted now."""
        self.bytes_per_second = self._speed.value or None
        return super().get(batch, timeout, cancel)


def serve(folder: str, blocks: int, speed: Any, ready: Event, stop: Event) -> None:
    """Run a service in this process until ``stop`` is set."""

    def opened(context: ConnectorContext) -> Slowed:
        storage = open_storage(context)
        assert isinstance(storage, PlacedStorage)
        return Slowed(storage, speed)

    storage_opening.open_storage = opened  # type: ignore[attr-defined]
    values = {
        "FDCACHE_SERVER": address(folder),
        "FDCACHE_RUNTIME_DIR": folder,
        "FDCACHE_HTTP_ADDRESS": "off",
        "FDCACHE_DISCARD": "1",
        "FDCACHE_HOST_MEMORY": (PROMPTS * blocks + 8) * 2 * host_block_bytes(LAYOUT),
        "FDCACHE_STORAGE": "local",
        "FDCACHE_STORAGE_DIR": f"{folder}/storage",
        "FDCACHE_STORAGE_SIZE": (PROMPTS * blocks + 8) * 2 * LAYOUT.record_bytes,
    }
    server = Server(Settings.load(environ={}, arguments=values))
    server.start()

    def end() -> None:
        ready.set()
        stop.wait()
        server.stop(force=True)

    threading.Thread(target=end, daemon=True).start()
    server.run()
    server.close()


def address(folder: str | Path) -> str:
    """Return the address of the service in a folder."""
    return f"ipc://{folder}/fdcache.sock"


class OwnStorage:
    """Two managers with storage of their own, by whether they stream. Their host tiers hold two of three prompts."""

    def __init__(self, folder: Path, blocks: int, step: float, owner: type[OwnBlocks | EngineBlocks]) -> None:
        size = (PROMPTS * blocks + 8) * 2 * LAYOUT.record_bytes
        cache = CacheSettings(
            host_memory=(2 * blocks + 8) * host_block_bytes(LAYOUT),
            device_blocks=blocks + blocks // 8 + 2,
            write_policy=WritePolicy.WRITE_THROUGH,
            eviction="lru",
        )
        self.engines: dict[bool, Engine] = {}
        for streams in (False, True):
            path = folder / str(streams)
            path.mkdir()
            storage = StorageTierSettings(
                connector="local", directory=path, size=size, prefetch_policy=WAIT_COMPLETE
            )
            self.engines[streams] = owner(cache, storage, step, streams=streams)
            for number in range(PROMPTS):
                self.engines[streams].store(number, blocks)

    def slow(self, bytes_per_second: float) -> None:
        """Set the speed of storage; 0 is its own."""
        for engine in self.engines.values():
            assert engine.rank.storage is not None
            engine.rank.storage.bytes_per_second = bytes_per_second or None

    def forget_host(self) -> None:
        """Do nothing: the host tier has other prompts."""

    def close(self) -> None:
        """Release everything."""
        for engine in self.engines.values():
            engine.rank.close()


class ServiceStorage:
    """Two managers at one service in another process, by whether they stream."""

    def __init__(self, folder: Path, blocks: int, step: float, owner: type[OwnBlocks | EngineBlocks]) -> None:
        folder.chmod(0o700)
        context = multiprocessing.get_context("spawn")
        self._speed, ready, self._stop = context.Value("d", 0.0), context.Event(), context.Event()
        arguments = (str(folder), blocks, self._speed, ready, self._stop)
        self._process = context.Process(target=serve, args=arguments)
        self._process.start()
        assert ready.wait(60), "the service does not start"
        self._client = Client(address(folder), timeout=60)
        cache = CacheSettings(
            server=address(folder),
            device_blocks=blocks + blocks // 8 + 2,
            write_policy=WritePolicy.WRITE_THROUGH,
            rpc_timeout=10.0,
        )
        terms = StorageTierSettings(prefetch_policy=WAIT_COMPLETE)
        self.engines: dict[bool, Engine] = {
            streams: owner(cache, terms, step, streams=streams) for streams in (False, True)
        }
        for number in range(PROMPTS):
            while self._stored() < (number + 1) * blocks:
                self.engines[True].store(number, blocks)

    def _stored(self) -> int:
        return sum(each["blocks"] for each in self._client.ask("storage")["layouts"])

    def slow(self, bytes_per_second: float) -> None:
        """Set the speed of storage; 0 is its own."""
        self._speed.value = bytes_per_second

    def forget_host(self) -> None:
        """Empty the service's host tier."""
        self._client.ask("reset", tier="host")

    def close(self) -> None:
        """Release everything, and end the service."""
        for engine in self.engines.values():
            engine.rank.close()
        self._client.close()
        self._stop.set()
        self._process.join(30)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--device", choices=OWNERS, default="own", help="who owns the device cache")
    parser.add_argument("--service", action="store_true", help="storage of a service in another process")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--slowed", type=float, nargs="+", default=[0.3, 1.0, 3.0, 0.0], metavar="GB/s")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--step", type=float, default=1.0, metavar="MS")


def measure(options: argparse.Namespace, report: Report) -> None:
    blocks = max(options.megabytes * MIB // LAYOUT.record_bytes, 1)
    nbytes = blocks * LAYOUT.record_bytes
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        kind = ServiceStorage if options.service else OwnStorage
        stage = kind(Path(folder), blocks, options.step / 1e3, OWNERS[options.device])
        (path, *_) = Path(folder).rglob(file_name(LAYOUT.fingerprint, 0))
        disk = read_speed(path, nbytes)
        stage.engines[True].load(0, blocks)
        link = min(stage.engines[True].load(0, blocks) for _ in range(5))  # from the host
        report.note(
            f"disk {disk.bytes_per_second / 1e9:.2f} GB/s ({disk.way}); from the host {1e3 * link:.1f} ms"
        )

        def rows() -> Iterator[Row]:
            for speed in options.slowed:
                stage.slow(speed * 1e9)
                after, during = (1e3 * each for each in medians(stage, blocks, options.rounds))
                reading = nbytes / min(disk.bytes_per_second, speed * 1e9 or disk.bytes_per_second)
                yield {
                    "storage GB/s": speed or "own",
                    "after, ms": after,
                    "while, ms": during,
                    "ratio": during / after,
                    "allowed, ms": 1.15e3 * max(reading, link) + options.step,
                }

        report.table("Loads after all reads, and while later blocks are read", rows())
        stage.close()


def medians(stage: OwnStorage | ServiceStorage, blocks: int, rounds: int) -> tuple[float, float]:
    """Return the median seconds of loads after the reads and while them, each prompt loaded once before."""
    turns = {streams: count() for streams in (False, True)}

    def load(streams: bool) -> float:
        stage.forget_host()
        return stage.engines[streams].load(next(turns[streams]) % PROMPTS, blocks)

    runs = {False: lambda: load(False), True: lambda: load(True)}
    in_turns(runs, PROMPTS)
    times = in_turns(runs, rounds)
    return statistics.median(times[False]), statistics.median(times[True])
