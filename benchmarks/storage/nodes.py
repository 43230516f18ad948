"""Measure what several nodes can share beside what one has: a bucket, a folder, host tiers, Mooncake, a local file.

Each store is filled, and read by another node's connector with an empty index, in turns in one run. `obstore` gets
objects of one record by itself, as many at once; `checked copies` also does what no reader of fdcache can leave out: it
copies each record to its place and computes its checksum. The server of S3 is moto on loopback; a store that does not
run here is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest

from benchmarks.harness import Report, Row, in_turns
from benchmarks.storage.speed import MIB, layout_of
from fdcache import _core
from fdcache.layout import KVLayout
from fdcache.settings.cache import FsyncPolicy
from fdcache.storage.connector import BatchResult, RecordBatch
from fdcache.storage.slab import SlabStore
from fdcache.testing.storage import KnownRecords, path_of
from tests.mooncake_master import Master, find_master
from tests.nodes_help import TwoNodes, free_address
from tests.object_help import Bucket, S3Server, open_bucket, open_folder

PATIENCE = 600.0
ALONE = 1
"""Bytes of an object in which every record is alone."""

Open = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A store: ``open`` makes a node's connector, or ``obstore`` its client, whose gets are measured by themselves."""

    name: str
    open: Open
    obstore: Any = None
    placed: bool = False
    single: bool = False
    """The writing connector is the reading one, too."""


class Work:
    """Blocks to store and read."""

    def __init__(self, layout: KVLayout, blocks: int) -> None:
        self.layout = layout
        self.blocks = blocks
        self.records = KnownRecords(layout, blocks)
        self.nbytes = blocks * layout.record_bytes

    def batch(self, name: str, *, placed: bool) -> RecordBatch:
        batch = self.records.fill(path_of(self.blocks, name))
        if not placed:
            return batch
        return replace(
            batch, slots=np.arange(self.blocks, dtype=np.int32), generations=np.ones(self.blocks, np.uint32)
        )


def _checked(result: BatchResult) -> None:
    if not result.ok.all():
        raise SystemExit(result.error or f"not every block was moved: {result.outcomes.tolist()}")


def _read(connector: Any, batch: RecordBatch) -> None:
    _checked(connector.get(batch, PATIENCE))


def _seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


class Runs:
    """The runs of one candidate. Every round stores a path of its own, and another node reads it."""

    def __init__(self, candidate: Candidate, work: Work, depth: int) -> None:
        self._candidate = candidate
        self._work = work
        self._depth = depth
        self._round = 0
        self.figures: dict[str, list[float]] = {}

    def __call__(self) -> float:
        self._round += 1
        if self._candidate.obstore is not None:
            return self._obstore_alone()
        work, placed = self._work, self._candidate.placed
        writer = self._candidate.open()
        writer.register(work.records.table)
        batch = work.batch(f"{self._candidate.name} {self._round}", placed=placed)
        self._add("write", work.nbytes / _seconds(lambda: _checked(writer.put(batch, PATIENCE))))
        reader = writer if placed or self._candidate.single else self._candidate.open()
        if reader is not writer:
            reader.register(work.records.table)
        if not placed:
            self._add("new path", _seconds(lambda: reader.exists(batch.hashes, PATIENCE)))
            self._add("miss", _seconds(lambda: reader.exists(path_of(16, f"no {self._round}"), PATIENCE)))
        for count in (1, 8):
            few = batch.select(slice(0, count))
            taken = [_seconds(partial(_read, reader, few)) for _ in range(5)]
            self._add(f"get {count}", float(np.median(taken)))
        work.records.wipe()
        speed = work.nbytes / min(_seconds(partial(_read, reader, batch)) for _ in range(2))
        self._add("read", speed)
        for connector in {id(each): each for each in (writer, reader)}.values():
            connector.close()
        return speed

    def _add(self, name: str, figure: float) -> None:
        self.figures.setdefault(name, []).append(figure)

    def _obstore_alone(self) -> float:
        """Get as many objects of one record at once as a connector would, the faster of two ways."""
        content = np.random.default_rng(self._round).bytes(self._work.layout.record_bytes)
        names = [f"alone/{self._round}/{i}" for i in range(self._work.blocks)]
        store, nbytes = self._candidate.obstore, self._work.nbytes
        with ThreadPoolExecutor(self._depth) as pool:

            def put(name: str) -> None:
                obstore.put(store, name, content, mode="create", use_multipart=False)

            def get(name: str) -> int:
                return len(obstore.get(store, name).bytes())

            self._add("write", nbytes / _seconds(lambda: list(pool.map(put, names))))
            by_threads = _seconds(lambda: list(pool.map(get, names)))
            into = np.ones((self._work.blocks, self._work.layout.record_bytes), np.uint8)

            def get_checked(place: int) -> int:
                source = np.frombuffer(memoryview(obstore.get(store, names[place]).bytes()), np.uint8)
                return _core.copy_with_checksum(into[place], source)

            checked = min(_seconds(lambda: list(pool.map(get_checked, range(len(names))))) for _ in range(2))
            self._add("checked copies", nbytes / checked)
        by_loop = _seconds(lambda: asyncio.run(_get_all(store, names, self._depth)))
        speed = nbytes / min(by_threads, by_loop)
        self._add("read", speed)
        return speed


async def _get_all(store: Any, names: list[str], depth: int) -> None:
    limit = asyncio.Semaphore(depth)

    async def get(name: str) -> int:
        async with limit:
            answer = await obstore.get_async(store, name)
            return len(await answer.bytes_async())

    await asyncio.gather(*map(get, names))


def _candidates(folder: Path, layout: KVLayout, blocks: int, stack: ExitStack) -> Iterator[Candidate]:
    size = blocks * (layout.record_bytes + 512) + MIB
    slab = _slab(folder / "local", layout, size)
    yield Candidate("local file", slab, placed=True)
    shared = folder / "shared"
    shared.mkdir()
    tier: dict[str, Any] = {"size": 1 << 50, "timeout": PATIENCE}
    yield Candidate("shared folder", lambda: open_folder(shared, layout, **tier))
    for others in (0, 7):
        name = "peer" if not others else f"peer, one of {others + 1}"
        yield Candidate(name, partial(_two_nodes, layout, blocks, others), single=True)
    yield from _buckets(Bucket(f"file://{folder}/bucket"), "local bucket", layout, tier)
    try:
        server = S3Server()
    except pytest.skip.Exception:
        pass
    else:
        stack.callback(server.kill)
        yield from _buckets(server.bucket("blocks"), "moto", layout, tier)
    try:
        master = Master(find_master(), folder)
    except pytest.skip.Exception:
        return
    stack.callback(master.kill)
    segment = 4 * blocks * (layout.record_bytes + MIB)
    yield Candidate(
        "mooncake", lambda: master.connect(layout, segment=segment, timeout=PATIENCE), single=True
    )


def _two_nodes(layout: KVLayout, blocks: int, others: int) -> TwoNodes:
    """A connector that reads from the host tier of another node; its writes are a copy to that."""
    return TwoNodes(layout, 0, free_address(), blocks=2 * blocks, others=others)


def _slab(folder: Path, layout: KVLayout, size: int) -> Open:
    return lambda: SlabStore(folder, layout, rank=0, size=size, fsync=FsyncPolicy.NEVER)


def _buckets(bucket: Bucket, name: str, layout: KVLayout, tier: dict[str, Any]) -> Iterator[Candidate]:
    client = open_bucket(bucket, layout, **tier)._backend._store  # type: ignore[attr-defined]
    yield Candidate(f"obstore, {name}", lambda: None, obstore=client)
    alone = replace(bucket, url=f"{bucket.url}/alone")
    yield Candidate(f"{name}, alone", lambda: open_bucket(alone, layout, object_bytes=ALONE, **tier))
    yield Candidate(name, lambda: open_bucket(bucket, layout, **tier))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--record-kib", type=int, nargs="+", default=[1024, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--only", help="measure the stores whose names contain this")


def measure(options: argparse.Namespace, report: Report) -> None:
    for record_kib in options.record_kib:
        layout = layout_of(record_kib)
        blocks = options.megabytes * MIB // layout.record_bytes
        with (
            tempfile.TemporaryDirectory(prefix="fdcache-bench", dir=options.folder) as name,
            ExitStack() as stack,
        ):
            work = Work(layout, blocks)
            runs = {
                each.name: Runs(each, work, options.depth)
                for each in _candidates(Path(name), layout, blocks, stack)
                if options.only is None or options.only in each.name
            }
            in_turns(runs, options.rounds)
            rows = list(_rows(runs))
            shutil.rmtree(name, ignore_errors=True)
        report.note(
            f"{blocks} records of {record_kib} KiB, {options.depth} at once, best of {options.rounds}"
        )
        report.table(f"Stores of several nodes, records of {record_kib} KiB", rows)


def _rows(runs: dict[str, Runs]) -> Iterator[Row]:
    best = {
        store: {
            name: max(figures) if name in ("read", "write") else min(figures)
            for name, figures in each.figures.items()
        }
        for store, each in runs.items()
    }
    for store, found in best.items():
        reference = best.get(f"obstore, {store.removesuffix(', alone')}", {})
        yield {
            "store": store,
            "write MB/s": found["write"] / 1e6,
            "read MB/s": found["read"] / 1e6,
            "of obstore": _share(found, reference, "read"),
            "of checked copies": _share(found, reference, "checked copies"),
            "1 record, ms": _ms(found, "get 1"),
            "8 records, ms": _ms(found, "get 8"),
            "new path, ms": _ms(found, "new path"),
            "miss, ms": _ms(found, "miss"),
        }


def _share(found: dict[str, float], reference: dict[str, float], name: str) -> str:
    return f"{found['read'] / reference[name]:.2f}" if reference else ""


def _ms(found: dict[str, float], name: str) -> str:
    return f"{found[name] * 1e3:.2f}" if name in found else ""
