"""Measure hand-overs from GPU to GPU: reads of a peer's scattered planes, and their cost to neighbours.

A process on ``--source`` fills planes; this one, on ``--target``, reads them: mapped by ``ipc``, or through NIXL in the
sections of ``rdma``. Bandwidths are shares of one large copy between the same memory, measured before and after.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.harness import Report, Table
from benchmarks.pd.gpu_handover import LAYER_US, measure_hand_overs
from benchmarks.pd.gpu_rdma import ReaderEnd
from benchmarks.pd.gpu_sides import MOVED, Reader, Source, neighbours, unit_seconds

PLANES = (128, 64, 16, 8)
GRIDS = ((132, 64), (4, 512), (8, 512), (16, 512), (4, 1024), (8, 1024), (12, 1024), (16, 1024))
COST_GRIDS = ((128, 64), (16, 512), (4, 1024), (8, 1024), (16, 1024))
_ROUNDS = 3


def bandwidth(source: Source, gpu: int) -> Table:
    rows = []
    for plane in PLANES:
        reader = Reader(source, gpu, plane)
        if not reader.is_right():
            raise RuntimeError(f"planes of {plane} KiB arrive with other bytes")
        before = reader.large()
        rate, pieces = reader.rate(), reader.pieces()
        copy = (before + reader.large()) / 2
        check = reader.sums()
        rows.append(
            {
                "plane": f"{plane} KiB",
                "one large copy, GB/s": f"{copy / 1e9:.0f}",
                "ipc, scattered, GB/s": f"{rate / 1e9:.0f}",
                "share": f"{rate / copy:.2f}",
                "a copy for each piece": f"{pieces / copy:.3f}",
                "check, ms for 1 GiB": f"{1e3 * check:.2f}",
            }
        )
    return rows


def rdma(source: Source, gpu: int) -> Table:
    rows = []
    for plane in PLANES:
        reader = Reader(source, gpu, plane)
        with joined(source, reader) as end:
            places, slots = reader.sample(MOVED // 4), reader.sample(MOVED // 4)
            end.seconds(places, slots)
            if not reader.has(places, slots):
                raise RuntimeError(f"planes of {plane} KiB arrive with other bytes")
            before = reader.large()
            places, slots = reader.sample(MOVED), reader.sample(MOVED)
            rate = len(places) * reader.rank.layout.payload_bytes / end.median_seconds(places, slots)
            one, four = end.run_rate(1), end.run_rate(4)
            copy = (before + reader.large()) / 2
        rows.append(
            {
                "plane": f"{plane} KiB",
                "one large copy, GB/s": f"{copy / 1e9:.0f}",
                "rdma, scattered, GB/s": f"{rate / 1e9:.0f}",
                "share": f"{rate / copy:.2f}",
                "NIXL, a run of 32 MiB": f"{one / copy:.2f}",
                "NIXL, four such runs": f"{four / copy:.2f}",
            }
        )
    return rows


@contextmanager
def joined(source: Source, reader: Reader) -> Iterator[ReaderEnd]:
    """Yield a reader through NIXL."""
    end = ReaderEnd(reader.rank)
    end.join(source.ask("rdma", end.description), reads=True)
    try:
        yield end
    finally:
        end.connector.close()
        source.ask("stop", "-")


def rdma_cost(source: Source, gpu: int) -> Table:
    rows = []
    reader, mine = Reader(source, gpu, 16), neighbours(gpu)
    units: dict[str, Callable[[str], float]] = {
        "reader's": lambda name: unit_seconds(mine[name], gpu),
        "source's": lambda name: float(source.ask("unit", name)),
    }
    with joined(source, reader) as end:
        places, slots = reader.sample(MOVED // 4), reader.sample(MOVED // 4)
        for (side, unit), name in itertools.product(units.items(), mine):
            slowdowns: list[float] = []
            moved: list[float] = []
            for _ in range(_ROUNDS):
                alone = unit(name)
                with end.reading(places, slots, moved):
                    slowdowns.append(unit(name) / alone - 1)
            slower, rate = statistics.median(slowdowns), statistics.median(moved)
            rows.append({"GPU": side, "work": name, "rdma": f"{100 * slower:+.1f}% at {rate / 1e9:.0f} GB/s"})
    return rows


def grids(source: Source, gpu: int) -> Table:
    rows = []
    for plane in PLANES:
        reader = Reader(source, gpu, plane)
        copy = reader.large()
        row = {"plane": f"{plane} KiB"}
        for grid in GRIDS:
            row[f"{grid[0]} x {grid[1]}"] = f"{reader.rate(reader.rank.with_grid(grid)) / copy:.2f}"
        rows.append(row)
    return rows


def small(source: Source, gpu: int) -> Table:
    rows = []
    reader = Reader(source, gpu, 16)
    record = reader.rank.layout.record_bytes
    for count, planes in itertools.product((1, 16, 128, 512), (4, 64)):
        on_gpu, in_all = reader.seconds(count * record, planes=planes)
        rows.append(
            {
                "blocks": count,
                "planes": planes,
                "KiB": count * planes * 16,
                "GPU, us": f"{1e6 * on_gpu:.0f}",
                "in all, us": f"{1e6 * in_all:.0f}",
            }
        )
    return rows


def cost(source: Source, gpu: int) -> Table:
    rows = []
    reader = Reader(source, gpu, 16)
    mine = neighbours(gpu)
    sides: dict[str, Callable[[str], float]] = {
        "reader's": lambda name: unit_seconds(mine[name], gpu),
        "source's": lambda name: float(source.ask("unit", name)),
    }
    for (side, unit), name in itertools.product(sides.items(), mine):
        row: dict[str, Any] = {"GPU": side, "work": name}
        for grid in COST_GRIDS:
            access = reader.rank.with_grid(grid)
            slowdowns: list[float] = []
            moved: list[float] = []
            for _ in range(_ROUNDS):
                alone = unit(name)
                with reader.reading(access, moved):
                    slowdowns.append(unit(name) / alone - 1)
            row[f"{grid[0]} x {grid[1]}"] = (
                f"{100 * statistics.median(slowdowns):+.1f}% at {statistics.median(moved) / 1e9:.0f} GB/s"
            )
        rows.append(row)
    return rows


def handover(source: Source, gpu: int) -> Table:
    return handovers(source, gpu, "ipc")


def rdma_handover(source: Source, gpu: int) -> Table:
    return handovers(source, gpu, "rdma")


def handovers(source: Source, gpu: int, connector: str) -> Table:
    rows = []
    for layer_us, verifies in itertools.product(LAYER_US, (True, False)):
        found = measure_hand_overs(source.ask, gpu, layer_us, verifies=verifies, connector=connector)
        rows.append(
            {
                "a layer takes, ms": layer_us / 1e3,
                "verified": "yes" if verifies else "no",
                "first group before the last layer, ms": f"{1e3 * found.first_before:.1f}",
                "1 GiB usable after the last layer, ms": f"{1e3 * found.all_after:.1f}",
            }
        )
    return rows


SECTIONS: dict[str, Callable[[Source, int], Table]] = {
    "bandwidth": bandwidth,
    "grids": grids,
    "small": small,
    "cost": cost,
    "handover": handover,
    "rdma": rdma,
    "rdma-cost": rdma_cost,
    "rdma-handover": rdma_handover,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", type=int, default=1, help="GPU of the prefill side")
    parser.add_argument("--target", type=int, default=0, help="GPU of the decode side")
    parser.add_argument("--section", action="append", choices=SECTIONS)


def measure(options: argparse.Namespace, report: Report) -> None:
    source = Source(options.source)
    for name in options.section or SECTIONS:
        title = f"GPU {options.source} to GPU {options.target}: {name}"
        report.table(title, SECTIONS[name](source, options.target))
    source.close()
