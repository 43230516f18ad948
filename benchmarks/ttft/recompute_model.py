"""Load or recompute with the model of this benchmark: TTFT for always, never and auto, from every tier.

One server for each length holds every way's blocks: first one manager decides by what it observes, at all speeds of
storage in turn; then managers that know only the blocks in storage load always. The host tier holds two of three
prompts that come in turn, so that each has to be read from storage again or computed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from benchmarks.storage.speed import read_speed
from benchmarks.ttft.model import Shape
from benchmarks.ttft.prefill import link_bandwidth
from benchmarks.ttft.recompute import Row
from benchmarks.ttft.server import Server, Tokens, prompt
from fdcache.manager.cost import Priors
from fdcache.storage.calibration import measure_storage

PROMPTS = 3
LEARNING_SECONDS = 1.0
"""Prompts are served for this long, at least two of them, before the times of a manager that decides count."""


@dataclass(frozen=True, slots=True)
class Case:
    """Where a prompt's blocks are when it comes: some of the leading ones on the host, the others in storage.

    ``gb_per_s`` is the speed of storage, 0.0 for its own.
    """

    gb_per_s: float
    on_host: float = 0.0

    @property
    def name(self) -> str:
        """Return the tiers in words."""
        if self.on_host >= 1:
            return "host"
        return "host and storage" if self.on_host else "storage"


@dataclass(slots=True)
class Samples:
    """Seconds to the first token, and the tokens that were reused."""

    seconds: list[float] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[float, int]]:
        return zip(self.seconds, self.reused, strict=True)

    @property
    def median(self) -> float:
        """Return the median of the seconds."""
        return statistics.median(self.seconds)


class Bench:
    """The prompts of one length, in storage."""

    def __init__(
        self, shape: Shape, device: str, length: int, folder: Path, samples: int, limit: float
    ) -> None:
        self.length = length
        self._samples, self._limit = samples, limit
        blocks = -(-length // shape.block_size)
        block_bytes = shape.layout().payload_bytes
        speed = measure_storage(folder)
        link = 1e9 * link_bandwidth(device, min(blocks * block_bytes, 1 << 30))
        self._tell("storage as `fdcache init` measures it", speed)
        self.server = Server(
            shape,
            device,
            device_blocks=blocks + 2,
            host_blocks=2 * blocks,
            max_positions=length + shape.block_size,
            storage=folder,
            load_or_recompute="auto",
            eviction="lru",
            priors=Priors(link, speed.bytes_per_second, speed.latency_seconds),
        )
        self.texts = [prompt(shape, length, 77 * length + seed) for seed in range(PROMPTS)]
        for use_cache in (False, True):  # the first prompts warm up
            for text in self.texts:
                self.server.first_token(text, use_cache=use_cache)
        whole = (length - 1) // shape.block_size
        self.nbytes = whole * self.server.layout.payload_bytes
        self.link = link
        disk = read_speed(self.server.storage_path, self.nbytes)
        self.disk, self.disk_way = disk.bytes_per_second, disk.way
        self._tell("disk", f"{self.disk / 1e9:.2f} GB/s", disk.way)
        self._block_size = shape.block_size

    def auto(self, case: Case) -> Samples:
        """Serve prompts with the manager that decides, first until it has learnt the speeds."""
        self._set_speed(case)
        turns = self._turns()
        started, learnt = time.perf_counter(), 0
        while learnt < 2 or (learnt < 2 * PROMPTS and time.perf_counter() - started < LEARNING_SECONDS):
            self._serve(next(turns), case)
            learnt += 1
        found = self._measure(lambda: self._serve(next(turns), case))
        self._tell(case.name, case.gb_per_s, self.server.manager.get_stats().loads.recent[-1:])
        return found

    def always(self, case: Case, *, loads_ahead: bool = True) -> Samples:
        """Serve prompts with managers that load everything."""
        self._set_speed(case)
        turns = self._turns()

        def serve() -> tuple[float, int]:
            self.server.forget_all_but_storage(loads_ahead=loads_ahead, load_or_recompute="always")
            return self._serve(next(turns), case)

        return self._measure(serve)

    def from_host_again(self, *, idle: float) -> Samples:
        """Load one prompt from the host many times with one manager, after ``idle`` seconds without work."""
        self.server.forget_all_but_storage(load_or_recompute="always")
        self._first_token(self.texts[0])

        def serve() -> tuple[float, int]:
            self.server.forget_device()
            time.sleep(idle)
            return self._first_token(self.texts[0])

        return self._measure(serve)

    def never(self) -> Samples:
        """Serve prompts without the cache."""
        turns = self._turns()
        return self._measure(lambda: self._first_token(next(turns), use_cache=False))

    def device_step(self) -> float:
        """Return the seconds of a prompt whose blocks are on the device."""
        text = self.texts[0]
        self._first_token(text)
        return self._measure(lambda: self._first_token(text)).median

    def seconds_of_read(self, case: Case) -> float:
        """Return about how long the blocks in storage take."""
        speed = min(self.disk, case.gb_per_s * 1e9) if case.gb_per_s else self.disk
        return self.nbytes * (1 - case.on_host) / speed

    def row(self, case: Case, auto: Samples, always: Samples, never: Samples, step: float) -> Row:
        """Return what the three ways took, and the goal for loading: bytes over the slower of disk and link."""
        best = min(always.median, never.median)
        allowed = 1.15 * max(self.seconds_of_read(case), self.nbytes / self.link) + step
        return {
            "prompt": self.length,
            "from": case.name,
            "storage GB/s": case.gb_per_s or "own",
            "always ms": round(1e3 * always.median, 1),
            "never ms": round(1e3 * never.median, 1),
            "auto ms": round(1e3 * auto.median, 1),
            "auto / best": round(auto.median / best, 3),
            "always reuses": round(statistics.mean(always.reused) / self.length, 2),
            "auto reuses": round(statistics.mean(auto.reused) / self.length, 2),
            "allowed ms": round(1e3 * allowed, 1),
            "always within": always.median <= allowed,
            "disk GB/s": round(self.disk / 1e9, 2),
            "disk by": self.disk_way.split(",")[0],
            "samples": "/".join(str(len(way.seconds)) for way in (always, never, auto)),
        }

    def _tell(self, *what: object) -> None:
        """Print a finding at once: a run that is stopped early has told it."""
        print(self.length, *what, file=sys.stderr, flush=True)

    def _set_speed(self, case: Case) -> None:
        self.server.storage.bytes_per_second = case.gb_per_s * 1e9 or None

    def _turns(self) -> Iterator[Tokens]:
        while True:
            yield from self.texts

    def _measure(self, serve: Callable[[], tuple[float, int]]) -> Samples:
        """Serve prompts and return their times."""
        found, started = Samples(), time.perf_counter()
        for _ in range(self._samples):
            seconds, reused = serve()
            found.seconds.append(seconds)
            found.reused.append(reused)
            if time.perf_counter() - started > self._limit:
                break
        self._tell([(round(1e3 * each, 1), reused) for each, reused in found])
        return found

    def _serve(self, text: Tokens, case: Case) -> tuple[float, int]:
        """Serve a prompt after its leading blocks have come to the host, and to the device for a while."""
        if case.on_host:
            leading = round(case.on_host * (self.length - 1)) // self._block_size * self._block_size
            self._first_token(text[: leading + 1])
            self.server.forget_device()
        return self._first_token(text)

    def _first_token(self, text: Tokens, *, use_cache: bool = True) -> tuple[float, int]:
        seconds, _ = self.server.first_token(text, use_cache=use_cache)
        return seconds, self.server.reused


def load_or_recompute(
    shape: Shape,
    device: str,
    *,
    lengths: Sequence[int],
    gb_per_s: Sequence[float],
    samples: int,
    limit: float,
    storage: Path,
    seconds: float = inf,
) -> list[Row]:
    """Return a row for each length and case. A median is of ``samples``, or those of ``limit`` seconds.

    Nothing is begun that would not end ``seconds`` after the start; its row is left out.
    """
    end = time.perf_counter() + seconds
    cases = [Case(speed) for speed in sorted(gb_per_s, key=lambda speed: -speed or -1e9)]
    cases += [Case(statistics.median_low(filter(None, gb_per_s)), on_host=0.5), Case(0.0, on_host=1.0)]
    rows = []
    for length in lengths:
        if time.perf_counter() > end:
            break
        folder = storage / str(length)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(shape, device, length, folder, samples, limit)
        never = bench.never()
        auto = {case: bench.auto(case) for case in cases if time.perf_counter() < end}
        again = [(idle, bench.from_host_again(idle=idle).median) for idle in (0.0, 0.5)]
        print(length, "host again, by seconds of rest", again, file=sys.stderr, flush=True)
        always: dict[Case, Samples] = {}
        for case in sorted(cases, key=bench.seconds_of_read):
            if time.perf_counter() + 1.3 * bench.seconds_of_read(case) < end:
                always[case] = bench.always(case)
        if cases[0] in always and time.perf_counter() + 2 * limit < end:
            after = bench.always(cases[0], loads_ahead=False)
            print(length, "always, loaded after the reads", after.median, file=sys.stderr, flush=True)
        step = bench.device_step()
        for case in cases:
            if case in always and case in auto:
                rows.append(bench.row(case, auto[case], always[case], never, step))
                print(*rows[-1].values(), file=sys.stderr, flush=True)
        path = bench.server.storage_path
        bench.server.close()
        path.unlink()
    return rows
