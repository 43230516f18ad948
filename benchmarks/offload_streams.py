"""Time from a request's arrival to the end of its load from storage, for an engine that owns its device cache.

    python -m benchmarks.offload_streams [FOLDER] [--megabytes 256] [--slowed 0.3 1 3 0] [--rounds 9]

Three prompts that are stored come in turn, with a host tier that holds two of them: all but a few blocks of each are
read and loaded. A manager that loads blocks while later ones are read, and one that loads them afterwards, take turns.
Storage is slowed to the given speeds; 0 is its own. A step takes ``--step`` milliseconds, in which other requests would
be computed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path

import numpy as np

from benchmarks.storage import layout_of
from benchmarks.ttft.recompute import ThrottledStorage
from fdcache.controller.cache_controller import CacheController
from fdcache.manager import LoadOutcome, LoadStatus, MatchStatus, OffloadManager, Request
from fdcache.settings.cache import (
    CacheSettings,
    CopySettings,
    PrefetchPolicy,
    StorageTierSettings,
    WritePolicy,
)
from fdcache.storage.slab import SlabStore
from fdcache.tiers.host import host_block_bytes

LAYOUT = layout_of(1024)
PROMPTS = 3
MIB = 1 << 20


class Engine:
    """A manager and its rank, with every prompt in storage after the first round."""

    def __init__(self, folder: Path, blocks: int, step: float, *, streams: bool) -> None:
        folder.mkdir()
        size = (PROMPTS * blocks + 8) * 2 * LAYOUT.record_bytes
        storage = StorageTierSettings(
            connector="local", directory=folder, size=size, prefetch_policy=PrefetchPolicy.WAIT_COMPLETE
        )
        memory = (2 * blocks + 8) * host_block_bytes(LAYOUT)
        cache = CacheSettings(host_memory=memory, write_policy=WritePolicy.WRITE_THROUGH, eviction="lru")
        self.manager = OffloadManager(cache, LAYOUT, storage=storage, streams=streams)
        self.controller = CacheController(CopySettings(), LAYOUT)
        self.planes = self.controller.initialize_kv_cache(blocks)
        self.controller.initialize_host_cache(self.manager.host_cache)
        self.storage = ThrottledStorage(SlabStore(folder, LAYOUT, rank=0, size=size))
        scan = self.controller.initialize_storage(self.storage)
        assert scan is not None
        self.manager.restore_storage([scan])
        self._ids = np.arange(blocks, dtype=np.int32)
        self._step = step
        self._served = 0
        for number in range(PROMPTS):
            request = self._request(number)
            self._fill(number)
            self.manager.begin(request)
            self.manager.offer(request, request.num_tokens, self._ids)
            while self._is_busy():
                self._run_step()
            self.manager.finish(request)

    def load(self, number: int) -> float:
        """Return the seconds until a prompt's blocks are on the device."""
        request = self._request(number)
        start = time.perf_counter()
        self.manager.begin(request)
        while (found := self.manager.match(request, 0)).status is MatchStatus.DEFERRED:
            self._run_step()
        assert self.manager.load(request, self._ids) == len(self._ids), found
        while not (outcomes := self._run_step()):
            pass
        seconds = time.perf_counter() - start
        assert outcomes[0].status is LoadStatus.CONFIRMED, outcomes
        assert all((plane == number + 1).all() for plane in self.planes), "the device has other bytes"
        self.manager.finish(request)
        while self._is_busy():
            self._run_step()
        return seconds

    def _is_busy(self) -> bool:
        return self.manager.has_pending_work

    def _request(self, number: int) -> Request:
        self._served += 1
        return Request(str(self._served), [number] * (len(self._ids) * LAYOUT.block_size + 1))

    def _fill(self, number: int) -> None:
        for plane in self.planes:
            plane[...] = number + 1

    def _run_step(self) -> list[LoadOutcome]:
        """Submit the step's plans, let it take its time, and return the loads that have ended."""
        for plan in self.manager.take_plans():
            self.controller.submit_swap_tasks(plan)
        time.sleep(self._step)
        return self.manager.apply(self.controller.poll())

    def close(self) -> None:
        """Release everything."""
        self.controller.shutdown()
        self.manager.close()


def options(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of what every benchmark of streams takes."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--slowed", type=float, nargs="+", default=[0.3, 1.0, 3.0, 0.0], metavar="GB/s")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--step", type=float, default=1.0, metavar="MS")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    flags = options("python -m benchmarks.offload_streams", __doc__).parse_args(arguments)
    blocks = max(flags.megabytes * MIB // LAYOUT.record_bytes, 1)
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        engines = {
            streams: Engine(Path(folder, str(streams)), blocks, flags.step / 1e3, streams=streams)
            for streams in (False, True)
        }
        print(f"{'storage GB/s':>13} {'after ms':>10} {'while ms':>10} {'ratio':>6}")
        for speed in flags.slowed:
            times: dict[bool, list[float]] = {False: [], True: []}
            for engine in engines.values():
                engine.storage.bytes_per_second = speed * 1e9 or None
                for number in range(PROMPTS):
                    engine.load(number)
            for turn, number in zip(range(flags.rounds), cycle(range(PROMPTS))):
                for streams in (bool(turn % 2), not turn % 2):
                    times[streams].append(engines[streams].load(number))
            after, during = (1e3 * statistics.median(times[each]) for each in (False, True))
            print(f"{speed or 'own':>13} {after:>10.1f} {during:>10.1f} {during / after:>6.3f}")
        for engine in engines.values():
            engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
