"""Measure the throughput of the local storage tier beside fio and beside one file per block.

All three move the same bytes with O_DIRECT, the same block size and the same number of requests in flight, on the
same file system, in turns in one run. For fio, the better of libaio and psync threads counts. The store verifies every
record it reads.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.harness import Report, Row
from fdcache.layout import KVLayout
from fdcache.settings.cache import FsyncPolicy
from fdcache.storage.connector import RecordBatch
from fdcache.storage.slab import SlabStore
from fdcache.testing.storage import HostRecords, path_of

_BATCH = 256
_SECTOR = 4096
PHASES = ("fill", "rewrite", "read")
"""Write a sparse file, overwrite it, read it."""
MIB = 1 << 20
Speeds = dict[tuple[str, str], list[float]]
"""Bytes per second by store and phase."""


def layout_of(record_kib: int) -> KVLayout:
    """Return a layout with records of ``record_kib`` KiB: key and value planes of 64 KiB, or of half the record."""
    plane_kib = min(64, record_kib // 2)
    return KVLayout.uniform(
        model="bench",
        revision="1",
        block_size=16,
        kv_heads=plane_kib // 4,
        head_dim=128,
        dtype="bfloat16",
        num_layers=record_kib // (2 * plane_kib),
    )


class Slab:
    """fdcache's local storage."""

    name = "fdcache"

    def __init__(self, folder: Path, layout: KVLayout, blocks: int, depth: int) -> None:
        self._records = HostRecords(layout, _BATCH)
        self._hashes = path_of(_BATCH, "bench")
        self._batch = self._records.fill(self._hashes)
        self._blocks = blocks
        # The store reserves one thread for reads, so writes get ``depth`` threads.
        size = blocks * (layout.record_bytes + 512) + MIB
        self._store = SlabStore(
            folder / "slab", layout, rank=0, size=size, fsync=FsyncPolicy.NEVER, threads=depth + 1
        )

    def _batches(self) -> list[RecordBatch]:
        ones = np.ones(_BATCH, np.uint32)
        return [
            replace(self._batch, slots=np.arange(first, first + _BATCH, dtype=np.int32), generations=ones)
            for first in range(0, self._blocks, _BATCH)
        ]

    def write(self) -> None:
        for batch in self._batches():
            if not self._store.put(batch, 600).ok.all():
                raise SystemExit(self._store.stats().error)

    def read(self) -> None:
        for batch in self._batches():
            if not self._store.get(batch, 600).ok.all():
                raise SystemExit(self._store.stats().error)

    def close(self) -> None:
        self._store.close()
        shutil.rmtree(self._store.path.parent)


class FilePerBlock:
    """One file per block, as other systems store them; with O_DIRECT and threads, without a checksum."""

    name = "file per block"

    def __init__(self, folder: Path, layout: KVLayout, blocks: int, depth: int) -> None:
        self._folder = folder / "files"
        self._folder.mkdir()
        self._records = HostRecords(layout, _BATCH)
        self._records.fill(path_of(_BATCH, "bench"))
        self._views = [self._records.table.record(slot) for slot in range(_BATCH)]
        self._blocks = blocks
        self._threads = ThreadPoolExecutor(depth)

    def _write_one(self, block: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT
        fd = os.open(self._folder / f"{block:08x}.kv", flags, 0o600)
        os.pwritev(fd, [self._views[block % _BATCH].data], 0)
        os.close(fd)

    def _read_one(self, block: int) -> None:
        fd = os.open(self._folder / f"{block:08x}.kv", os.O_RDONLY | os.O_DIRECT)
        os.preadv(fd, [self._views[block % _BATCH].data], 0)
        os.close(fd)

    def write(self) -> None:
        for _ in self._threads.map(self._write_one, range(self._blocks)):
            pass

    def read(self) -> None:
        for _ in self._threads.map(self._read_one, range(self._blocks)):
            pass

    def close(self) -> None:
        self._threads.shutdown()
        shutil.rmtree(self._folder)


def fio(folder: Path, record_bytes: int, nbytes: int, depth: int) -> dict[str, float]:
    """Return fio's bytes per second in each phase, by the better of two ways to keep ``depth`` requests in flight."""
    best = dict.fromkeys(PHASES, 0.0)
    for way in _ways_of_fio(nbytes, record_bytes, depth):
        for phase in PHASES:
            kind = "read" if phase == "read" else "write"
            best[phase] = max(best[phase], _fio(folder / "fio", kind, record_bytes, way))
        (folder / "fio").unlink()
    return best


def _ways_of_fio(nbytes: int, request_bytes: int, depth: int) -> list[tuple[str, ...]]:
    share = nbytes // depth // request_bytes * request_bytes
    return [
        ("--ioengine=libaio", f"--iodepth={depth}", f"--size={nbytes}"),
        ("--ioengine=psync", f"--numjobs={depth}", f"--size={share}", f"--offset_increment={share}"),
    ]


def _fio(path: Path, kind: str, request_bytes: int, way: tuple[str, ...]) -> float:
    command = ["fio", "--name=bench", f"--filename={path}", f"--rw={kind}", f"--bs={request_bytes}"]
    command += [
        "--direct=1",
        "--fallocate=none",
        "--thread",
        "--group_reporting",
        "--output-format=json",
        *way,
    ]
    if kind == "read":
        command.append("--readonly")
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["jobs"][0][kind]["bw_bytes"])


def timed(action: Callable[[], None], nbytes: int) -> float:
    begin = time.perf_counter()
    action()
    return nbytes / (time.perf_counter() - begin)


@dataclass(frozen=True, slots=True)
class ReadSpeed:
    """Bytes a second of reads of a file, and with what they were measured."""

    bytes_per_second: float
    way: str


def read_speed(path: Path, nbytes: int, *, depth: int = 16, rounds: int = 2) -> ReadSpeed:
    """Return how fast the first ``nbytes`` of a file are read with O_DIRECT, 4 MiB at a time: the best round.

    By fio if it is on PATH, as the better of its engines libaio and psync; otherwise by threads of this process.
    """
    nbytes = min(nbytes, path.stat().st_size)
    chunk = min(4 * MIB, nbytes // _SECTOR * _SECTOR)
    nbytes = nbytes // chunk * chunk
    if shutil.which("fio") is None:
        speed = max(_read_by_threads(path, nbytes, chunk, depth) for _ in range(rounds))
        return ReadSpeed(speed, f"threads, O_DIRECT, 4 MiB, {depth} reads at a time; fio is not on PATH")
    ways = _ways_of_fio(nbytes, chunk, min(depth, nbytes // chunk))
    speed = max(_fio(path, "read", chunk, way) for way in ways for _ in range(rounds))
    return ReadSpeed(speed, f"fio, O_DIRECT, 4 MiB, queue depth {depth}")


def _read_by_threads(path: Path, nbytes: int, chunk: int, threads: int) -> float:
    starts = range(0, nbytes, chunk)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffers = [mmap.mmap(-1, chunk) for _ in range(threads)]

    def read(thread: int) -> int:
        return sum(os.preadv(fd, [buffers[thread]], start) for start in starts[thread::threads])

    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        moved = sum(pool.map(read, range(threads)))
        seconds = time.perf_counter() - start
    os.close(fd)
    return moved / seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record-kib", type=int, default=1024)


def measure(options: argparse.Namespace, report: Report) -> None:
    if shutil.which("fio") is None:
        raise SystemExit("fio is not there; install it (Debian: apt-get install fio)")
    layout = layout_of(options.record_kib)
    blocks = options.megabytes * MIB // layout.record_bytes // _BATCH * _BATCH
    nbytes = blocks * layout.record_bytes
    with tempfile.TemporaryDirectory(prefix="fdcache-bench", dir=options.folder) as folder:
        speeds = speeds_in_turns(Path(folder), layout, blocks, options.depth, options.rounds)
    report.note(
        f"records of {options.record_kib} KiB, {nbytes // MIB} MiB, depth {options.depth}, O_DIRECT, "
        f"median of {options.rounds}"
    )
    report.table("Storage, MB/s and of fio", shares_of_fio(speeds))


def speeds_in_turns(folder: Path, layout: KVLayout, blocks: int, depth: int, rounds: int) -> Speeds:
    """Return the bytes per second of every store in every phase, one after the other in each round."""
    nbytes = blocks * layout.record_bytes
    speeds: Speeds = {}
    for _ in range(rounds):
        for phase, speed in fio(folder, layout.record_bytes, nbytes, depth).items():
            speeds.setdefault(("fio", phase), []).append(speed)
        for kind in (Slab, FilePerBlock):
            store = kind(folder, layout, blocks, depth)
            for phase in PHASES:
                speed = timed(store.read if phase == "read" else store.write, nbytes)
                speeds.setdefault((store.name, phase), []).append(speed)
            store.close()
    return speeds


def shares_of_fio(speeds: Speeds) -> Iterator[Row]:
    """Yield a row for each store, with its medians."""
    for name in ("fio", Slab.name, FilePerBlock.name):
        row: dict[str, object] = {"store": name}
        for phase in PHASES:
            speed = statistics.median(speeds[name, phase])
            row[phase] = speed / 1e6
            row[f"{phase}, of fio"] = speed / statistics.median(speeds["fio", phase])
        yield row
