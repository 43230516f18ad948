"""Measure the nanoseconds a block of the tier's operations in C++, beside a plain list of blocks.

Builds ``benchmarks/native/tier_blocks.cpp`` with the sources of the tier, without Python. The plain list is a hash
table, reference counts and one list by last use: what the same traffic costs without a tree, leases and copies.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Report, Row, compiled, rows_of, tier_sources

SIZES = (20_000, 200_000, 1_000_000)
PHASES = ("match", "reserve", "commit", "grow", "release")
REQUESTS = 100  # of a round


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=int, default=150, help="the lower quartile of this many (default 150)"
    )
    parser.add_argument("--slots", type=int, nargs="+", default=SIZES, help="sizes of the tier")


def measure(options: argparse.Namespace, report: Report) -> None:
    def rows() -> Iterator[Row]:
        for slots in options.slots:
            for row in rows_of(program, slots, REQUESTS, options.rounds):
                figures = {phase: row[phase] for phase in PHASES}
                yield {"slots": slots, "": row["name"], **figures, "us per request": row["request"] / 1000}

    with tempfile.TemporaryDirectory() as folder:
        program = compiled(Path(folder), "tier_blocks", tier_sources())
        report.table("Nanoseconds a block", rows())
