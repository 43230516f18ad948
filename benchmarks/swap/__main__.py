"""Measure block copies on a GPU: bandwidth against the link, small swaps, neighbours, time to the first layer.

python -m benchmarks.swap [--json FILE] [--section NAME]...
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, Table
from benchmarks.swap.peers import D2H, H2D, Peers, cost, neighbours
from benchmarks.swap.ranks import both_links
from benchmarks.swap.worker import GIB, KIB, SwapWorker, make_layout
from fdcache.devices.topology import visible_gpus
from fdcache.machine.calibration import Calibration

PLANES = (128, 72, 32, 16, 4)
METHODS = ("auto", "dma", "staged", "kernel")


def worker(plane: int, **options: Any) -> SwapWorker:
    return SwapWorker(make_layout(plane), calibration=Calibration(), **options)


def ratio(reference: Callable[[], float], measure: Callable[[], float | None]) -> str:
    """Return the ratio to a reference measured before and after, because other processes load the link too."""
    before = reference()
    found = measure()
    return "-" if found is None else f"{2 * found / (before + reference()):.3f}"


def bandwidth(peers: Peers) -> Table:
    rows = []
    for plane in PLANES:
        for way, kind in (("load", H2D), ("evict", D2H)):
            to_link = partial(ratio, partial(peers.alone, kind))
            row: dict[str, Any] = {"plane": f"{plane} KiB", "way": "H2D" if way == "load" else "D2H"}
            row["memcpyAsync loop"] = to_link(partial(peers.copy_loop, plane * KIB, kind))
            row["memcpyBatchAsync"] = to_link(partial(peers.copy_batch, plane * KIB, kind))
            for method in METHODS:
                swaps = worker(plane, swap_method=method)
                row[f"{method}, scattered"] = to_link(partial(swaps.rate, way, swaps.scattered, GIB))
                if method == "auto":
                    row["auto, runs of 16 MiB"] = to_link(partial(swaps.rate, way, swaps.in_runs, GIB))
                swaps.close()
            rows.append(row)
    return rows


def both_ways(peers: Peers) -> Table:
    rows = []
    to_pair = partial(ratio, peers.pair)
    for plane in PLANES:
        row: dict[str, Any] = {"plane": f"{plane} KiB"}
        for method in ("auto", "staged", "kernel"):
            swaps = worker(plane, pool_bytes=8 * GIB, swap_method=method)
            row[f"{method}, scattered"] = to_pair(partial(swaps.rate_both, swaps.scattered, GIB))
            row[f"{method}, runs"] = to_pair(partial(swaps.rate_both, swaps.in_runs, GIB))
            swaps.close()
        rows.append(row)
    return rows


def small(_: Peers) -> Table:
    rows = []
    swaps = worker(16)
    for blocks in (1, 4, 16, 64, 128):
        for name, pick in (("scattered", swaps.scattered), ("one run", swaps.in_runs)):
            for way in ("load", "evict"):
                times = [_one_small(swaps, way, pick, blocks) for _ in range(30)][5:]
                submit, first, done = (statistics.median(each) for each in zip(*times, strict=True))
                rows.append(
                    {
                        "blocks": blocks,
                        "host slots": name,
                        "way": way,
                        "submitting thread, us": f"{1e6 * submit:.0f}",
                        "first layer, us": f"{1e6 * first:.0f}",
                        "all done, us": f"{1e6 * done:.0f}",
                        "link alone, us": f"{1e6 * blocks * swaps.layout.payload_bytes / 55.5e9:.0f}",
                    }
                )
    swaps.close()
    return rows


def _one_small(
    swaps: SwapWorker, way: str, pick: Callable[[int], Any], blocks: int
) -> tuple[float, float, float]:
    slots = pick(max(blocks, 1) * swaps.layout.record_bytes)
    if pick == swaps.in_runs:
        start = int(swaps.random.integers(swaps.blocks // 64 - 2)) * 64
        slots.host[:] = range(start, start + blocks)
    plan = swaps.plan(**{way: slots})
    begin = time.perf_counter()
    counter = swaps.controller.submit_swap_tasks(plan, swaps.stream)
    submitted = time.perf_counter()
    counter.wait_for_layer(0)
    first = time.perf_counter()
    counter.wait_all()
    done = time.perf_counter()
    swaps.finish()
    return submitted - begin, first - begin, done - begin


def interference(_: Peers) -> Table:
    rows: Table = []
    work = neighbours()
    for method in METHODS:
        for plane in (128, 16):
            swaps = worker(plane, swap_method=method)
            for way in ("load", "evict"):
                row: dict[str, Any] = {"method": method, "plane": f"{plane} KiB", "way": way}
                for name, enqueue in work.items():
                    found = cost(swaps, way, enqueue)
                    row[name] = f"{100 * found.slowdown:+.1f}% at {found.rate / 1e9:.1f} GB/s"
                rows.append(row)
            swaps.close()
    return rows


def first_layer(_: Peers) -> Table:
    rows = []
    for plane in PLANES:
        swaps = worker(plane, pool_bytes=4 * GIB)
        for name, pick in (("scattered", swaps.scattered), ("runs", swaps.in_runs)):
            shares = []
            for _round in range(4):
                plan = swaps.plan(load=pick(2 * GIB))
                begin = time.perf_counter()
                counter = swaps.controller.submit_swap_tasks(plan, swaps.stream)
                counter.wait_for_layer(0)
                first = time.perf_counter() - begin
                counter.wait_all()
                shares.append((first, time.perf_counter() - begin))
                swaps.finish()
            first, whole = (statistics.median(each) for each in zip(*shares[1:], strict=True))
            rows.append(
                {
                    "plane": f"{plane} KiB",
                    "host slots": name,
                    "first layer, ms": f"{1e3 * first:.2f}",
                    "2 GiB, ms": f"{1e3 * whole:.1f}",
                    "share": f"{100 * first / whole:.1f}%",
                }
            )
        swaps.close()
    return rows


SECTIONS: dict[str, tuple[str, Callable[[Peers], Table]]] = {
    "bandwidth": ("Bandwidth as a ratio to one large pinned copy, 1 GiB moved", bandwidth),
    "both": ("Both ways at once, as a ratio to a pair of large copies", both_ways),
    "small": ("Small swaps, 64 planes of 16 KiB a block", small),
    "neighbours": ("Slowdown of a neighbour stream during copies in runs", interference),
    "ranks": ("Two ranks that keep latents once, over both links, 2 GiB each", both_links),
    "first": ("Time to the first layer of a 2 GiB load", first_layer),
}


def main() -> None:
    """Run the given sections, all by default, and print a table for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the tables here too")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="only this one; may be repeated")
    options = parser.parse_args()
    gpu = visible_gpus()[0]
    peers = Peers()
    link = peers.link()
    report = Report()
    report.note(f"{gpu.name}, {gpu.link}, CUDA {gpu.driver / 1000:g}")
    report.note(
        f"one large pinned copy: {link.to_device / 1e9:.2f} GB/s H2D, {link.to_host / 1e9:.2f} D2H, "
        f"{link.both / 1e9:.2f} both at once"
    )
    tables = {}
    for name in options.section or SECTIONS:
        title, measure = SECTIONS[name]
        start = time.perf_counter()
        tables[name] = report.table(title, measure(peers))
        report.note(f"\n({time.perf_counter() - start:.0f} s)")
    if options.json:
        options.json.write_text(json.dumps({"link": link.__dict__, "tables": tables}, indent=1))


if __name__ == "__main__":
    main()
