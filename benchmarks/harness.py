"""What the benchmarks share: the machine, timing, runs in turns, native programs, and tables, as text or as JSON.

A program has parts: modules with a docstring, ``add_options(parser)`` and ``measure(options, report)``.
`python -m benchmarks.NAME` runs the first part, `python -m benchmarks.NAME PART` another one, and `all` each of them
with its defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

ROOT = Path(__file__).parent.parent
FLAGS = ("-std=c++20", "-O3", "-DNDEBUG", f"-I{ROOT / 'csrc'}")
Row = Mapping[str, Any]
Table = list[dict[str, Any]]


def machine() -> str:
    """Return processor, number of CPUs and interpreter."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    return f"{processor}, {os.cpu_count()} CPUs, Python {platform.python_version()}"


def find_trace() -> Path | None:
    """Return the recorded trace, if there is one beside the repository."""
    for folder in Path(__file__).resolve().parents:
        trace = folder / "shared" / "traces" / "conversation_trace.jsonl"
        if trace.exists():
            return trace
    return None


# --- timing -----------------------------------------------------------------------------------------------


def median_us(call: Callable[[], object], samples: int, calls: int = 1) -> float:
    """Return the median microseconds of a call, over samples of ``calls`` each."""
    spent = []
    for _ in range(samples):
        since = time.perf_counter_ns()
        for _ in range(calls):
            call()
        spent.append((time.perf_counter_ns() - since) / calls)
    return float(np.median(spent)) / 1000


def least_us(call: Callable[[], object], samples: int) -> float:
    """Return the shortest time of a call in microseconds."""
    spent = []
    for _ in range(samples):
        since = time.perf_counter_ns()
        call()
        spent.append(time.perf_counter_ns() - since)
    return min(spent) / 1000


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p99, the greatest and the number of values."""
    if not values:
        return {"count": 0}
    p50, p99 = np.percentile(values, [50, 99])
    return {
        "p50": round(float(p50), 3),
        "p99": round(float(p99), 3),
        "max": round(max(values), 3),
        "count": len(values),
    }


def in_turns(runs: Mapping[Any, Callable[[], float]], rounds: int) -> dict[Any, list[float]]:
    """Make every run once a round, each round beginning with another one; return their figures."""
    names = list(runs)
    found: dict[Any, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(runs[name]())
    return found


# --- native programs --------------------------------------------------------------------------------------


def compiled(folder: Path, name: str, sources: Iterable[Path]) -> Path:
    """Return the program ``benchmarks/native/NAME.cpp``, compiled into a folder with these sources."""
    program = folder / name
    source = ROOT / f"benchmarks/native/{name}.cpp"
    subprocess.run(["g++", *FLAGS, source, *sources, "-o", program], check=True)
    return program


def tier_sources() -> list[Path]:
    """Return the sources of the tier, without Python's bindings."""
    return [path for path in (ROOT / "csrc/tier").glob("*.cpp") if "bindings" not in path.name]


def rows_of(program: Path, *arguments: object) -> Table:
    """Return the rows that a native program prints, a JSON object a line."""
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


# --- tables and programs ----------------------------------------------------------------------------------


def cell(value: Any) -> str:
    """Return a value as a table shows it: numbers with three digits or more."""
    if isinstance(value, float):
        size = abs(value)
        return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 10 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


class Report:
    """Tables of rows with equal keys, printed as Markdown while they are measured, or kept for JSON."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.found: dict[str, Any] = {"machine": machine(), "notes": [], "tables": {}}
        if not quiet:
            print(f"{machine()}\n", flush=True)

    def note(self, text: str) -> None:
        """Add a line."""
        self.found["notes"].append(text)
        if not self.quiet:
            print(text, flush=True)

    def table(self, title: str, rows: Iterable[Row]) -> Table:
        """Add a table, row by row as they come; return them."""
        kept: Table = []
        for row in rows:
            kept.append(dict(row))
            if self.quiet:
                continue
            if len(kept) == 1:
                print(f"\n{title}\n\n| {' | '.join(row)} |\n|{'---|' * len(row)}")
            cells = (f"{cell(value):>{len(name)}}" for name, value in row.items())
            print(f"| {' | '.join(cells)} |", flush=True)
        self.found["tables"][title] = kept
        return kept


class Part(Protocol):
    """A module that measures one thing."""

    __name__: str
    __doc__: str | None

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of the part."""

    def measure(self, options: argparse.Namespace, report: Report) -> bool | None:
        """Measure and report; return False if a goal is missed."""


def run(program: str, parts: Iterable[Any], words: list[str] | None = None) -> int:
    """Run the part that the first word names, or all, or else the first one; return 1 if a goal is missed."""
    named: dict[str, Part] = {part.__name__.rpartition(".")[2].replace("_", "-"): part for part in parts}
    words = sys.argv[1:] if words is None else words
    chosen, rest = list(named)[:1], words
    if words and words[0] in {*named, "all"}:
        chosen, rest = ([words[0]] if words[0] in named else list(named)), words[1:]
    good = True
    for name in chosen:
        good &= _run_part(f"python -m benchmarks.{program}", name, named, rest)
    return 0 if good else 1


def _run_part(program: str, name: str, named: dict[str, Part], words: list[str]) -> bool:
    part = named[name]
    parser = argparse.ArgumentParser(
        f"{program} {name}" if len(named) > 1 else program,
        description=part.__doc__,
        epilog=f"Parts: {', '.join(named)}, all." if len(named) > 1 else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    part.add_options(parser)
    parser.add_argument(
        "--json", nargs="?", const="-", help="print one object instead, or write it to a file"
    )
    options = parser.parse_args(words)
    report = Report(quiet=options.json == "-")
    good = part.measure(options, report) is not False
    if options.json == "-":
        print(json.dumps(report.found))
    elif options.json:
        Path(options.json).write_text(json.dumps(report.found, indent=1))
    elif not report.quiet:
        print()
    return good
