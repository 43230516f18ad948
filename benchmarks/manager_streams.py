"""Time from a request's arrival to the end of its load from storage, for a ``CacheManager``.

    python -m benchmarks.manager_streams [FOLDER] [--service] [--megabytes 256] [--slowed 0.3 1 3 0] [--rounds 9]

Storage is the manager's own, or with ``--service`` that of a service in another process. Prompts that are stored are
read and loaded. A manager that loads blocks while later ones are read,
and one that loads them afterwards, take turns. Storage is slowed to the given speeds; 0 is its own. A step takes
``--step`` milliseconds, in which other requests would be computed. Allowed is 1.15 times the larger of the bytes over
what fio reads from the same folder in this run, or over the slower speed given, and the bytes over the link, plus a
step. The link's time is that of a load from the host in this run.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from itertools import cycle
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from benchmarks.offload_streams import LAYOUT, MIB, PROMPTS, options
from benchmarks.storage import read_speed
from benchmarks.ttft.recompute import ThrottledStorage
from fdcache._core import CancelFlag
from fdcache.controller.cache_controller import CacheController
from fdcache.manager import CacheManager, LoadOutcome, LoadStatus, MatchStatus, Request
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

WAIT_COMPLETE = PrefetchPolicy.WAIT_COMPLETE


class Engine:
    """A manager and its rank, which load prompts and compute nothing."""

    def __init__(
        self, cache: CacheSettings, storage: StorageTierSettings, step: float, *, loads_ahead: bool
    ) -> None:
        self.manager = CacheManager(cache, LAYOUT, storage=storage, loads_ahead=loads_ahead)
        self.controller = CacheController(CopySettings(), LAYOUT)
        self.planes = self.controller.initialize_kv_cache(cache.device_blocks)
        self.controller.initialize_host_cache(self.manager.host_cache)
        self.storage: ThrottledStorage | None = None
        if storage.directory is not None and cache.server is None:
            self.storage = ThrottledStorage(SlabStore(storage.directory, LAYOUT, rank=0, size=storage.size))
            scan = self.controller.initialize_storage(self.storage)
            assert scan is not None
            self.manager.restore_storage([scan])
        self._step = step
        self._served = 0

    def store(self, number: int, blocks: int) -> None:
        """Compute a prompt, and wait until nothing is left to copy."""
        request = self._request(number, blocks)
        self.manager.match_prefix([request])
        assert self.manager.allocate_device_blocks([(request, request.num_tokens)])[0].ok
        for plane in self.planes:
            plane[request.block_table] = number + 1
        self.manager.commit([(request, request.num_tokens)])
        self._end(request)

    def load(self, number: int, blocks: int) -> float:
        """Return the seconds until a prompt's blocks are on the device."""
        self.manager.sleep()  # forgets the device
        self.manager.wakeup()
        request = self._request(number, blocks)
        self.manager.prepare([request])
        start = time.perf_counter()
        self.manager.begin([request])
        while (found := self.manager.match_prefix([request])[0]).status is MatchStatus.DEFERRED:
            self._run_step()
        assert found.total_matched_blocks == blocks, found
        assert self.manager.allocate_device_blocks([(request, request.num_tokens)])[0].ok
        waits = request.is_loading
        outcomes = self._run_step()
        while waits and not outcomes:
            outcomes = self._run_step()
        seconds = time.perf_counter() - start
        assert all(each.status is LoadStatus.CONFIRMED for each in outcomes), outcomes
        table = request.block_table[:blocks]
        assert all((plane[table] == number + 1).all() for plane in self.planes), "the device has other bytes"
        self._end(request)
        return seconds

    def _request(self, number: int, blocks: int) -> Request:
        self._served += 1
        return Request(str(self._served), [number] * (blocks * LAYOUT.block_size + 1))

    def _run_step(self) -> list[LoadOutcome]:
        """Submit the step's plans, let it take its time, and return the loads that have ended."""
        for plan in self.manager.take_plans():
            self.controller.submit_swap_tasks(plan)
        time.sleep(self._step)
        return self.manager.apply(self.controller.poll())

    def _end(self, request: Request) -> None:
        def is_busy() -> bool:
            stats = self.manager.get_stats()
            return bool(stats.plans_in_flight or stats.queued_backups or stats.queued_stores)

        self._run_step()
        while is_busy():
            self._run_step()
        self.manager.finish([request])

    def close(self) -> None:
        """Release everything."""
        self.controller.shutdown()
        self.manager.close()


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
    """Two managers with storage of their own, by ``loads_ahead``. Their host tiers hold two of three prompts."""

    def __init__(self, folder: Path, blocks: int, step: float) -> None:
        size = (PROMPTS * blocks + 8) * 2 * LAYOUT.record_bytes
        cache = CacheSettings(
            host_memory=(2 * blocks + 8) * host_block_bytes(LAYOUT),
            device_blocks=blocks + blocks // 8 + 2,
            write_policy=WritePolicy.WRITE_THROUGH,
            eviction="lru",
        )
        self.engines: dict[bool, Engine] = {}
        for ahead in (False, True):
            path = folder / str(ahead)
            path.mkdir()
            storage = StorageTierSettings(
                connector="local", directory=path, size=size, prefetch_policy=WAIT_COMPLETE
            )
            self.engines[ahead] = Engine(cache, storage, step, loads_ahead=ahead)
            for number in range(PROMPTS):
                self.engines[ahead].store(number, blocks)

    def slow(self, bytes_per_second: float) -> None:
        """Let storage read at this speed; 0 is its own."""
        for engine in self.engines.values():
            assert engine.storage is not None
            engine.storage.bytes_per_second = bytes_per_second or None

    def forget_host(self) -> None:
        """Do nothing: the host tier has other prompts."""

    def close(self) -> None:
        """Release everything."""
        for engine in self.engines.values():
            engine.close()


class ServiceStorage:
    """Two managers at one service in another process, by ``loads_ahead``."""

    def __init__(self, folder: Path, blocks: int, step: float) -> None:
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
        self.engines = {ahead: Engine(cache, terms, step, loads_ahead=ahead) for ahead in (False, True)}
        for number in range(PROMPTS):
            while self._stored() < (number + 1) * blocks:
                self.engines[True].store(number, blocks)

    def _stored(self) -> int:
        return sum(each["blocks"] for each in self._client.ask("storage")["layouts"])

    def slow(self, bytes_per_second: float) -> None:
        """Let storage read at this speed; 0 is its own."""
        self._speed.value = bytes_per_second

    def forget_host(self) -> None:
        """Empty the service's host tier."""
        self._client.ask("reset", tier="host")

    def close(self) -> None:
        """Release everything, and end the service."""
        for engine in self.engines.values():
            engine.close()
        self._client.close()
        self._stop.set()
        self._process.join(30)


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = options("python -m benchmarks.manager_streams", __doc__)
    parser.add_argument("--service", action="store_true")
    flags = parser.parse_args(arguments)
    blocks = max(flags.megabytes * MIB // LAYOUT.record_bytes, 1)
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        kind = ServiceStorage if flags.service else OwnStorage
        stage = kind(Path(folder), blocks, flags.step / 1e3)
        (path, *_) = Path(folder).rglob(file_name(LAYOUT.fingerprint, 0))
        nbytes = blocks * LAYOUT.record_bytes
        disk = read_speed(path, nbytes)
        stage.engines[True].load(0, blocks)
        link = min(stage.engines[True].load(0, blocks) for _ in range(5))  # from the host
        print(f"disk {disk.bytes_per_second / 1e9:.2f} GB/s ({disk.way}); from the host {1e3 * link:.1f} ms")
        print(f"{'storage GB/s':>13} {'after ms':>10} {'while ms':>10} {'ratio':>6} {'allowed ms':>10}")
        for speed in flags.slowed:
            stage.slow(speed * 1e9)
            times: dict[bool, list[float]] = {False: [], True: []}
            for turn, number in zip(range(-PROMPTS, flags.rounds), cycle(range(PROMPTS))):
                for ahead in (bool(turn % 2), not turn % 2):
                    stage.forget_host()
                    seconds = stage.engines[ahead].load(number, blocks)
                    if turn >= 0:
                        times[ahead].append(seconds)
            after, during = (1e3 * statistics.median(times[each]) for each in (False, True))
            reading = nbytes / min(disk.bytes_per_second, speed * 1e9 or disk.bytes_per_second)
            allowed = 1.15e3 * max(reading, link) + flags.step
            print(
                f"{speed or 'own':>13} {after:>10.1f} {during:>10.1f} {during / after:>6.3f} {allowed:>10.1f}"
            )
        stage.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
