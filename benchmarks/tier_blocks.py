"""Measure the nanoseconds a block of the tier's operations in C++, beside a plain list of blocks.

Builds ``benchmarks/native/tier_blocks.cpp`` with the sources of the tier, without Python. The plain list is a hash
table, reference counts and one list by last use: what the same traffic costs without a tree, leases and copies.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import machine

ROOT = Path(__file__).parents[1]
SIZES = (20_000, 200_000, 1_000_000)
PHASES = ("match", "reserve", "commit", "grow", "release")
REQUESTS = 100  # of a round
FLAGS = ("-std=c++20", "-O3", "-DNDEBUG", f"-I{ROOT / 'csrc'}")


def built(folder: Path, name: str = "tier_blocks") -> Path:
    """Return the program of this name, compiled in the folder with the sources of the tier."""
    sources = [each for each in (ROOT / "csrc/tier").glob("*.cpp") if "bindings" not in each.name]
    program = folder / name
    source = ROOT / f"benchmarks/native/{name}.cpp"
    subprocess.run(["g++", *FLAGS, source, *sources, "-o", program], check=True)
    return program


def measured(program: Path, slots: int, rounds: int) -> list[dict[str, Any]]:
    """Return the figures of the plain list and of the tier, which ran in turns."""
    done = subprocess.run(
        [program, str(slots), str(REQUESTS), str(rounds)], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=150, help="the lower quartile of this many (default 150)"
    )
    parser.add_argument("--slots", type=int, nargs="+", default=SIZES, help="sizes of the tier")
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = built(Path(folder))
        rows = [row for slots in options.slots for row in measured(program, slots, options.rounds)]
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows}))
        return
    print(machine())
    print(f"{'slots':>9} {'':>5} " + " ".join(f"{phase:>8}" for phase in PHASES) + f" {'us/request':>11}")
    for row in rows:
        figures = " ".join(f"{row[phase]:>8.1f}" for phase in PHASES)
        print(f"{row['slots']:>9,} {row['name']:>5} {figures} {row['request'] / 1000:>11.2f}")


if __name__ == "__main__":
    main()
